# SPDX-License-Identifier: Apache-2.0
"""The exchange `servers` at one member: contributions, pushes and pulls, and when it is complete."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from functools import partial

import pytest

from nicps import wire
from nicps.protocol import Pulled, SendServed, Stepped, Timings
from nicps.protocol.actions import Action
from nicps.protocol.exchange import ServersExchanger, exchanger_of
from nicps.protocol.exchange.servers import Begun
from nicps.protocol.progress import find_fault
from tests.listed import ROUND, token_of
from tests.served_kernel import FRAGMENTS, MEMBERS, VIEW, ServedKernel, phase_of

pytestmark = pytest.mark.unit

TIMINGS = Timings()
#: The list is closed.
closed = partial(token_of, len(MEMBERS))
PUSH, PULL, CONTRIBUTION = wire.FrameType.PUSH, wire.FrameType.PULL, wire.FrameType.CONTRIBUTION


def member(
    number: int = 2, kernel: ServedKernel | None = None, every: int = 4, fragments: int = FRAGMENTS
) -> ServersExchanger:
    phase = phase_of(every, fragments)
    part = exchanger_of(phase, VIEW, number, kernel or ServedKernel(), TIMINGS, 0.0)
    assert isinstance(part, ServersExchanger)
    part.open(ROUND)
    return part


def sent(actions: Iterable[Action]) -> list[SendServed]:
    return [action for action in actions if isinstance(action, SendServed)]


def finish(part: ServersExchanger, kernel: ServedKernel, actions: list[Action]) -> list[Action]:
    """All that is sent comes at once, until nothing is sent any more."""
    everything = list(actions)
    while sent(actions):
        kernel.take_all(actions)
        actions = part.advance(0.0)
        everything += actions
    return everything


# ---- a synchronisation


@pytest.mark.parametrize("told", ["closing it", "a token", "a contribution"])
def test_a_contribution_begins_once_the_list_is_known(told: str) -> None:
    part = member()
    part.conversion = 9
    token = closed(2, 3)
    if told == "closing it":
        actions = part.on_closed(0.0, token)
    elif told == "a token":
        actions = part.on_token(0.0, token)
    else:
        actions = part.on_list(0.0, 0b110, 0)
    assert {(a.type, a.number, a.members, a.round) for a in sent(actions)} == {
        (CONTRIBUTION, 9, 0b110, ROUND)
    }
    assert {a.to for a in sent(actions)} == {1, 4}
    assert part.on_token(0.0, token) == [], "once"


def test_who_is_not_listed_sends_nothing() -> None:
    part = member()
    part.conversion = 9
    assert part.on_closed(0.0, closed(3)) == []
    assert part.on_token(0.0, closed(2, closed=False)) == [], "open"
    part.on_dropped()
    assert part.on_closed(0.0, closed(2)) == [], "another view comes"


def test_a_worker_is_complete_when_all_of_its_contribution_is_added() -> None:
    kernel = ServedKernel()
    part = member(2, kernel)
    part.conversion = 9
    token = closed(2, 3)
    assert not part.is_complete(token), "it has not begun"
    actions = part.on_closed(0.0, token)
    assert not part.is_complete(token)
    finish(part, kernel, actions)
    assert part.is_complete(token)
    part.open(ROUND + 1)
    assert not part.is_complete(token), "it is that of the round before"


def test_a_server_is_complete_when_its_part_is_made() -> None:
    """It has half of the vector. A list that nobody is on needs nothing; another member is complete at once."""
    kernel = ServedKernel()
    part = member(4, kernel)
    for homes in (0, FRAGMENTS // 2 - 1):
        kernel.homes = homes
        assert not part.is_complete(closed(2, 3))
    assert part.is_complete(closed())
    kernel.homes = FRAGMENTS // 2
    assert part.is_complete(closed(2, 3))
    assert member(3).is_complete(closed(2))


def test_a_server_without_a_part_is_complete() -> None:
    """A vector of one fragment belongs to the last server."""
    assert member(4, fragments=1).is_complete(closed(2))
    assert not member(1, fragments=1).is_complete(closed(2))


# ---- pushes and pulls


def test_a_push_that_is_whole_is_told_with_what_it_counted_for() -> None:
    kernel = ServedKernel()
    part = member(2, kernel, every=64)
    actions = part.push(0.0, Begun(PUSH, 5))
    assert {(a.type, a.number) for a in sent(actions)} == {(PUSH, 5)}
    kernel.answers = {4: (5, 3, ROUND, 6), 1: (5, 1, ROUND, 8)}
    told = [a for a in finish(part, kernel, actions) if not isinstance(a, SendServed)]
    assert told == [Stepped(ROUND, 5, 9, (3, 1))]
    assert part.begun is None and part.advance(0.0) == []


def test_a_pull_that_is_whole_is_told() -> None:
    kernel = ServedKernel()
    part = member(2, kernel)
    actions = part.pull(0.0, Begun(PULL, 6))
    told = [a for a in finish(part, kernel, actions) if not isinstance(a, SendServed)]
    assert told == [Pulled(ROUND, 6)]


@pytest.mark.parametrize("brought", [FRAGMENTS, FRAGMENTS - 1])
def test_what_answers_to_a_step_have_brought_is_not_pulled(brought: int) -> None:
    """With lanes of 32 bits; all is pulled where an answer has none, and for the next pull and the next round."""
    kernel = ServedKernel()
    phase = replace(phase_of(64), width=32)
    part = exchanger_of(phase, VIEW, 2, kernel, TIMINGS, 0.0)
    assert isinstance(part, ServersExchanger)
    part.open(ROUND)
    for number in (5, 8):
        finish(part, kernel, part.push(0.0, Begun(PUSH, number)))
        kernel.here = set(range(brought))
        told = part.pull(0.0, Begun(PULL, number + 1))
        assert (told == [Pulled(ROUND, number + 1)]) is (brought == FRAGMENTS)
        assert bool(sent(told)) is (brought < FRAGMENTS)
        finish(part, kernel, told)
    assert sent(part.pull(0.0, Begun(PULL, 10)))
    finish(part, kernel, part.advance(0.0))
    finish(part, kernel, part.push(0.0, Begun(PUSH, 11)))
    part.open(ROUND + 1)
    assert sent(part.pull(0.0, Begun(PULL, 12))), "of another round"


def test_what_was_acknowledged_in_the_view_before_is_not_sent_again() -> None:
    """The same number goes on."""
    kernel = ServedKernel()
    kernel.take(5, range(FRAGMENTS))
    assert member(2, kernel).push(0.0, Begun(PUSH, 5))[-1] == Stepped(ROUND, 5, 0, ())


def test_a_push_names_the_same_versions_in_every_view() -> None:
    """With lanes of 32 bits the answers to its own fragments bring newer parameters."""
    kernel = ServedKernel()
    kernel.versions = dict.fromkeys(range(2 * FRAGMENTS), (ROUND, 4))
    part = member(2, kernel)
    part.push(0.0, Begun(PUSH, 5))
    kernel.versions = dict.fromkeys(range(2 * FRAGMENTS), (ROUND, 9))
    assert part.begun is not None
    again = member(2, kernel).push(0.0, part.begun)
    assert {a.version for a in sent(again)} == {4}


@pytest.mark.parametrize(
    ("every", "version", "due"),
    [(1, None, True), (4, None, False), (4, 1, False), (4, 2, True), (4, 7, True), (0, 99, False)],
)
def test_a_synchronisation_is_due_as_the_last_push_says(
    every: int, version: int | None, due: bool
) -> None:
    """At T - 1 pushes, the own one among them; T = 1 has no pushes, T = 0 no synchronisations."""
    kernel = ServedKernel()
    if version is not None:
        kernel.answers = {4: (5, 1, ROUND, version), 1: (5, 1, ROUND, 0)}
    part = member(2, kernel, every)
    assert part.is_due is due
    part.open(ROUND + 1)
    assert part.is_due is (every == 1), "each round counts for itself"


@pytest.mark.parametrize("kind", [PUSH, PULL])
def test_in_a_round_that_is_dropped_only_a_pull_goes_on(kind: wire.FrameType) -> None:
    """A test begins once all have read the last round."""
    kernel = ServedKernel()
    part = member(2, kernel)
    begin = part.push if kind is PUSH else part.pull
    actions = begin(0.0, Begun(kind, 5))
    part.on_dropped()
    assert (part.deadline() == math.inf) is (kind is PUSH)
    told = finish(part, kernel, actions)
    assert (Pulled(ROUND, 5) in told) is (kind is PULL)
    begun = Begun(PUSH, 5, versions={4: 0, 1: 0})
    assert (part.begun == begun) is (kind is PUSH), "it goes along into the next view"


def test_without_a_server_nothing_begins_and_nothing_goes_on() -> None:
    """Until there is a phase in which another member has its part: what is filled from a store must stand still."""
    kernel = ServedKernel()
    view = replace(VIEW, live=frozenset({1, 2, 3}))
    part = exchanger_of(phase_of(), view, 2, kernel, TIMINGS, 0.0)
    assert isinstance(part, ServersExchanger)
    part.open(ROUND)
    assert part.lacks_server and not part.may_enter()
    part.conversion = 9
    assert part.on_closed(0.0, closed(2, 3)) == []
    part.begun = Begun(PULL, 6)
    assert part.advance(0.0) == [] and part.deadline() == math.inf
    assert part.begun == Begun(PULL, 6), "it goes along into the next view"
    assert not member().lacks_server


def test_a_refusal_is_asked_again_soon() -> None:
    part = member()
    part.push(0.0, Begun(PUSH, 5))
    part.hear_refusal(0.0, 4, 5)
    assert part.deadline() == pytest.approx(0.001)


def test_before_go_nobody_offers() -> None:
    part = member()
    for round_ in (ROUND, ROUND + 1):  # also in the phase's first one
        part.open(round_)
        assert not part.may_enter()
        part.goes_on = round_
        assert part.may_enter()


# ---- R16


def test_a_server_that_does_not_answer_is_reported() -> None:
    """In the asynchronous stage too."""
    kernel = ServedKernel()
    part = member(2, kernel, every=64)
    part.push(0.0, Begun(PUSH, 5))
    kernel.take(5, range(150, 300))
    part.advance(0.0)
    kernel.take(5, range(150, 300))
    now, lacks = 0.0, dict[int, int]()
    while now < 10 * TIMINGS.silence_most_s and not lacks:
        now = part.deadline()
        part.advance(now)
        lacks = dict(part.take_report(now, closed()))
    assert lacks == {4: 150}


def test_a_server_that_most_workers_miss_is_at_fault() -> None:
    """Of members 1 to 5 the first three serve, and have nothing to report."""
    assert find_fault({4: {2: 9}, 5: {2: 7}}, live={4, 5}) == 2
    assert find_fault({4: {2: 9}}, live={4, 5}) == 4
