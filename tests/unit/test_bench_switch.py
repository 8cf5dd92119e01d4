# SPDX-License-Identifier: Apache-2.0
"""What `nicps bench switch` says of sums that are not what was sent."""

from __future__ import annotations

import numpy as np
import pytest

from nicps import wire
from nicps.bench import switch
from nicps.dataplane.maps import I64
from nicps.errors import JobFailed

WINDOWS = 3


def banks_of(width: int) -> dict[int, I64]:
    """Two hosts that have the sums of what both have sent, lane by lane."""
    kind = f">i{width // 8}"
    sent = [switch._lanes(number).view(kind).astype(np.int64) for number in (1, 2)]
    half = 1 << width - 1
    sums = (sent[0] + sent[1] + half) % (2 * half) - half  # wrapped round
    bank = np.concatenate(
        [sums[window : window + wire.QUANTUM].reshape(-1) for window in range(WINDOWS)]
    )
    return {1: bank, 2: bank.copy()}


@pytest.mark.parametrize("width", [32, 16, 8])
def test_the_sums_of_what_was_sent_pass(width: int) -> None:
    switch.compare(banks_of(width), width, WINDOWS)


@pytest.mark.parametrize("width", [32, 16, 8])
def test_a_lane_that_is_wrong_is_found(width: int) -> None:
    banks = banks_of(width)
    banks[2][-1] += 1
    with pytest.raises(JobFailed, match=r"^host 2 has 1 wrong lanes of \d+ in window 3$"):
        switch.compare(banks, width, WINDOWS)


def test_zeros_are_no_sums() -> None:
    banks = banks_of(32)
    banks[1][:] = 0
    with pytest.raises(JobFailed, match=r"^host 1 has \d+ wrong lanes of 92160 in window 1$"):
        switch.compare(banks, 32, WINDOWS)


def test_another_windows_sums_are_found() -> None:
    banks = banks_of(32)
    bank = banks[1]
    bank[92160 : 2 * 92160] = bank[:92160]
    with pytest.raises(JobFailed, match=r"in window 2$"):
        switch.compare(banks, 32, WINDOWS)
