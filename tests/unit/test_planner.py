# SPDX-License-Identifier: Apache-2.0
"""What the lead measures, and the plan that it makes of it: on times that a model of the line and of computing says."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

import pytest

from nicps.errors import JobFailed
from nicps.flows import Times
from nicps.measuring import SETTLED, Review
from nicps.need_first import Line, Plan, Timing, parts_at, plan_for, step_seconds
from trainer.flows import Parts
from trainer.planner import Planner

pytestmark = pytest.mark.unit

LAYERS, SIZE = 24, 14_400
LAYOUT: list[dict[str, Any]] = [
    {"name": f"p{k}", "kind": "parameter", "shape": [SIZE]} for k in range(LAYERS)
]
BUFFERS = [{"name": "mean", "kind": "buffer", "shape": [100]}]
ROOM = 4 * LAYERS * SIZE / 2**20  # the whole vector: the first plan has a round on each channel
PACE = 1.0 / (LAYERS * SIZE)  # all bytes take a second
BACKWARD, FORWARD, REST, ANSWER, ALPHA, UPDATE = 0.7, 0.3, 0.05, 0.003, 0.003, 0.024
TIMING = Timing(
    (SIZE,) * LAYERS,
    tuple(BACKWARD * (LAYERS - k) / LAYERS for k in range(LAYERS)),
    tuple(FORWARD * k / LAYERS for k in range(LAYERS)),
    BACKWARD,
    FORWARD,
)
LINE = Line(ALPHA + ANSWER, PACE, UPDATE / LAYERS / SIZE)


def parts_of(channels: int = 4, *, buffers: bool = False) -> Parts:
    return Parts(LAYOUT + BUFFERS * buffers, channels, "i8", ROOM)


def train(planner: Planner, parts: Parts, steps: int, slower: float = 1.0) -> None:
    """So many steps, measured, the first one not. The slowest member takes `slower` times as long to compute."""
    planner.enter(parts)
    now = 100.0
    planner.begin_backward(now, measures=planner.measures(0, 2))
    planner.note_step(3.0)
    measure(planner, parts, steps, slower, now)


def measure(
    planner: Planner,
    parts: Parts,
    steps: int,
    slower: float,
    now: float,
    first: int = 1,
    hosts: int = 2,
) -> None:
    """Steps that are measured, from that one on."""
    for step in range(first, first + steps):
        assert planner.measures(step, hosts)
        planner.begin_backward(now, measures=True)
        for index, released in enumerate(TIMING.released):
            planner.note_gradient(index, now + released)
        free, rounds = now, []
        for piece in parts.pieces:
            released = TIMING.released[min(piece.here.start // SIZE, LAYERS - 1)]
            offered = max(free, now + released)
            listed = max(offered, now + released * slower) + ANSWER
            free = listed + ALPHA + (piece.here.stop - piece.here.start) * PACE
            rounds.append((piece, Times(offered, listed, free, free)))
        forward = now + BACKWARD
        planner.begin_forward(forward)
        needed = {index: forward + use for index, use in enumerate(TIMING.needed)}
        ended = forward + FORWARD + UPDATE + 1.23
        planner.end_forward(ended, 1.23, UPDATE, needed, rounds)
        now = ended + REST
    planner.begin_backward(now, measures=False)


def expected(parts: Parts, timing: Timing) -> Any:
    options = {"channels": 4, "hosts": 2, "rounds": parts.most, "least": parts.least}
    return plan_for(timing, LINE, **options, grain=parts.fragment_bytes)  # type: ignore[arg-type]


def test_what_is_measured_makes_the_plan_and_its_prediction() -> None:
    parts = parts_of()
    planner = Planner(parts, 4, None)
    train(planner, parts, 3)
    assert planner.propose(4, 2) == [] and planner.predicted is None, "four steps are measured"
    planner = Planner(parts, 4, None)
    train(planner, parts, 4)
    plan = expected(parts, TIMING)
    rounds = planner.propose(5, 2)
    assert rounds == parts.rounds_of(plan) != parts.fragments
    planner.enter(parts.replanned(rounds))
    assert planner.predicted == pytest.approx(plan.seconds + REST, rel=0.01)
    assert planner.described.startswith(f"need first: {len(plan.ends)} rounds a step on 4 channels")
    assert planner.described == "", "it is said once"


def test_the_slowest_member_counts() -> None:
    """All rounds of the lead, which is not that member, wait for it."""
    parts, slower = parts_of(), 1.5
    planner = Planner(parts, 4, None)
    train(planner, parts, 4, slower=slower)
    planner.enter(parts.replanned(planner.propose(5, 2)))
    timing = Timing(
        TIMING.nbytes,
        tuple(slower * each for each in TIMING.released),
        tuple(slower * each for each in TIMING.needed),
        slower * BACKWARD,
        slower * FORWARD,
    )
    plan = expected(parts, timing)
    assert planner.predicted == pytest.approx(plan.seconds + slower * REST, rel=0.02)


def test_a_plan_that_is_hardly_better_is_not_taken() -> None:
    """The one in force is predicted instead."""
    first = parts_of()
    parts = first.replanned(first.rounds_of(expected(first, TIMING)))
    planner = Planner(parts, 4, None)
    train(planner, parts, 4)
    assert planner.propose(5, 2) == []
    pieces = sorted(parts.pieces, key=lambda piece: piece.here.start)
    cut = parts_at(TIMING, [piece.here.stop for piece in pieces])
    kept = step_seconds(TIMING, LINE, cut, [piece.channel for piece in pieces])
    assert planner.predicted == pytest.approx(kept + REST, rel=0.01)
    for step in range(5, 200):
        planner.note_step(kept + REST)
        assert not planner.measures(step, 2), "as predicted"


def test_a_plan_whose_steps_take_longer_is_made_again() -> None:
    """With fewer rounds, as each of them is seen to occupy the processors; and the one before comes back, if steps take
    even longer then.
    """
    parts = parts_of()
    planner = Planner(parts, 4, None)
    train(planner, parts, 4)
    parts = parts.replanned(planner.propose(5, 2))
    first, predicted = parts.fragments, planner.predicted
    planner.enter(parts)
    settle(planner, 6, 1.5)
    measure(planner, parts, 4, 1.0, 200.0, first=27)
    second = planner.propose(31, 2)
    assert sum(map(len, second)) < sum(map(len, first))
    parts = parts.replanned(second)
    planner.enter(parts)
    assert predicted is None and planner.predicted is not None and planner.predicted < 1.5
    settle(planner, 32, 1.8)
    assert not planner.measures(53, 2), "not before a hundred steps"
    measure(planner, parts, 4, 1.0, 300.0, first=132)
    assert planner.propose(136, 2) == first
    planner.enter(parts.replanned(first))
    assert planner.predicted == pytest.approx(1.5)


def settle(planner: Planner, step: int, seconds: float) -> None:
    """Steps that take so long, until the plan can be judged."""
    for each in range(step, step + SETTLED):
        assert not planner.measures(each, 2), "it is not judged yet"
        planner.note_step(seconds)


def test_steps_with_other_hosts_do_not_count() -> None:
    """A plan that was made for two hosts is judged by twenty steps with three."""
    parts = parts_of()
    planner = Planner(parts, 4, None)
    train(planner, parts, 4)
    planner.enter(parts.replanned(planner.propose(5, 2)))
    settle(planner, 6, 1.05)
    for step in range(26, 26 + SETTLED):
        assert not planner.measures(step, 3)
        planner.note_step(1.05)
    assert planner.measures(26 + SETTLED, 3)


def test_what_was_measured_with_other_hosts_does_not_count() -> None:
    """A host is lost after three of four measured steps: the plan is made of four steps without it."""
    parts = parts_of()
    planner = Planner(parts, 4, None)
    train(planner, parts, 3)
    planner.measures(4, 1)
    planner.note_step(3.0)
    measure(planner, parts, 3, 1.0, 200.0, first=5, hosts=1)
    assert planner.propose(8, 1) == [] and planner.predicted is None


# ---- when it is made again

SLOW, FAST = Plan((10,), (0,), 1.0, 1.0), Plan((4, 10), (1, 0), 0.9, 1.0)


def test_review() -> None:
    review = Review()
    assert review.asks(1, 4, 0.0), "there is no plan yet"
    assert review.take(5, 4, SLOW, FAST) is None, "the one in force is better"
    assert not review.asks(20, 4, 0.9), "as predicted"
    assert review.asks(20, 4, 1.04) and review.asks(20, 4, 0.76)
    assert review.asks(20, 3, 0.9), "a host has gone"
    assert review.take(24, 4, SLOW, FAST, took=1.01) is None, "not 2 % better"
    assert not review.asks(123, 4, 2.0), "the last judgement was 99 steps ago"
    assert not review.asks(124, 4, 1.01) and review.asks(124, 4, 1.17)
    assert review.take(128, 4, SLOW, FAST, took=1.1) == SLOW
    assert review.asks(248, 4, 1.13), "the other one was better"
    assert review.take(252, 4, replace(FAST, seconds=0.8), SLOW, took=1.13) == replace(
        FAST, seconds=1.1
    ), "its steps take as long as they did, whatever is predicted"


def test_what_was_seen_under_other_conditions_does_not_count() -> None:
    review = Review()
    review.take(5, 4, SLOW, FAST)
    review.take(24, 4, SLOW, FAST, took=0.95)
    assert review.take(128, 4, SLOW, FAST, took=1.2) == SLOW
    assert review.take(252, 3, FAST, SLOW, took=0.95) == FAST, "with other hosts it is tried again"


def test_a_plan_that_never_comes_into_force_is_not_what_a_step_is_predicted_by() -> None:
    """Another member may lead when its phase would begin, or a lost one end the job."""
    parts = parts_of()
    planner = Planner(parts, 4, None)
    train(planner, parts, 4)
    rounds = planner.propose(5, 2)
    assert rounds and planner.predicted is None, "not yet"
    planner.enter(parts)  # a phase without it
    assert planner.predicted is None
    other = parts.replanned(parts.rounds_of(expected(parts, replace(TIMING, forward=3.0))))
    assert other.fragments not in (rounds, parts.fragments)
    planner.enter(other)
    assert planner.predicted is None, "the plan of another one that leads"
    planner.enter(parts.replanned(rounds))
    assert planner.predicted is not None, "its own, later"


def test_nothing_is_measured_for_the_last_steps() -> None:
    planner = Planner(parts_of(), 4, 22)
    planner.note_step(1.0)
    assert planner.measures(2, 2) and not planner.measures(3, 2)


@pytest.mark.parametrize("buffers", [False, True])
@pytest.mark.parametrize("channels", [1, 2, 4, 8])
def test_all_members_make_the_same_parts_of_the_rounds(channels: int, buffers: bool) -> None:
    sizes = [1000 + 997 * (k % 7) ** 2 for k in range(LAYERS)]
    layout = [{"name": f"p{k}", "kind": "parameter", "shape": [n]} for k, n in enumerate(sizes)]
    end = sum(sizes)
    first = Parts(layout + BUFFERS * buffers, channels, "i8", ROOM)
    timing = replace(TIMING, nbytes=tuple(sizes))
    options = {"hosts": 2, "rounds": first.most, "grain": first.fragment_bytes}
    plan = plan_for(timing, LINE, channels=channels, **options)
    rounds = first.rounds_of(plan)
    parts = first.replanned(rounds)
    assert parts.fragments == rounds and parts.residual is first.residual
    front = sorted((p for p in parts.pieces if p.here.stop <= end), key=lambda p: p.here.start)
    assert tuple(p.here.stop for p in front) == plan.ends
    assert tuple(p.channel for p in front) == plan.channels
    if buffers:
        last = parts.channels[-1][-1]
        assert (last.here.start, last.here.stop) == (end, end + 100)
    for ends, pieces in zip(pairwise(accumulate(sizes, initial=0)), parts.pieces_of, strict=True):
        assert min(p.here.start for p in pieces) <= ends[0]
        assert max(p.here.stop for p in pieces) >= ends[1]


def test_rounds_of_another_model_are_refused() -> None:
    with pytest.raises(JobFailed, match=r"rounds of \[\[120\], \[121\]\] fragments.* has 240:"):
        parts_of().replanned([[120], [121]])
