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
from nicps.session.absolute import I8, Lanes, exponent_for, exponents_of, scale_of
from nicps.session.lanes import F32, LaneFormat
from nicps.session.sized import Outcome
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
        value, scaled, native = self._value[:count], self._sent[:count], self._native[:count]
        self._wanted(first, value)
        np.abs(value, out=scaled)
        exponent = exponents_of(scaled.max(axis=1), self._format)
        lost = exponent == NOT_FINITE
        value[lost] = 0.0
        np.multiply(value, scale_of(np.where(lost, 0, -exponent).astype(np.int32)), out=scaled)
        np.rint(scaled, out=scaled)
        np.copyto(native, scaled, casting="unsafe")
        lanes[first : first + count] = native
        exponents[first : first + count] = exponent

    def settle(self, outcome: Outcome) -> None:
        """As `Vector`."""
        for first in range(0, outcome.count, self._format.batch):
            self._settle_batch(outcome, first, min(self._format.batch, outcome.count - first))
        self._add_rests(outcome)

    def _wanted(self, first: int, value: F32) -> slice:
        """Write what these fragments should bring about: the vector and what was left over. Returns their numbers."""
        at = first * self._format.per_fragment
        here = slice(at, min(at + value.size, len(self._vector)))
        flat = value.reshape(-1)
        with np.errstate(over="ignore", invalid="ignore"):
            np.add(self._vector[here], self._kept[here], out=flat[: here.stop - at])
        flat[here.stop - at :] = 0.0
        return here

    def _settle_batch(self, outcome: Outcome, first: int, count: int) -> None:
        part = slice(first, first + count)
        value, sent, native = self._value[:count], self._sent[:count], self._native[:count]
        here = self._wanted(first, value)
        length = here.stop - here.start
        np.copyto(native, outcome.own_lanes[part])
        np.copyto(sent, native, casting="unsafe")
        exponent = outcome.exponents[part].astype(np.int32)
        lost = exponent == NOT_FINITE
        with np.errstate(over="ignore", invalid="ignore"):
            sent *= scale_of(outcome.own_exponents[part].astype(np.int32))
            value -= sent
        if lost.any():
            former = np.zeros_like(value)
            former.reshape(-1)[:length] = self._kept[here]
            value[lost] = former[lost]
        if outcome.counted:
            self._kept[here] = value.reshape(-1)[:length]
        np.copyto(native, outcome.lanes[part])
        np.copyto(sent, native, casting="unsafe")
        scale = scale_of(exponent)
        scale[lost] = np.nan
        with np.errstate(over="ignore"):
            sent *= scale
        by = np.float32(outcome.members if self._mean else 1)
        np.divide(sent.reshape(-1)[:length], by, out=self._vector[here])

    def _add_rests(self, outcome: Outcome) -> None:
        """Add what rounding the sums of the own stripe has left over."""
        rest, per, step = outcome.rest, self._format.per_fragment, self._format.batch
        if rest is None:
            return
        for at in range(0, len(rest.used), step):
            used = rest.used[at : at + step]
            scaled = self._value[: len(used)]
            unit = math.ldexp(1.0, outcome.unit)
            np.multiply(rest.lanes[at : at + step], unit, out=scaled, casting="unsafe")
            scaled[~used] = 0.0
            kept = self._kept[(rest.first + at) * per :][: scaled.size]
            kept += scaled.reshape(-1)[: len(kept)]
