# SPDX-License-Identifier: Apache-2.0
"""Gradients as integers: block floating point with one power-of-two scale a fragment, and back.

A fragment's lanes are `rint(value / 2**(unit + shift))` in `width` bits, big-endian; the kernel adds `lane << shift`
into 64-bit accumulators whose lowest bit is worth `2**unit`. What rounding leaves over is the residual (error
feedback). All functions work on whole batches of fragments. See docs/protocol.md, "Numbers on the wire".
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from nicps.errors import NonFinite
from nicps.wire import MAX_SHIFT, PAYLOAD_BYTES, lanes_per_fragment

F32 = npt.NDArray[np.float32]
I64 = npt.NDArray[np.int64]
U8 = npt.NDArray[np.uint8]

#: float32 values in a batch: its temporaries stay in a core's cache.
BATCH_VALUES = 92_160

#: The smallest exponent of lanes that have one of their own (`nicps.session.absolute`).
LEAST_EXPONENT = -120

_NATIVE: dict[int, type[np.signedinteger[Any]]] = {8: np.int8, 16: np.int16, 32: np.int32}
_WIRE = {8: ">i1", 16: ">i2", 32: ">i4"}
#: Largest magnitude of a lane that a float32 can name.
_LARGEST = {8: 127.0, 16: 32767.0, 32: 2147483520.0}


@dataclass(frozen=True, slots=True)
class LaneFormat:
    """How a vector of `lanes` float32 lies in fragments of `width`-bit lanes.

    `members`: of whom a switch adds the lanes, so that the sum must fit a lane too, and all have the same step; 0 if
    the kernel adds, into 64 bits.
    """

    lanes: int
    width: int
    members: int = 0

    @property
    def per_fragment(self) -> int:
        """Lanes in a fragment."""
        return lanes_per_fragment(self.width)

    @property
    def fragments(self) -> int:
        """Fragments of the whole vector; at least one."""
        return max(1, -(-self.lanes // self.per_fragment))

    @property
    def batch(self) -> int:
        """Fragments that are converted at a time."""
        return max(1, BATCH_VALUES // self.per_fragment)

    @property
    def native(self) -> type[np.signedinteger[Any]]:
        """NumPy's type of a lane in this processor's byte order."""
        return _NATIVE[self.width]

    @property
    def wire(self) -> str:
        """NumPy's type of a lane in a frame."""
        return _WIRE[self.width]

    @property
    def largest_lane(self) -> float:
        """Largest magnitude of a lane that a float32 can name."""
        return _LARGEST[self.width]

    @property
    def limit(self) -> float:
        """Largest magnitude of a lane; a whole number that a float32 can name."""
        return float(int(self.largest_lane) >> max(self.members - 1, 0).bit_length())

    @property
    def max_shift(self) -> int:
        """Largest shift of a fragment."""
        return 0 if self.members else MAX_SHIFT[self.width]

    def largest(self, unit: int) -> float:
        """The largest value that can be sent under `unit`."""
        return math.ldexp(self.limit, unit + self.max_shift)

    def unit_for(self, largest: float) -> int:
        """The smallest unit under which `largest` can be sent."""
        return math.frexp(largest / self.limit)[1] - self.max_shift


def check_finite(vector: F32) -> None:
    """Refuse a vector that holds NaN or infinity.

    Raises:
        NonFinite: it does.
    """
    finite = np.isfinite(vector)
    if not finite.all():
        index = int(np.argmin(finite))
        raise NonFinite(index, float(vector[index]))


class Residual:
    """What rounding has left over of the vectors that were counted, in whichever way they were converted.

    Args:
        kept: where it is, if not in memory of its own: float32 (lanes,), finite. There is no `next` then.

    Attributes: `kept`, float32 (fragments * per_fragment,) or as above, always finite; `next`, what takes its place if
    the vector converted last is counted. No magnitude in them is larger than `limit` and `next_limit`; infinity: not
    known.
    """

    def __init__(self, format: LaneFormat, kept: F32 | None = None) -> None:
        size = format.fragments * format.per_fragment
        self.kept: F32 = np.zeros(size, np.float32) if kept is None else kept
        self.next: F32 = np.zeros(size if kept is None else 0, np.float32)
        self.limit = self.next_limit = 0.0 if kept is None else math.inf

    def largest(self) -> float:
        """An upper bound of the magnitudes in `kept`."""
        if math.isinf(self.limit):
            self.limit = float(np.abs(self.kept).max())
        return self.limit

    def keep(self) -> None:
        """The vector converted last was counted."""
        self.kept, self.next = self.next, self.kept
        self.limit = self.next_limit

    def take(self, values: F32, limit: float) -> None:
        """It is that of an earlier run: float32 (lanes,), finite, and what was known as their limit."""
        self.kept[: len(values)] = values
        self.limit = max(limit, float(np.abs(values).max(initial=0.0)))

    def forget(self) -> None:
        """It belongs to nothing any more."""
        self.kept[:] = 0.0
        self.limit = 0.0


class Quantiser:
    """Converts one vector after another, batch by batch, keeping the residual of what was counted.

    Args:
        format: the vector's length and the lanes' width.
        residual: what is left over so far; default: nothing.

    Attributes: `saturated`, lanes of what was counted that were too large where a switch adds, and went out as the
    largest that fits; the rest of them is in the residual.
    """

    def __init__(self, format: LaneFormat, residual: Residual | None = None) -> None:
        self.format = format
        self.saturated = 0
        self._over = 0  # the same, of the vector converted last
        self._residual = residual or Residual(format)
        shape = (format.batch, format.per_fragment)
        self._value = np.empty(shape, np.float32)
        self._scaled = np.empty(shape, np.float32)
        self._native = np.empty(shape, format.native)

    @property
    def residual(self) -> F32:
        """What rounding has left over, float32 (fragments * per_fragment,)."""
        return self._residual.kept

    def batch(self, vector: F32, first: int, unit: int, lanes: U8, shifts: U8) -> int:
        """Convert fragments from `first` on; how many, at most `format.batch`.

        Args:
            vector: float32 (lanes,), finite; within `format.largest(unit)` together with the residual, if the kernel
                adds.
            lanes: uint8 (fragments, 1440), written in wire order.
            shifts: uint8 (fragments,), written.
        """
        per, total = self.format.per_fragment, self.format.fragments
        count = min(self.format.batch, total - first)
        at, end = first * per, (first + count) * per
        value, scaled = self._value[:count], self._scaled[:count]
        flat, inside = value.reshape(-1), min(end, self.format.lanes) - at
        np.add(vector[at : at + inside], self.residual[at : at + inside], out=flat[:inside])
        flat[inside:] = 0.0
        np.abs(value, out=scaled)
        shift = self._shifts(scaled.max(axis=1), unit)
        shifts[first : first + count] = shift
        exponent = shift.astype(np.int32) + unit
        if not first:
            self._over = 0
        np.multiply(value, np.ldexp(np.float32(1), -exponent)[:, None], out=scaled)
        np.rint(scaled, out=scaled)
        if self.format.members:
            limit = np.float32(self.format.limit)
            self._over += int(np.count_nonzero(np.abs(scaled) > limit))
            np.clip(scaled, -limit, limit, out=scaled)
        native = self._native[:count]
        np.copyto(native, scaled, casting="unsafe")
        out = lanes[first : first + count].view(self.format.wire)
        np.copyto(out, native)
        np.multiply(scaled, np.ldexp(np.float32(1), exponent)[:, None], out=scaled)
        left = self._residual.next[at:end].reshape(count, per)
        np.subtract(value, scaled, out=left)
        self._residual.next_limit = math.inf
        return count

    def keep(self) -> None:
        """The vector was counted: what rounding left over goes into the next one."""
        self._residual.keep()
        self.saturated += self._over
        self._over = 0

    def _shifts(self, largest: F32, unit: int) -> U8:
        """Smallest shift under which each fragment's largest magnitude fits a lane."""
        mantissa, exponent = np.frexp(largest * np.float32(1 / self.format.largest_lane))
        exponent = np.where(
            mantissa == 0.5, exponent - 1, exponent
        )  # 2**k itself fits a step of 2**k
        shift = np.maximum(exponent - unit, 0)
        over = np.ldexp(largest, -(shift + unit)) > self.format.largest_lane
        return np.where(largest > 0, np.minimum(shift + over, self.format.max_shift), 0).astype(
            np.uint8
        )


class Summer:
    """Reads a round's exact sum as float32, batch by batch: `float32(float64(sum) * 2**unit)`.

    Args:
        format: as it was sent.
    """

    def __init__(self, format: LaneFormat) -> None:
        self.format = format
        self._total = np.empty((format.batch, format.per_fragment), np.int64)

    def batch(
        self,
        first: int,
        accumulators: I64 | None,
        own: tuple[U8, U8] | None,
        unit: int,
        out: F32,
    ) -> int:
        """Convert fragments from `first` on; how many, at most `format.batch`.

        Args:
            accumulators: int64 (blocks, 1440) of the round's bank, or None if nobody else contributed.
            own: this member's (lanes, shifts), or None if it did not contribute.
            out: float32 (format.lanes,), written.
        """
        format = self.format
        per = format.per_fragment
        count = min(format.batch, format.fragments - first)
        at, end = first * per, min((first + count) * per, format.lanes)
        total = self._total[:count]
        if own is None:
            total[...] = 0
        else:
            lanes, shifts = own
            np.copyto(total, lanes[first : first + count].view(format.wire))
            total <<= shifts[first : first + count, None].astype(np.int64)
        if accumulators is not None:
            total += accumulators.reshape(-1, per)[first : first + count]
        flat = total.reshape(-1)[: end - at]
        np.multiply(flat, math.ldexp(1.0, unit), out=out[at:end], casting="unsafe")
        return count


assert PAYLOAD_BYTES % 4 == 0
