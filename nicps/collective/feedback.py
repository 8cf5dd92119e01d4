# SPDX-License-Identifier: Apache-2.0
"""float32 as lanes of 8, 16 or 32 bits, with error feedback: the mean over a round's members, in place.

What rounding leaves over is kept in a residual, which is added to the next vector (docs/stripes.md, "Numbers"): at the
sender what its own lanes left over, and at a stripe's aggregator what the rounded sums left over. So nothing is lost:
over any number of rounds the sums and the residuals come to what was given.
"""

from __future__ import annotations

import math

import numpy as np

from nicps.collective.lanes import largest_finite
from nicps.session.absolute import I8, AbsoluteSummer, Lanes, exponent_for, exponents_of, scale_of
from nicps.session.lanes import F32, LaneFormat
from nicps.session.loops import loops_for
from nicps.session.sized import Outcome, Rest
from nicps.wire import NOT_FINITE

_ROUNDED_UP = 1.0 + 2.0**-20  # of a few operations in float32


class Compressed:
    """One round of such a vector.

    Args:
        vector: float32 (n,). The mean over the members that were counted takes its place; NaN in a whole fragment where
            a member's number or the sum is not finite.
        residual: float32 (n,), finite, written with the sum. Fragments whose sum is not finite keep theirs.
        width: of the lanes, in bits.
        mean: False: the sum takes the vector's place.
    """

    feedback = True

    def __init__(self, vector: F32, residual: F32, width: int, *, mean: bool = True) -> None:
        self.width = width
        self._vector, self._kept, self._mean = vector, residual, mean
        self._format = LaneFormat(1 << 40, width)
        self._loops = loops_for(LaneFormat(len(vector), width))
        shape = (self._format.batch, self._format.per_fragment)
        self._value, self._sent = np.empty(shape, np.float32), np.empty(shape, np.float32)
        self._native = np.empty(shape, self._format.native)

    @property
    def numbers(self) -> int:
        """How many they are."""
        return len(self._vector)

    def bound(self) -> int:
        """As `Vector`: no number is larger than the norms of vector and residual together."""
        largest = largest_finite(self._vector) + largest_finite(self._kept)
        return exponent_for(largest * _ROUNDED_UP, self._format)

    def write(self, first: int, count: int, lanes: Lanes, exponents: I8) -> None:
        """As `Vector`. Vector and residual stay as they are: another view may ask for the same again."""
        rows, here = slice(first, first + count), self._numbers(range(first, first + count))
        numbers = self._vector[here], self._kept[here]
        loops = self._loops
        if loops is not None and loops.quantise(*numbers, lanes[rows], exponents[rows]):
            return
        value, scaled, native = self._value[:count], self._sent[:count], self._native[:count]
        self._wanted(here, value)
        np.abs(value, out=scaled)
        exponent = exponents_of(scaled.max(axis=1), self._format)
        lost = exponent == NOT_FINITE
        value[lost] = 0.0
        np.multiply(value, scale_of(np.where(lost, 0, -exponent).astype(np.int32)), out=scaled)
        np.rint(scaled, out=scaled)
        np.copyto(native, scaled, casting="unsafe")
        lanes[rows] = native
        exponents[rows] = exponent

    def settle(self, outcome: Outcome) -> None:
        """As `Vector`."""
        summer = AbsoluteSummer(self._format)
        summer.loops = self._loops
        whole, batch = len(self._vector) // self._format.per_fragment, self._format.batch
        parts = [range(first, min(first + batch, whole)) for first in range(0, whole, batch)]
        parts.append(range(whole, outcome.count))  # the last fragment, where that is not full
        for part in filter(None, parts):
            if outcome.counted:
                self._keep(outcome, part)
            summer.batch(outcome.lanes, outcome.exponents, part.start, len(part), self._vector)
            if self._mean:
                self._vector[self._numbers(part)] /= np.float32(outcome.members)
        if outcome.rest is not None:
            self._add_rests(outcome.rest, outcome.unit)

    def _numbers(self, part: range) -> slice:
        """Those of these fragments."""
        per = self._format.per_fragment
        return slice(part.start * per, min(part.stop * per, len(self._vector)))

    def _wanted(self, here: slice, value: F32) -> None:
        """Write what these numbers should bring about: the vector and what was left over."""
        flat, length = value.reshape(-1), here.stop - here.start
        with np.errstate(over="ignore", invalid="ignore"):
            np.add(self._vector[here], self._kept[here], out=flat[:length])
        flat[length:] = 0.0

    def _keep(self, outcome: Outcome, part: range) -> None:
        """The rounding error of these fragments is their residual."""
        rows, here, count = slice(part.start, part.stop), self._numbers(part), len(part)
        lost = outcome.exponents[rows] == NOT_FINITE
        lanes, exponents = outcome.own_lanes[rows], outcome.own_exponents[rows]
        numbers = self._vector[here], self._kept[here]
        if self._loops is not None and self._loops.keep(*numbers, lanes, exponents, lost):
            return
        value, sent, native = self._value[:count], self._sent[:count], self._native[:count]
        self._wanted(here, value)
        np.copyto(native, lanes)
        np.copyto(sent, native, casting="unsafe")
        with np.errstate(over="ignore", invalid="ignore"):
            sent *= scale_of(exponents.astype(np.int32))
            value -= sent
        left = value.reshape(-1)[: here.stop - here.start]
        stays = np.repeat(lost, self._format.per_fragment)[: len(left)]
        np.copyto(self._kept[here], left, where=~stays)

    def _add_rests(self, rest: Rest, unit: int) -> None:
        """Add what rounding the sums of the own stripe has left over."""
        per, step, scale = self._format.per_fragment, self._format.batch, math.ldexp(1.0, unit)
        whole = min(len(rest.used), len(self._kept) // per - rest.first)
        rows = self._kept[rest.first * per :][: whole * per].reshape(whole, per)
        full = rest.lanes[:whole], rest.used[:whole], scale
        done = whole if self._loops is not None and self._loops.add(rows, *full) else 0
        for at in range(done, len(rest.used), step):
            used = rest.used[at : at + step]
            scaled = self._value[: len(used)]
            np.multiply(rest.lanes[at : at + step], scale, out=scaled, casting="unsafe")
            scaled[~used] = 0.0
            kept = self._kept[(rest.first + at) * per :][: scaled.size]
            kept += scaled.reshape(-1)[: len(kept)]
