# SPDX-License-Identifier: Apache-2.0
"""Parameters of 64 bits out of weights and out of lanes, and as they are told, against `tests/served_reference.py`."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from nicps.dataplane import parameters
from nicps.errors import TooLarge
from tests import served_reference as reference
from tests.served_reference import PULLED

#: More than a batch of fragments.
FRAGMENTS = 300


def units(seed: int) -> list[int]:
    """Of all sizes that a home has, up to the limit, where rounding up does not fit."""
    random = np.random.default_rng(seed)
    found: list[int] = []
    for fragment in range(FRAGMENTS):
        bits = fragment % 63
        found += [int(n) >> (62 - bits) for n in random.integers(-(1 << 62), 1 << 62, PULLED)]
    found[62 * PULLED : 62 * PULLED + 3] = [(1 << 62) - 1, -(1 << 62), 1 << 61]
    found[PULLED : 2 * PULLED] = [0] * PULLED
    found[5 * PULLED : 6 * PULLED] = [-1] * PULLED
    return found


def test_as_told() -> None:
    numbers = units(1)
    out = np.full(FRAGMENTS * PULLED - 7, 5, np.float32)
    parameters.as_told(np.array(numbers, np.int64).reshape(-1, PULLED), out)
    parts = [numbers[at : at + PULLED] for at in range(0, len(numbers), PULLED)]
    expected = np.concatenate([reference.read(*reference.held(part)) for part in parts])
    assert (out.view(np.uint32) == expected[:-7].view(np.uint32)).all()


def test_weights_become_units() -> None:
    random = np.random.default_rng(3)
    size = FRAGMENTS * PULLED - 7
    weights = (random.standard_normal(size) * np.exp2(random.integers(-60, 20, size))).astype(
        np.float32
    )
    weights[:3] = np.nextafter(np.float32(1 << 22), np.float32(0)), 0.0, 2.0**-41
    found = np.full(size + 9, 5, np.int64)
    parameters.from_weights(weights, 0, found)
    assert found[:size].tolist() == [round(Fraction(float(w)) * (1 << 40)) for w in weights]
    assert (found[size:] == 5).all()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, float(1 << 22), -float(1 << 22)])
@pytest.mark.parametrize("place", [0, 92_160, 93_000])
def test_a_weight_that_is_no_parameter_is_named(value: float, place: int) -> None:
    weights = np.ones(93_001, np.float32)
    weights[place] = value
    with pytest.raises(TooLarge, match=f"^a weight is .* at index {720 + place}: servers take"):
        parameters.from_weights(weights, 720, np.zeros(93_001, np.int64))


def test_bit_lengths() -> None:
    numbers = [0, 1, 2, 3, (1 << 53) - 1, 1 << 53, (1 << 60) - 1, (1 << 63) - 1]
    numbers += [(1 << n) - 1 for n in range(63)] + [1 << n for n in range(63)]
    found = parameters.bit_lengths(np.array(numbers, np.int64))
    assert found.tolist() == [number.bit_length() for number in numbers]
