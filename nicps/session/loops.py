# SPDX-License-Identifier: Apache-2.0
"""Compiled loops between float32 and lanes with absolute exponents: one pass over each fragment while it is in cache.

`nicps.session.absolute` does the same with NumPy in several passes over each batch, and gets the same bits. That
code is the reference. It converts vectors of less than `LEAST_NUMBERS`, and all vectors if numba cannot be used.

`loops_for` imports numba and compiles, in 1.4 s of processor time. `Session.ready` calls it before the other members
wait for this one, so no round waits for it. numba keeps the code in a folder, and the next process needs 0.5 s: beside
this file if the user may write there, else in the user's ~/.cache/numba, else nowhere, without a word. The home of a
program that an agent has started is the job's folder, so only that job finds the code again. Users share no folder on
purpose: a user that writes to it could run code as the others.

The loops are C functions. ctypes calls them without the interpreter's lock, so other threads run meanwhile. They get
addresses, so `Loops` looks at each array first, and declines one that is not laid out as they need it.
"""

from __future__ import annotations

import ctypes
import functools
import math
import threading
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from nicps.session.lanes import F32, I64, LEAST_EXPONENT, LaneFormat
from nicps.wire import NOT_FINITE

#: Of a vector. The loops save 2 ms of processor time in a round of that length, so 700 rounds pay for the compilation.
LEAST_NUMBERS = 1 << 20

_MAGNITUDE, _MANTISSA = 0x7FFFFFFF, 0x7FFFFF
_made: dict[int, Loops | None] = {}  # by the lanes' width
_making = threading.Lock()


def loops_for(format: LaneFormat) -> Loops | None:
    """Those for vectors in this format; None: the vectors are short, or numba cannot be used."""
    if format.lanes < LEAST_NUMBERS:
        return None
    with _making:
        if format.width not in _made:
            try:
                _made[format.width] = Loops(format.width)
            except Exception:  # whatever is wrong with numba here, NumPy does the same
                _made[format.width] = None
        return _made[format.width]


def loops_there(format: LaneFormat) -> Loops | None:
    """As `loops_for`, but only what was compiled before: nothing is compiled in the middle of a call."""
    return _made.get(format.width) if format.lanes >= LEAST_NUMBERS else None


class Loops:
    """The loops for lanes of one width. Each method returns whether it has done its work: if not, nothing is changed.

    Arguments are as in `nicps.session.absolute`, the fragments in question only.

    Raises:
        ImportError: numba is not installed, or does not fit NumPy.
    """

    def __init__(self, width: int) -> None:
        format = LaneFormat(1, width)
        self._per, self._lane = format.per_fragment, np.dtype(format.wire)
        number, lane, x, flag = np.float32, format.native, np.int8, np.int8
        rows = lane, int, x, int
        carray = _numba().carray
        made = _quantise(carray, format)
        self._quantise = _compiled(made, number, number, int, *rows, int)
        self._read = _compiled(_read(carray, format), number, int, *rows, int)
        made = _keep(carray, format)
        self._keep = _compiled(made, flag, number, int, number, *rows, int)
        made = _add(carray, format)
        self._add = _compiled(made, number, np.int64, float, flag, int)

    def quantise(self, vector: F32, kept: F32, lanes: npt.NDArray[Any], exponents: Any) -> bool:
        """Convert vector and residual, both float32 (n,), to lanes and exponents."""
        if not (self._fits(lanes, exponents, writes=True) and len(kept) == len(vector)):
            return False
        if not (_plain(vector) and _plain(kept) and len(vector) <= lanes.size):
            return False
        numbers = _at(vector), _at(kept), len(vector)
        self._quantise(*numbers, *_strided(lanes), *_strided(exponents), len(lanes))
        return True

    def read(self, lanes: npt.NDArray[Any], exponents: Any, out: F32) -> bool:
        """Convert lanes and exponents to float32 (n,); NaN where the exponent says so."""
        if not (self._fits(lanes, exponents) and _plain(out, writes=True)):
            return False
        numbers = _at(out), len(out)
        self._read(*numbers, *_strided(lanes), *_strided(exponents), len(lanes))
        return True

    def keep(
        self, vector: F32, kept: F32, lanes: npt.NDArray[Any], exponents: Any, lost: Any
    ) -> bool:
        """Make the rounding error of the vector, float32 (n,), the residual, float32 (fragments * per_fragment,)."""
        if not (self._fits(lanes, exponents) and _flags(lost, len(lanes))):
            return False
        if not (_plain(vector) and _plain(kept, writes=True) and len(kept) == lanes.size):
            return False
        numbers = _at(vector), min(len(vector), len(kept)), _at(kept)
        rows = *_strided(lanes), *_strided(exponents), len(lanes)
        self._keep(_at(lost), *numbers, *rows)
        return True

    def add(self, kept: F32, remainders: I64, used: Any, unit: float) -> bool:
        """Add remainders in units, int64 (n, per_fragment), to a residual, float32 (n, per_fragment)."""
        whole = kept.shape == remainders.shape == (len(used), self._per)
        if not (whole and _plain(kept, writes=True) and _flags(used, len(kept))):
            return False
        if not (remainders.dtype == np.int64 and remainders.flags.c_contiguous):
            return False
        self._add(_at(kept), _at(remainders), unit, _at(used), len(used))
        return True

    def _fits(self, lanes: npt.NDArray[Any], exponents: Any, *, writes: bool = False) -> bool:
        """Whether lanes are (n, per_fragment) as they are in records, and exponents int8 (n,)."""
        if lanes.dtype != self._lane or lanes.shape[1:] != (self._per,) or not lanes.flags.aligned:
            return False
        if lanes.strides[1] != lanes.itemsize or lanes.strides[0] % lanes.itemsize:
            return False
        writable = lanes.flags.writeable and exponents.flags.writeable
        return (
            lanes.strides[0] >= self._per * lanes.itemsize
            and (exponents.dtype, exponents.shape) == (np.int8, lanes.shape[:1])
            and exponents.strides[0] > 0
            and (writable or not writes)
        )


def _plain(numbers: F32, *, writes: bool = False) -> bool:
    """Whether it is float32 without gaps."""
    flags = numbers.flags
    if numbers.dtype != np.float32 or not (flags.c_contiguous and flags.aligned):
        return False
    return flags.writeable or not writes


def _flags(values: npt.NDArray[Any], rows: int) -> bool:
    """Whether there is one for each row, without gaps."""
    return values.dtype == np.bool_ and values.shape == (rows,) and values.flags.c_contiguous


def _at(array: npt.NDArray[Any]) -> int:
    return array.ctypes.data


def _strided(array: npt.NDArray[Any]) -> tuple[int, int]:
    """Where it begins, and from row to row so many of its numbers."""
    return array.ctypes.data, array.strides[0] // array.itemsize


@functools.cache
def _numba() -> Any:
    """The module. It can compile what calls `_swapped`."""
    import numba

    numba.extending.register_jitable(_swapped)
    return numba


def _compiled(function: Callable[..., None], *kinds: Any) -> Callable[..., None]:
    """A C function with these parameters: `int` and `float`, or pointers to NumPy's types."""
    numba, parameters = _numba(), []
    arguments: list[Any] = []
    for kind in kinds:
        parameter = numba.from_dtype(np.dtype(kind))
        scalar = {int: ctypes.c_int64, float: ctypes.c_double}.get(kind)
        parameters.append(numba.types.CPointer(parameter) if scalar is None else parameter)
        arguments.append(ctypes.c_void_p if scalar is None else scalar)
    compiling = functools.partial(
        numba.cfunc, numba.types.void(*parameters), nopython=True, error_model="numpy"
    )
    try:
        made = compiling(cache=True)(function)
    except Exception:  # there is no folder for it, no space, or what is there cannot be read
        made = compiling()(function)
    call: Any = ctypes.CFUNCTYPE(None, *arguments)(made.address)
    call.made = made  # the code is there as long as it is
    return call  # type: ignore[no-any-return]


# ---- what is compiled. A row is a fragment. From one to the next there are so many numbers: `stride` and `step`.

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
