# SPDX-License-Identifier: Apache-2.0
"""The exchange `stripes` at one member: what it sends and when, what it asks for, and when it is complete."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nicps import wire
from nicps.exchange import Exchange
from nicps.protocol import Member, SendFragments, Striped, View
from nicps.protocol.exchange import exchanger_of
from tests.striped_member import (
    CONVERSION,
    FRAGMENTS,
    MEMBERS,
    PHASE,
    ROUND,
    TIMINGS,
    VIEW,
    WINDOW,
    Kernel,
    closed,
    kind,
    member,
    only,
)

# ---- the beginning


def test_who_sees_the_closed_list_begins_with_the_stripe_after_its_own() -> None:
    action = only(member().on_token(0.0, closed(1, 2, 4)))
    assert action.striped == Striped(wire.FrameType.CONTRIBUTION, 0b1011, -40, (1, 2, 4))
    assert action.ranges == ((2000, WINDOW), (0, WINDOW))
    assert not action.repair and action.exchange is Exchange.STRIPES


def test_who_closes_the_list_says_which_unit_the_largest_exponent_comes_to() -> None:
    token = closed(1, 2, units={1: -3, 2: -9, 4: 100})
    member().on_closed(0.0, token)
    assert token.unit == -3 - wire.MAX_SHIFT[16]
    token = closed(1, 2, units={1: -119, 2: -120})
    member().on_closed(0.0, token)
    assert token.unit == -120


def test_only_sums_of_others_show_that_the_network_carries_frames_to_one_host() -> None:
    """Its own ones show that contributions have come, and not that a sum can be sent."""
    kernel = Kernel()
    part = member(2, kernel)  # whose stripe is 1000 to 1999
    assert not part.has_sums
    part.on_closed(0.0, closed(1, 2, 4))
    kernel.sums = set(range(1000, 2000))
    assert not part.has_sums
    kernel.sums.add(2999)
    assert part.has_sums


def test_the_list_that_a_contribution_tells_of_is_as_good_and_begins_nothing_twice() -> None:
    part = member()
    assert only(part.on_list(0.0, 0b1011, -40)).ranges == ((2000, WINDOW), (0, WINDOW))
    assert part.on_token(0.0, closed(1, 2, 4)) == []


def test_an_open_list_or_another_rounds_begins_nothing() -> None:
    part, token = member(), closed(1, 2, 4)
    token.state = wire.TokenState.OPEN
    assert part.on_token(0.0, token) == []
    token = closed(1, 2, 4)
    token.round += 1
    assert part.on_token(0.0, token) == []
    part.on_dropped()
    assert part.on_token(0.0, closed(1, 2, 4)) == []


def test_who_is_not_listed_sends_nothing_and_asks_when_nothing_comes() -> None:
    part = member()
    assert part.on_token(0.0, closed(1, 4)) == []
    action = only(part.advance(part.deadline()))
    assert kind(action) is wire.FrameType.ASK and action.only_asks
    assert [first for first, _ in action.ranges] == [2000, 0]


def test_one_contributor_alone_sends_all_to_all_and_needs_its_own_lanes() -> None:
    """Not before they are there is it complete: a view of its own could commit the round at once."""
    kernel = Kernel()
    kernel.lanes = range(100)
    part, token = member(kernel=kernel), closed(2)
    action = only(part.on_token(0.0, token))
    assert kind(action) is wire.FrameType.SUM and action.ranges == ((0, 100),)
    assert not part.is_complete(token) and part.awaits_lanes and part.deadline() == float("inf")
    kernel.lanes = range(FRAGMENTS)
    assert only(part.advance(1.0)).ranges == ((100, FRAGMENTS - 100),)
    assert part.advance(2.0) == [] and not part.awaits_lanes and part.is_complete(token)
    other = member(4)
    assert other.on_token(0.0, token) == [] and not other.is_complete(token)
    asks = only(other.advance(other.deadline()))
    assert asks.striped is not None and asks.striped.members == 0b10 and asks.ranges == ((0, 4),)


def test_an_empty_list_is_complete() -> None:
    part = member()
    assert part.on_token(0.0, closed()) == [] and part.is_complete(closed())


def test_a_lone_member_is_complete_and_sends_nothing() -> None:
    view = View(3, MEMBERS, frozenset({2}), 2)
    part, token = member(view=view), closed(2)
    assert part.on_closed(0.0, token) == [] and part.is_complete(token)


# ---- its own lanes


def test_a_member_enters_the_list_once_its_own_stripe_is_converted() -> None:
    kernel = Kernel()
    part = member(kernel=kernel)
    kernel.lanes = range(1000, 1999)
    assert not part.may_enter()
    kernel.lanes = range(1000, 2000)
    assert part.may_enter()
    part.conversion = CONVERSION + 1
    assert not part.may_enter()


def test_what_is_known_to_be_converted_is_not_looked_at_again() -> None:
    kernel = Kernel()
    part = member(kernel=kernel)
    for end in (1400, 1400, 2000, 2000):
        kernel.lanes = range(1000, end)
        assert part.may_enter() == (end == 2000)
    assert kernel.looked_at == [(1000, 2000), (1400, 2000), (1400, 2000)]
    part.open(ROUND)
    part.conversion = CONVERSION
    assert part.may_enter()
    assert kernel.looked_at[3:] == [(1000, 2000)], "another round has records of its own"


def test_in_another_view_another_stripe_is_the_own() -> None:
    kernel = Kernel()
    kernel.lanes = range(1000, 2000)
    without_1 = replace(VIEW, live=frozenset({2, 4}), lead=2)
    assert not member(kernel=kernel, view=without_1).may_enter()
    kernel.lanes = range(1500)
    assert member(kernel=kernel, view=without_1).may_enter()


def test_only_what_is_converted_goes_out() -> None:
    kernel = Kernel()
    kernel.lanes = range(1000, 2010)
    part = member(kernel=kernel)
    assert only(part.on_token(0.0, closed(1, 2, 4))).ranges == ((2000, 10),)
    assert part.awaits_lanes
    kernel.lanes = range(1000, 3000)
    assert only(part.advance(0.001)).ranges == ((2010, WINDOW - 10),)
    kernel.lanes = range(FRAGMENTS)
    assert only(part.advance(0.002)).ranges == ((0, WINDOW),)
    assert not part.awaits_lanes


# ---- windows and repair


def test_sums_make_room_for_as_many_contributions() -> None:
    kernel = Kernel()
    part = member(kernel=kernel)
    part.on_token(0.0, closed(1, 2, 4))
    kernel.sums |= set(range(2000, 2010))
    assert only(part.advance(0.001)).ranges == ((2000 + WINDOW, 10),)
    kernel.sums |= {2011}  # out of turn: the one before it is missing
    assert part.advance(0.002) == []
    kernel.sums |= {2010} | set(range(WINDOW))
    assert only(part.advance(0.003)).ranges == ((2010 + WINDOW, 2), (WINDOW, WINDOW))


def test_a_slow_aggregator_slows_its_own_stripe_only() -> None:
    kernel = Kernel()
    part = member(kernel=kernel)
    part.on_token(0.0, closed(1, 2, 4))
    sent = WINDOW
    for _ in range(20):
        kernel.sums |= set(range(sent))
        for action in part.advance(0.001):
            assert isinstance(action, SendFragments) and action.ranges == ((sent, WINDOW),)
            sent += WINDOW
    assert sent == 21 * WINDOW


def test_sums_that_many_have_overtaken_are_asked_for_once_until_a_while_has_passed() -> None:
    kernel = Kernel()
    part = member(kernel=kernel)
    part.on_token(0.0, closed(1, 2, 4))
    lost = {2003, 2004, 2040}
    kernel.sums |= set(range(2000, 2000 + WINDOW)) - lost
    assert kind(only(part.advance(0.001))) == wire.FrameType.CONTRIBUTION, (
        "they may be on their way"
    )
    kernel.next_[4] = 2005 + WINDOW  # the kernel's own, which wait in no queue of the host
    kernel.sums |= set(range(2000, 2005 + WINDOW)) - lost
    actions = part.advance(0.001)
    assert [kind(a) for a in actions if isinstance(a, SendFragments)] == [wire.FrameType.ASK]
    assert only(actions).ranges == ((2003, 2),)  # 2040 may be on its way
    assert part.advance(0.002) == []
    again = only(part.advance(part.deadline()))
    assert again.ranges == ((2003, 2), (2040, 1))


def test_questions_become_rarer_and_answers_make_them_usual_again() -> None:
    kernel = Kernel()
    part = member(kernel=kernel)
    part.on_token(0.0, closed(1, 2, 4))
    now, gaps = 0.0, list[float]()
    for _ in range(8):
        due = part.deadline()
        gaps.append(due - now)
        now = due
        part.advance(now)
    assert gaps == sorted(gaps) and gaps[-1] == pytest.approx(TIMINGS.repeat_s * 25)
    kernel.sums |= {2000, 0}
    part.advance(now)
    assert part.deadline() - now < gaps[-1] / 2


def test_who_is_told_that_it_has_not_contributed_does_so_again() -> None:
    part = member()
    part.on_token(0.0, closed(1, 2, 4))

    def lacking(index: int, members: int) -> list[object]:
        body = wire.Lacking(members, index, FRAGMENTS, 1, 16, 0, -40)
        return [*part.on_lacking(0.01, body)]

    again = only(lacking(2003, 0b1010))
    assert again.ranges == ((2003, 1),) and again.repair
    assert kind(again) is wire.FrameType.CONTRIBUTION
    assert lacking(2004, 0b1000) == []  # another's
    assert lacking(2500, 0b0010) == []  # it has not gone out yet
    assert lacking(2003, 0b0110) == []  # member 3 is not listed: of nothing that is open here


@pytest.mark.parametrize("answers", [True, False])
def test_whose_contributions_are_lacking_is_reported_after_a_while(answers: bool) -> None:
    """An aggregator that answers is not to blame, nor who lacks nothing; one that does not is."""
    kernel = Kernel()
    kernel.lacking = {1: 0, 4: 0}
    part, token = member(kernel=kernel), closed(1, 2, 4)
    part.on_token(0.0, token)
    kernel.sums = set(range(2000))
    now = 0.0
    while now < 2 * TIMINGS.silence_most_s:
        now = part.deadline()
        part.advance(now)
        for index in range(2000, 2004) if answers else ():
            part.on_lacking(now, wire.Lacking(0b0001, index, FRAGMENTS, 1, 16, 0, -40))
    lacks = part.take_report(now, token)
    assert lacks == ({1: 1} if answers else {4: FRAGMENTS - 2000})


def test_who_lacks_nothing_is_not_accused() -> None:
    kernel = Kernel()
    part, token = member(kernel=kernel), closed(1, 2, 4)
    part.on_token(0.0, token)
    kernel.sums, kernel.lacking = set(range(FRAGMENTS)) - {1500}, {1: 0, 4: 1}
    now = 0.0
    while now < 2 * TIMINGS.silence_most_s:
        now = part.deadline()
        part.advance(now)
    assert part.take_report(now, token) == {4: 1}


@pytest.mark.parametrize("lost", [False, True])
def test_nobody_is_named_for_what_is_behind_a_window(lost: bool) -> None:
    """With a window of two, members that wait for sums themselves have not sent the third one, or the second.

    If the answer about the first one is lost, the aggregator has answered all the same.
    """
    kernel, counts = Kernel(), set[int]()

    def absent(round_: int, view: int, first: int, count: int, members: int) -> dict[int, int]:
        counts.add(count)
        return {4: count}

    kernel.absent = absent  # type: ignore[method-assign]
    part, token = member(kernel=kernel), closed(1, 2, 4)
    part.agree_on(2)
    part.on_token(0.0, token)
    kernel.sums, kernel.next_[4] = set(range(2000, FRAGMENTS)), FRAGMENTS
    now = part.deadline()
    assert only(part.advance(now)).ranges == ((0, 2),)
    while not (lacks := part.take_report(now, token)):
        if not lost:
            part.on_lacking(now, wire.Lacking(0b1000, 0, FRAGMENTS, 1, 16, 0, -40))
        part.on_lacking(now, wire.Lacking(0b1001, 1, FRAGMENTS, 1, 16, 0, -40))
        now = part.deadline()
        part.advance(now)
    assert lacks == {4: 1 if lost else 1 + 1} and counts == {1}


@pytest.mark.parametrize("hosts", [2, 3, 4, 6, 12, 16, 64])
def test_a_window_of_one_stripe_alone_shows_a_loss(hosts: int) -> None:
    """However small it is: whoever looks asks at once."""
    members = tuple(Member(k, bytes([2, 0, 0, 0, 1, k]), f"h{k}") for k in range(1, hosts + 1))
    view = View(3, members, frozenset(range(1, hosts + 1)), 1)
    phase = replace(PHASE, fragments=64_000, last_fragments=64_000, shares=(1,) * hosts)
    kernel = Kernel()
    kernel.lanes = range(64_000)
    part = exchanger_of(phase, view, 1, kernel, TIMINGS, 0.0)
    part.open(ROUND)
    part.conversion = CONVERSION
    action = only(part.on_list(0.0, (1 << hosts) - 1, -40))
    first, window = action.ranges[0]
    kernel.sums |= set(range(first + 1, first + window))
    kinds = [kind(a) for a in part.advance(0.001) if isinstance(a, SendFragments)]
    assert kinds == [wire.FrameType.ASK]


# ---- the end


def test_a_member_is_complete_with_all_sums_and_the_lead_after_all_others() -> None:
    kernel = Kernel()
    kernel.sums = set(range(FRAGMENTS - 1))
    token = closed(1, 2, 4)
    part, lead = member(kernel=kernel), member(1, kernel)
    assert not part.is_complete(token) and not part.wants_token(token)
    kernel.sums.add(FRAGMENTS - 1)
    assert part.is_complete(token) and part.wants_token(token)
    assert not lead.is_complete(token)
    for number in (2, 4):
        assert not lead.is_complete(token)
        token.lines[number - 1].marks |= wire.Mark.COMPLETE
    assert lead.is_complete(token)


def test_what_the_kernel_has_sent_is_not_sent_again() -> None:
    """It sends one for each sum that comes. The agent goes on from there, and repairs what was lost of it."""
    kernel = Kernel()
    part = member(2, kernel)
    part.on_token(0.0, closed(1, 2, 4))
    first, end = 2 * FRAGMENTS // 3, FRAGMENTS  # the stripe of member 4
    kernel.sums |= set(range(first, first + 10))
    kernel.next_[4] = first + WINDOW + 10
    assert part.advance(0.001) == []
    kernel.sums |= set(range(first + 10, first + 16))
    assert only(part.advance(0.003)).ranges == ((first + WINDOW + 10, 6),)
    lost = wire.Lacking(0b0010, first + WINDOW + 8, FRAGMENTS, 1, 8, 0, -40)
    assert only(part.on_lacking(0.004, lost)).ranges == ((first + WINDOW + 8, 1),)
    assert end > first + WINDOW + 16
