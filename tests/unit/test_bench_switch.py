# SPDX-License-Identifier: Apache-2.0
"""What `nicps bench switch` says of sums that are not what was sent."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from nicps import wire
from nicps.bench import switch
from nicps.errors import JobFailed

WINDOWS, ROUND = 3, 1


def hosts(width: int) -> list[Any]:
    """Two that have the sums of what both have sent, lane by lane."""
    kind = f">i{width // 8}"
    sent = [switch._lanes(number).view(kind).astype(np.int64) for number in (1, 2)]
    half = 1 << width - 1
    sums = (sent[0] + sent[1] + half) % (2 * half) - half  # wrapped round
    banks = np.zeros((2, WINDOWS * wire.QUANTUM * sums.shape[1]), np.int64)
    banks[ROUND & 1] = np.concatenate(
        [sums[window : window + wire.QUANTUM].reshape(-1) for window in range(WINDOWS)]
    )
    return [
        SimpleNamespace(number=number, plane=SimpleNamespace(accumulators=banks.copy()))
        for number in (1, 2)
    ]


@pytest.mark.parametrize("width", [32, 16, 8])
def test_the_sums_of_what_was_sent_pass(width: int) -> None:
    switch.compare(hosts(width), width, WINDOWS, ROUND)


@pytest.mark.parametrize("width", [32, 16, 8])
def test_a_lane_that_is_wrong_is_found(width: int) -> None:
    members = hosts(width)
    members[1].plane.accumulators[ROUND & 1, -1] += 1
    with pytest.raises(JobFailed, match=r"^host 2 has 1 wrong lanes of \d+ in window 3$"):
        switch.compare(members, width, WINDOWS, ROUND)


def test_zeros_are_no_sums() -> None:
    members = hosts(32)
    members[0].plane.accumulators[:] = 0
    with pytest.raises(JobFailed, match=r"^host 1 has \d+ wrong lanes of 92160 in window 1$"):
        switch.compare(members, 32, WINDOWS, ROUND)


def test_another_windows_sums_are_found() -> None:
    members = hosts(32)
    bank = members[0].plane.accumulators[ROUND & 1]
    bank[92160 : 2 * 92160] = bank[:92160]
    with pytest.raises(JobFailed, match=r"in window 2$"):
        switch.compare(members, 32, WINDOWS, ROUND)
