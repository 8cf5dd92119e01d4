# SPDX-License-Identifier: Apache-2.0
"""Matrices as products of two thin factors: PowerSGD (Vogels, Karimireddy, Jaggi 2019, algorithms 1 and 2).

    V = gradient + error          P = V Q           summed over the members, then orthonormalised
                                  Q = V^T P         averaged
    error = V - P Q_own^T         result = P Q^T

Factors are kept transposed, (rank, rows) and (rank, columns): BLAS is many times faster with these.

What all members must have bit for bit is made of single multiplications and additions in a fixed order: the basis in
float64, the result in float32. PyTorch's `mul` and `add` round each of these once, on every processor and with any
number of threads, and so do the compiled loops that visit large matrices (`nicps.compiled.factors`). What is a member's
own, P and Q before they are summed and the error, is made by BLAS or these loops.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from nicps.compiled.factors import FactorLoops

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]

#: Of all matrices together. The loops save 2 ms of a step's processor time then: 1,000 steps pay for compiling.
LEAST_NUMBERS = 1 << 20
_LARGEST_RANK = 16  # the compiler does not unroll loops over more columns, and then they are slower than PyTorch
_F32: Any = {"dtype": torch.float32, "device": "cpu"}  # whatever a script has as its defaults
_BLOCK = 1 << 16  # numbers of a visit's block: 256 KB, which stay in the cache
#: What is left of a column after the others are taken out: below it is only rounding.
_LEAST = 1e-6
_PAYS = 2  # times less to send, as PyTorch's `min_compression_rate`


def pays(rows: int, columns: int, rank: int) -> bool:
    """Whether the factors have less than half of the matrix's numbers."""
    return (rows + columns) * rank * _PAYS < rows * columns


def orthonormalise(columns: F64) -> F64:
    """Modified Gram-Schmidt, float64 (rank, n), in place: bit for bit the same on every processor.

    A column that the ones before it make up, or that is zero, becomes zero.

    Returns:
        Which columns did not, as 1.0 or 0.0 (rank,).
    """
    rank = len(columns)
    kept = np.zeros(rank)
    before = np.sqrt(_sums(columns * columns))
    for k in range(rank):
        column = columns[k]
        norm = np.sqrt(_sums((column * column)[None])[0])
        if norm <= _LEAST * before[k]:
            column[:] = 0.0
            continue
        kept[k] = 1.0
        column /= norm
        rest = columns[k + 1 :]
        rest -= _sums(rest * column)[:, None] * column
    return kept


def _sums(rows: F64) -> F64:
    """The sum of each row of (k, n), by halves: NumPy's own order of additions is not promised."""
    while (n := rows.shape[1]) > 1:
        half = n // 2
        added = rows[:, :half] + rows[:, n - half :]
        rows = added if n % 2 == 0 else np.concatenate([added, rows[:, half : half + 1]], axis=1)
    return rows[:, 0] if rows.shape[1] else np.zeros(len(rows))


def _write_product(
    left: torch.Tensor, right: torch.Tensor, out: torch.Tensor, term: torch.Tensor
) -> None:
    """Of (rank, rows, 1) and (rank, columns): (rows, columns). `term` is room for as much, or more rows."""
    torch.mul(left[0], right[0], out=out)
    for k in range(1, len(left)):
        here = term[: len(out)]
        torch.mul(left[k], right[k], out=here)
        torch.add(out, here, out=out)


class Matrix:
    """What a member keeps of one parameter from step to step.

    The error of a step is computed in the next one's first visit. Until then there is V, and what P Q_own^T is of it.

    Attributes: `shape`, rows and columns; `start`, float32 (rank, columns), the Q that the next step begins with.

    Args:
        number: of the parameter, the same at all members: the first Q is made of it.
        error: float32 (rows, columns), where `error` is put.
    """

    def __init__(
        self, rows: int, columns: int, rank: int, number: int, error: torch.Tensor | None = None
    ) -> None:
        self.shape = rows, columns
        # Bits out of the generator alone: a normal distribution would take the processor's logarithms.
        random = np.random.default_rng([number, rank]).random((rank, columns), np.float32)
        self._first = torch.from_numpy(random - np.float32(0.5))
        self.start = self._first.clone()
        self._home = torch.zeros(rows, columns, **_F32) if error is None else error
        #: V of the last step that counted, or the error; and of the step under way.
        self._visited, self._visits = self._home, torch.zeros(rows, columns, **_F32)
        #: P and Q_own of these steps, (rank, rows) and (rank, columns).
        self._taken, self._takes = (
            (torch.zeros(rank, rows, **_F32), torch.zeros(rank, columns, **_F32)) for _ in range(2)
        )
        self._kept: F64 = np.zeros(rank)
        self._finite = True
        #: Compiled ones that visit the matrix, where there are some (`accelerate`).
        self.loops: FactorLoops | None = None
        self._step = max(1, _BLOCK // columns)
        self._term = torch.empty(min(self._step, rows), columns, **_F32)

    @property
    def error(self) -> torch.Tensor:
        """What has not been applied yet of this member's gradients, float32 (rows, columns).

        Between steps it may be changed in place.
        """
        self.settle()
        return self._home

    def settle(self) -> None:
        """Bring to its place what `error` is. In the middle of a step it is that of the one before."""
        for at in range(0, len(self._home), self._step):
            here = slice(at, at + self._step)
            error = self._term[: len(self._home[here])]
            self._take_off(here, error)
            if self._visits is self._home:
                self._visited[here] = self._home[here]  # V of the step under way
            self._home[here] = error
        if self._visits is self._home:
            self._visits = self._visited
        self._visited = self._home
        for factor in self._taken:
            factor.zero_()

    def _take_off(self, here: slice, out: torch.Tensor) -> None:
        """The error of some rows, with the bits that `project` adds."""
        left, right = self._taken[0][:, here], self._taken[1]
        if self.loops is not None:
            given = self._visited[here], left.contiguous(), right, out
            self.loops.take_off(*map(_array, given))
        else:
            torch.addmm(self._visited[here], left.t(), right, alpha=-1, out=out)

    def project(self, gradient: torch.Tensor) -> F32:
        """The first visit: V, the error and the gradient (rows, columns) together. P of that, (rank, rows).

        Each column of P is divided by a power of two that all members know, or with Q's it would have the square of the
        gradients' scale. A basis does not depend on that.
        """
        left, _ = self._takes
        if self.loops is not None:
            before = gradient, self._visited, *self._taken
            self.loops.project(*map(_array, (*before, self._visits, self.start, left)))
        else:
            self._project(gradient, left)
        _, exponents = np.frexp(np.abs(_array(self.start)).max(axis=1, keepdims=True, initial=0.0))
        scaled: F32 = np.ldexp(_array(left), -exponents)
        return scaled

    def _project(self, gradient: torch.Tensor, left: torch.Tensor) -> None:
        """What the loops do, with PyTorch's operations."""
        for at in range(0, len(gradient), self._step):
            here = self._visits[at : at + self._step]
            error = self._term[: len(here)]
            self._take_off(slice(at, at + self._step), error)
            torch.add(gradient[at : at + self._step], error, out=here)
            torch.mm(here, self.start.t(), out=left[:, at : at + self._step].t())

    def take_basis(self, total: F32) -> bool:
        """P summed over the members, (rank, rows). Whether it is finite."""
        self._finite = bool(np.isfinite(total).all())
        if self._finite:
            wide = total.astype(np.float64)
            self._kept = orthonormalise(wide)
            self._takes[0].copy_(torch.from_numpy(wide))
        return self._finite

    def project_back(self) -> F32:
        """The second visit: Q of V, (rank, columns), this member's own.

        What of it does not reach the sum is subtracted before `apply`, so that it stays in the error.
        """
        left, right = self._takes
        if self._finite:
            torch.mm(left, self._visits, out=right)
        return _array(right)

    def apply(self, mean: F32, out: torch.Tensor, *, commit: bool) -> None:
        """The third visit: the result, (rows, columns), to `out`.

        Args:
            mean: Q averaged over the members, (rank, columns).
            commit: whether the error and Q change, which they do if all sums of the step are finite.
        """
        if not self._finite:
            out.fill_(float("nan"))
            return
        left, right = self._takes[0], torch.from_numpy(mean)
        if self.loops is not None:
            self.loops.result(*map(_array, (left, right, out)))
        else:
            for at in range(0, len(out), self._step):
                block = left[:, at : at + self._step, None]
                _write_product(block, right, out[at : at + self._step], self._term)
        if commit:
            self._visited, self._visits = self._visits, self._visited
            self._taken, self._takes = self._takes, self._taken
            self.start.copy_(right)
            for k in np.flatnonzero(self._kept == 0.0):
                self.start[k] = self._first[k]  # or that column would be zero for good


def accelerate(matrices: Collection[Matrix]) -> None:
    """Give matrices their loops, if together they are large enough, before other members wait for this one."""
    if sum(math.prod(matrix.shape) for matrix in matrices) >= LEAST_NUMBERS:
        for matrix in matrices:
            if len(matrix.start) <= _LARGEST_RANK:
                matrix.loops = _compiled(len(matrix.start))


@functools.cache
def _compiled(rank: int) -> FactorLoops | None:
    try:
        return FactorLoops(rank)
    except Exception:  # whatever is wrong with numba here, PyTorch does the same
        return None


def exchange(
    matrices: Sequence[tuple[Matrix, torch.Tensor]],
    rest: Sequence[tuple[F32, F32]],
    add: Callable[[F32], F32],
    combine: Callable[[F32, F32], F32],
    per_fragment: int = 1,
) -> None:
    """A step's two rounds. All members see the same sums, so all do the same after each.

    Args:
        matrices: with this member's gradients (rows, columns), which the results replace.
        rest: what is exchanged as it is, float32, which the results replace; and the residual of each.
        add: sums up a vector over the members, or any multiple of that: it chooses the basis, and no more.
        combine: sums up a vector over the members, or takes the mean: of that the results are. It adds the residual, of
            the same length, and puts in its place what of both is not in the sum.
        per_fragment: how many numbers share an exponent on the wire: each matrix begins with the first one, and so does
            the rest, or a large one beside a small one would leave nothing of it.
    """
    finite = True
    if matrices:
        parts = [matrix.project(value) for matrix, value in matrices]
        total = add(_one(parts, per_fragment))
        for (matrix, _), part in zip(matrices, _cut(total, parts, per_fragment), strict=True):
            finite = matrix.take_basis(part) and finite
    own = [matrix.project_back() for matrix, _ in matrices]
    values, residuals = [value for value, _ in rest], [residual for _, residual in rest]
    parts = [*own, _one(values)]
    left = _one([*map(np.zeros_like, own), _one(residuals)], per_fragment)
    found = combine(_one(parts, per_fragment), left)
    finite = finite and bool(np.isfinite(found).all())
    *means, others = _cut(found, parts, per_fragment)
    *lacking, others_left = _cut(left, parts, per_fragment)
    for (matrix, value), mean, part, lacks in zip(matrices, means, own, lacking, strict=True):
        part -= lacks  # it stays in the error
        matrix.apply(mean, value, commit=finite)
    for place, part in zip(values, _cut(others, values), strict=True):
        place[:] = part
    if finite:
        for place, part in zip(residuals, _cut(others_left, residuals), strict=True):
            place[:] = part


def _one(parts: Sequence[F32], per: int = 1) -> F32:
    """One behind the other, each from a multiple of `per` on."""
    ends = [*itertools.accumulate((_places(part, per) for part in parts), initial=0)]
    whole = np.zeros(ends[-1], np.float32)
    for part, at in zip(parts, ends, strict=False):
        whole[at : at + part.size] = part.reshape(-1)
    return whole


def _cut(whole: F32, like: Sequence[F32], per: int = 1) -> list[F32]:
    """The parts of a vector that `_one` has made."""
    found, at = [], 0
    for part in like:
        found.append(whole[at : at + part.size].reshape(part.shape))
        at += _places(part, per)
    return found


def _places(part: F32, per: int) -> int:
    return -(-part.size // per) * per


def _array(tensor: torch.Tensor) -> F32:
    found: F32 = tensor.numpy()
    return found
