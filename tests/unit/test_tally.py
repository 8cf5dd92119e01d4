# SPDX-License-Identifier: Apache-2.0
"""What an agent counts of rounds, lists and repairs."""

from __future__ import annotations

from dataclasses import replace

from nicps import wire
from nicps.agent.tally import BOUNDS, Tally
from nicps.exchange import Exchange
from nicps.job.actions import EnterView, NoteCommit
from nicps.protocol import Member, Phase, SendFragments, View
from nicps.protocol.actions import Striped
from nicps.protocol.plan import ChannelPlan
from tests.listed import members_of

MEMBERS = members_of(4)
A, B, C, D = (member.mac for member in MEMBERS)
PHASE = Phase(1, 1, wire.PhaseKind.TRAIN, fragments=8, shares=(1, 1, 1, 1))


def view(number: int, *live: int, members: tuple[Member, ...] = MEMBERS) -> EnterView:
    return EnterView(View(number, members, frozenset(live), min(live)), 1)


def test_rounds_and_their_seconds() -> None:
    """A round is as long as the time since the one before; the first one, and one behind a test, have none."""
    tally = Tally(0.0)
    for now, round_, test in ((1.0, 1, False), (1.03, 2, False), (5.0, 3, True), (6.0, 4, False)):
        tally.note_commit(now, NoteCommit(round_, test, {1: 10, 3: 5}), MEMBERS)
    assert (tally.rounds, tally.tests, tally.samples) == (3, 1, 45)
    assert tally.samples_of == {A: 30, C: 15}
    assert sum(tally.round_counts) == 1
    assert tally.round_counts[BOUNDS.index(0.05)] == 1
    assert round(tally.round_seconds, 6) == 0.03


def test_members_that_go_and_come() -> None:
    tally = Tally(0.0)
    tally.note_view(view(1, 1, 2, 3))
    assert (tally.views, tally.evictions, tally.returns) == (1, 0, 0)
    tally.note_view(view(2, 1, 2))
    assert (tally.views, tally.evictions, tally.returns) == (2, 1, 0)
    tally.note_view(view(3, 1, 2, 3, 4))  # 3 is back, 4 is new
    assert (tally.views, tally.evictions, tally.returns) == (3, 1, 2)


def test_another_network_has_lost_nobody() -> None:
    tally = Tally(0.0)
    tally.note_view(view(1, 1, 2, 3))
    tally.note_network_gone()
    tally.note_view(view(1, 1, 4))
    assert (tally.evictions, tally.returns) == (0, 0)


def test_repairs_are_whose_stripe_it_is() -> None:
    tally = Tally(0.0)
    striped = Striped(wire.FrameType.ASK, 15, 0, (1, 2, 3, 4))
    asks = SendFragments(1, 1, 1, 0, ((2, 2), (6, 1)), True, Exchange.STRIPES, striped)
    tally.note_repairs(asks, PHASE, MEMBERS)
    assert tally.asked_of == {B: 2, D: 1} and not tally.resent_to
    again = replace(striped, type=wire.FrameType.CONTRIBUTION)
    tally.note_repairs(replace(asks, samples=1, striped=again), PHASE, MEMBERS)
    assert tally.resent_to == {B: 2, D: 1}
    tally.note_repairs(replace(asks, repair=False), PHASE, MEMBERS)
    tally.note_repairs(replace(asks, striped=None), PHASE, MEMBERS)  # to all
    assert tally.asked_of.total() == tally.resent_to.total() == 3


def test_repairs_of_a_switch_are_its_own() -> None:
    tally = Tally(0.0)
    switch = Striped(wire.FrameType.ASK, 15, 0, (0,))
    asks = SendFragments(1, 1, 1, 0, ((2, 2), (6, 1)), True, Exchange.LINUX_SWITCH, switch)
    tally.note_repairs(asks, PHASE, MEMBERS)
    assert tally.asked_of == {wire.SWITCH: 3} and not tally.resent_to
    again = replace(switch, type=wire.FrameType.CONTRIBUTION)
    tally.note_repairs(replace(asks, samples=1, striped=again), PHASE, MEMBERS)
    assert tally.resent_to == {wire.SWITCH: 3}


def test_repairs_of_a_channel_are_of_its_own_rounds() -> None:
    """Channel 1 has 80 fragments a round, channel 0 has eight."""
    tally = Tally(0.0)
    phase = replace(PHASE, channels=(ChannelPlan(0, 8, (8,)), ChannelPlan(1, 80, (80,))))
    striped = Striped(wire.FrameType.ASK, 15, 0, (1, 2, 3, 4))
    asks = SendFragments(1, 1, 1, 0, ((2, 2),), True, Exchange.STRIPES, striped)
    tally.note_repairs(asks, phase, MEMBERS)
    tally.note_repairs(replace(asks, ranges=((2, 2), (75, 1)), channel=1), phase, MEMBERS)
    assert tally.asked_of == {B: 2, A: 2, D: 1}


def test_pushes_count_once() -> None:
    """Between the rounds that count, and not again in them; a round that is dropped takes nothing away."""
    tally = Tally(0.0)
    tally.note_pushes("run-1", 3, 10, A)
    assert (tally.pushes, tally.samples, tally.rounds) == (3, 30, 0)
    tally.note_commit(1.0, NoteCommit(1, False, {1: 40, 2: 50}), MEMBERS)
    assert tally.samples_of == {A: 40, B: 50} and tally.samples == 90
    tally.note_pushes("run-1", 5, 10, A)
    tally.note_commit(1.0, NoteCommit(2, False, {}), MEMBERS)  # sync_every=0
    assert tally.samples_of[A] == 60
    tally.note_pushes("run-2", 1, 20, A)
    tally.note_commit(1.0, NoteCommit(1, False, {1: 40}), MEMBERS)
    assert (tally.pushes, tally.samples_of[A]) == (6, 100)
