# SPDX-License-Identifier: Apache-2.0
"""B2, B3: who is whose partner, and how a worker pulls half of the parameters from it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest

from nicps.protocol import Phase, Timings
from nicps.protocol.actions import SendServed
from nicps.protocol.exchange.steps import Steps
from nicps.protocol.exchange.windows import PROBES, QUEUE
from nicps.protocol.partners import Pairing, first_set, groups, own_set
from tests.served_kernel import ROUND, VIEW_NUMBER, ServedKernel, indices, phase_of

pytestmark = pytest.mark.unit

TIMINGS = Timings()
ROOM = 600  # fragments of parameters: two of each that is pushed
SETS = 320


def phase(workers: Iterable[int], members: int = 6, sets: int = SETS) -> Phase:
    """Member 4 serves fragments 0 to 300, member 1 the others."""
    base = phase_of(1)
    assert base.serving is not None
    shares = tuple(int(k in {*workers}) for k in range(1, members + 1))
    return replace(base, shares=shares, serving=replace(base.serving, sets=sets))


# ---- groups


@pytest.mark.parametrize(
    ("workers", "due"),
    [
        ([], []),
        ([4], [(4,)]),
        ([5, 2], [(2, 5)]),
        ([2, 3, 4], [(2, 3, 4)]),
        ([2, 3, 5, 7], [(2, 3), (5, 7)]),
        ([2, 3, 4, 5, 6], [(2, 3), (4, 5, 6)]),
    ],
)
def test_groups(workers: list[int], due: list[tuple[int, ...]]) -> None:
    assert groups(workers) == due
    sets = [[first_set(group, worker) for worker in group] for group in due]
    assert sets == [[1, 2, 2][: len(group)] for group in due]


def test_a_pair_gives_each_other_its_sets() -> None:
    of = phase([2, 3, 5, 6])
    assert Pairing.of(of, range(1, 7), 2) == Pairing(3, range(SETS), range(SETS, ROOM))
    assert Pairing.of(of, range(1, 7), 3) == Pairing(2, range(SETS, ROOM), range(SETS))
    assert Pairing.of(of, range(1, 7), 6) == Pairing(5, range(SETS, ROOM), range(SETS))
    assert Pairing.of(of, range(1, 7), 4) is None, "a server"


def test_in_a_group_of_three_the_first_serves_both_others() -> None:
    of = phase([2, 3, 5])
    partners = {k: Pairing.of(of, range(1, 7), k) for k in (2, 3, 5)}
    assert {k: p.partner for k, p in partners.items() if p} == {2: 3, 3: 2, 5: 2}
    assert partners[3] == partners[5]


def test_a_view_deals_out_groups_anew() -> None:
    """Member 3 has gone: who was its partner is in the other group."""
    of = phase([2, 3, 5, 6])
    live = {1, 2, 4, 5, 6}
    assert [p.partner for k in (2, 5, 6) if (p := Pairing.of(of, live, k))] == [5, 2, 2]
    assert Pairing.of(of, {1, 2, 4}, 2) is None, "alone"


def test_without_sets_nobody_has_a_partner() -> None:
    assert Pairing.of(phase([2, 3], sets=0), range(1, 7), 2) is None


def test_the_own_set_is_fixed_with_the_phase() -> None:
    """Whether partners are used or not: the order of computing follows it."""
    of = phase([2, 3, 5], sets=0)
    assert [own_set(of, k) for k in range(1, 7)] == [0, 1, 2, 0, 2, 0]


# ---- pulls

WINDOW = QUEUE // 2


def worker(kernel: ServedKernel, number: int = 2, sets: int = SETS) -> Steps:
    of = phase([2, 3], sets=sets)
    pairing = Pairing.of(of, range(1, 7), number)
    return Steps(of, VIEW_NUMBER, number, kernel, TIMINGS, pairing)


def of_member(actions: list[SendServed], member: int) -> set[int]:
    return set().union(*(indices(a) for a in actions if a.to == member))


def test_the_partner_is_asked_as_the_own_set_comes() -> None:
    """Of both parts of set 2, in the same measure: the partner pulls both from two servers at once."""
    kernel = ServedKernel()
    steps = worker(kernel)
    actions = steps.pull(0.0, 1, ROUND)
    assert {a.to for a in actions} == {4, 1}, "nothing is asked for of the partner"
    assert steps.deadline() <= 0.002, "but it looks again soon"
    asked, partners = list(actions), dict[int, int]()
    while not steps.whole:
        kernel.take(1, set().union(*(indices(a) for a in actions)))
        actions = steps.advance(0.0)
        asked += actions
        own = len(kernel.here & {*range(SETS)})
        partners[own] = len(of_member(asked, 3))
        assert partners[own] <= max(0, own - WINDOW) * (ROOM - SETS) / SETS or own == SETS
    assert partners[sorted(partners)[-2]] > 0, "before the own set is whole"
    assert of_member(asked, 3) == {*range(SETS, ROOM)}
    assert sum(len(indices(a)) for a in asked) == ROOM, "each once"


def test_what_a_partner_lacks_does_not_concern_the_servers() -> None:
    kernel = ServedKernel()
    steps = worker(kernel)
    actions = steps.pull(0.0, 1, ROUND)
    while not of_member(actions, 3):
        kernel.take(1, set().union(*(indices(a) for a in actions)))
        actions = steps.advance(0.0)
    before = {*of_member(actions, 3)}
    steps.hear_refusal(0.0, 3, 1)
    assert steps.advance(0.0015) == [], "nothing of the servers is due"
    again = steps.advance(0.002)
    assert {a.to for a in again} == {3}
    assert of_member(again, 3) <= before and len(of_member(again, 3)) <= PROBES
    kernel.take(1, of_member(again, 3))
    more = steps.advance(0.002)
    assert before - of_member(again, 3) <= of_member(more, 3), "it has them: all that it was asked"


def refused(steps: Steps, now: float) -> tuple[float, list[SendServed]]:
    """The partner has nothing: until the servers are asked for its set."""
    while True:
        steps.hear_refusal(now, 3, 1)
        now = steps.deadline()
        actions = steps.advance(now)
        if {a.to for a in actions} - {3}:
            return now, actions


def own_set_whole(kernel: ServedKernel) -> Steps:
    steps = worker(kernel)
    actions = steps.pull(0.0, 1, ROUND)
    while len(kernel.here) < SETS:
        kernel.take(1, set().union(*(indices(a) for a in actions)) & {*range(SETS)})
        actions = steps.advance(0.0)
    return steps


def test_a_partner_that_lacks_it_all_is_asked_five_times() -> None:
    """Each time after three times as long: 2, 6, 18, 54 and 162 ms. Then the server gives what is in its part."""
    kernel = ServedKernel()
    steps = own_set_whole(kernel)
    now, actions = refused(steps, 0.0)
    assert now == pytest.approx(0.242)
    assert {a.to for a in actions} == {1} and of_member(actions, 1) <= {*range(SETS, ROOM)}


@pytest.mark.parametrize(("number", "heard"), [(1, True), (0, False), (2, False)])
def test_a_refusal_of_another_pull_says_nothing(number: int, heard: bool) -> None:
    """An attacker sends it again, as often as it likes: the partner is asked on, and not given up."""
    kernel = ServedKernel()
    steps = own_set_whole(kernel)
    due, now, asked = steps.deadline(), 0.0, list[SendServed]()
    for _ in range(6):
        steps.hear_refusal(now, 3, number)
        assert heard or steps.deadline() == due
        now = steps.deadline() if heard else now
        asked += steps.advance(now)
    assert bool({a.to for a in asked} - {3}) is heard
    if not heard:
        assert not asked, "nothing is late"


def test_a_silent_partner_costs_the_servers_line() -> None:
    """It is no fault of a server's (R16), and it is not reported."""
    kernel = ServedKernel()
    steps = own_set_whole(kernel)
    now, actions = 0.0, list[SendServed]()
    while not {a.to for a in actions} - {3}:
        assert steps.take_report(now) == {}
        now = steps.deadline()
        actions = steps.advance(now)
    assert now < TIMINGS.silence_most_s
    while not steps.whole:
        kernel.take(1, set().union(*(indices(a) for a in actions)))
        actions = steps.advance(now)
        assert {a.to for a in actions} <= {1}


def test_a_partner_that_gives_something_is_asked_on() -> None:
    kernel = ServedKernel()
    steps = own_set_whole(kernel)
    now, come = 0.0, SETS
    while not steps.whole:
        for _ in range(3):
            steps.hear_refusal(now, 3, 1)
            now = steps.deadline()
            actions = steps.advance(now)
            assert {a.to for a in actions} <= {3}
        kernel.take(1, range(come, come + 20))
        come += 20
        steps.advance(now)


def test_a_partner_gives_one_part_and_not_the_other() -> None:
    """In a small model all fragments can belong to set 1: the other worker has none of its own, by which to pace."""
    kernel = ServedKernel()
    steps = worker(kernel, 3, ROOM)
    actions, now, come = steps.pull(0.0, 1, ROUND), 0.0, 299
    assert {a.to for a in actions} == {2}
    while not {a.to for a in actions} - {2}:
        kernel.take(1, [come := come + 1])
        now = steps.deadline()
        actions = steps.advance(now)
    assert {a.to for a in actions} - {2} == {4}, "the server of the first part"
    while not steps.whole:
        kernel.take(1, set().union(*(indices(a) for a in actions)))
        actions = steps.advance(now)
        now = steps.deadline()
