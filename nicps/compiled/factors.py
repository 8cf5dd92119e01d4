# SPDX-License-Identifier: Apache-2.0
"""The loops of `nicps.torch.factors`, which visit a matrix once where PyTorch's operations do so several times:
`python -m nicps.compiled.factors FD RANK` writes their machine code to that file.

Factors are (rank, rows) and (rank, columns). The rank is a constant of the code, so that the compiler unrolls what is
done for each of its columns.
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
_OFF: Kinds = (_N, _N, _N, _N, int, int)
_PROJECT: Kinds = (_N, _N, _N, _N, _N, _N, _N, _N, int, int, int)
_RESULT: Kinds = (_N, _N, _N, _N, int, int, int)
_LINE = 16  # numbers in a line of the cache


class FactorLoops:
    """All arrays are float32 without gaps, of one matrix (rows, columns) and its factors.

    Raises:
        Exception: they cannot be made here; which one depends on numba.
    """

    def __init__(self, rank: int) -> None:
        module, kinds = sys.modules[__name__], (_PROJECT, _RESULT, _OFF)
        name = f"factors-{rank}"
        self._project, self._result, self._off = functions(name, module, kinds, rank, rank)

    def project(
        self, gradient: F32, visited: F32, left: F32, right: F32, out: F32, start: F32, found: F32
    ) -> None:
        """The first visit.

        Args:
            visited, left, right: the error is what P Q^T of these factors lacks of `visited`.
            out: where error and gradient together go.
            start, found: Q, and where P of `out` goes, (rank, rows).
        """
        row = _row(out)
        given = _addresses(gradient, visited, left, right, out, row, start, found)
        self._project(*given, *out.shape, _begun(out))

    def result(self, left: F32, right: F32, out: F32) -> None:
        """P Q^T to `out`. The products are added in the order of the rank's columns, each rounded once."""
        row = _row(out)
        self._result(*_addresses(left, right, out, row), *out.shape, _begun(out))

    def take_off(self, visited: F32, left: F32, right: F32, out: F32) -> None:
        """The error that `project` adds, to `out`."""
        self._off(*_addresses(visited, left, right, out), *out.shape)


def _row(matrix: F32) -> F32:
    return np.empty(matrix.shape[1], np.float32)


def _begun(array: F32) -> int:
    """Numbers of a line of the cache that are in front of it."""
    return array.ctypes.data // array.itemsize % _LINE


def _addresses(*arrays: F32) -> list[int]:
    for array in arrays:
        if array.dtype != np.float32 or not array.flags.c_contiguous:
            raise ValueError("a matrix's numbers must be float32 without gaps")
    return [array.ctypes.data for array in arrays]


# ---- what is compiled


def loops(rank: int) -> list[Loop]:
    """As `FactorLoops` has them. P of a member's own may be added up in any order, and the rest may not."""
    import numba

    rest, stores = _rest(numba, rank), _stores(numba)
    return [
        Loop(_project(numba.carray, rank, rest, _dot(numba), *stores), _PROJECT),
        Loop(_result(numba.carray, rank, *stores), _RESULT),
        Loop(_off(numba.carray, rank, rest), _OFF),
    ]


def _project(
    carray: Any, rank: int, rest: Any, dot: Any, store: Any, end_stores: Any
) -> Callable[..., None]:
    def project(
        gradient_: P,
        visited_: P,
        left_: P,
        right_: P,
        out_: P,
        row_: P,
        start_: P,
        found_: P,
        rows: int,
        columns: int,
        begun: int,
    ) -> None:
        gradient, visited = carray(gradient_, (rows, columns)), carray(visited_, (rows, columns))
        left, right = carray(left_, (rank, rows)), carray(right_, (rank, columns))
        start, found = carray(start_, (rank, columns)), carray(found_, (rank, rows))
        row = carray(row_, (columns,))
        for i in range(rows):
            for k in range(columns):
                row[k] = gradient[i, k] + rest(visited, left, right, i, k)
            store(out_, i * columns, row_, columns, begun)
            for r in range(rank):
                found[r, i] = dot(row, start[r])
        end_stores()

    return project


def _result(carray: Any, rank: int, store: Any, end_stores: Any) -> Callable[..., None]:
    def result(left_: P, right_: P, out_: P, row_: P, rows: int, columns: int, begun: int) -> None:
        left, right = carray(left_, (rank, rows)), carray(right_, (rank, columns))
        row = carray(row_, (columns,))
        for i in range(rows):
            for k in range(columns):
                total = left[0, i] * right[0, k]
                for r in range(1, rank):
                    total = total + left[r, i] * right[r, k]
                row[k] = total
            store(out_, i * columns, row_, columns, begun)
        end_stores()

    return result


def _off(carray: Any, rank: int, rest: Any) -> Callable[..., None]:
    def off(visited_: P, left_: P, right_: P, out_: P, rows: int, columns: int) -> None:
        visited, out = carray(visited_, (rows, columns)), carray(out_, (rows, columns))
        left, right = carray(left_, (rank, rows)), carray(right_, (rank, columns))
        for i in range(rows):
            for k in range(columns):
                out[i, k] = rest(visited, left, right, i, k)

    return off


def _rest(numba: Any, rank: int) -> Any:
    """What P Q^T lacks of a number."""

    def rest(visited: Any, left: Any, right: Any, i: int, k: int) -> Any:
        here = visited[i, k]
        for r in range(rank):
            here = here - left[r, i] * right[r, k]
        return here

    return numba.njit(error_model="numpy")(rest)


def _dot(numba: Any) -> Any:
    def dot(one: Any, other: Any) -> Any:
        total = np.float32(0)
        for k in range(len(one)):
            total += one[k] * other[k]
        return total

    return numba.njit(error_model="numpy", fastmath={"reassoc", "contract"})(dot)


def _stores(numba: Any) -> tuple[Any, Any]:
    """A function that stores a row from a number on, and what comes after the last one.

    Whole lines of the cache go past it: an ordinary store would have each of them read from memory first.
    """
    store_line, end_stores = _past_the_cache(numba)

    def store(to: Any, at: int, row: Any, columns: int, begun: int) -> None:
        first = min(-(begun + at) % _LINE, columns)
        last = first + (columns - first) // _LINE * _LINE
        for k in range(first):
            to[at + k] = row[k]
        for k in range(first, last, _LINE):
            store_line(to, at + k, row, k)
        for k in range(last, columns):
            to[at + k] = row[k]

    return numba.njit(error_model="numpy")(store), end_stores


def _past_the_cache(numba: Any) -> tuple[Any, Any]:
    """Two functions for loops.

    The first, `(to, at, source, first)`, stores the numbers of `source` from `first` on in a line of the cache, `to`
    from `at` on, without reading it. The second lets other threads see such stores.
    """
    from llvmlite import ir

    line, nothing = ir.VectorType(ir.FloatType(), _LINE), ir.FunctionType(ir.VoidType(), [])

    def store_line(_: Any, to: Any, at: Any, source: Any, first: Any) -> Any:
        def generate(context: Any, builder: Any, _: Any, given: Any) -> Any:
            to, at, source, first = given
            numbers = builder.bitcast(builder.gep(source, [first]), line.as_pointer())
            place = builder.bitcast(builder.gep(to, [at]), line.as_pointer())
            stored = builder.store(builder.load(numbers, align=4), place, align=4 * _LINE)
            stored.set_metadata("nontemporal", builder.module.add_metadata([ir.IntType(32)(1)]))
            return context.get_dummy_value()

        return numba.types.void(to, at, source, first), generate

    def end_stores(_: Any) -> Any:
        def generate(context: Any, builder: Any, *_: Any) -> Any:
            fence = builder.module.declare_intrinsic("llvm.x86.sse.sfence", fnty=nothing)
            builder.call(fence, [])
            return context.get_dummy_value()

        return numba.types.void(), generate

    return numba.extending.intrinsic(store_line), numba.extending.intrinsic(end_stores)


if __name__ == "__main__":
    write(loops(int(sys.argv[2])))
