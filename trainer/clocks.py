# SPDX-License-Identifier: Apache-2.0
"""Hosts' clocks laid over each other: all see a round's commit at the same time, within milliseconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

SAME_CLOCK_S = 0.25


@dataclass(frozen=True)
class Clock:
    """What is known of one clock. `commits`: when rounds were committed, by it; `waited`: seconds in all."""

    commits: dict[int, float] = field(default_factory=dict)
    waited: float = 0.0


def clock_shifts(clocks: Sequence[Clock]) -> list[float | None]:
    """How far each clock is ahead of one of them, in seconds; None for one that shares no round with the others.

    A host that is computing at a commit sees it late. So the host that waited most is the measure, and of the
    differences the low ones count. A clock that shares no round with the measure is laid over those already placed.
    """
    shifts: list[float | None] = [None] * len(clocks)
    order = sorted(range(len(clocks)), key=lambda k: clocks[k].waited, reverse=True)
    waiting = [k for k in order if clocks[k].commits]
    known: dict[int, float] = {}
    while waiting:
        measure, placed = not known, len(waiting)
        for k in waiting[:1] if measure else waiting[:]:
            commits = clocks[k].commits
            ahead = sorted(t - known[r] for r, t in commits.items() if r in known)
            if ahead or measure:
                shift = shifts[k] = ahead[len(ahead) // 10] if ahead else 0.0
                known = {r: t - shift for r, t in commits.items()} | known
                waiting.remove(k)
        if len(waiting) == placed:
            break
    # The clocks of two machines, which count from their starts, are never as near as that.
    if max((abs(shift) for shift in shifts if shift is not None), default=0.0) < SAME_CLOCK_S:
        return [0.0] * len(clocks)
    return shifts
