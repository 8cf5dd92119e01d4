# SPDX-License-Identifier: Apache-2.0
"""What the lead measures, and the plan that it makes of it: on times that a model of the line and of computing says."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

import pytest

from nicps.errors import JobFailed
from nicps.flows import Times
from nicps.need_first import Line, Timing, parts_at, plan_for, step_seconds
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
    for step in range(1, steps + 1):
        assert planner.measures(step, 2)
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
    train_on = [planner.measures(step, 2) for step in range(5, 200)]
    assert not any(train_on[:95]), "it is let alone for a while"


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
