# SPDX-License-Identifier: Apache-2.0
"""The proposer of a view: how long it waits, and what it chooses."""

from __future__ import annotations

import math

import pytest

from nicps import wire
from nicps.protocol import Timings, View
from nicps.protocol.phase import AdaptiveTimeout
from nicps.protocol.signals import Chosen
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


def test_a_proposer_that_has_not_seen_the_phase_keeps_the_unit_of_its_round() -> None:
    """It was put into the view after it had left the one before. The unit that it knows came with the list."""
    view = View(4, members_of(3), frozenset({1, 2, 3}), 1)
    timings = Timings()
    change = ViewChange(view, 1, 1, timings, AdaptiveTimeout(timings), lambda: bytes(16))
    place = Place(Standing(0, 9, learns=True), {}, unit=-37)
    steps = change.rebuild(0.0, place, ())
    for step in (wire.ViewStep.PROPOSE, wire.ViewStep.ACCEPT):
        for number in (2, 3):
            vote = wire.Vote(number, 1, 2, 9, 2, view.members[0].mac, step, 0)
            frame = wire.Frame(view.header(number, 9), vote, ((), (), (), ()))
            steps += change.on_vote(0.01, place, number, frame)
    (chosen,) = [step.successor for step in steps if isinstance(step, Chosen)]
    assert (chosen.follows, chosen.round, chosen.unit, chosen.lead) == (2, 9, -37, 2)
