# SPDX-License-Identifier: Apache-2.0
"""One member with the exchange `stripes`, its kernel played: for unit tests of the exchanger."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from nicps import wire
from nicps.exchange import Exchange
from nicps.protocol import Phase, SendFragments, Timings, View
from nicps.protocol.exchange import StripesExchanger, exchanger_of
from tests.listed import ROUND, members_of, token_of

FRAGMENTS, CONVERSION = 3000, 5
MEMBERS = members_of(4)
#: Member 3 has left; three aggregators have a thousand fragments each.
VIEW = View(3, MEMBERS, frozenset({1, 2, 4}), 1)
PHASE = Phase(
    1,
    1,
    wire.PhaseKind.TRAIN,
    first_round=ROUND,
    fragments=FRAGMENTS,
    last_fragments=FRAGMENTS,
    width=16,
    shares=(4, 4, 4, 4),
    exchange=Exchange.STRIPES,
)
WINDOW = 42  # of two other aggregators, in a queue of 170 frames
TIMINGS = Timings()


class Kernel:
    """Sums that are here, and lanes that are converted: all, unless a test says less."""

    def __init__(self) -> None:
        self.sums: set[int] = set()
        self.lanes = range(FRAGMENTS)
        self.lacking: Mapping[int, int] = {}
        self.looked_at: list[tuple[int, int]] = []  # records, whether they are converted
        self.next_: dict[int, int] = {}  # by aggregator: what the kernel sends next

    def count(self, round_: int, view: int, sender: int) -> int:
        assert (round_, view, sender) == (ROUND, VIEW.number, 0)
        return len(self.sums)

    def missing(self, *_: int) -> list[tuple[int, int]]:
        raise AssertionError("fragments are broadcast in other exchanges")

    def reached(self, round_: int, view: int, first: int, end: int) -> tuple[int, int]:
        here = next((i for i in range(first, end) if i not in self.sums), end)
        return here, max((i + 1 for i in range(first, end) if i in self.sums), default=first)

    def missing_sums(
        self, round_: int, view: int, first: int, end: int, limit: int
    ) -> list[tuple[int, int]]:
        ranges = list[tuple[int, int]]()
        for index in (i for i in range(first, end) if i not in self.sums):
            if ranges and sum(ranges[-1]) == index:
                ranges[-1] = (ranges[-1][0], ranges[-1][1] + 1)
            else:
                ranges.append((index, 1))
        return ranges[:limit]

    def converted(self, round_: int, conversion: int, first: int, end: int) -> int:
        self.looked_at.append((first, end))
        if conversion != CONVERSION:
            return 0
        return next((i for i in range(first, end) if i not in self.lanes), end) - first

    def next_to_send(self, round_: int, aggregator: int) -> int:
        return self.next_.get(aggregator, 0)

    def absent(
        self, round_: int, view: int, first: int, count: int, members: int
    ) -> Mapping[int, int]:
        return self.lacking


def member(number: int = 2, kernel: Kernel | None = None, view: View = VIEW) -> StripesExchanger:
    """With an offer for the round."""
    kernel = kernel or Kernel()
    part = exchanger_of(PHASE, view, number, kernel, TIMINGS, 0.0)
    assert isinstance(part, StripesExchanger)
    part.open(ROUND)
    part.conversion = CONVERSION
    return part


#: The list is closed, with these members' largest exponents.
closed = partial(token_of, len(MEMBERS))


def only(actions: object) -> SendFragments:
    assert isinstance(actions, list)
    (action,) = actions
    assert isinstance(action, SendFragments)
    return action


def kind(action: SendFragments) -> wire.FrameType:
    assert action.striped is not None
    return action.striped.type
