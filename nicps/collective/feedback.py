# SPDX-License-Identifier: Apache-2.0
"""float32 as lanes of 8, 16 or 32 bits, with error feedback: the mean over a round's members, in place.

What rounding leaves over is kept in a residual, which is added to the next vector (docs/stripes.md, "Numbers"): at the
sender what its own lanes left over, and at a stripe's aggregator what the rounded sums left over. So nothing is lost:
over any number of rounds the sums and the residuals come to what was given.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from nicps.session.absolute import I8, AbsoluteQuantiser, AbsoluteSummer, Lanes, largest_finite
from nicps.session.lanes import F32, LaneFormat, Residual
from nicps.session.loops import loops_for
from nicps.session.sized import Outcome, Vector
from nicps.wire import NOT_FINITE


class Form(Protocol):
    """What makes a round of a part of a vector, and of its residual, wherever these lie: `Compressed` of NumPy's."""

    def __call__(self, vector: Any, residual: Any, width: int, /) -> Vector:
        """With lanes of so many bits; the mean takes the vector's place."""


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
        self.width, self.numbers = width, len(vector)
        self._vector, self._mean = vector, mean
        self._format = format = LaneFormat(len(vector), width)
        self._residual = Residual(format, residual)
        self._quantiser = AbsoluteQuantiser(format, self._residual)
        self._summer = AbsoluteSummer(format)
        self._quantiser.loops = self._summer.loops = loops_for(format)

    def bound(self) -> int:
        """As `Vector`: no number is larger than the norms of vector and residual together."""
        self._residual.limit = largest_finite(self._residual.kept)
        return self._quantiser.bound(self._vector)

    def write(self, first: int, count: int, lanes: Lanes, exponents: I8) -> None:
        """As `Vector`. Vector and residual stay as they are: another view may ask for the same again."""
        self._quantiser.batch(self._vector, first, count, lanes, exponents)

    def settle(self, outcome: Outcome) -> None:
        """As `Vector`."""
        for first in range(0, outcome.count, self._format.batch):
            self._settle_batch(outcome, first, min(self._format.batch, outcome.count - first))
        if (rest := outcome.rest) is not None:
            exponents = outcome.exponents[rest.first : rest.first + len(rest.used)]
            self._quantiser.add(rest.first, rest.lanes, exponents, rest.used, outcome.unit)

    def _settle_batch(self, outcome: Outcome, first: int, count: int) -> None:
        vector, per = self._vector, self._format.per_fragment
        if outcome.counted:
            own = outcome.own_lanes, outcome.own_exponents
            lost = outcome.exponents[first : first + count] == NOT_FINITE
            self._quantiser.keep_part(vector, first, *own, lost)
        self._summer.batch(outcome.lanes, outcome.exponents, first, count, vector)
        if self._mean:
            vector[first * per : (first + count) * per] /= np.float32(outcome.members)
