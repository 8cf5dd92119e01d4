# SPDX-License-Identifier: Apache-2.0
"""Broadcast marks (`Exchange.broadcasts_marks`): a member that has those of all members commits without the token."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nicps import wire
from nicps.exchange import Exchange
from nicps.protocol.actions import Committed, Send
from nicps.protocol.ring import Offer, Ring
from nicps.protocol.signals import Steps
from nicps.protocol.token import Line, TokenState
from tests.ring_parts import START, TIMINGS, VIEW, ring_of
from tests.rooms import NoKernel

FRAGMENTS = 8


class Kernel(NoKernel):
    """All lanes are converted; all sums are here, unless `lacks`."""

    lacks = 0

    def count(self, round_: int, view: int, sender: int) -> int:
        return FRAGMENTS - self.lacks

    def reached(self, round_: int, view: int, first: int, end: int) -> tuple[int, int]:
        return (first, first) if self.lacks else (end, end)

    def missing_sums(self, *_: int) -> list[tuple[int, int]]:
        return []

    def next_to_send(self, round_: int, aggregator: int) -> int:
        return 0

    def converted(self, round_: int, conversion: int, first: int, end: int) -> int:
        return end - first


def closed(
    hop: int, owner: int = 1, round_: int = 1, *marked: int, parked: bool = True
) -> wire.Frame:
    """The token of a round whose list is closed: all have contributed, and these say in it that they have all."""
    lines = [Line(samples=4, marks=wire.Mark.CONTRIBUTED, read=round_ - 1) for _ in VIEW.members]
    for number in marked:
        lines[number - 1].marks |= wire.Mark.COMPLETE
    token = TokenState(1, hop, owner, round_, -40, -40, lines, wire.TokenState.CLOSING)
    header = VIEW.header(1, round_, wire.Flag.PARKED * parked)
    return token.frame(header)


def mark(sender: int, round_: int = 1) -> wire.Frame:
    """That member has all of the round."""
    header = VIEW.header(sender, round_, wire.Flag.COMPLETE)
    return wire.Frame(header, wire.Want(0, round_ - 1), ((),))


def marks_in(steps: Steps) -> list[int]:
    """Rounds of which this member says that it has all."""
    return [
        step.frame.header.round
        for step in steps
        if isinstance(step, Send) and step.frame.header.flags & wire.Flag.COMPLETE
    ]


def commits_in(steps: Steps) -> list[int]:
    return [step.round for step in steps if isinstance(step, Committed)]


def member(number: int = 2, lacks: int = 0) -> tuple[Ring, Kernel]:
    kernel = Kernel()
    kernel.lacks = lacks
    ring = ring_of(number, Exchange.STRIPES, receiver=kernel)
    return ring, kernel


def test_who_has_all_sums_says_so_once_and_commits_when_all_have_said_so() -> None:
    ring, kernel = member(lacks=1)
    assert marks_in(ring.on_token(START, closed(5))) == []
    kernel.lacks = 0
    steps = ring.advance(START)
    assert marks_in(steps) == [1] and ring.complete and not commits_in(steps)
    assert not marks_in(ring.advance(START))
    assert not commits_in(ring.on_want(START, mark(3)))
    assert commits_in(ring.on_want(START, mark(1))) == [1]
    assert ring.round == 2 and not ring.complete


def test_what_is_committed_is_the_closed_list() -> None:
    ring, _ = member()
    ring.on_token(START, closed(5))
    ring.on_want(START, mark(3))
    (commit,) = [s for s in ring.on_want(START, mark(1)) if isinstance(s, Committed)]
    assert dict(commit.counted) == {1: 4, 2: 4, 3: 4}
    assert (commit.unit, commit.view, commit.aggregators) == (-40, VIEW.number, (1, 2, 3))


def test_marks_that_come_before_the_list_count() -> None:
    ring, _ = member()
    ring.on_token(START, replace_state(closed(4), wire.TokenState.OPEN))
    ring.on_want(START, mark(1))
    ring.on_want(START, mark(3))
    assert ring.round == 1
    assert commits_in(ring.on_token(START, closed(5))) == [1]


def replace_state(frame: wire.Frame, state: int) -> wire.Frame:
    assert isinstance(frame.body, wire.Token)
    return wire.Frame(frame.header, replace(frame.body, state=state), frame.items, frame.tail)


def test_marks_in_the_token_and_broadcast_marks_are_the_same() -> None:
    ring, _ = member()
    ring.on_token(START, closed(5, 1, 1, 3))
    assert commits_in(ring.on_want(START, mark(1))) == [1]


def test_nobody_commits_without_its_own_sums() -> None:
    ring, kernel = member(lacks=1)
    ring.on_token(START, closed(5, 1, 1, 1, 3))
    ring.on_want(START, mark(1))
    assert ring.round == 1 and not ring.complete
    kernel.lacks = 0
    assert commits_in(ring.advance(START)) == [1]


def test_who_has_promised_a_new_view_neither_marks_nor_commits() -> None:
    ring, kernel = member(lacks=1)
    ring.on_token(START, closed(5))
    ring.freeze()
    kernel.lacks = 0
    assert not marks_in(ring.advance(START)) and not ring.complete
    ring, _ = member()
    ring.on_token(START, closed(5))
    ring.on_want(START, mark(3))
    ring.freeze()
    assert not commits_in(ring.on_want(START, mark(1))) and ring.round == 1


def test_the_lead_marks_itself_last() -> None:
    """It commits, and keeps the token that it has parked: nobody needs it."""
    ring, _ = member(1)
    frame = closed(5, 1, parked=False)
    assert isinstance(frame.body, wire.Token)
    body = replace(frame.body, idle=2)  # nobody else had anything to do with it
    assert not marks_in(ring.on_token(START, wire.Frame(frame.header, body, frame.items)))
    assert ring.parked
    assert not ring.complete
    ring.on_want(START, mark(2))
    assert not ring.complete
    steps = ring.on_want(START, mark(3))
    assert marks_in(steps) == [1] and commits_in(steps) == [1]
    tokens = [s.frame.body for s in steps if isinstance(s, Send)]
    tokens = [body for body in tokens if isinstance(body, wire.Token)]
    assert not tokens and ring.parked and ring.holding and ring.round == 2


def test_a_token_of_the_round_that_was_committed_is_brought_forward() -> None:
    ring, _ = member()
    ring.on_token(START, closed(5))
    ring.on_want(START, mark(3))
    ring.on_want(START, mark(1))
    steps = ring.on_token(START, closed(6, 2, parked=False))
    assert ring.round == 2 and not commits_in(steps)
    sent = [s.frame for s in steps if isinstance(s, Send)]
    assert sent and all(frame.header.round == 2 for frame in sent)
    body = sent[-1].body
    assert isinstance(body, wire.Token) and body.owner != 2
    assert [entry.samples_before for entry in sent[-1].items[0]] == [4, 4, 4]  # type: ignore[union-attr]


def test_a_token_of_a_round_that_was_not_committed_here_is_not_brought_forward() -> None:
    ring, _ = member()
    ring.on_token(START, closed(5, 1, 2))
    assert ring.round == 2
    assert (
        ring.on_token(START, replace_state(closed(6, 2, 1, parked=False), wire.TokenState.OPEN))
        == []
    )


@pytest.mark.parametrize("lost", [1, 3])
def test_a_mark_is_repeated_until_the_round_is_committed(lost: int) -> None:
    ring, _ = member()
    ring.on_token(START, closed(5))
    now, said = START, 0
    for _ in range(6):
        now = max(now + 1e-4, ring.deadline())
        said += len(marks_in(ring.tick(now)))
    assert said >= 3
    for sender in {1, 3} - {lost}:
        ring.on_want(now, mark(sender))
    assert commits_in(ring.on_want(now, mark(lost))) == [1]
    assert not marks_in(ring.tick(now + 10 * TIMINGS.repeat_s))


def test_who_has_committed_tells_who_has_not_but_not_at_every_copy() -> None:
    ring, _ = member()
    ring.on_token(START, closed(5))
    ring.on_want(START, mark(3))
    ring.on_want(START, mark(1))
    later = START + TIMINGS.repeat_s
    assert marks_in(ring.on_want(later, mark(3))) == [1]
    assert marks_in(ring.on_want(later, mark(3))) == []


def test_other_exchanges_mark_in_the_token_alone() -> None:
    ring = ring_of(2, Exchange.BROADCAST, receiver=Kernel())
    assert not marks_in(ring.on_token(START, closed(5)) + ring.advance(START))


def test_others_wait_for_a_program_that_has_offered_and_does_not_convert() -> None:
    """Its agent must look after it: the round cannot even be closed."""
    ring, kernel = member()
    kernel.converted = lambda *_: 0  # type: ignore[method-assign]
    ring.on_token(START, replace_state(closed(4), wire.TokenState.OPEN))
    assert not ring.awaits_lanes
    open_ = ring_of(2, Exchange.STRIPES, receiver=kernel)
    open_.offer(START, Offer(1, 4, unit=-20, conversion=7))
    assert open_.awaits_lanes
    kernel.converted = lambda round_, conversion, first, end: end - first  # type: ignore[method-assign]
    assert not open_.awaits_lanes
