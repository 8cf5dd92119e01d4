# SPDX-License-Identifier: Apache-2.0
"""Rounds in stripes, or with a Linux switch: each has a vector of its own, of one kind of numbers (docs/collective.md).

Groups and all jobs have them. Where lanes are multiples of a unit: `nicps.session.reducers.AddingReducer`.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy.typing as npt

from nicps.session import shared_form
from nicps.session.absolute import BOOL, I8, Lanes
from nicps.session.arena import Arena
from nicps.session.lanes import I64, LaneFormat
from nicps.session.stripes import OwnRecords, Records, Remainders, in_turn, stripe
from nicps.wire import fragments_per_block, sized_samples

#: Fragments of a short vector, at most. Converting them takes 0.1 to 0.4 ms, less than a turn of the agent's loop.
_SHORT = 200


class Sum(Protocol):
    """What a commit tells of a round's sum: as `shared_form.Committed`, and `nicps.session.phases.Commit`."""

    @property
    def round(self) -> int:
        """The round."""

    @property
    def view(self) -> int:
        """The one in which the sum was made."""

    @property
    def counted(self) -> Mapping[int, int]:
        """What each member in its list has offered, by number."""

    @property
    def aggregators(self) -> tuple[int, ...]:
        """By their ranks; 0 is a Linux switch."""

    @property
    def unit(self) -> int:
        """log2."""


@dataclass(frozen=True, slots=True)
class Bank:
    """The records of a round's vector: `lanes` (fragments, per_fragment), `exponents` (fragments,)."""

    lanes: Lanes
    exponents: I8


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
        channel: int,
        first: int,
        mapping: threading.Lock,
    ) -> None:
        self._number, self._channel, self._first = number, channel, first
        self._memory, self._rests = memory, rests
        self._mapping = mapping

    def offer(
        self,
        round_: int,
        vector: Vector,
        call: int,
        live: Collection[int],
        send: Callable[[shared_form.Offer], None],
        *,
        sized: bool = True,
    ) -> None:
        """Send the offer of a vector, and convert it, in the order that `is_short` says.

        Args:
            call, sized: as `begin`.
            live: as `convert`.
        """
        offer, short = self.begin(round_, vector, call, sized=sized), is_short(vector)
        if not short:
            send(offer)
        self.convert(round_, vector, live, rings=not short)
        if short:
            send(offer)

    def begin(
        self, round_: int, vector: Vector, call: int, *, sized: bool = True
    ) -> shared_form.Offer:
        """The offer of a vector, before that is converted.

        Args:
            call: a checksum of what is called; if the round has no size of its own, the samples.
        """
        conversion = self._memory.own.begin(round_, self._channel)
        samples = sized_samples(_fragments_of(vector), call, vector.width) if sized else call
        of = vector.bound(), False, conversion, self._channel
        return shared_form.Offer(round_, samples, *of)

    def convert(
        self,
        round_: int,
        vector: Vector,
        live: Collection[int],
        own_batch: int = 0,
        *,
        rings: bool = True,
    ) -> None:
        """Convert it: this member's own stripe first, then a batch of each other one in turn.

        Args:
            live: the members that have a stripe; none: a switch makes all sums, and is sent all.
            own_batch: fragments of the own stripe that `vector` converts at once, if not as many as of the others.
            rings: as `OwnRecords.convert`.
        """
        order, fragments = sorted(live) or [0], _fragments_of(vector)
        rank = order.index(self._number) if self._number in order else 0
        bank = self.own(round_, vector)

        def write(first: int, count: int) -> None:
            vector.write(first, count, bank.lanes, bank.exponents)

        batch = LaneFormat(1, vector.width).batch
        parts = in_turn(fragments, batch, rank, len(order), own_batch if live else 0)
        kept = len(stripe(fragments, rank, len(order))) if live else 0
        place = self._channel, self._first
        self._memory.own.convert(round_, parts, write, kept, *place, rings=rings)

    def own(self, round_: int, vector: Vector) -> Bank:
        """What this member has converted the vector to."""
        return self._bank(self._memory.own.records, round_, vector)

    def sums(self, round_: int, vector: Vector) -> Bank:
        """The sums, as far as they have come."""
        return self._bank(self._memory.sums, round_, vector)

    def tags(self, round_: int, vector: Vector) -> npt.NDArray[Any]:
        """(fragments,): of each sum, the view << 32 | the round."""
        return self._memory.sums["tag"][round_ & 1, self._here(vector)]

    def sent(self, round_: int) -> bool:
        """Whether the agent has begun to send what was converted for that round, on channel 0: a list has it."""
        return self._memory.own.sent(round_)

    def settle(self, round_: Sum, vector: Vector) -> None:
        """Give the vector the sums of a round, in which all have called the same."""
        alone, own = set(round_.counted) == {self._number}, self.own(round_.round, vector)
        sums = own if alone else self.sums(round_.round, vector)
        rest = None if alone or not vector.feedback else self._rest(round_, vector)
        outcome = Outcome(
            _fragments_of(vector),
            sums.lanes,
            sums.exponents,
            own.lanes,
            own.exponents,
            len(round_.counted),
            round_.unit,
            rest,
            self._number in round_.counted,
        )
        vector.settle(outcome)

    def _here(self, vector: Vector) -> slice:
        return slice(self._first, self._first + _fragments_of(vector))

    def _bank(self, records: Records, round_: int, vector: Vector) -> Bank:
        bank, here = round_ & 1, self._here(vector)
        lanes: Lanes = records["lane"][bank].view(LaneFormat(1, vector.width).wire)[here]
        return Bank(lanes, records.exponents[bank, here])

    def _rest(self, round_: Sum, vector: Vector) -> Rest | None:
        order, width = round_.aggregators, vector.width
        if self._number not in order:
            return None
        here = stripe(_fragments_of(vector), order.index(self._number), len(order))
        mine = slice(self._first + here.start, self._first + here.stop)
        used = self._memory.sums.usable_rests(round_.round, round_.view, mine)
        count = -(-len(here) // fragments_per_block(width))
        with self._mapping:
            blocks = self._rests.of(round_.round, round_.view, count)
        lanes = blocks.reshape(-1, LaneFormat(1, width).per_fragment)[: len(here)]
        return Rest(here.start, lanes, used)


def is_short(vector: Vector) -> bool:
    """Whether a vector is converted before its offer is sent, so that the agent hears of both at once.

    The agent announces an offer only once the lanes of this member's own stripe are converted. Of a long vector the
    other lanes are converted, and sent, while the other members answer.
    """
    return _fragments_of(vector) <= _SHORT


def _fragments_of(vector: Vector) -> int:
    return LaneFormat(vector.numbers, vector.width).fragments
