# SPDX-License-Identifier: Apache-2.0
"""Frames of stripes, and the memory that a kernel has for them (docs/stripes.md). A lane stands for a fragment's."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from operator import attrgetter
from random import Random
from typing import Any

from nicps.wire import FrameType
from tests.simulator.gradients import Lane

STALLS_S = (1e-4, 3e-3, 0.03, 0.15)  # shorter than a round, and longer than some
NO_LANE = Lane(0, 0)


@dataclass(slots=True)
class KernelFrame:
    """A frame, as it is on the wire, that no agent reads. `to`: the address that it goes to; None: everybody.

    It is not changed once it is made. Making a frozen one takes longer.
    """

    type: FrameType
    view: int
    key: bytes | None
    round: int
    sender: int
    to: bytes | None

    @property
    def tag(self) -> int:
        """Later rounds have larger ones, and all rounds of a later view."""
        return self.view << 32 | self.round


@dataclass(slots=True)
class StripeFrame(KernelFrame):
    """A frame of stripes, or of a Linux switch."""

    members: int
    index: int
    fragments: int
    width: int
    unit: int
    lane: Lane
    number: int = 0
    rest_view: int = 0
    behind: int = 0

    def changed(self, **values: Any) -> StripeFrame:
        """A copy, with these fields; `dataclasses.replace` takes longer."""
        made = StripeFrame(*_fields_of(self))
        for name, value in values.items():
            setattr(made, name, value)
        return made


_fields_of = attrgetter(*[field.name for field in fields(StripeFrame)])


class Odds:
    """How seldom what is seldom happens, from a seed: only where the exchange is stripes."""

    def __init__(self, seed: int) -> None:
        self.random = Random(f"stripes {seed}")
        self.stalls = self.random.choice((0.0, 0.001, 0.01))
        self.floods = self.random.choice((0.0, 0.01))
        self.bells_lost = self.random.choice((0.0, 0.1, 0.5))
        self.converting_s = self.random.choice((1e-4, 1e-4, 5e-3))  # a step takes up to this
        self.forgetful = False  # the switch knows nobody's port
        self.switch = Random(f"linux switch {seed}")
        self._places = Random(f"places {seed}")
        self._places_s = self._places.choice(
            (0.002, 0.002, 0.2)
        )  # to make those of a view takes up to this
        self._late = Random(f"late {seed}")
        self._lates = self._late.choice((0.0, 0.05, 0.5))

    def places_s(self) -> float:
        """How long a view's places take."""
        return self._places.random() * self._places_s

    def is_late(self) -> bool:
        """The kernel works a moment longer by what the agent has written before."""
        return bool(self._lates and self._late.random() < self._lates)

    def stall_s(self) -> float:
        """How long a processor stands still; mostly not at all."""
        rng = self.random
        return rng.choice(STALLS_S) if self.stalls and rng.random() < self.stalls else 0.0

    def flood(self) -> bool:
        """A frame for one host goes to all."""
        return self.forgetful or bool(self.floods and self.random.random() < self.floods)

    def lose_bell(self) -> bool:
        """The ring buffer has no room."""
        return bool(self.bells_lost and self.random.random() < self.bells_lost)


@dataclass(slots=True)
class Own:
    """This member's lanes of a fragment, and the conversion that they are of."""

    conversion: int = 0
    lane: Lane = NO_LANE


@dataclass(slots=True)
class Stored:
    """A sum; `rest`: its tag, if it was made here."""

    tag: int = 0
    rest: int = 0
    lane: Lane = NO_LANE
    claimed: bool = False


@dataclass(slots=True)
class Gather:
    """A place in the own stripe."""

    tag: int = 0
    seen: int = 0
    what: tuple[int, int, int, int, int] = (0, 0, 0, 0, 0)  # list, unit, size, width, index
    not_finite: bool = False
    claimed: bool = False


class Records:
    """Own lanes and sums of `room` fragments, by bank."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.own = [[Own() for _ in range(room)] for _ in range(2)]
        self.sums = [[Stored() for _ in range(room)] for _ in range(2)]


class Places:
    """The own stripe, by bank: `blocks` of places, and of sums, which become remainders."""

    def __init__(self, blocks: int, per_block: int) -> None:
        self.blocks, self.per_block = blocks, per_block
        count = blocks * per_block
        self.gathers = [[Gather() for _ in range(count)] for _ in range(2)]
        self.totals = [[0] * count for _ in range(2)]


@dataclass(slots=True)
class Progress:
    """The count of a bank's sums."""

    tag: int = 0
    count: int = 0
    counting: int = 0

    def enter(self, tag: int) -> str:
        """An empty text, or why not."""
        if tag > self.tag and not self.counting:
            self.tag, self.count = tag, 0
        if tag != self.tag:
            return "round" if tag < self.tag else "busy"
        self.counting += 1
        return ""

    def leave(self) -> int:
        """One more; how many there are."""
        self.count, self.counting = self.count + 1, self.counting - 1
        return self.count


@dataclass(slots=True)
class Asked:
    """Which numbers of a member's questions have been answered."""

    newest: int = 0
    before: set[int] = field(default_factory=set)

    def answer(self, number: int) -> bool:
        """Whether it has not been answered yet; from now on it has."""
        if number <= self.newest - 32 or number == self.newest or number in self.before:
            return False
        if number > self.newest:
            self.before.add(self.newest)
            self.newest = number
            self.before = {n for n in self.before if n >= number - 32}
        else:
            self.before.add(number)
        return True


def bounds(fragments: int, rank: int, aggregators: int) -> tuple[int, int]:
    """The stripe of that rank, from 0."""
    return fragments * rank // aggregators, fragments * (rank + 1) // aggregators


def owner_of(index: int, fragments: int, aggregators: tuple[int, ...]) -> int:
    """The member that adds that fragment up."""
    n = len(aggregators)
    return next(k for r, k in enumerate(aggregators) if index < bounds(fragments, r, n)[1])
