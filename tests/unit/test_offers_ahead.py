# SPDX-License-Identifier: Apache-2.0
"""Offers to the round after the open one of a channel, which wait at the member's own agent (docs/channels.md)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nicps import wire
from nicps.protocol.actions import Closed, Committed
from nicps.protocol.carried import Carried
from tests.channelled import AHEAD, PLANS, Members, phase_of
from tests.unit.test_channels import begun, in_next_view

pytestmark = pytest.mark.unit


def of(members: Members, number: int, channel: int) -> Carried:
    """What that member would take along of a channel."""
    carried = members[number].ring.carry()
    return carried.others[channel - 1] if channel else carried


@pytest.mark.parametrize("channel", [0, 1])
def test_it_goes_out_in_the_turn_in_which_the_round_before_is_committed(channel: int) -> None:
    members = begun()
    members.offer(1 - channel)
    before = len(members.sent)
    members.offer_ahead(channel)
    assert len(members.sent) == before, "nobody else hears of it yet"
    assert of(members, 2, channel).ahead
    members.offer(channel)
    assert members.rounds() == {(2, 2, 1)}
    offers = {
        (sender, frame.header.round)
        for sender, frame in members.sent
        if frame.header.flags & wire.Flag.OFFERED and wire.channel_of(frame.header.flags) == channel
    }
    assert offers == {(number, round_) for number in (1, 2, 3) for round_ in (1, 2)}
    kernel = members[2].ring.kernel
    assert (kernel.channels[0] if channel else kernel).offered == (AHEAD, 0)
    members.read(channel, 1)
    assert members[1].done(channel) == [1, 2], "marks wait for what is read, and nothing else does"


def test_it_is_not_kept_over_the_end_of_a_step() -> None:
    members = begun()
    members.offer_ahead(2)
    assert not of(members, 1, 2).ahead, "channel 2 has one round a step"
    for channel in (0, 2):
        members.offer(channel)
    members.offer_ahead(0)
    assert not of(members, 1, 0).ahead
    members.offer_ahead(2)
    assert not of(members, 1, 2).ahead, "channel 2 is in the next step, and channel 0 is not"


def test_it_is_not_more_than_one_round_ahead() -> None:
    members = begun()
    members.offer_ahead(1)
    members.offer(0)
    for number in (1, 2):
        members.offer(1, number)
    assert members.rounds() == {(2, 1, 1)}
    kept = of(members, 3, 1).ahead
    assert kept and kept.round == 2
    ring = members[3].ring
    members.take(3, ring.offer(members.now, replace(kept, round=3)))
    assert of(members, 3, 1).ahead == kept


def test_a_member_outside_the_list_drops_it() -> None:
    members = begun(quorum=8)
    members.offer_ahead(1, 3)
    members.offer_ahead(0, 3)
    assert of(members, 3, 1).ahead and of(members, 3, 0).ahead
    members.offer(0, 1, 2)
    assert members.rounds() == {(2, 1, 1)} and Closed(1) in members[3].other
    assert not of(members, 3, 1).ahead and not of(members, 3, 0).ahead
    assert not of(members, 3, 0).offer
    members.offer_ahead(1, 3)
    assert members[3].other[-1] == Closed(1) and not of(members, 3, 1).ahead


def test_a_list_that_is_known_by_the_commit_is_heeded() -> None:
    """The member hears of list and commit at once, in the token."""
    members = begun(quorum=8)
    members.offer_ahead(0, 3)
    members.lost = lambda sender, to, frame: to == 3
    members.offer(0, 1, 2)
    members.lost = lambda sender, to, frame: False
    for after in (0.01, 0.03, 0.06, 0.1, 0.2, 0.4):
        members.tick(members.now + after)
    assert members.rounds() == {(2, 1, 1)}
    assert not of(members, 3, 0).offer and not of(members, 3, 0).ahead


def test_it_goes_along_into_the_next_view() -> None:
    members = begun()
    members.offer_ahead(1)
    members.offer(0)
    members.offer(1, 2, 3)
    later = in_next_view(members, (2, 1, 1))
    later.begin()
    assert later.rounds() == {(2, 2, 1)}, "round 1 has the offers that members had"
    for number in (2, 3):
        carried = of(later, number, 1)
        assert carried.offer and (carried.offer.round, carried.offer.conversion) == (2, AHEAD)
    later.read(1, 1)
    assert later[3].done(1) == [1, 2]


def test_a_round_that_is_committed_as_the_view_changes_takes_it() -> None:
    """All survivors have it whole, and have not heard each other's marks."""
    members = begun()
    members.offer_ahead(1)
    members.offer(0)
    members.lost = lambda sender, to, frame: (
        wire.channel_of(frame.header.flags) == 1 and bool(frame.header.flags & wire.Flag.COMPLETE)
    )
    members.offer(1)
    assert members.rounds() == {(2, 1, 1)}
    later = in_next_view(members, (2, 2, 1))
    assert all(isinstance(each, Committed) for each in later[2].commits)
    assert later[2].done(1) == [1]
    later.begin()
    later.read(1, 1)
    assert later[3].done(1) == [1, 2]


def test_a_program_that_offers_again_has_left_it() -> None:
    members = begun()
    members.offer_ahead(0)
    members.offer_ahead(1)
    left = members[2].ring.carry().without_offers()
    assert left.ahead is None and left.others[0].ahead is None


def test_without_a_plan_there_is_none() -> None:
    """Calls of a group are no steps."""
    plans = tuple(replace(plan, rounds=()) for plan in PLANS)
    members = Members(phase_of(sized=True, channels=plans))
    members.begin()
    members.offer_ahead(1)
    assert not of(members, 2, 1).ahead
