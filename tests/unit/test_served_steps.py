# SPDX-License-Identifier: Apache-2.0
"""A worker's steps and pulls: what goes to which server, what is sent again, and when all of it is there."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from nicps import wire
from nicps.protocol import Phase, Timings
from nicps.protocol.actions import SendServed
from nicps.protocol.exchange.steps import Source, Steps
from nicps.protocol.exchange.windows import LEAST_WINDOW, PROBES, QUEUE
from tests.listed import ROUND
from tests.served_kernel import (
    FRAGMENTS,
    VIEW_NUMBER,
    ServedKernel,
    finish_with_losses,
    indices,
    phase_of,
)

TIMINGS = Timings()
PUSH, PULL, CONTRIBUTION = wire.FrameType.PUSH, wire.FrameType.PULL, wire.FrameType.CONTRIBUTION
PHASE = phase_of(64)
#: Of two workers; the parts are 0 to 150 of member 4, and 150 to 300 of member 1.
WINDOW = QUEUE // 2


def worker(kernel: ServedKernel, number: int = 2, phase: Phase = PHASE) -> Steps:
    return Steps(phase, VIEW_NUMBER, number, kernel, TIMINGS)


def push(steps: Steps, now: float, number: int) -> list[SendServed]:
    """Of what is pulled now."""
    return steps.push(now, number, ROUND, steps.versions(ROUND))


def sent(actions: list[SendServed]) -> list[tuple[int, tuple[tuple[int, int], ...]]]:
    return [(action.to, action.ranges) for action in actions]


def finish(
    steps: Steps, kernel: ServedKernel, actions: list[SendServed], now: float = 0.0
) -> list[SendServed]:
    """All that is sent comes at once; what was sent until all was there."""
    everything = list(actions)
    while not steps.whole:
        assert actions, "it waits for what was never sent"
        for action in actions:
            kernel.take(action.number, indices(action))
        actions = steps.advance(now)
        everything += actions
    return everything


# ---- steps


def test_a_step_goes_to_all_servers_by_their_parts() -> None:
    kernel = ServedKernel()
    steps = worker(kernel)
    actions = push(steps, 0.0, 5)
    assert sent(actions) == [(4, ((0, WINDOW),)), (1, ((150, WINDOW),))]
    assert {(a.view, a.round, a.type, a.number, a.repair) for a in actions} == {
        (VIEW_NUMBER, ROUND, PUSH, 5, False)
    }
    assert not steps.whole and steps.clock == WINDOW // 2
    everything = finish(steps, kernel, actions)
    assert set().union(*(indices(a) for a in everything if a.to == 4)) == set(range(150))
    assert sum(len(indices(a)) for a in everything) == FRAGMENTS, "each once"
    assert steps.advance(9.0) == [] and steps.deadline() == float("inf")


def test_a_push_names_to_each_server_the_least_version_of_its_part() -> None:
    """A fragment of parameters each is half of a push fragment; what was pulled in another round is version 0."""
    kernel = ServedKernel()
    kernel.versions = dict.fromkeys(range(2 * FRAGMENTS), (ROUND, 6)) | {
        299: (ROUND, 5),
        301: (ROUND, 4),
    }
    steps = worker(kernel)
    assert [(a.to, a.version) for a in push(steps, 0.0, 1)] == [(4, 5), (1, 4)]
    kernel.versions[300] = (ROUND - 1, 9)
    finish(steps, kernel, steps.advance(0.0) or push(steps, 0.0, 2))
    assert [(a.to, a.version) for a in push(steps, 0.0, 3)] == [(4, 5), (1, 0)]


def test_a_contribution_names_the_list() -> None:
    steps = worker(ServedKernel())
    actions = steps.contribute(0.0, 1, ROUND, 0b110)
    assert {(a.type, a.members, a.version) for a in actions} == {(CONTRIBUTION, 0b110, 0)}
    assert {a.members for a in steps.pull(0.0, 2, ROUND)} == {0}


@pytest.mark.parametrize("workers", [1, 2, 5, 64])
def test_all_workers_windows_fit_a_servers_port(workers: int) -> None:
    shares = tuple([0] * 4 + [4] * workers)
    steps = worker(ServedKernel(), 5, replace(PHASE, shares=shares, fragments=2000))
    (_, ((_, count),)), _ = sent(push(steps, 0.0, 1))
    assert count * workers <= QUEUE or count == LEAST_WINDOW


def test_a_small_vector_has_nothing_for_some_server() -> None:
    kernel = ServedKernel()
    steps = worker(kernel, phase=replace(PHASE, fragments=1, last_fragments=1))
    actions = push(steps, 0.0, 1)
    assert sent(actions) == [(1, ((0, 1),))]
    finish(steps, kernel, actions)


def test_a_host_that_serves_sends_itself_nothing() -> None:
    assert sent(push(worker(ServedKernel(), 4), 0.0, 1)) == [(1, ((150, WINDOW),))]


def test_numbers_rise() -> None:
    steps = worker(ServedKernel())
    push(steps, 0.0, 5)
    for number in (5, 4):
        with pytest.raises(AssertionError, match="numbers rise"):
            steps.pull(0.0, number, ROUND)


# ---- what is lost


def test_the_window_opens_as_fragments_are_acknowledged() -> None:
    kernel = ServedKernel()
    steps = worker(kernel)
    push(steps, 0.0, 1)
    kernel.take(1, range(10))
    assert sent(steps.advance(0.0)) == [(4, ((WINDOW, 10),))]
    kernel.take(1, range(11, 20))
    assert steps.advance(0.0) == [], "one is lacking"


def test_what_others_have_overtaken_is_sent_again() -> None:
    """At once, and once; until nothing has come for too long."""
    kernel = ServedKernel()
    steps = worker(kernel)
    push(steps, 0.0, 1)
    kernel.take(1, {*range(40)} - {3, 7})
    again, fresh = steps.advance(0.0)
    assert (again.to, again.ranges, again.repair) == (4, ((3, 1), (7, 1)), True)
    assert (fresh.ranges, fresh.repair) == (((WINDOW, 3),), False)
    assert steps.advance(0.0) == []
    late = steps.deadline()
    assert 0 < late < 1
    assert (4, ((3, 1), (7, 1))) in sent(steps.advance(late))
    kernel.take(1, {3, 7})
    assert sent(steps.advance(late))[0] == (4, ((WINDOW + 3, 37),))


def test_where_nothing_comes_a_few_are_sent_again() -> None:
    """And later and later."""
    steps = worker(ServedKernel())
    push(steps, 0.0, 1)
    waits, now = [], 0.0
    for _ in range(4):
        waits.append(steps.deadline() - now)
        now = steps.deadline()
        actions = steps.advance(now)
        assert sent(actions) == [(4, ((0, PROBES),)), (1, ((150, PROBES),))]
        assert all(action.repair for action in actions)
    assert waits == sorted(waits) and waits[0] < waits[-1]


def test_after_a_refusal_it_is_sent_again_soon() -> None:
    steps = worker(ServedKernel())
    push(steps, 0.0, 1)
    steps.hear_refusal(0.0, 4, 1)
    assert steps.deadline() == pytest.approx(0.001)
    assert len(steps.advance(0.001)) == 2


def test_a_server_that_does_not_answer_is_reported() -> None:
    """Not before it has had its time; the other one is done."""
    kernel = ServedKernel()
    steps = worker(kernel)
    push(steps, 0.0, 1)
    kernel.take(1, range(150, 300))
    steps.advance(0.0)
    kernel.take(1, range(150, 300))
    now, lacks = 0.0, dict[int, int]()
    while now < 10 * TIMINGS.silence_most_s and not lacks:
        now = steps.deadline()
        steps.advance(now)
        lacks = dict(steps.take_report(now))
    assert lacks == {4: 150} and now >= TIMINGS.silence_most_s
    assert steps.take_report(now) == {}


# ---- pulls and partners


def test_a_pull_asks_every_server_for_its_part() -> None:
    """In fragments of 32-bit lanes, two of which are one of 16."""
    kernel = ServedKernel()
    steps = worker(kernel)
    actions = steps.pull(0.0, 1, ROUND)
    assert sent(actions) == [(4, ((0, WINDOW),)), (1, ((300, WINDOW),))]
    assert {a.type for a in actions} == {PULL}
    everything = finish(steps, kernel, actions)
    assert set().union(*(indices(a) for a in everything)) == set(range(2 * FRAGMENTS))


PARTNERED = (Source(4, 0, 200), Source(3, 200, 600))


def test_a_partner_gives_its_set() -> None:
    kernel = ServedKernel()
    steps = worker(kernel)
    actions = steps.pull(0.0, 1, ROUND, PARTNERED)
    assert sent(actions) == [(4, ((0, WINDOW),)), (3, ((200, WINDOW),))]
    everything = finish(steps, kernel, actions)
    assert {a.to for a in everything} == {3, 4}


def test_the_servers_are_asked_where_a_partner_does_not_answer() -> None:
    """For the rest, each for its part of it: a slow partner costs the servers' line, never the round."""
    kernel = ServedKernel()
    steps = worker(kernel)
    steps.pull(0.0, 1, ROUND, PARTNERED)
    now, asked = 0.0, list[SendServed]()
    for _ in range(4):  # the server's set is whole
        kernel.take(1, range(230))
        steps.advance(now)
    for _ in range(20):
        steps.hear_refusal(now, 3, 1)
        now = steps.deadline()
        asked = steps.advance(now)
        if {action.to for action in asked} != {3}:
            break
    assert sent(asked) == [(4, ((230, 70),)), (1, ((300, WINDOW),))]
    assert {action.to for action in finish(steps, kernel, asked, now)} == {1, 4}


def test_a_server_is_not_given_up_for_another() -> None:
    steps = worker(ServedKernel())
    steps.pull(0.0, 1, ROUND)
    for _ in range(20):
        again = ((4, ((0, PROBES),)), (1, ((300, PROBES),)))
        assert set(sent(steps.advance(steps.deadline()))) <= set(again)


# ---- with loss


@pytest.mark.parametrize("seed", range(40))
def test_all_of_it_comes_in_the_end(seed: int) -> None:
    """Partners answer, or never."""
    random = Random(seed)
    kernel = ServedKernel()
    steps = worker(kernel)
    now, silent = 0.0, {3} if random.random() < 0.3 else ()
    for number in range(1, 5):
        partners = PARTNERED if random.random() < 0.5 else ()
        begin = random.choice(["push", "pull", "contribute"])
        if begin == "push":
            actions = push(steps, now, number)
        elif begin == "pull":
            actions = steps.pull(now, number, ROUND, partners)
        else:
            actions = steps.contribute(now, number, ROUND, 0b110)
        now = finish_with_losses(steps, kernel, actions, now, random, silent)
