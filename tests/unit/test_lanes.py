# SPDX-License-Identifier: Apache-2.0
"""Gradients as the lanes that a switch adds: one step for all, no sum too large, and nothing lost (docs/protocol.md).

`tests/reference.py` says by itself what the lanes and the residual must be.
"""

from __future__ import annotations

import numpy as np
import pytest

from nicps.session.lanes import LaneFormat, Quantiser
from tests import reference

WIDTHS = (32, 16, 8)
LANES = 100
UNIT = -20
WIRE = {32: ">i4", 16: ">i2", 8: ">i1"}
F32 = reference.F32


def convert(quantiser: Quantiser, vector: F32, unit: int = UNIT) -> np.ndarray:
    """All batches of it; the lanes, int64 (LANES,)."""
    format = quantiser.format
    lanes = np.empty((format.fragments, 1440), np.uint8)
    shifts = np.full(format.fragments, 255, np.uint8)
    done = 0
    while done < format.fragments:
        done += quantiser.batch(vector, done, unit, lanes, shifts)
    if format.members:
        assert not shifts.any(), "one step for all"
    return lanes.reshape(-1).view(WIRE[format.width])[: format.lanes].astype(np.int64)


def small(width: int, seed: int = 1) -> F32:
    """Numbers that fit easily, and are no multiples of the step."""
    steps = np.random.default_rng(seed).uniform(-20, 20, LANES)
    return (steps * 2.0**UNIT).astype(np.float32)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("members", [1, 2, 3, 4, 5, 63, 64])
def test_no_sum_overflows(width: int, members: int) -> None:
    format = LaneFormat(LANES, width, members)
    assert members * format.limit <= 2 ** (width - 1) - 1
    power = next(2**k for k in range(7) if 2**k >= members)
    assert format.limit == reference.LARGEST[width] // power
    assert format.max_shift == 0


@pytest.mark.parametrize("width", WIDTHS)
def test_the_unit_that_fits(width: int) -> None:
    format = LaneFormat(LANES, width, 3)
    for largest in (1e-9, 0.7, 1.0, 123.4):
        unit = format.unit_for(largest)
        assert format.largest(unit - 1) <= largest <= format.largest(unit)


@pytest.mark.parametrize("width", WIDTHS)
def test_one_number_is_too_large(width: int) -> None:
    """It goes out as the largest that fits, is counted once, and all of the rest of it comes out later."""
    quantiser = Quantiser(LaneFormat(LANES, width, 3))
    member, limit = reference.Member(width), quantiser.format.limit
    vector = small(width)
    vector[7] = -2.0 * limit * 2.0**UNIT
    lanes = convert(quantiser, vector)
    whole, member.residual = member.quantise(vector, UNIT, 3)
    assert (lanes == whole).all() and lanes[7] == -limit
    assert quantiser.saturated == 0, "not counted yet"
    quantiser.keep()
    assert quantiser.saturated == 1
    assert (quantiser.residual[:LANES] == member.residual).all()
    assert quantiser.residual[7] == vector[7] + np.float32(limit * 2.0**UNIT)
    sums, nothing = whole.copy(), np.zeros(LANES, np.float32)
    for rest in (-limit, 0):
        whole, member.residual = member.quantise(nothing, UNIT, 3)
        lanes = convert(quantiser, nothing)
        quantiser.keep()
        assert (lanes == whole).all() and lanes[7] == rest and quantiser.saturated == 1
        sums += lanes
    left = vector.astype(np.float64) - sums * 2.0**UNIT
    assert (np.abs(left) <= 0.5 * 2.0**UNIT).all()


@pytest.mark.parametrize("width", WIDTHS)
def test_what_is_not_counted_is_not_saturated(width: int) -> None:
    """It is converted again, or another is in its place: each that counts is counted once."""
    quantiser = Quantiser(LaneFormat(LANES, width, 3))
    vector = small(width)
    vector[:2] = 3.0 * quantiser.format.limit * 2.0**UNIT
    for _ in range(3):
        convert(quantiser, vector)
    assert quantiser.saturated == 0 and not quantiser.residual.any()
    quantiser.keep()
    assert quantiser.saturated == 2
    convert(quantiser, vector)
    quantiser.format = LaneFormat(LANES, width)  # from now on the hosts add
    convert(quantiser, vector)
    quantiser.keep()
    assert quantiser.saturated == 2


def test_all_batches_are_counted() -> None:
    """A vector of three batches with something too large in each."""
    lanes = 200_000
    quantiser = Quantiser(LaneFormat(lanes, 16, 3))
    vector = np.zeros(lanes, np.float32)
    vector[[0, 100_000, -1]] = quantiser.format.limit * 2.0**UNIT * 4
    convert(quantiser, vector)
    quantiser.keep()
    assert quantiser.saturated == 3
