# SPDX-License-Identifier: Apache-2.0
"""Types of numbers that travel, and what can be done with them.

bfloat16 is no type of NumPy: a vector of it is uint16, and the call names its type.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from nicps.errors import UsageProblem
from nicps.session.lanes import F32, U8

Array = npt.NDArray[Any]

BFLOAT16 = "bfloat16"
_HALVES = ("float16", BFLOAT16)
_SMALL = ("bool", "int8", "uint8", "int16", "uint16")
_NAMES = (
    *_HALVES,
    "float32",
    "float64",
    "complex64",
    "complex128",
    *_SMALL,
    "int32",
    "uint32",
    "int64",
    "uint64",
)

_UFUNCS: Mapping[str, Callable[..., Any]] = {
    "sum": np.add,
    "avg": np.add,
    "product": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
    "band": np.bitwise_and,
    "bor": np.bitwise_or,
    "bxor": np.bitwise_xor,
}
OPERATIONS = tuple(_UFUNCS)


@dataclass(frozen=True, slots=True)
class Kind:
    """A type of numbers. `name` is NumPy's, or `bfloat16`; `carrier`, in what a vector of it is."""

    name: str
    carrier: np.dtype[Any]

    @classmethod
    def of(cls, vector: Array, name: str | None = None) -> Kind:
        """The type of a vector; `name` says so where NumPy does not know it.

        Raises:
            UsageProblem: it cannot travel.
        """
        found = name or vector.dtype.name
        if found not in _NAMES:
            raise UsageProblem(f"vectors of {found} cannot be exchanged: {', '.join(_NAMES)} can")
        carrier = np.dtype("uint16" if found == BFLOAT16 else found)
        if vector.dtype != carrier:
            raise UsageProblem(
                f"a vector of {found} must be a NumPy array of {carrier}, not {vector.dtype}"
            )
        return cls(found, carrier)

    @property
    def is_float32(self) -> bool:
        """Its sums can be made in lanes, out of float32."""
        return self.name in ("float32", *_HALVES)

    @property
    def is_complex(self) -> bool:
        """Each number is two."""
        return self.name.startswith("complex")

    @property
    def is_small(self) -> bool:
        """An integer of which 64 fit a lane of 32 bits together, as a sum."""
        return self.name in _SMALL

    def check(self, operation: str) -> None:
        """Refuse what cannot be done with such numbers.

        Raises:
            UsageProblem: there is no such operation, or these numbers do not have it.
        """
        if operation not in _UFUNCS:
            raise UsageProblem(f"{operation!r} is not an operation: {', '.join(OPERATIONS)} are")
        whole = self.is_small or (self.carrier.kind in "iu" and self.name != BFLOAT16)
        if operation in ("band", "bor", "bxor") and not whole:
            raise UsageProblem(f"{operation} needs whole numbers, not {self.name}")
        if operation == "avg" and whole:
            raise UsageProblem(f"avg needs numbers with fractions, not {self.name}")
        if self.is_complex and operation not in ("sum", "avg", "product"):
            raise UsageProblem(f"{operation} cannot be made of {self.name}")

    # ---- as float32, and back

    def widen(self, vector: Array) -> F32:
        """As float32; the vector itself if it is."""
        if self.name == BFLOAT16:
            return (vector.astype(np.uint32) << np.uint32(16)).view(np.float32)
        return vector.astype(np.float32, copy=False)

    def narrow(self, vector: F32) -> Array:
        """Of float32, rounded to the nearest, halves to even."""
        if self.name != BFLOAT16:
            with np.errstate(over="ignore"):
                return vector.astype(self.carrier, copy=False)
        bits = vector.view(np.uint32)
        rounded = (
            bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
        ) >> np.uint32(16)
        quiet = (bits >> np.uint32(16)) | np.uint32(0x40)  # rounding could make a NaN infinite
        return np.where(np.isnan(vector), quiet, rounded).astype(np.uint16)

    # ---- what members have, in rank order

    def fold(self, rows: Array, operation: str) -> Array:
        """The operation over (members, n), the first row with the second, and so on: of halves in float32."""
        ufunc = _UFUNCS[operation]
        if self.name == "bool":
            ufunc = {"sum": np.logical_or, "product": np.logical_and}.get(operation, ufunc)
        elif self.is_complex and operation == "product":
            ufunc = _multiply_complex
        halves = self.name in _HALVES
        with np.errstate(all="ignore"):
            total = self.widen(rows[0]) if halves else rows[0].copy()
            for row in rows[1:]:
                total = ufunc(total, self.widen(row) if halves else row)
        return total

    def finish(self, total: Array, members: int = 1) -> Array:
        """The average of so many, of which that is the sum; of halves it is float32 and rounded once."""
        if members > 1:
            with np.errstate(all="ignore"):
                total = total / total.dtype.type(members)
        if self.name in _HALVES:
            return self.narrow(total)
        return total.astype(self.carrier, copy=False)


def _multiply_complex(left: Array, right: Array) -> Array:
    """Of complex numbers, each operation rounded by itself: NumPy fuses some where the processor can."""
    product = np.empty_like(left)
    np.subtract(left.real * right.real, left.imag * right.imag, out=product.real)
    np.add(left.real * right.imag, left.imag * right.real, out=product.imag)
    return product


def as_bytes(vector: Array) -> U8:
    """A contiguous vector's memory."""
    return vector.reshape(-1).view(np.uint8)
