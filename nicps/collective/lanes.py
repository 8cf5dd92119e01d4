# SPDX-License-Identifier: Apache-2.0
"""Numbers as lanes, and back: `value = lane * 2**x`, one x for each fragment (docs/stripes.md, "Numbers").

Whole numbers travel with x = 0. A sum of them is exact as long as its own x is not above 0: the kernel then has
rounded nothing away.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from nicps.session.absolute import (
    BOOL,
    I8,
    AbsoluteSummer,
    Lanes,
    exponent_for,
    exponents_of,
    largest_finite,
    scale_of,
)
from nicps.session.lanes import F32, LEAST_EXPONENT, LaneFormat
from nicps.session.loops import loops_for
from nicps.session.sized import Outcome
from nicps.wire import NOT_FINITE

I32 = npt.NDArray[np.int32]

#: Of a vector of any length.
FORMAT = LaneFormat(1 << 40, 32)
PER_FRAGMENT = FORMAT.per_fragment
_ROUNDED_UP = 1.0 + 2.0**-20  # of a few operations in float32
_NOTHING = np.zeros(FORMAT.batch * PER_FRAGMENT, np.float32)  # a residual of a batch


def fragments_of(numbers: int, width: int = 32) -> int:
    """Fragments of so many numbers; at least one."""
    return LaneFormat(numbers, width).fragments


class Floats:
    """float32.

    Args:
        vector: float32 (n,), not changed.
        out: float32 (n,), where the sums go.
        marred: (fragments,), set where a sum is not finite, as a number in it is not, or the sum is too large.
    """

    width, feedback = 32, False

    def __init__(self, vector: F32, out: F32, marred: BOOL) -> None:
        self._vector, self._out, self._marred = vector, out, marred
        self._loops = loops_for(LaneFormat(len(vector), 32))

    @property
    def numbers(self) -> int:
        """How many they are."""
        return len(self._vector)

    def bound(self) -> int:
        """As `nicps.session.sized.Vector`: no number is larger than the vector's norm."""
        return exponent_for(largest_finite(self._vector) * _ROUNDED_UP, FORMAT)

    def write(self, first: int, count: int, lanes: Lanes, exponents: I8) -> None:
        """As `Vector`."""
        here = self._vector[first * PER_FRAGMENT : (first + count) * PER_FRAGMENT]
        rows, loops = slice(first, first + count), self._loops
        if loops is not None and loops.quantise(
            here, _NOTHING[: len(here)], lanes[rows], exponents[rows]
        ):
            return
        value = np.zeros((count, PER_FRAGMENT), np.float32)
        value.reshape(-1)[: len(here)] = here
        with np.errstate(over="ignore", invalid="ignore"):
            exponent = exponents_of(np.abs(value).max(axis=1, initial=0.0), FORMAT)
        value[exponent == NOT_FINITE] = 0.0
        value *= scale_of(np.where(exponent == NOT_FINITE, 0, -exponent).astype(np.int32))
        np.rint(value, out=value)
        lanes[rows] = value.astype(np.int32)
        exponents[rows] = exponent

    def settle(self, outcome: Outcome) -> None:
        """As `Vector`."""
        lanes, exponents, count = outcome.lanes, outcome.exponents, outcome.count
        self._marred[:count] = exponents[:count] == NOT_FINITE
        summer = AbsoluteSummer(FORMAT)
        summer.loops = self._loops
        for first in range(0, count, FORMAT.batch):
            now = min(FORMAT.batch, count - first)
            summer.batch(lanes, exponents, first, now, self._out)


class Words:
    """Whole numbers of 32 bits.

    Args:
        words: int32 (n,), not changed.
        out: int32 (n,), where the sums go, modulo 2**32 where they are exact.
        marred: (fragments,), set where they are not exact.
    """

    width, feedback = 32, False

    def __init__(self, words: I32, out: I32, marred: BOOL) -> None:
        self._words, self._out, self._marred = words, out, marred

    @property
    def numbers(self) -> int:
        """How many they are."""
        return len(self._words)

    def bound(self) -> int:
        """As `Vector`."""
        return 0

    def write(self, first: int, count: int, lanes: Lanes, exponents: I8) -> None:
        """As `Vector`."""
        here = self._words[first * PER_FRAGMENT : (first + count) * PER_FRAGMENT]
        whole = len(here) // PER_FRAGMENT
        lanes[first : first + whole] = here[: whole * PER_FRAGMENT].reshape(whole, PER_FRAGMENT)
        if whole < count:
            lanes[first + whole] = 0
            rest = here[whole * PER_FRAGMENT :]
            lanes[first + whole, : len(rest)] = rest
        exponents[first : first + count] = 0

    def settle(self, outcome: Outcome) -> None:
        """As `Vector`."""
        lanes, exponents, count = outcome.lanes, outcome.exponents, outcome.count
        self._marred[:count] = exponents[:count] > 0
        shift = np.maximum(-exponents[:count].astype(np.int32), 0)[:, None]
        for first in range(0, count, FORMAT.batch):
            part = slice(first, min(first + FORMAT.batch, count))
            found = lanes[part].astype(np.int32) >> shift[part]
            here = self._out[part.start * PER_FRAGMENT : part.stop * PER_FRAGMENT]
            here[:] = found.reshape(-1)[: len(here)]


assert LEAST_EXPONENT < 0
