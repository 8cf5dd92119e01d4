# SPDX-License-Identifier: Apache-2.0
"""Gradients as integers with absolute exponents: `value = lane * 2**x`, one x for each fragment, and back.

x is the smallest under which the fragment's largest magnitude fits a lane, and at least -120. What rounding leaves over
is the residual. A fragment with NaN or infinity in it, or with what would be read as infinity, has the x of 127, and
lanes of zero. See docs/stripes.md, "Numbers". All functions work on whole batches of fragments.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from nicps.errors import NonFinite, TooLarge
from nicps.session.lanes import (
    BATCH_VALUES,
    F32,
    I64,
    LEAST_EXPONENT,
    LaneFormat,
    Residual,
    check_finite,
)
from nicps.session.loops import Loops
from nicps.wire import NOT_FINITE

I8 = npt.NDArray[np.int8]
BOOL = npt.NDArray[np.bool_]
#: Lanes as they are sent, big-endian integers of 8, 16 or 32 bits: (fragments, per_fragment).
Lanes = npt.NDArray[np.signedinteger]

#: log2: no number of a step for parameter servers may reach that (docs/servers.md, "Numbers").
STEP_LIMIT_BITS = 21
_LARGEST_VALUE = float(np.finfo(np.float32).max)
_LEAST_SQUARE = 2.0**-100  # a sum of squares below that may have lost some
_ROUNDED_UP = 1.0 + 2.0**-20  # of a few operations in float32


def largest_finite(vector: F32, *, finite: bool = False) -> float:
    """An upper bound of the finite magnitudes in a vector: its norm, or where that says nothing, the largest.

    Raises:
        NonFinite: it must be `finite`, and is not.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        square = float(np.dot(vector, vector))
    if _LEAST_SQUARE <= square < math.inf:
        return math.sqrt(square)
    if finite:
        check_finite(vector)
    # In pieces: where many threads do so, each keeps the memory of what it has taken at once.
    pieces = (vector[at : at + BATCH_VALUES] for at in range(0, len(vector), BATCH_VALUES))
    each = (float(np.abs(v).max(where=np.isfinite(v), initial=0.0)) for v in pieces)
    return max(each, default=0.0)


def exponent_for(largest: float, format: LaneFormat) -> int:
    """The x of a fragment with that largest magnitude, which is finite."""
    if not largest:
        return LEAST_EXPONENT
    mantissa, exponent = math.frexp(min(largest, _LARGEST_VALUE))
    over = mantissa > math.ldexp(format.largest_lane, 1 - format.width)
    return max(exponent - (format.width - 1) + over, LEAST_EXPONENT)


def exponents_of(largest: F32, format: LaneFormat) -> npt.NDArray[np.int32]:
    """The same of a batch, int32 (n,), from float32 (n,), which may not be finite."""
    mantissa, exponent = np.frexp(largest)
    over = mantissa > np.float32(math.ldexp(format.largest_lane, 1 - format.width))
    x = np.where(largest > 0, exponent - (format.width - 1) + over, LEAST_EXPONENT)
    x = np.maximum(x, LEAST_EXPONENT)
    with np.errstate(over="ignore", invalid="ignore"):
        read = np.rint(np.ldexp(largest, -x)) * np.ldexp(np.float32(1), x)
    return np.where(np.isfinite(read), x, NOT_FINITE).astype(np.int32)


def scale_of(exponents: npt.NDArray[np.int32]) -> F32:
    """2**x as a column, float32 (n, 1)."""
    column: F32 = np.ldexp(np.float32(1), exponents)[:, None]
    return column


class AbsoluteQuantiser:
    """Converts one vector after another, batch by batch, and keeps the residual of what was counted.

    Args:
        format: the vector's length and the lanes' width.
        residual: what rounding has left over.

    Attributes: `loops`, compiled ones that do the same, where there are some.
    """

    def __init__(self, format: LaneFormat, residual: Residual) -> None:
        self.format = format
        self.loops: Loops | None = None
        self._residual = residual
        shape = (min(format.batch, format.fragments), format.per_fragment)
        self._value = np.empty(shape, np.float32)
        self._scaled = np.empty(shape, np.float32)
        self._native = np.empty(shape, format.native)
        self._early = np.zeros(
            format.fragments, np.bool_
        )  # their rounding error is the residual already

    def bound(self, vector: F32, *, finite: bool = False) -> int:
        """An upper bound of the x of all fragments of `vector` that are finite, before it is converted.

        Args:
            vector: float32 (lanes,).
            finite: the vector must be finite.

        Raises:
            NonFinite: it is not.
        """
        largest = largest_finite(vector, finite=finite)
        return exponent_for((largest + self._residual.largest()) * _ROUNDED_UP, self.format)

    def begin(self) -> None:
        """Another vector is converted."""
        assert not self._early.any(), "the vector before was neither kept nor dropped"
        self._residual.next_limit = 0.0

    def batch(self, vector: F32, first: int, count: int, lanes: Lanes, exponents: I8) -> None:
        """Convert `count` fragments from `first` on. The residual stays as it is (`keep`).

        Args:
            vector: float32 (format.lanes,).
            lanes: (fragments, per_fragment), written.
            exponents: int8 (fragments,), written.
        """
        per, residual = self.format.per_fragment, self._residual
        here = slice(first * per, min((first + count) * per, self.format.lanes))
        rows = slice(first, first + count)
        numbers = vector[here], residual.kept[here]
        loops = self.loops
        if loops is None or not loops.quantise(*numbers, lanes[rows], exponents[rows]):
            for at in range(0, count, self.format.batch):
                end = at + self.format.batch
                given, kept = (each[at * per : end * per] for each in numbers)
                self._quantise(given, kept, lanes[rows][at:end], exponents[rows][at:end])
        former, most = 0.0, int(exponents[rows].max(initial=LEAST_EXPONENT))
        if most == NOT_FINITE:
            finite = exponents[rows] != NOT_FINITE
            most = int(exponents[rows].max(where=finite, initial=LEAST_EXPONENT))
            former = residual.largest()
        residual.next_limit = max(residual.next_limit, math.ldexp(0.5, most), former)

    def _quantise(self, vector: F32, kept: F32, lanes: Lanes, exponents: I8) -> None:
        """Convert these fragments."""
        value, inside = self._value[: len(lanes)], len(vector)
        flat = value.reshape(-1)
        with np.errstate(over="ignore", invalid="ignore"):
            np.add(vector, kept, out=flat[:inside])
        flat[inside:] = 0.0
        exponent = self._exponents(len(lanes))
        value[exponent == NOT_FINITE] = 0.0
        self._write(exponent, lanes, exponents)

    def _exponents(self, count: int) -> npt.NDArray[np.int32]:
        """Of the first `count` fragments of `_value`, int32 (count,)."""
        np.abs(self._value[:count], out=self._scaled[:count])
        return exponents_of(self._scaled[:count].max(axis=1), self.format)

    def _write(self, exponent: npt.NDArray[np.int32], lanes: Lanes, exponents: I8) -> None:
        """Round what is in `_value` to lanes, and write these fragments. `_scaled` has them, too."""
        count = len(exponent)
        scaled, native = self._scaled[:count], self._native[:count]
        np.multiply(self._value[:count], scale_of(-exponent), out=scaled)
        np.rint(scaled, out=scaled)
        np.copyto(native, scaled, casting="unsafe")
        np.copyto(lanes, native)
        exponents[:] = exponent

    def keep(self, vector: F32, lanes: Lanes, exponents: I8, lost: BOOL) -> None:
        """The vector converted last was counted: what rounding has left over of it is the residual.

        That is computed from what it was converted to: so there is one residual in memory, not two.

        Args:
            vector: as it was converted.
            lanes: (fragments, per_fragment), `exponents`: int8 (fragments,), what it was converted to.
            lost: (fragments,): the sum is not finite there, and the residual stays as it was.
        """
        residual = self._residual
        self._restore(vector, lanes, exponents, self._early & lost)
        limit = residual.next_limit
        # A lost fragment keeps its residual, so its exponent does not bound the residual.
        if lost.any():
            most = int(exponents.max(where=~lost, initial=LEAST_EXPONENT))
            limit = max(math.ldexp(0.5, most), residual.largest())
        self._replace(vector, residual.kept, lanes, exponents, lost | self._early)
        residual.limit = limit
        self._early[:] = False

    def keep_early(self, vector: F32, first: int, lanes: Lanes, exponents: I8, lost: BOOL) -> None:
        """As `keep`, of `len(lost)` fragments from `first` on, before it is known whether the vector is counted.

        `keep` leaves these as they are, and `drop` takes them back. No bound of the residual is known until then.
        """
        rows = slice(first, first + len(lost))
        early = self._early[rows]
        # What is not finite has no residual, whatever became of the sum meanwhile.
        left_out = lost | early | (exponents[rows] == NOT_FINITE)
        self.keep_part(vector, first, lanes, exponents, left_out)
        early |= ~left_out

    def keep_part(
        self, vector: F32, first: int, lanes: Lanes, exponents: I8, left_out: BOOL
    ) -> None:
        """As `keep`, of `len(left_out)` fragments from `first` on, but for those left out. No bound is known then."""
        per, rows = self.format.per_fragment, slice(first, first + len(left_out))
        here = slice(rows.start * per, rows.stop * per)
        of_part = lanes[rows], exponents[rows], left_out
        self._replace(vector[here], self._residual.kept[here], *of_part)

    def drop(self, vector: F32, lanes: Lanes, exponents: I8) -> None:
        """The vector converted last is not counted, or not yet: the residual is that of the vectors before it.

        Arguments are as for `keep`. Where the residual is that of this vector already, it becomes (residual + sent) -
        vector, in float32: the former one, but for the last bits that the sum of vector and residual has rounded away.
        """
        self._restore(vector, lanes, exponents, self._early)

    def _restore(self, vector: F32, lanes: Lanes, exponents: I8, back: BOOL) -> None:
        per, residual, found = self.format.per_fragment, self._residual, np.flatnonzero(back)
        for fragment in found:
            here = slice(fragment * per, (fragment + 1) * per)
            kept, given = residual.kept[here], vector[here]
            kept += lanes[fragment] * np.ldexp(np.float32(1), np.int32(exponents[fragment]))
            kept[: len(given)] -= given
        if len(found):
            self._early[found] = False
            residual.limit = residual.next_limit = math.inf

    def _replace(self, vector: F32, kept: F32, lanes: Lanes, exponents: I8, left_out: BOOL) -> None:
        """Make the rounding error of these fragments their residual, but for those left out."""
        loops, per = self.loops, self.format.per_fragment
        for rows, left in self._whole_fragments(kept, len(left_out)):
            of_part = vector[rows.start * per :], left, lanes[rows], exponents[rows], left_out[rows]
            if loops is None or not loops.keep(*of_part):
                self._keep(*of_part)

    def _whole_fragments(self, kept: F32, count: int) -> Iterator[tuple[slice, F32]]:
        """A residual of so many fragments, to be changed in parts of whole ones: it may end where the vector ends."""
        per, whole = self.format.per_fragment, len(kept) // self.format.per_fragment
        if whole:
            yield slice(0, whole), kept[: whole * per]
        if whole < count:
            rest, last = kept[whole * per :], np.zeros(per, np.float32)
            last[: len(rest)] = rest
            yield slice(whole, count), last
            rest[:] = last[: len(rest)]

    def _keep(self, vector: F32, residual: F32, lanes: Lanes, exponents: I8, lost: BOOL) -> None:
        format = self.format
        for first in range(0, len(lost), format.batch):
            part = slice(first, min(first + format.batch, len(lost)))
            gone = lost[part]
            kept = residual[part.start * format.per_fragment : part.stop * format.per_fragment]
            rows = kept.reshape(len(gone), -1)
            former = rows[gone]
            scaled = self._scaled[: len(gone)]
            np.copyto(scaled, lanes[part], casting="unsafe")
            np.multiply(scaled, scale_of(exponents[part].astype(np.int32)), out=scaled)
            here = vector[part.start * format.per_fragment :][: len(kept)]
            with np.errstate(over="ignore", invalid="ignore"):  # what is lost
                kept[: len(here)] += here
                kept[len(here) :] = 0.0
                np.subtract(rows, scaled, out=rows)
            rows[gone] = former

    def add(self, first: int, remainders: I64, exponents: I8, used: BOOL, unit: int) -> None:
        """Add what rounding a sum has left over, for fragments from `first` on.

        Args:
            remainders: int64 (n, per_fragment), in units.
            exponents: int8 (n,), of the sums.
            used: (n,): the others are left out.
            unit: log2.
        """
        residual, per, loops = self._residual, self.format.per_fragment, self.loops
        if not used.any():
            return
        mine = residual.kept[first * per : (first + len(used)) * per]
        for rows, left in self._whole_fragments(mine, len(used)):
            of_part = left.reshape(-1, per), remainders[rows], used[rows], math.ldexp(1.0, unit)
            if loops is None or not loops.add(*of_part):
                self._add(*of_part)
        # A remainder is less than a lane's step: half of one, but for a sum at the end of its range. Where the step is
        # the unit there is no remainder.
        rounded = used & (exponents > unit)
        most = math.ldexp(1.0, int(exponents.max(where=rounded, initial=LEAST_EXPONENT)))
        residual.limit = (residual.limit + most) * _ROUNDED_UP

    def _add(self, kept: F32, remainders: I64, used: BOOL, unit: float) -> None:
        step = self.format.batch
        for at in range(0, len(used), step):
            part = slice(at, at + step)
            scaled = self._scaled[: len(used[part])]
            np.multiply(remainders[part], unit, out=scaled, casting="unsafe")
            scaled[~used[part]] = 0.0
            kept[part] += scaled


class StepQuantiser(AbsoluteQuantiser):
    """Converts steps for parameter servers, batch by batch: what weights differ in from the parameters pulled before.

    What rounding leaves over lies in `Residual.next` then: the store may hold other parameters once the step counts.
    """

    def step(
        self,
        weights: F32,
        pulled: F32,
        first: int,
        count: int,
        lanes: Lanes,
        exponents: I8,
    ) -> None:
        """Convert `count` fragments from `first` on, at most `format.batch`.

        Args:
            weights: float32 (format.lanes,).
            pulled: float32 (count * per_fragment,), or as much of it as the vector has.
            lanes: (fragments, per_fragment), written.
            exponents: int8 (fragments,), written.

        Raises:
            NonFinite, TooLarge: a number of the step is not finite, or reaches 2**`STEP_LIMIT_BITS`. With narrow lanes
                it may not be above the largest lane either: 127 * 2**14 with 8 bits.
        """
        format, residual = self.format, self._residual
        at, end = first * format.per_fragment, (first + count) * format.per_fragment
        value, scaled = self._value[:count], self._scaled[:count]
        flat, inside = value.reshape(-1), min(end, format.lanes) - at
        with np.errstate(over="ignore", invalid="ignore"):
            np.subtract(weights[at : at + inside], pulled[:inside], out=flat[:inside])
            flat[:inside] += residual.kept[at : at + inside]
        flat[inside:] = 0.0
        exponent = self._exponents(count)
        if (over := exponent > STEP_LIMIT_BITS + 1 - format.width).any():
            self._refuse(int(over.argmax()), first)
        rows = slice(first, first + count)
        self._write(exponent, lanes[rows], exponents[rows])
        np.multiply(scaled, scale_of(exponent), out=scaled)
        left = residual.next[at:end].reshape(count, -1)
        np.subtract(value, scaled, out=left)
        residual.next_limit = max(residual.next_limit, math.ldexp(0.5, int(exponent.max())))

    def _refuse(self, row: int, first: int) -> None:
        """There is a number in that fragment of `_value` that cannot be sent.

        Raises:
            NonFinite, TooLarge: always.
        """
        here = self._value[row]
        place = int(np.abs(here).argmax())  # of NaN, where there is one
        index, number = (first + row) * self.format.per_fragment + place, float(here[place])
        if not math.isfinite(number):
            raise NonFinite(index, number)
        raise TooLarge(index, number, "a number of the step is")


class AbsoluteSummer:
    """Reads lanes with their exponents as float32, batch by batch.

    Args:
        format: as they were sent.

    Attributes: `loops`, as `AbsoluteQuantiser`.
    """

    def __init__(self, format: LaneFormat) -> None:
        self.format = format
        self.loops: Loops | None = None
        shape = (min(format.batch, format.fragments), format.per_fragment)
        self._native = np.empty(shape, format.native)
        self._value = np.empty(shape, np.float32)

    def batch(self, lanes: Lanes, exponents: I8, first: int, count: int, out: F32) -> None:
        """Convert `count` fragments from `first` on, at most `format.batch`.

        Args:
            lanes: (fragments, per_fragment).
            exponents: int8 (fragments,); where one is 127, the whole fragment is NaN.
            out: float32 (format.lanes,), written.
        """
        per, loops, rows = self.format.per_fragment, self.loops, slice(first, first + count)
        here = out[first * per : (first + count) * per]
        if loops is None or not loops.read(lanes[rows], exponents[rows], here):
            self._read(lanes[rows], exponents[rows], here)

    def _read(self, lanes: Lanes, exponents: I8, here: F32) -> None:
        per, count = self.format.per_fragment, len(lanes)
        native, value = self._native[:count], self._value[:count]
        np.copyto(native, lanes)
        np.copyto(value, native, casting="unsafe")
        exponent = exponents.astype(np.int32)
        scale = scale_of(exponent)
        scale[exponent == NOT_FINITE] = np.nan
        whole = len(here) // per
        with np.errstate(over="ignore"):
            np.multiply(value[:whole], scale[:whole], out=here[: whole * per].reshape(whole, per))
            if whole < count:
                rest = here[whole * per :]
                np.multiply(value[whole, : len(rest)], scale[whole], out=rest)
