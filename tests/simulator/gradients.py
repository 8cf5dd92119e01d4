# SPDX-License-Identifier: Apache-2.0
"""Gradients with exponents of their own: one lane a fragment, in whole numbers, so that nothing is lost unseen.

A gradient is in multiples of 2 to the power of `LEAST`. Lanes, units and rounding are those of docs/stripes.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from nicps import wire

LEAST = -120
_MOST = 126  # of an exponent that is finite


@dataclass(frozen=True, slots=True)
class Lane:
    """A fragment of a contribution, or of a sum: `value * 2**exponent`, or nothing that is finite."""

    exponent: int
    value: int

    @property
    def finite(self) -> bool:
        """It stands for a number."""
        return self.exponent != wire.NOT_FINITE

    @property
    def whole(self) -> int:
        """That number, in multiples of 2 to the power of `LEAST`."""
        return self.value << self.exponent - LEAST if self.finite else 0

    def units(self, unit: int, width: int) -> int:
        """The same in units: what lies below is rounded down."""
        by = min(self.exponent - unit, wire.MAX_SHIFT[width])
        return self.value << by if by >= 0 else self.value >> min(-by, 63)


@dataclass(frozen=True, slots=True)
class Contribution:
    """What a program offers; `gradient` is what it has come to, `left` what the lanes do not have of it."""

    lanes: tuple[Lane, ...]
    gradient: tuple[int, ...]
    left: tuple[int, ...]

    @property
    def largest(self) -> int:
        """The largest exponent of what is finite."""
        return max((lane.exponent for lane in self.lanes if lane.finite), default=LEAST)


@dataclass(frozen=True, slots=True)
class Reference:
    """What a closed list comes to: the sums, what is left over of each in units, and what lay below the unit.

    `added`: what a switch has added to each of what was left over before, in units.
    """

    unit: int
    sums: tuple[Lane, ...]
    rests: tuple[int, ...]
    below: tuple[int, ...]
    added: tuple[int, ...] = ()


def quantise(rng: Random, residual: Sequence[int], width: int) -> Contribution:
    """A random gradient and the residual: some fragments are zero, some huge, some not finite."""
    centre = rng.choice((-30, -30, -5, 40, -118, 100 if rng.random() < 0.1 else 0))
    lanes, gradients, left = [], [], []
    for over in residual:
        gradient = rng.randrange(-1 << width + 3, 1 << width + 3)
        gradient <<= max(0, centre + rng.choice((0, 0, 1, 3, 10, 30, -20, -60)) - LEAST)
        if rng.random() < 0.1:
            gradient = 0
        value = gradient + over
        exponent = max(LEAST, _bits(value) - (width - 1) + LEAST)
        if exponent > _MOST or rng.random() < 0.01:
            lanes.append(Lane(wire.NOT_FINITE, rng.randrange(-5, 6)))
            gradients.append(0)
            left.append(over)
            continue
        lane = Lane(exponent, value >> exponent - LEAST)
        lanes.append(lane)
        gradients.append(gradient)
        left.append(value - lane.whole)
    return Contribution(tuple(lanes), tuple(gradients), tuple(left))


def unit_of(exponents: Sequence[int], width: int) -> int:
    """Of a round in which these are the members' largest exponents."""
    return max(LEAST, max(exponents, default=LEAST) - wire.MAX_SHIFT[width])


def round_sum(total: int, width: int, unit: int, not_finite: bool) -> tuple[Lane, int]:
    """The lane that a sum in units is rounded to, and the remainder."""
    shift = max(0, _bits(total) - (width - 1))
    half = 1 << shift - 1 if shift else 0
    value = min(total + half >> shift, (1 << width - 1) - 1)
    if not_finite or unit + shift > 128 - width:
        return Lane(wire.NOT_FINITE, value), 0
    return Lane(unit + shift, value), total - (value << shift)


def remainder_in(rest: int, before: int, exponent: int, unit: int, members: int) -> int:
    """What a switch adds of a remainder, in the units of a later round.

    Args:
        rest, before, exponent: the remainder, the unit that it is in, and the exponent of the sum that has left it.
        members: the largest number of a live one.
    """
    if unit >= before:
        return rest >> min(unit - before, 63)
    most = 0 if members == 64 else 57 if members > 32 else 61
    return rest << before - unit if most and exponent - unit <= most else 0


def reference(
    listed: Sequence[Contribution],
    largest: Sequence[int],
    width: int,
    before: Reference | None = None,
    members: int = 0,
) -> Reference:
    """Of these contributions, whose members have named these exponents as their largest.

    Args:
        before: the round whose remainders a switch adds; `members` is as for `remainder_in`.
    """
    unit = unit_of(largest, width)
    sums, rests, below, added = [], [], [], []
    for index, lanes in enumerate(zip(*(one.lanes for one in listed), strict=True)):
        if len(lanes) == 1:
            sums.append(lanes[0])
            rests.append(0)
            below.append(0)
            added.append(0)
            continue
        total, more = sum(lane.units(unit, width) for lane in lanes), 0
        if before is not None and before.sums[index].finite:
            rest, exponent = before.rests[index], before.sums[index].exponent
            more = remainder_in(rest, before.unit, exponent, unit, members)
        made, rest = round_sum(total + more, width, unit, not all(lane.finite for lane in lanes))
        added.append(more)
        sums.append(made)
        rests.append(rest)
        whole = sum(lane.whole for lane in lanes)
        below.append(whole - (total << unit - LEAST) if made.finite else 0)
    return Reference(unit, tuple(sums), tuple(rests), tuple(below), tuple(added))


def _bits(value: int) -> int:
    return (value if value >= 0 else ~value).bit_length()
