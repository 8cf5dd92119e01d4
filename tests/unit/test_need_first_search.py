# SPDX-License-Identifier: Apache-2.0
"""Need first against a search of all cuts, for networks of few parameters, by the same model of a step's time."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import accumulate, combinations, product

import pytest

from nicps.need_first import (
    Line,
    Timing,
    _channels,
    _descend,
    cut,
    parts_at,
    plan_for,
    step_seconds,
)

pytestmark = pytest.mark.unit

SEEDS = range(100)
#: At most so much longer a step is than with the best of all cuts at the ends of parameters.
WHOLE, INSIDE = 1.04, 1.06


def network(seed: int) -> tuple[Timing, Line, int]:
    """At most eight parameters, even ones or some of them large; a step of 1 s without the line, which takes a quarter
    of that to three times as long; and channels.
    """
    chosen = random.Random(seed)
    count = chosen.randint(2, 8)
    even, by_size = chosen.random() < 0.5, chosen.random() < 0.5
    nbytes = [chosen.randint(1, 9) if even else 2 ** chosen.randint(0, 6) for _ in range(count)]
    back = [chosen.random() * (each if by_size else 1) for each in nbytes]
    front = [each * chosen.uniform(0.5, 1.5) for each in back]
    back = [each / sum(back) * 2 / 3 for each in back]
    front = [each / sum(front) / 3 for each in front]
    released = tuple(sum(back[at:]) for at in range(count))
    needed = tuple(sum(front[:at]) for at in range(count))
    timing = Timing(tuple(nbytes), released, needed, 2 / 3, 1 / 3)
    wire, update = chosen.choice([0.25, 0.5, 0.75, 1, 1.5, 2, 3]), chosen.choice([0, 0.02, 0.1])
    latency, total = chosen.choice([0, 0.002, 0.01, 0.05]), sum(nbytes)
    channels = min(count, chosen.randint(2, 4))
    return timing, Line(latency, wire / total, update / total), channels


def every_plan(timing: Timing, channels: int) -> Iterator[tuple[list[int], list[int]]]:
    """Ends and channels: at the end of each parameter a part goes on, or ends, or its channel ends, too."""
    *places, total = accumulate(timing.nbytes)
    for kinds in product(("on", "part", "channel"), repeat=len(places)):
        cuts = [
            (end, kind == "channel")
            for end, kind in zip(places, kinds, strict=True)
            if kind != "on"
        ]
        left = sum(ends for _, ends in cuts)
        if left < channels:
            of_parts = [
                left - before for before in accumulate((ends for _, ends in cuts), initial=0)
            ]
            yield [*(end for end, _ in cuts), total], of_parts


def best_of_all(timing: Timing, line: Line, channels: int) -> float:
    """Seconds of a step with the best of them."""
    return min(
        step_seconds(timing, line, parts_at(timing, ends), of_parts)
        for ends, of_parts in every_plan(timing, channels)
    )


def test_every_plan_is_tried() -> None:
    timing = Timing((5, 3, 2), (3.0, 2.0, 1.0), (0.0, 1.0, 2.0), 3.0, 3.0)
    found = [(tuple(ends), tuple(of_parts)) for ends, of_parts in every_plan(timing, 2)]
    assert sorted(found) == [
        ((5, 8, 10), (0, 0, 0)),
        ((5, 8, 10), (1, 0, 0)),
        ((5, 8, 10), (1, 1, 0)),
        ((5, 10), (0, 0)),
        ((5, 10), (1, 0)),
        ((8, 10), (0, 0)),
        ((8, 10), (1, 0)),
        ((10,), (0,)),
    ]


@pytest.mark.short("few")
@pytest.mark.parametrize("seeds", [SEEDS[:20], SEEDS[20:]], ids=["few", "many"])
def test_no_cuts_are_much_better(seeds: range) -> None:
    """1 % is given for fewer rounds, and 3 % for one channel. With whole parameters nothing else is lost; where parts
    end inside parameters they have about equal sizes, or grow by one factor."""
    for seed in seeds:
        timing, line, channels = network(seed)
        best = best_of_all(timing, line, channels)
        given = timing, line
        whole = plan_for(*given, channels=channels, hosts=2, inside=False)
        assert {*whole.ends} <= {*accumulate(timing.nbytes)}
        assert best - 1e-9 <= whole.seconds <= WHOLE * best, seed
        assert plan_for(*given, channels=channels, hosts=2).seconds <= INSIDE * best, seed


def test_descent_finds_about_the_best_channels_of_given_parts() -> None:
    """It may end where no single cut is to be moved: one in a hundred of 400 took over 7 % longer, at most 15.
    `plan_for` makes up for that by its numbers and sizes of parts."""
    longer = []
    for seed in SEEDS:
        timing, line, channels = network(seed)
        for growth in (1, 8):
            parts = cut(timing, 12, 1, growth)
            channels = min(channels, len(parts))
            choices = combinations(range(1, len(parts)), channels - 1)
            best = min(
                step_seconds(timing, line, parts, _channels(len(parts), cuts[::-1]))
                for cuts in choices
            )
            found = _descend(timing, line, parts, channels).seconds
            longer.append(found / best)
            assert 1 - 1e-9 <= longer[-1] <= 1.15, (seed, growth)
    assert sorted(longer)[len(longer) * 9 // 10] < 1.03
