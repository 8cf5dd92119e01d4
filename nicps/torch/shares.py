# SPDX-License-Identifier: Apache-2.0
"""Which parameters of a script's model make a part, and on which channel it travels (P2; docs/channels.md).

A part is a run of whole parameters, in the order in which the forward pass needs them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from nicps.errors import UsageProblem
from nicps.need_first import (
    MOST_ROUNDS,
    Line,
    Part,
    Plan,
    Timing,
    cut,
    equal_shares,
    parts_at,
    planned,
)

#: Numbers of all parts that are on their way at a time: this part of the model, and so many at least.
_OPEN_PART, _LEAST_OPEN = 1 / 4, 5 << 18


@dataclass(frozen=True, slots=True)
class Shares:
    """Attributes:
    cuts: with how many parameters before it another part begins, rising.
    channels: of each part, front first; a higher one is more urgent.
    """

    cuts: tuple[int, ...]
    channels: tuple[int, ...]

    @classmethod
    def equal(cls, sizes: Sequence[int], channels: int) -> Shares:
        """Parts of about equal size, in equal numbers on all channels.

        Args:
            sizes: numbers of each parameter.
        """
        count = least_parts(sizes, channels)
        plan = equal_shares(_plain(sizes), Line(0.0, 0.0), channels, count)
        return cls.of(plan.ends, plan.channels, sizes)

    @classmethod
    def by_hand(cls, sizes: Sequence[int], cuts: Sequence[int]) -> Shares:
        """A channel for each run of parameters between these cuts, in parts of about equal size.

        Raises:
            UsageProblem: a channel would have no parameter.
        """
        edges = [0, *cuts, len(sizes)]
        if any(last <= first for first, last in pairwise(edges)):
            raise UsageProblem(
                f"cuts {list(cuts)} do not rise between 0 and {len(sizes)}, the number of parameters: each channel"
                " needs one"
            )
        count = least_parts(sizes, len(edges) - 1)
        share, ends, channels, at = sum(sizes) / count, list[int](), list[int](), 0
        for place, (first, last) in enumerate(pairwise(edges)):
            whole = sum(sizes[first:last])
            parts = cut(_plain(sizes[first:last]), max(1, round(whole / share)))
            ends += [at + part.last for part in parts]
            channels += [len(edges) - 2 - place] * len(parts)
            at += whole
        return cls.of(ends, channels, sizes)

    @classmethod
    def of(cls, ends: Sequence[int], channels: Sequence[int], sizes: Sequence[int]) -> Shares:
        """Parts that end at the ends of parameters that are nearest to these.

        Args:
            ends: in numbers, or bytes, as `sizes` are.
        """
        places = list(accumulate(sizes))
        cuts, kept, before = list[int](), list[int](), 0
        for end, channel in zip(ends, channels, strict=True):
            at = min(range(len(places)), key=lambda k: abs(places[k] - end)) + 1
            if end == ends[-1]:
                at = len(places)
            if at > before:
                cuts.append(at)
                kept.append(channel)
                before = at
        return cls(tuple(cuts[:-1]), tuple(kept))

    def parts(self, timing: Timing) -> list[Part]:
        """The parts, for the arithmetic of `nicps.need_first`."""
        places = [0, *accumulate(timing.nbytes)]
        return parts_at(timing, [places[at] for at in (*self.cuts, len(timing.nbytes))])

    def predicted(self, timing: Timing, line: Line) -> Plan:
        """The same as a plan of need first."""
        return planned(timing, line, self.parts(timing), self.channels)

    def sizes(self, sizes: Sequence[int]) -> list[int]:
        """Numbers of each part."""
        places = [0, *accumulate(sizes)]
        return [places[b] - places[a] for a, b in pairwise((0, *self.cuts, len(sizes)))]


def least_parts(sizes: Sequence[int], channels: int) -> int:
    """So many parts a step has at least, a multiple of the channels."""
    total = sum(sizes)
    room = max(total * _OPEN_PART, _LEAST_OPEN)
    most = MOST_ROUNDS // channels * channels
    return min(channels * max(1, -int(-total // room)), most)


def _plain(sizes: Sequence[int]) -> Timing:
    """Of which only the sizes are known."""
    none = (0.0,) * len(sizes)
    return Timing(tuple(sizes), none, none, 0.0, 0.0)
