# SPDX-License-Identifier: Apache-2.0
"""The collectives, each as what it exchanges in rounds.

| what | how |
| --- | --- |
| sums of float32 and halves | lanes of 32 bits; of a fragment or less, gathered and added in rank order |
| sums of integers | lanes of 32 bits, exact; int64 in three pieces of 22 bits |
| all other reductions, and float64 | gathered, and folded in rank order |
| averages with error feedback | lanes of 8, 16 or 32 bits |
| broadcast, all_gather | a sum in which only one member has something other than zeros |
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np

from nicps.collective.feedback import Form
from nicps.collective.kinds import Array, Kind, as_bytes
from nicps.collective.lanes import I32, PER_FRAGMENT
from nicps.collective.rounds import Attempt
from nicps.session.absolute import BOOL

_PIECES, _PIECE_BITS = 3, 22  # 64 sums of a piece fit a lane


@dataclass(frozen=True, slots=True)
class Call(ABC):
    """What one member calls. `vector` is flat, and does not change until the call is done."""

    kind: Kind
    vector: Array

    @property
    @abstractmethod
    def text(self) -> str:
        """What must be the same at all members, for people too."""

    @abstractmethod
    def carry_out(self, attempt: Attempt) -> Any:
        """The result at this member."""

    def alone(self) -> Any:
        """The result at a program that has come late, and is not in the group yet: what it gives, it gets."""
        return self.vector.copy()

    @property
    def _operand(self) -> str:
        return f"{len(self.vector):,} {self.kind.name}"


@dataclass(frozen=True, slots=True)
class Reduce(Call):
    """Every member gets the result, or (`root`) the one of that rank, or (`scatter`) each its own part of it."""

    operation: str
    size: int
    rank: int
    root: int | None = None
    scatter: bool = False

    @property
    def text(self) -> str:
        """As `Call`."""
        name = "reduce_scatter" if self.scatter else "all_reduce" if self.root is None else "reduce"
        to = "" if self.root is None else f" to rank {self.root}"
        return f"{name}({self.operation}{to}) of {self._operand}"

    def carry_out(self, attempt: Attempt) -> Array | None:
        """(n,), or the own part of it; None at members that are not the root."""
        total = self._total(attempt)
        if self.root is not None:
            return total if self.root == self.rank else None
        if self.scatter:
            part = len(total) // self.size
            return total[self.rank * part : (self.rank + 1) * part].copy()
        return total

    def alone(self) -> Array | None:
        """As `Call`."""
        if not self.scatter:
            return self.vector.copy() if self.root in (None, self.rank) else None
        part = len(self.vector) // self.size
        return self.vector[self.rank * part : (self.rank + 1) * part].copy()

    def _total(self, attempt: Attempt) -> Array:
        kind, operation, vector = self.kind, self.operation, self.vector
        if kind.is_complex and operation in ("sum", "avg"):
            name = "float32" if kind.name == "complex64" else "float64"
            parts = Kind(name, np.dtype(name))
            inner = Reduce(parts, vector.view(parts.carrier), operation, self.size, self.rank)
            return inner._total(attempt).view(kind.carrier)
        summed = operation in ("sum", "avg") and not attempt.is_small(vector.nbytes)
        if summed and kind.is_float32 and len(vector) > PER_FRAGMENT:
            total = add_floats(attempt, kind, vector)
        elif summed and operation == "sum" and kind.name == "bool":
            return add_words(attempt, vector.astype(np.int32)) > 0
        elif summed and operation == "sum" and kind.is_small:
            return add_words(attempt, vector.astype(np.int32)).astype(kind.carrier)
        elif summed and operation == "sum" and kind.name in ("int32", "uint32"):
            return add_words(attempt, vector.view(np.int32)).view(kind.carrier)
        elif summed and operation == "sum" and kind.name in ("int64", "uint64"):
            return add_wide(attempt, vector.view(np.uint64)).view(kind.carrier)
        else:
            rows = attempt.gather_counted(vector)
            total = kind.fold(rows, operation)
        return kind.finish(total, len(attempt.counted) if operation == "avg" else 1)


def add_floats(attempt: Attempt, kind: Kind, vector: Array) -> Array:
    """The sum as float32; what is not finite as IEEE 754 has it."""
    wide = kind.widen(vector)
    total, marred = attempt.add_floats(wide)
    _mend(attempt, wide, total, marred)
    return total


def add_words(attempt: Attempt, words: I32) -> I32:
    """The sum modulo 2**32."""
    total, marred = attempt.add_words(words)
    _mend(attempt, words, total, marred)
    return total


def _mend(attempt: Attempt, vector: Array, total: Array, marred: BOOL) -> None:
    """Fragments that lanes cannot hold: gather them, and add them in rank order. All members know the same ones."""
    at = np.flatnonzero(marred)
    if not len(at):
        return
    index = (at[:, None] * PER_FRAGMENT + np.arange(PER_FRAGMENT)).reshape(-1)
    index = index[index < len(vector)]
    rows = attempt.gather_counted(np.ascontiguousarray(vector[index]))
    with np.errstate(all="ignore"):
        total[index] = np.add.accumulate(rows, axis=0, dtype=rows.dtype)[-1]


def add_wide(attempt: Attempt, vector: Array) -> Array:
    """The sum of uint64 modulo 2**64, in pieces."""
    pieces = np.empty((_PIECES, len(vector)), np.int32)
    mask = np.uint64((1 << _PIECE_BITS) - 1)
    for k in range(_PIECES):
        pieces[k] = (vector >> np.uint64(k * _PIECE_BITS)) & mask
    sums, _ = attempt.add_words(pieces.reshape(-1))
    total = np.zeros(len(vector), np.uint64)
    for k, piece in enumerate(sums.reshape(_PIECES, -1)):
        total += piece.astype(np.uint64) << np.uint64(k * _PIECE_BITS)
    return total


@dataclass(frozen=True, slots=True)
class Average(Call):
    """The mean takes the place of every member's vector; what rounding leaves over is in `residual`.

    Vector and residual may be another library's: nothing is done with them here but `len` and slices, for `form`.
    """

    residual: Any
    width: int
    form: Form

    @property
    def text(self) -> str:
        """As `Call`."""
        return f"average of {self._operand} in lanes of {self.width} bits"

    def carry_out(self, attempt: Attempt) -> Any:
        """(n,), the vector."""
        attempt.average(self.vector, self.residual, self.width, self.form)
        return self.vector

    def alone(self) -> Any:
        """As `Call`; in place, too."""
        return self.vector


@dataclass(frozen=True, slots=True)
class Broadcast(Call):
    """Every member gets what the root has."""

    root: int
    rank: int

    @property
    def text(self) -> str:
        """As `Call`."""
        return f"broadcast from rank {self.root} of {self._operand}"

    def carry_out(self, attempt: Attempt) -> Array:
        """(n,)."""
        own = as_bytes(self.vector)
        size = len(own)
        if attempt.is_small(size):
            given = attempt.give(own.tobytes() if self.rank == self.root else b"")
            if given is not None:
                attempt.require((self.root,), self.text)
                return np.frombuffer(given[attempt.number_of(self.root)], self.vector.dtype).copy()
        words = np.zeros(-(-len(own) // 4), np.int32)
        if self.rank == self.root:
            words.view(np.uint8)[: len(own)] = own
        found, _ = attempt.add_words(words)
        attempt.require((self.root,), self.text)
        return found.view(np.uint8)[: len(own)].view(self.vector.dtype)


@dataclass(frozen=True, slots=True)
class Gather(Call):
    """Every member gets what each member has."""

    size: int

    @property
    def text(self) -> str:
        """As `Call`."""
        return f"all_gather of {self._operand}"

    def carry_out(self, attempt: Attempt) -> Array:
        """(size, n)."""
        rows = attempt.gather(self.vector)
        attempt.require(tuple(range(self.size)), self.text)
        return rows

    def alone(self) -> Array:
        """As `Call`."""
        return np.tile(self.vector, (self.size, 1))


@dataclass(frozen=True, slots=True)
class Barrier(Call):
    """All members that are left have come so far."""

    name: str = "barrier"

    @property
    def text(self) -> str:
        """As `Call`."""
        return self.name

    def carry_out(self, attempt: Attempt) -> None:
        """Nothing."""
        if attempt.give(b"") is None:
            attempt.add_words(np.zeros(0, np.int32))

    def alone(self) -> None:
        """As `Call`."""
