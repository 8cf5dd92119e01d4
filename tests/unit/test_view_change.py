# SPDX-License-Identifier: Apache-2.0
"""The proposer of a view waits between its deadlines."""

from __future__ import annotations

import math

import pytest

from nicps.protocol import Timings, View
from nicps.protocol.phase import AdaptiveTimeout
from nicps.protocol.view_change import Place, Standing, ViewChange
from tests.listed import members_of

pytestmark = pytest.mark.unit


def test_each_deadline_of_a_proposer_is_followed_by_a_later_one() -> None:
    """Nobody answers. A deadline that stayed in the past would keep the agent's loop busy until the next frame."""
    view = View(1, members_of(3), frozenset({1, 2, 3}), 1)
    timings = Timings()
    change = ViewChange(view, 1, 1, timings, AdaptiveTimeout(timings), lambda: bytes(16))
    place = Place(Standing(), {})
    change.suspect(0.0, place, 3)
    now = 0.0
    while now < 3.0:
        deadline = change.deadline()
        assert now < deadline < math.inf
        now = deadline
        change.tick(now, place)
