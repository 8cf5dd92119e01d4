# SPDX-License-Identifier: Apache-2.0
"""The numbers of a view run out: the same members go on in a new one before they do."""

from __future__ import annotations

import pytest

from nicps import wire
from nicps.protocol import Action, Send
from nicps.protocol.control import Control
from nicps.protocol.token import MOST_HOPS, TokenState
from tests.simulator import schedules
from tests.simulator.drill import job
from tests.simulator.host import Host

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("first", [(1 << 32) - 300, MOST_HOPS - 300])
def test_a_tokens_hops_do_not_run_out(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A phase has gone on for days: training goes on in the next view, with the same weights at all hosts."""

    def create_late(control: Control) -> TokenState:
        token = create(control)
        if control._view.number == 1 and control.phase.kind is wire.PhaseKind.TRAIN:
            token.hop = first
        return token

    create = Control.create
    monkeypatch.setattr(Control, "create", create_late)
    lan, _ = job(rounds=30)
    hops: list[tuple[int, int]] = []

    def note(_: Host, action: Action) -> bool:
        if isinstance(action, Send) and isinstance(action.frame.body, wire.Token):
            hops.append((action.frame.header.view, action.frame.body.hop))
        return False

    lan.moments.append(note)
    assert schedules.finish(lan).what == "done"
    assert len({host.result for host in lan.hosts}) == 1
    assert 0 <= max(hop for view, hop in hops if view == 1) - max(first, MOST_HOPS) < 100
    assert max(hop for view, hop in hops if view == 2) < MOST_HOPS
    assert max(view for view, _ in hops) == 2
