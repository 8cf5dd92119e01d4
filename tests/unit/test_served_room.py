# SPDX-License-Identifier: Apache-2.0
"""A server's own part between float32 and units of 2**-40, beside the model of the kernel's program."""

from __future__ import annotations

import numpy as np
import pytest

from nicps.agent.served_room import units_of, weights_of
from nicps.errors import JobFailed
from tests.servers import shown

BITS = 40


def test_weights_are_whole_units() -> None:
    """What is below half a unit is 0."""
    weights = np.array([1.0, -0.5, 2.0**-17, 2.0**-41, 2.0**-42, -(2.0**-40), 3.5e6], np.float32)
    assert units_of(weights, BITS).tolist() == [
        1 << 40,
        -(1 << 39),
        1 << 23,
        0,  # a half: to the even one
        0,
        -1,
        int(np.float32(3.5e6)) << 40,
    ]


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan, 2.0**22, -(2.0**22)])
def test_a_weight_that_no_server_can_hold_is_named(value: float) -> None:
    weights = np.zeros(3_000_000, np.float32)
    weights[2_999_999] = value
    with pytest.raises(JobFailed, match=r"parameter 2999999 of this server's part is "):
        units_of(weights, BITS)


@pytest.mark.parametrize(
    "most", [1, 1 << 20, (1 << 31) - 1, 1 << 31, (1 << 53) - 1, 1 << 53, (1 << 54) + 1, 1 << 61]
)
def test_a_part_is_read_as_workers_read_it(most: int) -> None:
    """Of each 360 parameters one is as large as `most`, also where it is the only one, and where it is negative."""
    random = np.random.default_rng(most % 1000)
    units = random.integers(-most, most, (7, 360), np.int64, endpoint=True)
    units[0], units[1] = 0, 0
    units[0, 3], units[1, 4], units[2, 5], units[3, 6] = most, -most, most, -most
    units[4, 7] = most - 1
    lanes, exponents = zip(*map(shown, units), strict=True)
    expected = np.array([np.frombuffer(row, ">i4") for row in lanes]).astype(np.float32)
    expected *= np.ldexp(np.float32(1), np.array(exponents, np.int32))[:, None]
    found = weights_of(units, BITS).reshape(7, 360)
    assert found.tobytes() == expected.tobytes()
