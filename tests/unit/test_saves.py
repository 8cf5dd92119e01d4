# SPDX-License-Identifier: Apache-2.0
"""The lead writes a checkpoint after a round (R22): all members hear of it with the round's commit, however they do."""

from __future__ import annotations

from collections import deque

import pytest

from nicps import wire
from nicps.exchange import Exchange
from nicps.protocol.actions import Committed, Send, SendFragments
from nicps.protocol.carried import Offer
from nicps.protocol.ring import Ring
from nicps.protocol.signals import Steps
from tests.ring_parts import START, ring_of
from tests.unit.test_broadcast_marks import Kernel, closed, mark

EXCHANGES = (Exchange.BROADCAST, Exchange.STRIPES)


class Three:
    """Three rings that hear one another; all that is sent arrives. `deaf` members hear no frame of these kinds."""

    def __init__(self, exchange: Exchange) -> None:
        self.rings = {n: ring_of(n, exchange, receiver=Kernel()) for n in (1, 2, 3)}
        self.saved: dict[int, dict[int, bool]] = {}  # by round, by member
        self.deaf: dict[int, type] = {}
        self.now = START

    def carry_out(self, number: int, steps: Steps) -> None:
        waiting = deque([(number, step) for step in steps])
        while waiting:
            sender, step = waiting.popleft()
            if isinstance(step, Committed):
                self.saved.setdefault(step.round, {})[sender] = step.saved
            elif isinstance(step, SendFragments):
                self.rings[sender].sent(self.now)
            elif isinstance(step, Send):
                for other, ring in self.rings.items():
                    if other != sender and not isinstance(
                        step.frame.body, self.deaf.get(other, ())
                    ):
                        waiting.extend((other, more) for more in self.hear(ring, step.frame))

    def hear(self, ring: Ring, frame: wire.Frame) -> Steps:
        token = isinstance(frame.body, wire.Token)
        return (ring.on_token if token else ring.on_want)(self.now, frame)

    def offer(self, round_: int) -> None:
        for number, ring in self.rings.items():
            self.carry_out(number, ring.offer(self.now, Offer(round_, 4, -40, conversion=1)))

    def wait(self, seconds: float) -> None:
        """What is due by then."""
        end = self.now + seconds
        while (due := min(ring.deadline() for ring in self.rings.values())) <= end:
            self.now = max(self.now + 1e-4, due)
            for number, ring in self.rings.items():
                if ring.deadline() <= self.now:
                    self.carry_out(number, ring.tick(self.now))
        self.now = end

    def apply(self, round_: int, saves: bool) -> None:
        """All have applied it, and the lead goes on."""
        for number, ring in self.rings.items():
            self.carry_out(number, ring.read(self.now, round_, 0))
        self.carry_out(1, self.rings[1].go_on(self.now, saves=saves))


def run(exchange: Exchange, asks: list[bool], deaf: dict[int, type]) -> Three:
    """Rounds, each of which the lead's program asks for as the one before is applied."""
    three = Three(exchange)
    three.carry_out(1, three.rings[1].create(three.now))
    for round_, ask in enumerate(asks, 1):
        three.apply(round_ - 1, ask)
        three.deaf = deaf
        three.offer(round_)
        three.wait(0.1)
        three.deaf = {}
        three.wait(0.2)
    return three


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("deaf", [{}, {2: wire.Want}, {3: wire.Want}, {3: wire.Token}])
def test_all_members_hear_which_rounds_are_saved(exchange: Exchange, deaf: dict[int, type]) -> None:
    asks = [True, False, True, True, False]
    three = run(exchange, asks, deaf)
    assert three.saved == {
        round_: dict.fromkeys((1, 2, 3), ask) for round_, ask in enumerate(asks, 1)
    }


def test_a_mark_that_is_repeated_says_it_too() -> None:
    """A member that has committed answers the mark of one that has not, with what it has heard of the lead."""
    ring = ring_of(2, Exchange.STRIPES, receiver=Kernel())
    ring.on_token(START, closed(5))
    ring.on_want(START, mark(3))
    said = mark(1)
    said.header.flags |= wire.Flag.SAVES
    assert [s.saved for s in ring.on_want(START, said) if isinstance(s, Committed)] == [True]
    (answer,) = [s for s in ring.on_want(START + 1, mark(3)) if isinstance(s, Send)]
    flags = wire.Flag.COMPLETE | wire.Flag.SAVES | wire.Flag.REPEAT
    assert answer.frame.header.flags == flags
    forwarded = ring.on_token(START + 1, closed(6, 2, parked=False))
    tokens = [s.frame for s in forwarded if isinstance(s, Send)]
    marks = [entry.marks for frame in tokens for entry in frame.items[0]]  # type: ignore[union-attr]
    assert wire.Mark.SAVED in marks  # of a token of the round before, which was brought forward
