# SPDX-License-Identifier: Apache-2.0
"""What steps for parameter servers, and parameters that are read, must be, bit for bit.

Imports nothing of the product: it is written from docs/servers.md ("Numbers") alone. Units are whole numbers of any
size, and lanes are worked out in float64, which holds each of these numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

PAYLOAD_BITS = 1440 * 8
PULLED = 360  # parameters in a fragment that is pulled
LEAST = -120
# The largest magnitude that a lane takes and a float32 can name.
LARGEST = {32: 2.0**31 - 2.0**7, 16: 2.0**15 - 1, 8: 2.0**7 - 1}

F32 = npt.NDArray[np.float32]


def held(units: list[int]) -> tuple[int, list[int]]:
    """Exponent and lanes of a fragment of parameters, multiples of 2**-40, as a server tells them."""
    bits = max((unit if unit >= 0 else ~unit).bit_length() for unit in units)
    shift = max(0, bits - 31)
    half = 1 << shift >> 1
    return shift - 40, [min((unit + half) >> shift, 2**31 - 1) for unit in units]


def read(exponent: int, lanes: list[int]) -> F32:
    """As everybody reads them: a lane is rounded to float32."""
    values: F32 = (np.array(lanes, np.float64) * 2.0**exponent).astype(np.float32)
    return values


@dataclass
class Piece:
    """A fragment of a step, and what rounding leaves over of it."""

    exponent: int
    lanes: list[int]
    left: F32


def convert(weights: F32, pulled: F32, residual: F32, width: int) -> list[Piece]:
    """A step: what the weights differ in from what was pulled, and what earlier ones have left over."""
    step = weights - pulled + residual
    assert step.dtype == np.float32
    per, pieces = PAYLOAD_BITS // width, []
    for first in range(0, len(step), per):
        here = step[first : first + per].astype(np.float64)
        exponent, most = LEAST, float(np.abs(here).max())
        while most > LARGEST[width] * 2.0**exponent:
            exponent += 1
        lanes = np.rint(here / 2.0**exponent)
        left = (here - lanes * 2.0**exponent).astype(np.float32)
        pieces.append(Piece(exponent, [int(lane) for lane in lanes], left))
    return pieces
