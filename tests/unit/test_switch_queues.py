# SPDX-License-Identifier: Apache-2.0
"""The queue of a P4 switch's port that each 802.1p priority has."""

from __future__ import annotations

import pytest

from nicps.switch.runtime import queues_of

BY_URGENCY = [1, 0, 2, 3, 4, 5, 6, 7]


def test_one_queue_is_no_choice() -> None:
    assert queues_of(1) == {}


@pytest.mark.parametrize("count", range(2, 9))
def test_the_more_urgent_never_has_the_lower_queue(count: int) -> None:
    """All queues are used, and alike."""
    found = queues_of(count)
    assert sorted(found) == list(range(8))
    queues = [found[priority] for priority in BY_URGENCY]
    assert queues == sorted(queues) and set(queues) == set(range(count))
    each = [queues.count(queue) for queue in range(count)]
    assert max(each) - min(each) <= 1


def test_eight_queues() -> None:
    assert [queues_of(8)[priority] for priority in BY_URGENCY] == list(range(8))
