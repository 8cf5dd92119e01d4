# SPDX-License-Identifier: Apache-2.0
"""The loops of `nicps.session.loops`: `python -m nicps.session.loop_sources FD WIDTH` writes their machine code,
for lanes of that width.

A row is a fragment. From one to the next there are so many numbers: `stride` and `step`.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np

from nicps.compiled.build import Kinds, Loop, write
from nicps.session.lanes import F32, LEAST_EXPONENT, LaneFormat
from nicps.wire import NOT_FINITE

_MAGNITUDE, _MANTISSA = 0x7FFFFFFF, 0x7FFFFF


def parameters(format: LaneFormat) -> tuple[Kinds, ...]:
    """Those of `quantise`, `read`, `keep` and `add`."""
    number, lane, x, flag = np.float32, format.native, np.int8, np.int8
    rows = lane, int, x, int
    return (
        (number, number, int, *rows, int),
        (number, int, *rows, int),
        (flag, number, int, number, *rows, int),
        (number, np.int64, float, flag, int),
    )


def basis(format: LaneFormat) -> tuple[Any, ...]:
    """What determines the code, beside this text."""
    numbers = format.per_fragment, format.wire, format.largest_lane
    return *numbers, LEAST_EXPONENT, NOT_FINITE


def loops(format: LaneFormat) -> list[Loop]:
    """All of them, as `parameters`."""
    import numba

    numba.extending.register_jitable(_swapped)
    makers = (_quantise, _read, _keep, _add)
    return [
        Loop(make(numba.carray, format), kinds)
        for make, kinds in zip(makers, parameters(format), strict=True)
    ]


P: TypeAlias = Any  # a pointer


def _powers() -> F32:
    """2**x at 128 + x, for each x of 8 bits."""
    return np.ldexp(np.float32(1), np.arange(-128, 128, dtype=np.int32))


def _swapped(lane: Any, width: int) -> Any:
    """A lane's bytes in the other order, in the lowest bits."""
    if width == 8:
        return lane
    if width == 16:
        return ((lane & 0xFF) << 8) | ((lane >> 8) & 0xFF)
    outer = (lane << 24) | ((lane >> 24) & 0xFF)
    return outer | ((lane & 0xFF00) << 8) | ((lane >> 8) & 0xFF00)


def _quantise(carray: Any, format: LaneFormat) -> Callable[..., None]:
    width, per, native, powers = format.width, format.per_fragment, format.native, _powers()
    most = np.float32(math.ldexp(format.largest_lane, 1 - width))
    last = int(most.view(np.int32)) & _MANTISSA  # the mantissa of the largest lane

    def quantise(
        vector_: P, kept_: P, inside: int, lanes_: P, stride: int, xs_: P, step: int, rows: int
    ) -> None:
        vector, kept = carray(vector_, inside), carray(kept_, inside)
        lanes, exponents = carray(lanes_, rows * stride), carray(xs_, rows * step)
        for row in range(rows):
            at, end = min(row * per, inside), min(row * per + per, inside)
            value, left = vector[at:end], kept[at:end]
            out = lanes[row * stride : row * stride + per]
            top: Any = np.int32(0)
            for k in range(end - at):  # magnitudes compared as integers: NaN is above infinity
                bits = np.float32(value[k] + left[k]).view(np.int32)
                top = max(top, np.int32(bits & _MAGNITUDE))
            x = max((top >> 23) - 125 - width + ((top & _MANTISSA) > last), LEAST_EXPONENT)
            largest = np.int32(top).view(np.float32)
            if not np.isfinite(np.rint(largest * powers[128 - x]) * powers[128 + x]):
                x = NOT_FINITE
            exponents[row * step] = x
            filled = 0 if x == NOT_FINITE else end - at
            by = powers[128 - x]
            for k in range(filled):
                lane = np.int32(np.rint((value[k] + left[k]) * by))
                out[k] = native(_swapped(lane, width))
            for k in range(filled, per):
                out[k] = 0

    return quantise


def _read(carray: Any, format: LaneFormat) -> Callable[..., None]:
    width, per, native, powers = format.width, format.per_fragment, format.native, _powers()

    def read(out_: P, inside: int, lanes_: P, stride: int, xs_: P, step: int, rows: int) -> None:
        lanes, exponents = carray(lanes_, rows * stride), carray(xs_, rows * step)
        out = carray(out_, inside)
        for row in range(rows):
            at, end = min(row * per, inside), min(row * per + per, inside)
            value, given = out[at:end], lanes[row * stride : row * stride + per]
            x = exponents[row * step]
            by = np.float32(np.nan) if x == NOT_FINITE else powers[128 + x]
            for k in range(end - at):
                value[k] = np.float32(native(_swapped(given[k], width))) * by

    return read


def _keep(carray: Any, format: LaneFormat) -> Callable[..., None]:
    width, per, native, powers = format.width, format.per_fragment, format.native, _powers()

    def keep(
        lost_: P,
        vector_: P,
        inside: int,
        kept_: P,
        lanes_: P,
        stride: int,
        xs_: P,
        step: int,
        rows: int,
    ) -> None:
        vector, kept = carray(vector_, inside), carray(kept_, rows * per)
        lanes, exponents = carray(lanes_, rows * stride), carray(xs_, rows * step)
        lost = carray(lost_, rows)
        for row in range(rows):
            if lost[row]:
                continue
            at, end = min(row * per, inside), min(row * per + per, inside)
            value, left = vector[at:end], kept[row * per : row * per + per]
            given = lanes[row * stride : row * stride + per]
            by = powers[128 + exponents[row * step]]
            for k in range(end - at):
                sent = np.float32(native(_swapped(given[k], width))) * by
                left[k] = (left[k] + value[k]) - sent
            for k in range(end - at, per):
                left[k] = np.float32(0) - np.float32(native(_swapped(given[k], width))) * by

    return keep


def _add(carray: Any, format: LaneFormat) -> Callable[..., None]:
    per = format.per_fragment

    def add(kept_: P, remainders_: P, unit: float, used_: P, rows: int) -> None:
        kept, remainders = carray(kept_, rows * per), carray(remainders_, rows * per)
        used = carray(used_, rows)
        for row in range(rows):
            left, more = kept[row * per : row * per + per], remainders[row * per : row * per + per]
            if used[row]:
                for k in range(per):
                    left[k] += np.float32(more[k] * unit)
            else:
                for k in range(per):
                    left[k] += np.float32(0)  # -0.0 becomes 0.0

    return add


if __name__ == "__main__":
    write(loops(LaneFormat(1, int(sys.argv[2]))))
