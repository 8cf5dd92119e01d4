# SPDX-License-Identifier: Apache-2.0
"""Rounds of several channels in one phase: steps, inherited lists, R14 by step, marks, views (docs/channels.md)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nicps import wire
from nicps.protocol.actions import Closed, Committed, Send, SendFragments
from nicps.protocol.carried import Carried, Offer
from nicps.protocol.offers import Offers
from nicps.protocol.plan import ChannelPlan
from nicps.protocol.signals import Lacking
from nicps.protocol.view import View
from tests.channelled import PLANS, Member, Members, flags_in, phase_of
from tests.ring_parts import START, TIMINGS, VIEW

pytestmark = pytest.mark.unit

WITHOUT_1 = View(2, VIEW.members, frozenset({2, 3}), 2)


def begun(quorum: int = 12) -> Members:
    members = Members(phase_of(quorum))
    members.begin()
    return members


def test_channels_commit_in_any_order_within_a_step() -> None:
    members = begun()
    members.offer(2)
    members.offer(1)
    assert members.rounds() == {(1, 1, 1)}, "the step's list is not known yet"
    members.offer(0)
    assert members.rounds() == {(2, 2, 2)}
    lists = [dict(commit.counted) for commit in members[3].commits]
    assert lists == [{1: 4, 2: 4, 3: 4}] * 3
    assert {commit.channel for commit in members[2].commits} == {0, 1, 2}


def test_nobody_offers_to_a_step_before_the_one_before_is_committed_on_all_channels() -> None:
    members = begun()
    members.offer(0)
    members.offer(2)
    assert members.rounds() == {(2, 1, 2)}, "channel 2 is in the next step"
    members.read(2, 1)
    before = len(members.sent)
    members.offer(2)
    assert len(members.sent) == before, "its offer is refused"
    assert members[2].ring.step is not None and members[2].ring.step.current == 0


def test_the_lead_marks_nothing_of_a_step_before_it_has_decided_on_the_last_one() -> None:
    members = begun()
    members.step()
    assert members.rounds() == {(3, 4, 2)}
    for channel in (2, 1, 0):
        members.offer(channel)
    assert members.rounds() == {(3, 4, 2)}, "undecided"
    assert members[2].ring.completes == (True, True, True)
    members.go_on()
    assert members.rounds() == {(4, 5, 3)}


def test_between_two_rounds_of_a_step_nothing_is_decided() -> None:
    members = begun()
    for place in (1, 2, 3):
        members.offer(1)
        members.offer(0) if place == 1 else None
        members.read(1, place)
    assert members[1].done(1) == [1, 2, 3]


def test_a_mark_says_that_the_round_before_is_read() -> None:
    members = begun()
    members.offer(0)
    members.offer(1)
    assert members.rounds() == {(2, 2, 1)}
    members.offer(1)
    assert members.rounds() == {(2, 2, 1)}, "round 1 of channel 1 is not read"
    members.read(1, 1, 1, 2)
    assert members.rounds() == {(2, 2, 1)}
    members.read(1, 1, 3)
    assert members.rounds() == {(2, 3, 1)}


def test_the_quorum_is_the_first_rounds_and_the_others_inherit_its_list() -> None:
    members = begun(quorum=8)
    members.offer(1, 3)  # of a straggler: it is not counted
    members.offer(0, 1, 2)
    assert members.rounds() == {(2, 1, 1)}
    assert Closed(1) in members[3].other
    assert not members[3].ring.awaits_lanes and not members[3].ring.carry().others[0].offer
    members.offer(1, 1)
    assert members.rounds() == {(2, 1, 1)}, "the other member of the list has not offered"
    members.offer(1, 2)
    members.read(1, 1)
    assert members.rounds() == {(2, 2, 1)}
    (commit,) = [c for c in members[3].commits if c.channel == 1]
    assert dict(commit.counted) == {1: 4, 2: 4}
    members.offer(1, 3)
    assert members[3].other[-1] == Closed(1), "it is told so again, as it offers"
    assert members[3].ring.rounds == (2, 2, 1)


def test_a_member_in_the_list_passes_over_no_round() -> None:
    members = begun(quorum=8)
    members.offer(0, 1, 2)
    members.read(0, 1)
    ring = members[2].ring
    members.take(2, ring.offer(START, Offer(2, 4, 0, True, 7)))
    assert ring.token is not None and not ring.token.lines[1].settled
    members.offer(0, 1, 2)
    assert members.rounds() == {(3, 1, 1)}


def test_a_round_of_channel_0_that_inherits_its_list_closes_by_the_token_too() -> None:
    members = begun(quorum=8)
    members.offer(0, 1, 2)
    members.read(0, 1)
    wants = lambda sender, to, frame: isinstance(frame.body, wire.Want)  # noqa: E731
    members.lost = wants
    members.offer(0, 1, 2)
    assert members.rounds() == {(2, 1, 1)}, "nobody has heard the offers"
    members.lost = lambda sender, to, frame: False
    for after in (0.01, 0.03, 0.06, 0.1):
        members.tick(START + after)
    assert members.rounds() == {(3, 1, 1)}


def test_an_offer_is_a_mark_for_what_was_before() -> None:
    """The last marks of channel 2 do not get to member 3; the others' offers to the next step tell it."""
    members = begun()
    lost = lambda sender, to, frame: (  # noqa: E731
        to == 3 and wire.channel_of(frame.header.flags) == 2
    )
    for channel in (0, 1):
        for _ in range(len(PLANS[channel].rounds)):
            members.offer(channel)
            members.read(channel, members[1].ring.rounds[channel] - 1)
    members.offer(2, 1, 2)
    ring = members[3].ring
    for sender in (1, 2):  # their offers have come, their marks will not
        header = VIEW.header(sender, 1, wire.Flag.OFFERED | wire.channel_flags(2))
        members.take(3, ring.on_want(START, wire.Frame(header, wire.Want(4, 0), ((),))))
    members.lost = lost
    members.offer(2, 3)
    assert members[1].ring.rounds == (3, 4, 2) and members[3].ring.rounds == (3, 4, 1)
    members.go_on()
    members.read(2, 1, 1, 2)
    members.offer(1, 1)
    assert members[3].ring.rounds == (3, 4, 2), "an offer of the next step, on channel 1"


def test_offers_are_repeated_by_one_timer_the_channels_in_turn() -> None:
    members = begun()
    members.lost = lambda sender, to, frame: isinstance(frame.body, wire.Want)
    for channel in (0, 1, 2):
        members.offer(channel, 2)
    ring, seen = members[2].ring, []
    now = START
    for _ in range(3):
        now = ring.deadline()
        steps = ring.tick(now)
        seen += [channel for channel in (0, 1, 2) if flags_in(steps, channel)]
    assert sorted(seen) == [0, 1, 2]


def test_a_frame_of_a_channel_that_the_phase_has_not_is_dropped() -> None:
    members = begun()
    header = VIEW.header(1, 1, wire.Flag.OFFERED | wire.channel_flags(3))
    ring = members[2].ring
    assert ring.on_want(START, wire.Frame(header, wire.Want(4, 0), ((),))) == []
    body = wire.Lacking(0b111, 0, 8, 1, 16, 0, 0)
    frame = wire.Frame(VIEW.header(1, 1, wire.channel_flags(3)), body)
    assert ring.on_lacking(START, frame) == []
    assert ring.offer(START, Offer(1, 4, 0, False, 7, 3)) == []


def test_reports_are_of_their_channels_open_round() -> None:
    members = begun()
    members.offer(0)
    members.offer(1)
    ring = members[2].ring

    def report(round_: int) -> list[Lacking]:
        header = VIEW.header(1, round_, wire.channel_flags(1))
        want = wire.Frame(header, wire.Want(0, 0, lacks=1), ((wire.Lack(5, 3),),))
        return [step for step in ring.on_want(START, want) if isinstance(step, Lacking)]

    assert report(2) == [Lacking(2, 1, {3: 5}, 1)]
    assert report(1) == [], "it is committed"
    assert report(3) == []


def test_saves_is_a_mark_of_channel_0s_last_round_of_the_step() -> None:
    """The lead says so with its decision, rounds before."""
    members = begun()
    members.step()
    members.go_on(saves=True)
    members.step()
    saved = [(c.channel, c.round) for c in members[3].commits if c.saved]
    assert saved == [(0, 4)]
    members.go_on()
    members.step()
    assert len([c for c in members[3].commits if c.saved]) == 1


def test_what_the_kernel_must_know_of_a_channel() -> None:
    members = begun()
    members.offer(0)
    members.offer(1)
    members.read(1, 1)
    members.offer(1, 2)
    first, second = members[2].ring.kernel.channels
    assert (first.round, first.round_low, first.round_high, first.offered) == (2, 2, 2, (7, 0))
    assert (second.round, second.offered) == (1, (0, 0))
    members[3].kernel.lacks.add(2)
    members.offer(2)
    assert members[2].ring.kernel.channels[1].round_high == 2, "complete: others may be one ahead"


def test_fragments_of_a_channel_are_counted_within_its_round_and_name_it() -> None:
    """Channel 1 has three fragments: one is for each of the three members."""
    members = begun()
    members.offer(0)
    members.offer(1)
    sent = [action for action in members[2].other if isinstance(action, SendFragments)]
    assert [action.channel for action in sent] == [0, 1]
    assert [action.ranges for action in sent] == [((5, 3), (0, 2)), ((2, 1), (0, 1))]
    assert [wire.channel_of(action.flags) for action in sent] == [0, 1]
    members[2].ring.sent(START, 1)


# ---- decisions, and views


def test_who_decides_says_which_rounds_are_open_and_a_frozen_member_commits_those_before() -> None:
    members = begun()
    for channel in (0, 1):
        for _ in range(len(PLANS[channel].rounds)):
            members.offer(channel)
            members.read(channel, members[1].ring.rounds[channel] - 1)
    members.lost = lambda sender, to, frame: (
        to == 3 and bool(frame.header.flags & wire.Flag.COMPLETE)
    )
    members.offer(2)
    ring = members[3].ring
    assert (members[1].ring.rounds, ring.rounds) == ((3, 4, 2), (3, 4, 1))
    ring.freeze()
    assert not ring.catch_up((4, 1)), "not before the lead has"
    (commit,) = ring.catch_up((4, 2))
    assert isinstance(commit, Committed) and (commit.channel, commit.round) == (2, 1)
    assert ring.catch_up((4, 2)) == [] and ring.rounds == (3, 4, 2)


def test_a_frozen_member_offers_marks_and_commits_nothing_on_any_channel() -> None:
    members = begun()
    members.offer(0)
    members.offer(1, 1, 2)
    members[3].ring.freeze()
    before = len(members.sent)
    members.offer(1, 3)
    members.offer(2, 3)
    assert len(members.sent) == before
    assert members[3].ring.rounds == (2, 1, 1)


def test_between_steps() -> None:
    members = begun()
    lead = members[1].ring
    assert lead.between_steps
    members.offer(0)
    assert not lead.between_steps, "a round of the step is committed"
    members.offer(1)
    members.offer(2)
    for channel in (0, 1, 1):
        members.read(channel, lead.rounds[channel] - 1)
        members.offer(channel)
    assert lead.rounds == (3, 4, 2) and lead.between_steps
    assert lead.awaits_decision((3, 4, 2)) and not lead.awaits_decision((3, 4, 3))
    assert not lead.awaits_decision((1, 1, 1)), "the phase's first step needs no word"


def next_view(member: Member, rounds: tuple[int, ...]) -> Member:
    """The same host's ring in a view without member 1."""
    ring = member.ring
    ring.freeze()
    settled = [action for action in ring.settle(rounds) if isinstance(action, Committed)]
    assert ring.rounds == rounds
    carried = replace(ring.carry(), undecided=False)
    after = Member(member.number, ring.phase.among({2, 3}, 2, 0), WITHOUT_1, carried)
    after.commits = [*member.commits, *settled]
    return after


def in_next_view(members: Members, rounds: tuple[int, ...]) -> Members:
    later = Members.__new__(Members)
    later.phase, later.view, later.sent = members.phase.among({2, 3}, 2, 0), WITHOUT_1, []
    later.lost = lambda sender, to, frame: False
    later.all = {k: next_view(members[k], rounds) for k in (2, 3)}
    return later


def test_once_a_round_of_a_step_is_committed_its_list_stands_in_the_next_view() -> None:
    members = begun(quorum=8)
    members.offer(0, 1, 2)
    assert members.rounds() == {(2, 1, 1)}
    later = in_next_view(members, (2, 1, 1))
    step = later[3].ring.step
    assert step is not None and step.listed == {2: 4}, "without the one that has left"
    assert later[3].ring.enter() == [Closed(1)] and later[2].ring.enter() == []
    later.begin()
    later.offer(1, 2)
    assert later.rounds() == {(2, 2, 1)}
    assert [dict(c.counted) for c in later[3].commits if c.channel == 1] == [{2: 4}]


def test_a_list_that_has_become_empty_commits_what_is_left_without_a_sum() -> None:
    members = begun(quorum=4)
    members.offer(0, 1)
    later = in_next_view(members, (2, 1, 1))
    later.begin()
    assert later.rounds() == {(2, 2, 2)}, "what comes next must be read before"
    later.read(0, 1)
    later.read(1, 1)
    later.read(1, 2)
    assert later.rounds() == {(3, 4, 2)}
    assert all(not commit.counted for commit in later[3].commits[1:])


def test_where_no_round_is_committed_the_list_is_made_anew() -> None:
    members = begun()
    members.lost = lambda sender, to, frame: bool(frame.header.flags & wire.Flag.COMPLETE)
    for channel in (0, 1, 2):
        members.offer(channel)
    assert members.rounds() == {(1, 1, 1)}
    later = in_next_view(members, (1, 1, 1))
    step = later[2].ring.step
    assert step is not None and step.listed is None
    later.begin()
    assert later.rounds() == {(2, 2, 2)}, "the offers have come along"
    assert dict(later[3].commits[-1].counted) == {2: 4, 3: 4}


def test_a_member_that_is_one_behind_in_a_channel_commits_as_it_enters() -> None:
    members = begun()
    members.offer(0)
    members.lost = lambda sender, to, frame: (
        to == 3 and bool(frame.header.flags & wire.Flag.COMPLETE)
    )
    members.offer(2)
    assert members[2].ring.rounds == (2, 1, 2) and members[3].ring.rounds == (2, 1, 1)
    assert members[3].ring.completes == (False, False, True)
    later = in_next_view(members, (2, 1, 2))
    assert later[3].done(2) == [1]


def test_the_lead_that_goes_on_keeps_its_word_in_the_middle_of_a_step() -> None:
    members = Members(view=replace(VIEW, lead=2))
    members.begin()
    members.step()
    members.go_on(saves=True)
    members.offer(0)
    assert members[2].ring.carry().saves and members[2].ring.carry().listed == {1: 4, 2: 4, 3: 4}
    later = in_next_view(members, (4, 4, 2))
    later.begin()
    later.read(0, 3)
    later.offer(0)
    assert [c.round for c in later[3].commits if c.saved] == [4]


def test_the_window_of_a_round_is_that_of_its_list() -> None:
    """What a member outside it offers does not reach all members before they know the list."""
    offers = Offers(phase_of(quorum=8), VIEW, broadcast=True)
    offers.open(1, lambda: {1: 4, 3: 4})
    for member, window in ((1, 20), (2, 5), (3, 30)):
        offers.hear(1, member, 4, 0, window)
    assert offers.window(1) == 20


def test_offers_do_not_go_along_where_a_program_has_left() -> None:
    of = Carried(3, 0, 2, offer=Offer(3, 4, 0, False, 7), others=(Carried(4, 0, 3, ready=4),))
    left = of.without_offers()
    assert (left.offer, left.others[0].ready, left.round, left.others[0].round) == (None, 0, 3, 4)


# ---- channels without steps


def test_where_rounds_have_sizes_of_their_own_channels_are_on_their_own() -> None:
    plans = tuple(replace(plan, rounds=()) for plan in PLANS)
    members = Members(phase_of(quorum=12, sized=True, channels=plans))
    members.begin()
    samples = wire.sized_samples(2, 1, 16)
    members.offer(2, samples=samples)
    assert members.rounds() == {(1, 1, 2)}
    members.read(2, 1)
    members.offer(2, samples=samples)
    assert members.rounds() == {(1, 1, 2)}, "the lead has not decided on round 1 of channel 2"
    members.take(1, members[1].ring.go_on(START, saves=False, channel=2))
    assert members.rounds() == {(1, 1, 3)}
    members.offer(0, samples=samples)
    assert members.rounds() == {(2, 1, 3)}


def test_a_channel_that_waits_for_a_more_urgent_one_reports_ten_times_later() -> None:
    plans = ChannelPlan(0, 90, (90,)), ChannelPlan(1, 90, (90,))
    members = Members(phase_of(fragments=90, last_fragments=90, channels=plans))
    members.begin()
    for channel in (0, 1):
        members[2].kernel.lacks.add(channel)
    members.offer(0)
    members.offer(1)
    ring = members[2].ring

    def reported(until: float) -> set[int]:
        now, found = START, set[int]()
        while now < START + until:
            now = max(min(ring.deadline(), now + 0.1), now + 1e-3)
            assert ring.token is not None
            beacon = VIEW.header(ring.token.owner, ring.round)
            ring.on_want(now, wire.Frame(beacon, wire.Want(0, 0), ((),)))
            for step in ring.tick(now):
                if isinstance(step, Lacking):
                    found.add(step.channel)
        return found

    assert reported(4 * TIMINGS.silence_most_s) == {1}, "channel 0 is behind channel 1"


def test_every_frame_of_a_channel_names_it() -> None:
    members = begun()
    for channel in (0, 1, 2):
        members.offer(channel)
    wants = [frame for _, frame in members.sent if isinstance(frame.body, wire.Want)]
    assert {wire.channel_of(frame.header.flags) for frame in wants} == {0, 1, 2}
    tokens = [frame for _, frame in members.sent if isinstance(frame.body, wire.Token)]
    assert tokens and not any(wire.channel_of(frame.header.flags) for frame in tokens)
    assert isinstance(Send(tokens[0]).frame, wire.Frame)
