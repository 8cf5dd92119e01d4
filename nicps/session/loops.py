# SPDX-License-Identifier: Apache-2.0
"""Compiled loops between float32 and lanes with absolute exponents: one pass over each fragment while it is in cache.

`nicps.session.absolute` does the same with NumPy in several passes over each batch, and gets the same bits. That
code is the reference. It converts vectors as long as none has had `LEAST_NUMBERS`, and all vectors if there are no
loops: numba is not installed, or the processor is no x86-64.

numba compiles them in a child process, in 2 s of processor time (`nicps.compiled`). `Session.ready` calls `loops_for`
before the other members wait for this one, so no round waits for it. The code is kept for the next process.

The loops are C functions. ctypes calls them without the interpreter's lock, so other threads run meanwhile. They get
addresses, so `Loops` looks at each array first, and declines one that is not laid out as they need it.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import numpy.typing as npt

from nicps.compiled.build import functions
from nicps.session import loop_sources
from nicps.session.lanes import F32, I64, LaneFormat

#: Of a vector. The loops save 2 ms of processor time in a round of that length: 1,000 rounds pay for compiling.
LEAST_NUMBERS = 1 << 20

_made: dict[int, Loops | None] = {}  # by the lanes' width
_making = threading.Lock()


def loops_for(format: LaneFormat) -> Loops | None:
    """Those for vectors in this format; None: no vector of that width was long yet, or numba cannot be used."""
    with _making:
        if format.width not in _made:
            if format.lanes < LEAST_NUMBERS:
                return None
            try:
                _made[format.width] = Loops(format.width)
            except Exception:  # whatever is wrong with numba here, NumPy does the same
                _made[format.width] = None
        return _made[format.width]


class Loops:
    """The loops for lanes of one width. Each method returns whether it has done its work: if not, nothing is changed.

    Arguments are as in `nicps.session.absolute`, the fragments in question only.

    Raises:
        Exception: they cannot be made here; which one depends on numba.
    """

    def __init__(self, width: int) -> None:
        format = LaneFormat(1, width)
        self._per, self._lane = format.per_fragment, np.dtype(format.wire)
        self._quantise, self._read, self._keep, self._add = functions(
            f"loops{width}",
            loop_sources,
            loop_sources.parameters(format),
            loop_sources.basis(format),
            width,
        )

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
