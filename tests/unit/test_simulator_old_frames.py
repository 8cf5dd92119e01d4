# SPDX-License-Identifier: Apache-2.0
"""A stranger sends frames again that it has overheard: valid ones, tag included, in their time."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from nicps import wire
from nicps.job.plan import Plan
from tests.simulator.lan import Lan, kind_of

pytestmark = pytest.mark.unit

PLAN = Plan("job", batch=50, width=16, alarm_below=0.0)


def lan_of(hosts: int, seed: int, starter: int = 0, rounds: int = 5) -> Lan:
    lan = Lan(hosts, seed=seed, plan=PLAN, rounds=rounds, fragments=4, compute_s=0.01)
    lan.hosts[starter].submit()
    return lan


def again(lan: Lan, frames: Iterator[tuple[bytes, bytes, bytes | None]], start: float) -> None:
    """Each of them, one every 0.3 s."""
    for at, frame in enumerate(frames):
        lan.at(start + 0.3 * at, lambda frame=frame: lan.replay(*frame))


def ended_well(lan: Lan) -> bool:
    assert lan.run(lambda: bool(lan.ended), limit_s=60.0)
    return lan.well


def test_an_old_answer_changes_no_view() -> None:
    """R20: the lead takes a host back that answers its call, not one that once did."""
    lan = lan_of(5, seed=7, rounds=400)
    gone = lan.hosts[4]
    lan.at(0.9, gone.kill)
    lan.at(2.0, gone.restart)
    assert lan.run(lambda: gone.node.view.number > 2, limit_s=10.0), "it has come back"
    answers = [said for said in lan.overheard if kind_of(said[1]) == wire.FrameType.ANSWER]
    assert [said for said in answers if said[0] == gone.mac]
    gone.kill()
    lead = lan.hosts[0].node
    assert lan.run(lambda: lead.view.live == frozenset({1, 2, 3, 4}), limit_s=10.0)
    view = lead.view.number
    again(lan, (said for said in answers * 3 if said[0] == gone.mac), lan.now)
    assert ended_well(lan)
    assert lead.view.number == view
    assert any("AGAIN ANSWER" in line for line in lan.trace)


@pytest.mark.parametrize("starter", [0, 2])
def test_an_old_call_ends_no_submission(starter: int) -> None:
    """R3: the lower MAC address wins only if its list comes."""
    before = lan_of(3, seed=7)
    assert ended_well(before)
    calls = [said for said in before.overheard if kind_of(said[1]) == wire.FrameType.CALL]
    assert calls and {said[0] for said in calls} == {before.hosts[0].mac}
    lan = lan_of(3, seed=8, starter=starter)  # other agents, with other nonces
    again(lan, itertools.islice(itertools.cycle(calls), 20), 0.05)
    assert ended_well(lan)
    assert not any("FAILED" in line for line in lan.trace)
    assert lan.hosts[starter].node.view.live == frozenset({1, 2, 3})
    assert lan.now < 0.9 + lan.timings.yield_s + lan.timings.quiet_s


def test_an_old_list_is_not_taken() -> None:
    """R18: it names nonces of that time."""
    before = lan_of(3, seed=7)
    assert ended_well(before)
    lists = [said for said in before.overheard if kind_of(said[1]) == 100 + wire.ViewStep.INSTALL]
    assert lists
    lan = lan_of(3, seed=8, starter=2)
    again(lan, iter(lists * 3), 0.05)
    assert ended_well(lan)
    assert lan.hosts[0].node.view.lead == 1
    assert lan.hosts[0].node.members[0].mac == lan.hosts[2].mac, "the third host's network"
