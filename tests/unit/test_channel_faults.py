# SPDX-License-Identifier: Apache-2.0
"""What must not go wrong with several channels: lists that stand, phases that a member has not entered, lost frames."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nicps import wire
from nicps.protocol import Committed
from nicps.protocol.actions import Differs
from nicps.protocol.carried import Carried, Offer
from nicps.protocol.deciding import Decisions
from nicps.protocol.local_host import LocalHost, NodeState
from nicps.protocol.phase import AdaptiveTimeout
from nicps.protocol.plan import ChannelPlan
from nicps.protocol.rings import Rings
from tests.channelled import Kernel, Member, Members, phase_of
from tests.ring_parts import START, TIMINGS, VIEW

pytestmark = pytest.mark.unit


def in_next_view(listed: dict[int, int]) -> Members:
    """Round 1 of channel 2 was committed with that list; of channel 0 not even the first round was."""
    phase = phase_of(quorum=7)
    members = Members(phase)
    for number in VIEW.order:
        offer = Offer(1, listed[number], 0, False, 7, 0) if number in listed else None
        first = Carried(1, 0, 0, offer=offer, passes=offer is None)
        others = (Carried(1, 0, 0), Carried(2, 0, 1))
        carried = replace(first, others=others, listed=listed)
        members.all[number] = Member(number, phase, VIEW, carried)
    return members


def test_the_first_round_too_has_the_list_that_stands() -> None:
    """A view came between: the quorum is reached without member 2, but a round of the step has its gradient."""
    listed = {1: 4, 2: 2, 3: 4}
    members = in_next_view(listed)
    convert = Kernel().converted
    members[2].kernel.converted = lambda *whose: 0  # type: ignore[method-assign]
    members.begin()
    members.offer(1, 1, 3)
    assert all(member.ring.step.listed == listed for member in members.all.values())
    members[2].kernel.converted = convert  # type: ignore[method-assign]
    members.take(2, members[2].ring.advance(START))
    members.offer(1, 2, samples=2)
    members.tick(START + 0.01)  # it wants the token, which has the offers of members 1 and 3
    for member in members.all.values():
        assert [commit.counted for commit in member.commits] == [listed, listed]


def test_a_member_outside_the_list_that_stands_does_not_enter_the_first_round() -> None:
    listed = {1: 4, 3: 4}
    members = in_next_view(listed)
    members.offer(0, 2)
    members.begin()
    for member in members.all.values():
        assert [commit.counted for commit in member.commits] == [listed]


# ---- phases that a member has not entered yet


def test_a_decision_of_a_phase_that_is_not_entered_here_commits_nothing_of_the_one_before() -> None:
    """The lead dropped the open round. It has begun the next phase, whose token was lost, and decides again."""
    members = Members()
    members.begin()
    members.step()
    members.offer(0)
    members.offer(1)
    ring = members[3].ring
    assert ring.completes[1], "all but the lead have marked it"
    host = LocalHost(VIEW.members[2].mac, "h3", NodeState.MEMBER, VIEW, 3)
    timeout = AdaptiveTimeout(TIMINGS)
    rings = Rings(host, Kernel(), TIMINGS, timeout)  # type: ignore[arg-type]
    rings.current = ring
    decisions = Decisions(host, rings, TIMINGS, timeout)
    dropped = ring.rounds[1]
    later = phase_of(first_round=members[1].ring.rounds[1] + 1, number=2, generation=2)

    def hear(phase_number: int, round_: int, opened: tuple[int, ...]) -> list[object]:
        phase = replace(later, number=phase_number, generation=phase_number, opened=opened)
        body = wire.Decision(phase_number, phase_number, phase.kind)
        frame = wire.Frame(VIEW.header(1, round_), body, tail=phase.pack())
        return [step for step in decisions.hear(frame) if isinstance(step, Committed)]

    assert not hear(2, ring.round, members[1].ring.rounds[1:])
    phase = decisions.take_turn()
    assert phase is not None
    decisions.prepared(START, phase, b"")
    first = later.first_round
    assert first == dropped + 1
    assert not hear(3, first, (first, first)), "that round was never committed at the lead"
    assert ring.rounds[1] == dropped


# ---- lost frames


def test_what_a_quiet_channel_has_said_is_repeated_beside_a_channel_that_never_rests() -> None:
    """Rounds of channel 1 follow one another; the offer of channel 2 was lost on its way to member 1."""
    plans = tuple(ChannelPlan(urgency, 8) for urgency in (0, 2, 1))
    members = Members(phase_of(sized=True, channels=plans))
    members.begin()

    def loses(sender: int, to: int, frame: wire.Frame) -> bool:
        return wire.channel_of(frame.header.flags) == 2 and to == 1

    size = wire.sized_samples(8, 1, 16)
    members.lost = loses
    members.offer(2, samples=size)
    members.lost = lambda sender, to, frame: False
    assert {member.ring.rounds[2] for member in members.all.values()} == {1}
    for turn in range(1, 40):
        members.now = START + turn * 0.003
        members.offer(1, samples=size)
        members.read(1, members[2].ring.rounds[1] - 1)
        members.take(1, members[1].ring.go_on(members.now, saves=False, channel=1))
        members.tick(members.now)
    assert members[2].ring.rounds[1] > 20
    assert {member.ring.rounds[2] for member in members.all.values()} == {2}


# ---- digests


def test_a_digest_that_follows_what_was_read_is_compared() -> None:
    """Channel 0's last sum was read, and others heard so, before the step was whole: only then there is a digest."""
    members = Members()
    members.begin()
    members.offer(0)
    members.read(0, 1)
    members.offer(0)
    members.read(0, 2)
    for member in members.all.values():
        frame = wire.Frame(
            VIEW.header(member.number, 2, wire.Flag.COMPLETE), wire.Want(0, 2, 0), ((),)
        )
        for other in members.all.values():
            members.take(other.number, other.ring.on_want(START, frame))
    for place in (1, 2, 3):
        members.offer(1)
        members.read(1, place)
    members.offer(2)
    members.read(2, 1)
    for number, digest in ((1, 7), (2, 7), (3, 9)):
        members.take(number, members[number].ring.read(START, 2, digest))
    members.go_on()
    members.offer(0)
    for member in members.all.values():
        assert Differs(2, frozenset({3})) in member.other
