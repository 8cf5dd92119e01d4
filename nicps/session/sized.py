# SPDX-License-Identifier: Apache-2.0
"""Rounds of any size: each has a vector of its own, of one kind of numbers (docs/collective.md).

The other representations of a round's vector are in `nicps.session.reducers`.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Protocol

from nicps.session import shared_form
from nicps.session.absolute import BOOL, I8, Lanes
from nicps.session.arena import Arena
from nicps.session.lanes import I64, LaneFormat
from nicps.session.stripes import OwnRecords, Records, Remainders, in_turn, stripe
from nicps.wire import fragments_per_block, sized_samples


@dataclass(frozen=True, slots=True)
class Rest:
    """What rounding the sums of this member's stripe has left over, in units: the fragments from `first` on.

    Attributes: `lanes`, int64 (n, per_fragment); `used`, (n,), the others are not of this round.
    """

    first: int
    lanes: I64
    used: BOOL


@dataclass(frozen=True, slots=True)
class Outcome:
    """What has come of a round of `count` fragments.

    Attributes: `lanes` and `exponents`, the sums: (fragments, per_fragment) and (fragments,); `own_lanes` and
    `own_exponents`, the same of what this member has contributed; `members`, how many have; `unit`, log2 of that of the
    sums; `rest`, None if this member has made no sums; `counted`, whether this member is one of them.
    """

    count: int
    lanes: Lanes
    exponents: I8
    own_lanes: Lanes
    own_exponents: I8
    members: int
    unit: int
    rest: Rest | None = None
    counted: bool = True


class Vector(Protocol):
    """One kind of numbers as a round exchanges them."""

    @property
    def width(self) -> int:
        """Bits of a lane."""

    @property
    def feedback(self) -> bool:
        """Whether `settle` needs the own lanes and the rest."""

    @property
    def numbers(self) -> int:
        """How many they are."""

    def bound(self) -> int:
        """An upper bound of the x of all fragments that are finite."""

    def write(self, first: int, count: int, lanes: Lanes, exponents: I8) -> None:
        """Convert `count` fragments from `first` on, at most `LaneFormat.batch`, into (fragments,
        per_fragment) and (fragments,)."""

    def settle(self, outcome: Outcome) -> None:
        """Take the sums as the result."""


@dataclass(frozen=True, slots=True)
class Round:
    """A round that is committed. `offers`: what each member in its list has offered, by number. `seconds_listed`: from
    this member's offer until all had offered.
    """

    number: int
    offers: dict[int, int]
    seconds_listed: float = 0.0

    @property
    def agrees(self) -> bool:
        """All have called the same; otherwise there is no sum."""
        return len(set(self.offers.values())) <= 1


class RoundMemory:
    """The memory of such rounds: a member's own lanes, and the sums. A round's fragments lie anywhere in a bank.

    Args:
        arena, doorbell: as `OwnRecords`.
    """

    def __init__(self, arena: Arena, doorbell: int) -> None:
        self.own = OwnRecords(arena, doorbell)
        self._sums: Records | None = None

    @property
    def sums(self) -> Records:
        """The sums."""
        assert self._sums is not None, "the agent has sent no sums"
        return self._sums

    def map(self, message: shared_form.Phase | shared_form.View, fds: Iterator[int]) -> None:
        """Map what comes with a message."""
        if isinstance(message, shared_form.Phase) and message.room:
            whole = LaneFormat(message.room * LaneFormat(1, 32).per_fragment, 32)
            self.own.map(whole, next(fds), message.room)
            self._sums = Records("stored", whole, next(fds), message.room, mmap.PROT_READ)


class ChannelRounds:
    """The rounds of one channel, in memory that is mapped.

    Args:
        number: this member's.
        rests: what rounding has left over, by blocks.
        first: where the channel's fragments begin in a bank.
        mapping: held while there are new remainders.
    """

    def __init__(
        self,
        number: int,
        memory: RoundMemory,
        rests: Remainders,
        channel: int = 0,
        first: int = 0,
        mapping: threading.Lock | None = None,
    ) -> None:
        self._number, self._channel, self._first = number, channel, first
        self._memory, self._rests = memory, rests
        self._mapping = mapping or threading.Lock()

    def begin(
        self, round_: int, vector: Vector, call: int, *, sized: bool = True
    ) -> shared_form.Offer:
        """The offer of a vector, which must be sent before it is converted.

        Args:
            call: a checksum of what is called; if the round has no size of its own, the samples.
        """
        conversion = self._memory.own.begin(round_, self._channel)
        samples = sized_samples(_fragments_of(vector), call, vector.width) if sized else call
        of = vector.bound(), False, conversion, self._channel
        return shared_form.Offer(round_, samples, *of)

    def convert(self, round_: int, vector: Vector, live: Collection[int]) -> None:
        """Convert it: this member's own stripe first."""
        bank, order = round_ & 1, sorted(live)
        lanes, exponents = self._of_bank(self._memory.own.records, bank, vector.width)
        rank = order.index(self._number) if self._number in order else 0

        def write(first: int, count: int) -> None:
            vector.write(first, count, lanes, exponents)

        batch = LaneFormat(1, vector.width).batch
        fragments = _fragments_of(vector)
        parts = in_turn(fragments, batch, rank, len(order))
        own = len(stripe(fragments, rank, len(order)))
        self._memory.own.convert(round_, parts, write, own, self._channel, self._first)

    def settle(self, round_: shared_form.Committed, vector: Vector) -> None:
        """Give the vector the sums of a round in which all have called the same."""
        alone, own = set(round_.counted) == {self._number}, self._memory.own.records
        sums = own if alone else self._memory.sums
        bank, width = round_.round & 1, vector.width
        rest = None if alone or not vector.feedback else self._rest(round_, sums, vector)
        outcome = Outcome(
            _fragments_of(vector),
            *self._of_bank(sums, bank, width),
            *self._of_bank(own, bank, width),
            len(round_.counted),
            round_.unit,
            rest,
            self._number in round_.counted,
        )
        vector.settle(outcome)

    def _of_bank(self, records: Records, bank: int, width: int) -> tuple[Lanes, I8]:
        """Lanes and exponents of this channel's fragments, and of those behind them."""
        first = self._first
        return _lanes(records, bank, width)[first:], records.exponents[bank, first:]

    def _rest(self, round_: shared_form.Committed, sums: Records, vector: Vector) -> Rest | None:
        order, width = round_.aggregators, vector.width
        if self._number not in order:
            return None
        here = stripe(_fragments_of(vector), order.index(self._number), len(order))
        mine = slice(self._first + here.start, self._first + here.stop)
        used = sums.usable_rests(round_.round, round_.view, mine)
        count = -(-len(here) // fragments_per_block(width))
        with self._mapping:
            blocks = self._rests.of(round_.round, round_.view, count)
        lanes = blocks.reshape(-1, LaneFormat(1, width).per_fragment)[: len(here)]
        return Rest(here.start, lanes, used)


class SizedRounds(ChannelRounds):
    """Such rounds in one channel, and their memory.

    Args:
        number: this member's.
        arena, doorbell: as `OwnRecords`.
    """

    def __init__(self, number: int, arena: Arena, doorbell: int) -> None:
        super().__init__(number, RoundMemory(arena, doorbell), Remainders(LaneFormat(1, 8)))

    def map(self, message: shared_form.Phase | shared_form.View, fds: Iterator[int]) -> None:
        """Map what comes with a message, but for accumulators."""
        self._memory.map(message, fds)
        if message.places:
            self._rests.map(next(fds), message.places, message.view)

    def close(self) -> None:
        """Give the memory back; the mappings go with the last view of them."""
        self._memory.own.close()


def _fragments_of(vector: Vector) -> int:
    return LaneFormat(vector.numbers, vector.width).fragments


def _lanes(records: Records, bank: int, width: int) -> Lanes:
    """(room, per_fragment)."""
    found: Lanes = records["lane"][bank].view(LaneFormat(1, width).wire)
    return found
