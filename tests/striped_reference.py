# SPDX-License-Identifier: Apache-2.0
"""What sums and residuals must be where the exchange is `stripes`, bit for bit.

Imports nothing of the product: it is written from docs/stripes.md ("Numbers") alone, with whole numbers of any size.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

PAYLOAD_BITS = 1440 * 8
LEAST, NOT_FINITE = -120, 127
# The largest magnitude that a lane takes and a float32 can name, and the largest shift, by the lanes' bits.
LARGEST = {32: 2.0**31 - 2.0**7, 16: 2.0**15 - 1, 8: 2.0**7 - 1}
MOST_SHIFT = {32: 26, 16: 42, 8: 50}

F32 = npt.NDArray[np.float32]


@dataclass
class Piece:
    """A fragment: of a member's vector, or of the sum with its remainder."""

    exponent: int
    lanes: list[int]
    rest: list[int] = field(default_factory=list)

    def values(self) -> F32:
        """As everybody reads it."""
        if self.exponent == NOT_FINITE:
            return np.full(len(self.lanes), np.nan, np.float32)
        with np.errstate(over="ignore"):
            return (np.array(self.lanes, np.float64) * 2.0**self.exponent).astype(np.float32)


def smallest_exponent(largest: float, width: int) -> int:
    """The smallest that is allowed and under which the magnitude fits a lane."""
    exponent = LEAST
    while largest > LARGEST[width] * 2.0**exponent:
        exponent += 1
    return exponent


@dataclass
class Member:
    """One member's rounding error."""

    width: int
    residual: F32
    left: F32 = field(default_factory=lambda: np.zeros(0, np.float32))

    def parts(self) -> list[slice]:
        """The vector's fragments."""
        per = PAYLOAD_BITS // self.width
        return [
            slice(at, min(at + per, len(self.residual))) for at in range(0, len(self.residual), per)
        ]

    def convert(self, vector: F32) -> list[Piece]:
        """Its fragments; `left` is what rounding leaves over."""
        with np.errstate(over="ignore", invalid="ignore"):
            values = vector + self.residual
        assert values.dtype == np.float32
        self.left = self.residual.copy()
        pieces = []
        for part in self.parts():
            exact = values[part].astype(np.float64)
            if not np.isfinite(exact).all():
                pieces.append(Piece(NOT_FINITE, [0] * len(exact)))
                continue
            exponent = smallest_exponent(float(np.abs(exact).max()), self.width)
            lanes = np.rint(exact / 2.0**exponent)
            if (np.abs(lanes) * 2.0**exponent >= 2.0**128).any():
                pieces.append(Piece(NOT_FINITE, [0] * len(exact)))
                continue
            self.left[part] = exact - lanes * 2.0**exponent
            pieces.append(Piece(exponent, [int(lane) for lane in lanes]))
        return pieces

    def counted(self, sums: list[Piece]) -> None:
        """The vector converted last is in these sums."""
        for part, piece in zip(self.parts(), sums, strict=True):
            if piece.exponent != NOT_FINITE:
                self.residual[part] = self.left[part]

    def add_rest(self, index: int, piece: Piece, unit: int) -> None:
        """This member has made the sum."""
        if piece.exponent != NOT_FINITE and piece.rest:
            more = (np.array(piece.rest, np.float64) * 2.0**unit).astype(np.float32)
            self.residual[self.parts()[index]] += more


def unit_of(exponents: list[int], width: int) -> int:
    """Of a round, from the exponents of the listed members."""
    return max(LEAST, max(exponents) - MOST_SHIFT[width])


def carry(piece: Piece, before: int, unit: int, listed: int) -> list[int] | None:
    """What a sum whose unit was `before` has left over, in units of another sum of so many; None: it has no room."""
    if piece.exponent == NOT_FINITE:
        return [0] * len(piece.lanes)
    # With it the lanes of all are below 2**63: those of one are below 2**57.
    room = 61 if listed <= 32 else 57
    if listed == 64 or piece.exponent - unit > room:
        return None
    by = before - unit
    return [rest << by if by >= 0 else rest >> -by for rest in piece.rest]


def add(pieces: list[Piece], width: int, unit: int, carried: list[int] | None = None) -> Piece:
    """The sum of a fragment; without a remainder where there is one contribution only.

    `carried`: what a Linux switch adds of the round before.
    """
    if len(pieces) == 1 and carried is None:
        return pieces[0]
    if any(piece.exponent == NOT_FINITE for piece in pieces):
        return Piece(NOT_FINITE, [0] * len(pieces[0].lanes))
    total = list(carried or [0] * len(pieces[0].lanes))
    for piece in pieces:
        by = piece.exponent - unit
        for at, lane in enumerate(piece.lanes):
            total[at] += lane << by if by >= 0 else lane >> -by
    bits = max((number if number >= 0 else -number - 1).bit_length() for number in total)
    shift = max(0, bits - (width - 1))
    half = 1 << shift - 1 if shift else 0
    lanes = [min((number + half) >> shift, (1 << width - 1) - 1) for number in total]
    if unit + shift > 128 - width:
        return Piece(NOT_FINITE, [0] * len(lanes))
    rest = [number - (lane << shift) for number, lane in zip(total, lanes, strict=True)]
    return Piece(unit + shift, lanes, rest)
