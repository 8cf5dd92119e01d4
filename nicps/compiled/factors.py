# SPDX-License-Identifier: Apache-2.0
"""The loops of `nicps.torch.factors`, which visit a matrix once where PyTorch's operations do so several times:
`python -m nicps.compiled.factors FD` writes their machine code to that file.

Factors are (rank, rows) and (rank, columns). Two of their columns are taken at a time, while a row of the matrix is in
the cache.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from nicps.compiled.build import Kinds, Loop, functions, write

F32 = npt.NDArray[np.float32]
P: TypeAlias = Any  # a pointer

_N = np.float32
#: rank, rows, columns
_SIZES: Kinds = (int, int, int)
_KINDS: tuple[Kinds, ...] = ((_N, _N, _N, _N, *_SIZES), (_N, _N, _N, _N, _N, *_SIZES))


class FactorLoops:
    """All arrays are float32 without gaps, of one matrix (rows, columns).

    Raises:
        Exception: they cannot be made here; which one depends on numba.
    """

    def __init__(self) -> None:
        module = sys.modules[__name__]
        self._project, self._apply = functions("factors", module, _KINDS, None)

    def project(self, value: F32, error: F32, start: F32, left: F32) -> None:
        """Add the error to `value` in place, and write P = `value` Q, (rank, rows), to `left`; `start` is Q."""
        numbers = _addresses(value, error, start, left)
        self._project(*numbers, len(start), *value.shape)

    def apply(self, value: F32, error: F32, left: F32, own: F32, mean: F32) -> None:
        """Make the error what P Q^T of this member's own Q lacks of `value`, and `value` P Q^T of the mean Q.

        The products are added in the order of the rank's columns, each rounded once.
        """
        numbers = _addresses(value, error, left, own, mean)
        self._apply(*numbers, len(left), *value.shape)


def _addresses(*arrays: F32) -> list[int]:
    for array in arrays:
        if array.dtype != np.float32 or not array.flags.c_contiguous:
            raise ValueError("a matrix's numbers must be float32 without gaps")
    return [array.ctypes.data for array in arrays]


# ---- what is compiled


def loops() -> list[Loop]:
    """`project` and `apply`. P of a member's own may be added up in any order, and the rest may not."""
    import numba

    carray, freedom = numba.carray, frozenset({"reassoc", "contract"})
    return [Loop(_project(carray), _KINDS[0], freedom), Loop(_apply(carray), _KINDS[1])]


def _project(carray: Any) -> Callable[..., None]:
    def project(
        value_: P, error_: P, start_: P, left_: P, rank: int, rows: int, columns: int
    ) -> None:
        values, errors = carray(value_, (rows, columns)), carray(error_, (rows, columns))
        start, left = carray(start_, (rank, columns)), carray(left_, (rank, rows))
        for i in range(rows):
            value, error, first = values[i], errors[i], start[0]
            total = np.float32(0)
            for k in range(columns):
                here = value[k] + error[k]
                value[k] = here
                total += here * first[k]
            left[0, i] = total
            for r in range(1, rank, 2):
                first, second = start[r], start[min(r + 1, rank - 1)]
                total, other = np.float32(0), np.float32(0)
                for k in range(columns):
                    total += value[k] * first[k]
                    other += value[k] * second[k]
                left[r, i] = total
                left[min(r + 1, rank - 1), i] = other

    return project


def _apply(carray: Any) -> Callable[..., None]:
    def apply(
        value_: P, error_: P, left_: P, own_: P, mean_: P, rank: int, rows: int, columns: int
    ) -> None:
        values, errors = carray(value_, (rows, columns)), carray(error_, (rows, columns))
        left = carray(left_, (rank, rows))
        own, mean = carray(own_, (rank, columns)), carray(mean_, (rank, columns))
        odd = rank % 2
        for i in range(rows):
            value, error = values[i], errors[i]
            if odd:
                a, first, new = left[0, i], own[0], mean[0]
                for k in range(columns):
                    error[k] = value[k] - a * first[k]
                    value[k] = a * new[k]
            else:
                a, first, new = left[0, i], own[0], mean[0]
                b, second, newer = left[1, i], own[1], mean[1]
                for k in range(columns):
                    error[k] = (value[k] - a * first[k]) - b * second[k]
                    value[k] = a * new[k] + b * newer[k]
            for r in range(2 - odd, rank, 2):
                a, first, new = left[r, i], own[r], mean[r]
                b, second, newer = left[r + 1, i], own[r + 1], mean[r + 1]
                for k in range(columns):
                    error[k] = (error[k] - a * first[k]) - b * second[k]
                    value[k] = (value[k] + a * new[k]) + b * newer[k]

    return apply


if __name__ == "__main__":
    write(loops())
