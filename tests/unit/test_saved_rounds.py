# SPDX-License-Identifier: Apache-2.0
"""All members know after which round the lead writes a checkpoint (R22), also those that commit it with a new view."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import pytest

from nicps import wire
from nicps.exchange import Exchange
from nicps.job.plan import Plan
from nicps.protocol import Action, Committed, Node
from nicps.protocol.standing import SAVED, SAVES, Standing
from tests.simulator import schedules
from tests.simulator.drill import TRAINING_S, job
from tests.simulator.host import Host
from tests.simulator.lan import Lan

pytestmark = pytest.mark.unit

#: Of a round: what its commits say, by the name of the host.
Said = dict[int, dict[str, bool]]


def saving(monkeypatch: pytest.MonkeyPatch, exchange: Exchange) -> tuple[Lan, Said]:
    """A job whose lead writes a checkpoint after each round."""
    go_on = Node.go_on

    def saves(node: Node, now: float, *, saves: bool = False, channel: int = 0) -> list[Action]:
        return go_on(node, now, saves=True, channel=channel)

    monkeypatch.setattr(Node, "go_on", saves)
    plan = Plan("job", batch=30, width=16, alarm_below=0.0, exchange=exchange)
    lan, _ = job(hosts=3, plan=plan, rounds=20, compute_s=0.05)
    said: Said = defaultdict(dict)

    def note(host: Host, action: Action) -> bool:
        if isinstance(action, Committed) and action.phase.kind is wire.PhaseKind.TRAIN:
            said[action.round][host.node.name] = action.saved
        return False

    lan.moments.append(note)
    return lan, said


@pytest.mark.parametrize("exchange", [Exchange.STRIPES, Exchange.BROADCAST])
def test_a_member_that_commits_with_the_next_view(
    exchange: Exchange, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has not heard the lead's last mark. The lead's promise says it, and so does the list in force."""
    lan, said = saving(monkeypatch, exchange)
    lead, last = lan.hosts[0], lan.hosts[2]
    hear, missed = last.take_frame, set[int]()

    def take_frame(source: bytes, data: bytes, key: bytes | None) -> None:
        frame = wire.unpack(data)
        ahead = isinstance(frame.body, wire.Token) and frame.header.round > last.node.open_round
        marks = isinstance(frame.body, wire.Want) and frame.header.flags & wire.Flag.COMPLETE
        commits = ahead or (marks and source == lead.mac)
        if not commits or lan.now < TRAINING_S or last.node.view.number > 1:
            hear(source, data, key)
            return
        if not missed and lead.node.open_round > last.node.open_round:
            lead.renew()
        missed.add(last.node.open_round)

    last.take_frame = take_frame  # type: ignore[method-assign]
    lan.trouble(TRAINING_S)
    assert schedules.finish(lan).what == "done"
    (round_,) = missed
    assert said[round_] == dict.fromkeys(("h1", "h2", "h3"), True)
    assert lan.checks.views.keys() >= {(b"", 2)}


@pytest.mark.parametrize(
    ("standing", "round_", "knows"),
    [
        (Standing(2, 7, saved=True), 7, True),
        (Standing(2, 7, saved=True), 8, False),
        (Standing(2, 7, complete=True, saves=True), 8, True),
        (Standing(2, 7, complete=True, saves=True), 7, False),
        (Standing(1, 7, saved=True), 7, False),
    ],
)
def test_a_promise_says_which_round_is_saved(standing: Standing, round_: int, knows: bool) -> None:
    """And of which phase."""
    assert standing.saves_before(2, round_) is knows
    flags = SAVES * standing.saves | SAVED * standing.saved
    assert standing.flags & (SAVES | SAVED) == flags
    body = wire.Vote(1, 1, standing.phase, standing.round, 0, bytes(6), 1, standing.flags)
    nothing: tuple[Sequence[wire.Item], ...] = ((), (), (), ())
    assert Standing.of(wire.Frame(wire.Header(), body, nothing)) == standing
