# SPDX-License-Identifier: Apache-2.0
"""Parameters as servers hold them, whole numbers of 2**-40 in 64 bits: what they are made of, and what is told of them.

Batch by batch, so that temporaries stay in a core's cache (docs/servers.md, "Numbers").
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from nicps import wire
from nicps.errors import TooLarge
from nicps.layout import layout

F32 = npt.NDArray[np.float32]
I64 = npt.NDArray[np.int64]

_BITS: int = layout().limits["PARAMETER_BITS"]
_FULL = 1 << 62  # of a magnitude, in units: its home takes no more steps
_TOLD_WIDTH = 32
_LANES = wire.lanes_per_fragment(_TOLD_WIDTH)
_BATCH = 256  # fragments of parameters


def from_weights(weights: F32, first: int, units: I64) -> None:
    """Parameters are these weights.

    Args:
        weights: float32 (n,).
        first: where they are in the vector, for errors.
        units: int64, as long or longer; what is behind stays.

    Raises:
        TooLarge: one is not finite, or reaches 2**22.
    """
    step = _BATCH * _LANES
    for at in range(0, len(weights), step):
        here = np.array(weights[at : at + step], np.float64)  # the file's owner can still write
        fits = np.abs(here) < _FULL >> _BITS  # no NaN does
        if not fits.all():
            place = int(fits.argmin())
            raise TooLarge(first + at + place, float(here[place]), "a weight is")
        here *= 1 << _BITS
        np.copyto(units[at : at + len(here)], np.rint(here), casting="unsafe")


def as_told(units: I64, out: F32) -> None:
    """Convert parameters to float32, rounded as in an answer to a pull.

    Args:
        units: int64 (n, 360).
        out: float32 (n * 360,), or less; written.
    """
    for at in range(0, len(units), _BATCH):
        here = units[at : at + _BATCH]
        shift = np.maximum(bit_lengths(magnitudes_of(here)) - (_TOLD_WIDTH - 1), 0)[:, None]
        # A server cuts a lane of 2**31 down by one, which is the same float32.
        lanes = (here + ((1 << shift) >> 1)) >> shift
        values = lanes.astype(np.float32) * np.ldexp(np.float32(1), shift.astype(np.int32) - _BITS)
        place = out[at * _LANES : (at + _BATCH) * _LANES]
        place[:] = values.reshape(-1)[: len(place)]


def magnitudes_of(units: I64) -> I64:
    """Of each row all bits that one of its magnitudes has, as the kernel's programs have it; int64 (n,)."""
    found: I64 = np.bitwise_or.reduce(units ^ (units >> 63), axis=-1)
    return found


def bit_lengths(numbers: I64) -> I64:
    """Of numbers from 0 on, as `int.bit_length`."""
    rest, bits = numbers.copy(), np.zeros_like(numbers)
    for step in (32, 16, 8, 4, 2, 1):
        large = rest >> step > 0
        bits[large] += step
        rest[large] >>= step
    return bits + rest


def largest(units: I64) -> tuple[int, float]:
    """The place of the largest magnitude, and its value."""
    place = int((units ^ (units >> 63)).argmax())
    return place, float(units[place]) / (1 << _BITS)
