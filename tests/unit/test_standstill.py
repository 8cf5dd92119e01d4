# SPDX-License-Identifier: Apache-2.0
"""Who is at fault where an exchange makes no sums: a member, or the network (`nicps.protocol.progress.Standstill`)."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import pytest

from nicps import wire
from nicps.exchange import Exchange
from nicps.protocol import Committed, Member, Phase, Timings, View
from nicps.protocol.actions import NoProgress
from nicps.protocol.fault_finder import FaultFinder
from nicps.protocol.local_host import LocalHost, NodeState
from nicps.protocol.membership import Membership
from nicps.protocol.phase import AdaptiveTimeout
from nicps.protocol.plan import ChannelPlan
from nicps.protocol.progress import Standstill
from nicps.protocol.rings import Rings
from nicps.protocol.serving import Serving
from nicps.protocol.signals import Lacking, Steps
from tests.rooms import NoKernel

pytestmark = pytest.mark.unit

TIMINGS = Timings(silence_most_s=3.0)


def phase(*shares: int) -> Phase:
    return Phase(1, 1, wire.PhaseKind.TRAIN, shares=shares, exchange=Exchange.STRIPES)


def view(*last: int, lead: int = 1) -> View:
    """Of hosts whose addresses end with these."""
    members = tuple(Member(k, bytes([2, 0, 0, 0, 0, n]), f"h{n}") for k, n in enumerate(last, 1))
    return View(1, members, frozenset(m.number for m in members), lead)


def standstill(seen: View, number: int = 2) -> tuple[Standstill, LocalHost]:
    member = seen.members[number - 1]
    host = LocalHost(member.mac, member.name, NodeState.MEMBER, seen, number)
    return Standstill(host, TIMINGS), host


def committed(*members: int) -> Committed:
    counted = dict.fromkeys(members, 1)
    return Committed(phase(1), 1, counted, 0, 0, Exchange.STRIPES, 1, members)


def test_an_exchange_must_have_worked_among_all_of_them_at_once() -> None:
    """1 with 2, and 1 with 3: that says nothing of the way between 2 and 3."""
    found, _ = standstill(view(1, 2, 3))
    found.note_counted(committed(1, 2))
    assert not found.blames_network(phase(1, 1, 0))
    found.note_counted(committed(1, 3))
    assert found.blames_network(phase(1, 1, 1))
    found.note_counted(committed(1, 2, 3))
    assert not found.blames_network(phase(1, 1, 1))
    assert not found.blames_network(phase(1, 0, 1))


def test_a_round_in_which_members_call_different_things_proves_nothing() -> None:
    found, _ = standstill(view(1, 2))
    sized = replace(phase(1, 1), sized=True)
    differing = replace(committed(1, 2), phase=sized, counted={1: 7, 2: 8})
    found.note_counted(differing)
    assert found.blames_network(sized)
    found.note_counted(replace(differing, counted={1: 7, 2: 7}))
    assert not found.blames_network(sized)


def test_a_contributor_that_is_alone_in_the_list_proves_nothing() -> None:
    """It has broadcast its lanes: no frame went to one host only."""
    found, _ = standstill(view(1, 2))
    found.note_counted(replace(committed(1, 2), counted={2: 30}))
    assert found.blames_network(phase(1, 1))


KEEPS = [
    replace(phase(1, 1, 1), sized=True),
    replace(phase(1, 1, 1), channels=(ChannelPlan(0, 4, (4,)),)),
]


@pytest.mark.parametrize("keeps", KEEPS)
def test_where_nothing_can_replace_the_exchange_any_two_hosts_prove_it(keeps: Phase) -> None:
    """The network carries frames to one host then, and a member is at fault: otherwise the job would end."""
    found, _ = standstill(view(1, 2, 3), number=1)
    assert found.blames_network(keeps)
    assert not found.blames_network(keeps, has_sums=True)
    assert found.blames_network(phase(1, 1, 1), has_sums=True), "broadcast keeps all hosts"
    found.note_counted(committed(1, 2))
    assert not found.blames_network(keeps)
    assert found.blames_network(phase(1, 1, 1))


@pytest.mark.parametrize("number", [1, 2])
def test_the_end_of_a_job_takes_more_verdicts(number: int) -> None:
    """The lead gives the exchange up with its eighth; the others wait for that, and for two more."""
    found, _ = standstill(view(1, 2, 3), number)
    blamed = []
    for turn in range(150):
        for verdict in found.hear(0.1 * turn, Lacking(7, 3, {2: 1}), frozenset()):
            if verdict.evicted:
                blamed.append(found.blames_network(KEEPS[0]))
                assert found.gives_up(KEEPS[0]) == (len(blamed) >= 8)
                assert found.gives_up(phase(1, 1, 1))
    assert len(blamed) > 11
    waits = len(blamed) if number == 1 else 9
    assert blamed == [True] * waits + [False] * (len(blamed) - waits)


def test_numbers_of_the_job_before_are_others() -> None:
    found, host = standstill(view(1, 2, 3))
    found.note_counted(committed(1, 2, 3))
    host.view = view(1, 2, 9)
    assert found.blames_network(phase(1, 1, 1))
    host.view = view(3, 2, 1)
    assert not found.blames_network(phase(1, 1, 1))


@pytest.mark.parametrize("leads", [False, True])
def test_not_all_wait_for_one_another(leads: bool) -> None:
    """A host that has just come back blames the network, and waits for the lead. The lead, which has seen sums, blames
    a member, and waits for that host to propose. So only a lead blames the network for good.
    """
    found, _ = standstill(view(1, 2, 3, lead=2 if leads else 1))
    blamed = []
    for turn in range(60):
        now = 0.1 * turn
        for reporter in (2, 3):
            for verdict in found.hear(now, Lacking(7, reporter, {1: 40}), frozenset()):
                if verdict.evicted:
                    blamed.append(found.blames_network(phase(1, 1, 1)))
    assert len(blamed) >= 4
    assert blamed == ([True] * len(blamed) if leads else [True] * 2 + [False] * (len(blamed) - 2))
    found.hear(9.0, Lacking(8, 3, {1: 40}), frozenset())
    assert found.blames_network(phase(1, 1, 1)), "another round begins anew"


def test_only_workers_judge_a_server() -> None:
    """Of six members four serve: they lack nothing, and so do not speak for one that two workers miss."""
    served = replace(
        phase(0, 0, 0, 0, 1, 1), exchange=Exchange.SERVERS, serving=Serving((1, 2, 3, 4), 8)
    )
    found, _ = standstill(view(1, 2, 3, 4, 5, 6))
    blamed = set[int]()
    for now in (0.0, 0.1, 1.5, 1.6):
        for worker in (5, 6):
            told = found.hear(now, Lacking(7, worker, {2: 9}), (), served)
            blamed |= {one.evicted for one in told if one.evicted}
    assert blamed == {2}


class _Evictions:
    """A membership without learners: what it is asked for, by the number of the host that asks."""

    learners: frozenset[int] = frozenset()

    def __init__(self) -> None:
        self.asked: list[frozenset[int]] = []

    def evict(self, now: float, numbers: frozenset[int]) -> Steps:
        self.asked.append(numbers)
        return []


@pytest.mark.parametrize(("number", "verdicts"), [(1, 1), (2, 2), (4, 3)])
def test_who_stays_acts_in_turn(number: int, verdicts: int) -> None:
    """The lowest of those that stay has perhaps heard other reports, and accuses itself or nobody."""
    seen = view(1, 2, 3, 4)
    _, host = standstill(seen, number)
    rings, evictions = Rings(host, NoKernel(), TIMINGS, AdaptiveTimeout(TIMINGS)), _Evictions()
    finder, found = FaultFinder(host, rings, cast(Membership, evictions), TIMINGS), 0
    for turn in range(200):
        for reporter in (1, 2):
            steps = finder.hear(0.1 * turn, Lacking(7, reporter, {3: 40}))
            found += sum(isinstance(step, NoProgress) and step.evicted == 3 for step in steps)
        if evictions.asked:
            break
    assert evictions.asked[0] == frozenset({3}) and found == verdicts
