# SPDX-License-Identifier: Apache-2.0
"""Broadcast offers (`nicps.protocol.offers`): where all must contribute, the list is known without the token."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nicps import wire
from nicps.exchange import Exchange
from nicps.protocol.actions import Committed, Send, SendFragments
from nicps.protocol.carried import Offer
from nicps.protocol.ring import Ring
from nicps.protocol.signals import Steps
from nicps.protocol.token import Line, TokenState
from tests.ring_parts import START, TIMINGS, VIEW, ring_of
from tests.rooms import NoKernel

pytestmark = pytest.mark.unit

FRAGMENTS = 8
OFFERED, COMPLETE = wire.Flag.OFFERED, wire.Flag.COMPLETE


class Kernel(NoKernel):
    """`lanes` of the own vector are converted; no sums are here before `all_sums`."""

    lanes = FRAGMENTS
    all_sums = False

    def count(self, round_: int, view: int, sender: int) -> int:
        return FRAGMENTS * self.all_sums

    def reached(self, round_: int, view: int, first: int, end: int) -> tuple[int, int]:
        return (end, end) if self.all_sums else (first, first)

    def missing_sums(self, *_: int) -> list[tuple[int, int]]:
        return []

    def next_to_send(self, round_: int, aggregator: int) -> int:
        return 0

    def converted(self, round_: int, conversion: int, first: int, end: int) -> int:
        return max(0, min(self.lanes, end) - first)


def token(hop: int, round_: int = 1, owner: int = 1, *, parked: bool = True) -> wire.Frame:
    """Nobody is in the list of that round."""
    lines = [Line(read=round_ - 1) for _ in VIEW.members]
    header = VIEW.header(1, round_, wire.Flag.PARKED * parked)
    return TokenState(1, hop, owner, round_, -40, -40, lines).frame(header)


def said(sender: int, flags: int, round_: int = 1, unit: int = -60) -> wire.Frame:
    """What that member broadcasts."""
    header = VIEW.header(sender, round_, flags)
    return wire.Frame(header, wire.Want(4, round_ - 1, unit=unit), ((),))


def member(number: int = 2, quorum: int = 12) -> tuple[Ring, Kernel]:
    """It has seen the token, which member 1 has parked."""
    kernel = Kernel()
    ring = ring_of(number, Exchange.STRIPES, receiver=kernel, quorum=quorum)
    ring.on_token(START, token(5))
    return ring, kernel


def announced(steps: Steps) -> list[tuple[int, int, int, int]]:
    """Rounds, flags, samples and units of what this member broadcasts."""
    found = []
    for step in steps:
        if isinstance(step, Send) and isinstance(step.frame.body, wire.Want):
            header, want = step.frame.header, step.frame.body
            found.append((header.round, int(header.flags), want.ready, want.unit))
    return found


def sent(steps: Steps) -> list[SendFragments]:
    return [step for step in steps if isinstance(step, SendFragments)]


def offer(ring: Ring, round_: int = 1, unit: int = -70) -> Steps:
    return ring.offer(START, Offer(round_, 4, unit, conversion=round_))


def test_the_offers_of_all_close_the_list() -> None:
    """Contributions go out at once, in the unit that the largest exponent asks for."""
    ring, kernel = member()
    assert not sent(ring.on_want(START, said(1, OFFERED, unit=-60)))
    steps = offer(ring)
    assert announced(steps) == [(1, OFFERED, 4, -70)] and not sent(steps)
    (contribution,) = sent(ring.on_want(START, said(3, OFFERED, unit=-65)))
    striped = contribution.striped
    assert striped is not None
    assert (striped.members, striped.unit) == (0b111, -60 - wire.MAX_SHIFT[16])
    kernel.all_sums = True
    assert announced(ring.advance(START)) == [(1, OFFERED | COMPLETE, 4, -70)]
    ring.on_want(START, said(1, OFFERED | COMPLETE))
    (commit,) = (
        s for s in ring.on_want(START, said(3, OFFERED | COMPLETE)) if isinstance(s, Committed)
    )
    assert dict(commit.counted) == {1: 4, 2: 4, 3: 4}
    assert ring.round == 2


def test_the_least_window_that_was_offered_is_that_of_the_round() -> None:
    """One that has none says 0."""
    ring, _ = member()
    for number, window in ((1, 0), (3, 2)):
        frame = said(number, OFFERED, unit=-60)
        assert isinstance(frame.body, wire.Want)
        body = replace(frame.body, window=window)
        ring.on_want(START, wire.Frame(frame.header, body, frame.items))
    steps = offer(ring)
    (own,) = (s.frame.body for s in steps if isinstance(s, Send))
    assert isinstance(own, wire.Want) and own.window == 170 // 4
    (contribution,) = sent(steps)
    assert {count for _, count in contribution.ranges} == {2}


def test_the_member_that_has_the_token_needs_it_no_more_than_others() -> None:
    """It stays parked."""
    kernel = Kernel()
    ring = ring_of(1, Exchange.STRIPES, receiver=kernel)
    frame = token(4, owner=1, parked=False)
    assert isinstance(frame.body, wire.Token)
    body = replace(frame.body, idle=2)  # nobody else had anything to do with it
    ring.on_token(START, wire.Frame(frame.header, body, frame.items))
    assert ring.parked
    ring.on_want(START, said(2, OFFERED))
    ring.on_want(START, said(3, OFFERED))
    steps = offer(ring)
    assert announced(steps) == [(1, OFFERED, 4, -70)] and sent(steps)
    ring.go_on(START, saves=False)
    kernel.all_sums = True
    ring.on_want(START, said(2, OFFERED | COMPLETE))
    steps = ring.on_want(START, said(3, OFFERED | COMPLETE)) + ring.advance(START)
    frames = [step.frame.body for step in steps if isinstance(step, Send)]
    assert not any(isinstance(body, wire.Token) for body in frames)
    assert ring.round == 2 and ring.parked


def test_a_list_that_may_lack_somebody_is_the_tokens() -> None:
    """Two of three are enough: whoever closes it decides."""
    ring, _ = member(quorum=8)
    ring.on_want(START, said(1, OFFERED))
    ring.on_want(START, said(3, OFFERED))
    steps = offer(ring)
    assert not sent(steps)
    assert [flags for _, flags, *_ in announced(steps)] == [wire.Flag.TOKEN_WANTED]


def test_nothing_is_offered_before_the_own_stripe_is_converted() -> None:
    ring, kernel = member()
    kernel.lanes = 3
    assert not announced(offer(ring))
    kernel.lanes = FRAGMENTS
    assert announced(ring.advance(START)) == [(1, OFFERED, 4, -70)]


def test_an_offer_to_the_next_round_comes_before_the_commit_of_this_one() -> None:
    ring, kernel = member()
    for number in (1, 3):
        ring.on_want(START, said(number, OFFERED))
    offer(ring)
    kernel.all_sums = True
    ring.advance(START)
    ring.on_want(START, said(1, OFFERED | COMPLETE))
    ring.on_want(START, said(1, OFFERED, round_=2))
    ring.on_want(START, said(3, OFFERED | COMPLETE))
    kernel.all_sums = False
    assert ring.round == 2
    ring.on_want(START, said(3, OFFERED, round_=2))
    assert sent(offer(ring, 2))
    assert not ring.on_want(START, said(1, OFFERED, round_=4))


def test_what_was_broadcast_stands() -> None:
    """A program that was started again cannot offer something else."""
    ring, _ = member()
    offer(ring)
    assert not offer(ring, unit=-10)
    ring.on_want(START, said(1, OFFERED))
    (contribution,) = sent(ring.on_want(START, said(3, OFFERED)))
    assert contribution.striped is not None
    assert contribution.striped.unit == -60 - wire.MAX_SHIFT[16]


@pytest.mark.parametrize("frozen", [False, True])
def test_no_token_opens_the_list_again(frozen: bool) -> None:
    """Also none that passes a member that has promised another view: what that one has marked is the closed list."""
    ring, kernel = member()
    for number in (1, 3):
        ring.on_want(START, said(number, OFFERED))
    offer(ring)
    kernel.all_sums = True
    ring.advance(START)
    assert ring.complete
    if frozen:
        ring.freeze()
    ring.on_token(START, token(7, owner=3, parked=False))
    (commit,) = (step for step in ring.settle((ring.round + 1,)) if isinstance(step, Committed))
    assert dict(commit.counted) == {1: 4, 2: 4, 3: 4}


def test_a_frozen_member_closes_no_list() -> None:
    ring, _ = member()
    offer(ring)
    ring.on_want(START, said(1, OFFERED))
    ring.freeze()
    assert not sent(ring.on_want(START, said(3, OFFERED)))
    assert not ring.complete


def test_a_token_that_has_missed_rounds_is_brought_up_to_date() -> None:
    ring, kernel = member()
    for round_ in (1, 2, 3):
        for number in (1, 3):
            ring.on_want(START, said(number, OFFERED, round_))
        kernel.all_sums = False
        offer(ring, round_)
        kernel.all_sums = True
        ring.advance(START)
        for number in (1, 3):
            ring.on_want(START, said(number, OFFERED | COMPLETE, round_))
    assert ring.round == 4
    steps = ring.on_token(START, token(6, round_=1, owner=2, parked=False))
    (frame,) = (
        s.frame for s in steps if isinstance(s, Send) and isinstance(s.frame.body, wire.Token)
    )
    assert (frame.header.round, frame.body.owner, frame.body.state) == (4, 3, wire.TokenState.OPEN)


def bounced(hop: int, round_: int = 1) -> wire.Frame:
    """The kernel has handed that token on, which it took for one that says nothing new."""
    frame = token(hop, round_, owner=3, parked=False)
    return wire.Frame(
        replace(frame.header, flags=wire.Flag.BOUNCED, sender=2), frame.body, frame.items
    )


def commits(ring: Ring, kernel: Kernel, round_: int = 1) -> list[Committed]:
    """All offer, have all sums, and say so."""
    for number in (1, 3):
        ring.on_want(START, said(number, OFFERED, round_))
    offer(ring, round_)
    kernel.all_sums = True
    steps = ring.advance(START)
    kernel.all_sums = False
    for number in (1, 3):
        steps += ring.on_want(START, said(number, OFFERED | COMPLETE, round_))
    return [step for step in steps if isinstance(step, Committed)]


def test_a_token_that_the_kernel_hands_on_meanwhile_opens_no_list() -> None:
    """The agent hears of it after it has closed the list, and marked itself: the view commits what is marked."""
    ring, kernel = member()
    for number in (1, 3):
        ring.on_want(START, said(number, OFFERED))
    offer(ring)
    kernel.all_sums = True
    ring.advance(START)
    ring.bounced(START, bounced(7))
    assert not ring.kernel.bounce
    assert ring.complete
    ring.freeze()
    (commit,) = (step for step in ring.settle((ring.round + 1,)) if isinstance(step, Committed))
    assert dict(commit.counted) == {1: 4, 2: 4, 3: 4}


def test_a_token_that_the_kernel_hands_on_meanwhile_is_of_a_round_that_is_over() -> None:
    """The agent hears of it after it has committed the round: the next one goes on as if nothing had been."""
    ring, kernel = member()
    assert commits(ring, kernel)
    ring.bounced(START, bounced(7))
    (commit,) = commits(ring, kernel, 2)
    assert dict(commit.counted) == {1: 4, 2: 4, 3: 4}
    ring.bounced(START, bounced(9, 2))
    steps = ring.on_token(START, token(10, 2, owner=2, parked=False))
    (frame,) = (
        s.frame for s in steps if isinstance(s, Send) and isinstance(s.frame.body, wire.Token)
    )
    entries = [entry for entry in frame.items[0] if isinstance(entry, wire.Entry)]
    assert (frame.header.round, [e.samples_before for e in entries]) == (3, [4, 4, 4])


def test_what_the_kernel_has_handed_on_is_sent_again_as_it_was() -> None:
    """Whoever has it, and whoever gets it now, must know the same token."""
    ring, kernel = member()
    assert commits(ring, kernel)
    ring.bounced(START, bounced(7))
    now = START + 2 * TIMINGS.repeat_s
    (again,) = (s.frame for s in ring.tick(now) if isinstance(s, Send))
    assert isinstance(again.body, wire.Token)
    assert (again.header.round, again.body.hop) == (1, 7)


def test_more_samples_than_a_share_close_no_list_early() -> None:
    """A program says that it has worked more than its share: nobody may close another list than all others do."""
    ring, _ = member()
    ring.offer(START, Offer(1, 40, -70, conversion=1))
    ring.tick(START + TIMINGS.repeat_s)  # it wants the token now, too
    steps = ring.on_token(START, token(6, owner=2, parked=False))
    (frame,) = (
        s.frame for s in steps if isinstance(s, Send) and isinstance(s.frame.body, wire.Token)
    )
    assert frame.body.state == wire.TokenState.OPEN and not sent(steps)
    ring.on_want(START, said(1, OFFERED))
    (contribution,) = sent(ring.on_want(START, said(3, OFFERED)))
    assert contribution.striped is not None and contribution.striped.members == 0b111


def test_a_round_that_was_dropped_is_marked_by_nobody() -> None:
    """A late frame of the phase before: this member has committed no such round."""
    kernel = Kernel()
    ring = ring_of(2, Exchange.STRIPES, receiver=kernel, first_round=5)
    ring.on_token(START, token(5, round_=5))
    later = START + TIMINGS.repeat_s
    assert not announced(ring.on_want(later, said(3, OFFERED | COMPLETE, round_=4)))


def test_a_member_whose_offer_is_not_answered_repeats_it_and_wants_the_token() -> None:
    ring, _ = member()
    offer(ring)
    assert ring.deadline() == START + TIMINGS.repeat_s
    now = START + TIMINGS.repeat_s
    assert [flags for _, flags, *_ in announced(ring.tick(now))] == [
        OFFERED,
        wire.Flag.TOKEN_WANTED,
    ]


def test_an_answer_is_not_answered() -> None:
    """A member answers a mark of the round that it has committed last, unless that mark is itself an answer."""
    ring, kernel = member()
    offer(ring)
    ring.on_want(START, said(1, OFFERED))
    ring.on_want(START, said(3, OFFERED))
    kernel.all_sums = True
    ring.advance(START)
    ring.on_want(START, said(1, OFFERED | COMPLETE))
    assert any(isinstance(s, Committed) for s in ring.on_want(START, said(3, OFFERED | COMPLETE)))
    later = START + TIMINGS.repeat_s
    answer = COMPLETE | wire.Flag.REPEAT
    assert [x[:2] for x in announced(ring.on_want(later, said(3, COMPLETE)))] == [(1, answer)]
    later += TIMINGS.repeat_s
    assert not announced(ring.on_want(later, said(3, answer)))
    assert announced(ring.on_want(later, said(1, OFFERED | COMPLETE)))
