# SPDX-License-Identifier: Apache-2.0
"""A round's windows while a more urgent one is open (P3): how small they are, and when they are large again."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest

from nicps import wire
from nicps.protocol import Narrow, SendFragments
from nicps.protocol.exchange.giving_way import GivingWay, LineFigures
from nicps.protocol.exchange.windows import Window
from nicps.protocol.plan import ChannelPlan
from tests.channelled import Members, phase_of
from tests.ring_parts import START
from tests.striped_member import (
    FRAGMENTS,
    ROUND,
    TIMINGS,
    VIEW,
    WINDOW,
    Kernel,
    closed,
    member,
    only,
)

pytestmark = pytest.mark.unit

STRIPE = FRAGMENTS // 3


@dataclass
class Round:
    """A more urgent one: what it has on its way to each aggregator."""

    frames: dict[int, int]
    under_way: bool = True

    def on_the_way(self, owner: int) -> int:
        return self.frames[owner]


# ---- how small


def test_a_window_without_anything_more_urgent_is_whole() -> None:
    over = Round({1: 40}, under_way=False)
    way = GivingWay(42, [over], LineFigures())
    way.find_urgent()
    assert way.window(1) == 42 and not way.waits


def test_it_leaves_the_more_urgent_ones_their_part_of_a_busy_line() -> None:
    line = LineFigures()
    line.note_round(0, 10_000, 0.002)
    way = GivingWay(42, [Round({1: 3, 2: 90}), Round({1: 4, 2: 0})], line)
    way.find_urgent()
    assert way.waits
    assert way.window(1) == 20 - 3 - 4
    assert way.window(2) == 1, "one fragment keeps bulk from starving"
    line.note_round(0, 100_000, 0.002)
    assert way.window(1) == 42, "never more than without"


def test_before_anything_is_known_of_the_line_the_window_is_what_keeps_it_busy() -> None:
    way = GivingWay(42, [Round({1: 5})], LineFigures())
    way.find_urgent()
    assert way.window(1) == 37


def test_the_line_is_as_fast_as_in_the_best_of_the_last_ten_rounds_of_each_channel() -> None:
    """Rounds that waited, and many small ones of another channel, do not make it slower."""
    line = LineFigures()
    assert line.frames == math.inf
    line.note_round(0, 8_000, 0.004)
    for _ in range(30):
        line.note_round(1, 100, 0.001)
    assert line.frames == pytest.approx(8)
    for _ in range(9):
        line.note_round(0, 5_000, 0.004)
    assert line.frames == pytest.approx(8)
    line.note_round(0, 5_000, 0.004)
    assert line.frames == pytest.approx(5)


def test_what_is_lost_does_not_stop_a_small_window() -> None:
    way = GivingWay(42, [Round({1: 41})], LineFigures())
    way.find_urgent()
    stripe = Window(1, 0, 1000, here=10, sent=30, beyond=30, asked=10)
    assert way.room(stripe) == 31
    stripe.beyond = stripe.sent = 60
    assert way.room(stripe) == 52, "never farther than a whole window"


def lossy(way: GivingWay) -> None:
    """A round of a long stripe of member 1 that loses a tenth."""
    stripe = Window(1, 0, 5000, here=5000, sent=5000, beyond=5000, asked=5000, lost=500)
    stripe.took_s = 1.0
    way.note_losses([stripe])
    way.open()


def test_losses_make_windows_smaller_and_what_gives_way_begins_from_there() -> None:
    urgent = Round({1: 5, 2: 5}, under_way=False)
    way = GivingWay(42, [urgent], LineFigures())
    way.find_urgent()
    lossy(way)
    assert way.window(1) == 42 and way.proposed == 21, "until all know of it"
    way.agree_on(21)
    assert way.window(1) == way.window(2) == 21
    assert way.room(Window(1, 0, 1000, here=10, sent=20, beyond=15, asked=10)) == 31
    assert way.swallow(Window(1, 0, 1000, 0, 21, 0, 0)) is None
    urgent.under_way = True
    way.find_urgent()
    assert way.window(1) == way.window(2) == 16
    assert way.swallow(Window(1, 0, 1000, 0, 21, 0, 0)) == 5


def test_what_is_agreed_on_after_a_round_was_whole_is_not_its_size() -> None:
    """Contributions, and all sums, can be here before the last offer. Then it was not the size that is proposed."""
    way = GivingWay(42, [], LineFigures())
    lossy(way)
    assert way.proposed == 21
    way.begin(10.0)
    way.note_whole(10.5, 0, 100, 0.001)
    way.agree_on(21)
    assert way.size == 42
    lossy(way)
    assert way.proposed == 21, "nothing of it was judged"
    way.agree_on(21)
    assert way.size == 21


def test_losses_of_a_round_that_has_given_way_show_nothing() -> None:
    urgent = Round({1: 5})
    way = GivingWay(42, [urgent], LineFigures())
    way.find_urgent()
    urgent.under_way = False
    way.find_urgent()
    lossy(way)
    way.find_urgent()
    assert way.proposed == 42
    lossy(way)
    assert way.proposed == 21


# ---- the kernel's windows


class Two:
    """Member 2's exchanges of two channels: bulk, and one that goes first. Each has a kernel of its own."""

    def __init__(self) -> None:
        self.kernel, self.urgent_kernel = Kernel(), Kernel()
        self.bulk, self.urgent = member(2, self.kernel), member(2, self.urgent_kernel)
        line = LineFigures()
        self.urgent.give_way_to([], line)
        self.bulk.give_way_to([self.urgent], line)
        assert only(self.bulk.on_token(0.0, closed(1, 2, 4))).ranges == (
            (2 * STRIPE, WINDOW),
            (0, WINDOW),
        )
        self.kernel.next_ = {4: 2 * STRIPE + WINDOW, 1: WINDOW}

    def urgent_ends(self) -> None:
        self.urgent_kernel.sums = set(range(FRAGMENTS))
        self.urgent.advance(0.004)


def swallowed(actions: list[Any]) -> dict[int, int]:
    (narrow,) = [each for each in actions if isinstance(each, Narrow)]
    assert (narrow.view, narrow.round, narrow.channel) == (VIEW.number, ROUND, 0)
    return dict(narrow.swallow)


def test_an_urgent_round_makes_the_windows_that_are_under_way_smaller() -> None:
    two = Two()
    assert two.bulk.advance(0.0) == []
    two.urgent.on_token(0.0, closed(1, 2, 4))
    assert swallowed(two.bulk.advance(0.001)) == {4: WINDOW - 1, 1: WINDOW - 1}
    assert two.bulk.advance(0.002) == [], "that is known"
    two.kernel.sums = {*range(WINDOW - 1)}
    assert two.bulk.advance(0.003) == [], "one is on its way to member 1"


def test_what_has_come_behind_a_lost_one_is_not_under_way() -> None:
    """The first sum of member 1 is lost, ten have come behind it."""
    two = Two()
    two.kernel.sums = {*range(1, 11)}
    two.urgent.on_token(0.0, closed(1, 2, 4))
    assert swallowed(two.bulk.advance(0.001)) == {4: WINDOW - 1, 1: WINDOW - 1 - 11}


def test_after_it_they_are_whole_again() -> None:
    two = Two()
    two.urgent.on_token(0.0, closed(1, 2, 4))
    two.bulk.advance(0.001)
    two.kernel.sums = {*range(WINDOW - 1)}
    two.urgent_ends()
    actions = two.bulk.advance(0.004)
    assert swallowed(actions) == {4: 0, 1: 0}
    assert isinstance(actions[0], Narrow), "before what is sent"
    assert only(actions[1:]).ranges == ((WINDOW, WINDOW - 1),)


def test_beside_the_end_of_an_urgent_stripe_there_is_more_room() -> None:
    """It has ten on the way to member 1, and all to member 4."""
    two = Two()
    two.urgent.on_token(0.0, closed(1, 2, 4))
    two.urgent_kernel.sums = {*range(STRIPE - 10), *range(2 * STRIPE, 3 * STRIPE)}
    two.urgent_kernel.next_ = {1: STRIPE, 4: 3 * STRIPE}
    two.urgent.advance(0.001)
    assert swallowed(two.bulk.advance(0.002)) == {1: 10}


def test_a_round_that_begins_behind_an_urgent_one_begins_with_a_small_window() -> None:
    two = Two()
    two.urgent.on_token(0.0, closed(1, 2, 4))
    two.bulk.open(ROUND)
    two.bulk.conversion, two.kernel.next_ = two.urgent.conversion, {}
    assert only(two.bulk.on_token(0.0, closed(1, 2, 4))).ranges == ((2 * STRIPE, 1), (0, 1))
    assert two.bulk.batch == 2, "of it no more may wait in this host's queues"
    two.urgent_ends()
    assert two.bulk.batch == 0


def test_without_other_channels_nothing_is_narrowed_or_measured() -> None:
    part = member()
    actions = part.on_token(0.0, closed(1, 2, 4)) + part.advance(1.0)
    assert not any(isinstance(each, Narrow) for each in actions)
    assert part.batch == 0 and part.last_took == (0.0, -math.inf)


def test_what_waits_is_asked_for_ten_times_later() -> None:
    two = Two()
    due = two.bulk.deadline()
    two.bulk.note_urgent(due - 0.004, True)
    assert two.bulk.deadline() == pytest.approx(due - 0.004 + 0.04)
    two.bulk.note_urgent(due - 0.002, True)
    assert two.bulk.deadline() == pytest.approx(due - 0.004 + 0.04), "once"
    two.bulk.note_urgent(due + 0.006, False)
    assert two.bulk.deadline() == pytest.approx(due + 0.006 + 0.003)


def test_so_is_what_begins_behind_an_urgent_round() -> None:
    due = []
    for behind in (False, True):
        part = member()
        part.note_urgent(1.0, behind)
        part.on_token(1.0, closed(1, 2, 4))
        due.append(part.deadline() - 1.0)
    assert due[1] == pytest.approx(10 * due[0])


@pytest.mark.parametrize("behind", [False, True])
def test_however_long_it_waits_it_asks_at_the_usual_intervals_at_the_most(behind: bool) -> None:
    two = Two()
    two.bulk.note_urgent(0.0, behind)
    now, asked = 0.0, []
    while now < 5.0:
        now = two.bulk.deadline()
        found = [a for a in two.bulk.advance(now) if isinstance(a, SendFragments) and a.asks]
        asked += [now] * bool(found)
    assert max(b - a for a, b in pairwise(asked)) <= 25 * TIMINGS.repeat_s + 1e-9


def test_members_that_wait_behind_a_small_window_are_neither_asked_about_nor_named() -> None:
    """Member 4 has not converted a lane of its own stripe. Member 1 has sent one fragment to it, and waits for its sum.

    That is so as well where this member has all of the urgent round, and its own window is whole.
    """
    two, token = Two(), closed(1, 2, 4)
    two.kernel.sums, two.kernel.next_[1] = set(range(2 * STRIPE)), STRIPE
    two.urgent.on_token(0.0, closed(1, 2, 4))
    two.bulk.advance(0.001)
    now = two.bulk.deadline()
    assert only(two.bulk.advance(now)).ranges == ((2 * STRIPE, 1),)
    two.urgent_ends()
    two.bulk.advance(now)
    while not (lacks := two.bulk.take_report(now, token)):
        for index, absent in ((2 * STRIPE, 0b1000), (2 * STRIPE + 1, 0b1001)):
            body = wire.Lacking(absent, index, FRAGMENTS, 1, 16, 0, -40)
            two.bulk.on_lacking(now, body)
        now = two.bulk.deadline()
        two.bulk.advance(now)
    assert lacks == {4: 1}


def test_what_a_round_took_is_known_once_its_sums_are_here() -> None:
    two = Two()
    two.urgent.on_token(1.0, closed(1, 2, 4))
    two.urgent_kernel.sums = set(range(FRAGMENTS - 1))
    two.urgent.advance(1.5)
    assert two.urgent.last_took == (0.0, -math.inf)
    two.urgent_kernel.sums = set(range(FRAGMENTS))
    two.urgent.advance(3.0)
    assert two.urgent.last_took == (2.0, 3.0)
    two.urgent.advance(4.0)
    assert two.urgent.last_took == (2.0, 3.0)


# ---- the ring


def test_others_give_way_as_soon_as_the_urgent_list_is_known() -> None:
    """Of three channels the second one is the most urgent, whatever their numbers."""
    plans = tuple(ChannelPlan(urgency, 90, (90,)) for urgency in (0, 2, 1))
    members = Members(phase_of(fragments=90, last_fragments=90, channels=plans))
    ring, kernel = members[2].ring, members[2].kernel
    members.begin()
    kernel.lacks |= {0, 1, 2}
    whole = 30  # a stripe is smaller than a window
    members.offer(0)
    assert window_of(members, 0) == whole
    members.offer(2)
    assert window_of(members, 0) == whole and window_of(members, 2) == whole
    narrowed = len(members[2].other)
    members.offer(1)
    found = [step for step in members[2].other[narrowed:] if isinstance(step, Narrow)]
    left = whole - (WINDOW - whole)
    assert {step.channel: dict(step.swallow) for step in found} == {
        2: {1: left, 3: left},
        0: {1: whole - 1, 3: whole - 1},
    }
    assert ring.batch(1) == 0
    assert ring.batch(2) == 2 * (WINDOW - whole)
    assert ring.batch(0) == 2
    kernel.lacks -= {1}
    members.take(2, ring.advance(START))
    assert ring.batch(2) == 0 and ring.batch(0) == 2 * (WINDOW - whole)
    kernel.lacks -= {2}
    members.take(2, ring.advance(START))
    assert ring.batch(0) == 0 and ring.batch(7) == 0


def window_of(members: Members, channel: int) -> int:
    """Fragments of each stripe that have been sent first."""
    found = [step for step in members[2].other if isinstance(step, SendFragments)]
    (first,) = [step for step in found if step.channel == channel]
    (count,) = {count for _, count in first.ranges}
    return count
