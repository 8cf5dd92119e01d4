# SPDX-License-Identifier: Apache-2.0
"""What the programs of a group call, the same at all members: sections of calls on each channel, and calls on all.

A call has one round or several, each of a size and a width of its own (docs/collective.md, "Rounds of any size").
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from nicps import wire
from nicps.protocol.plan import ChannelPlan

#: After what follows the calls of a section the next one begins.
JOINTS = ("nothing", "admit", "admit", "plan")
_SIZES = (1, 3, 9, 9, 40)
_WIDTHS = (8, 16, 32)


@dataclass(frozen=True, slots=True)
class Turn:
    """What a member offers to a round: so many fragments, of lanes of so many bits, and what the call is."""

    fragments: int
    width: int
    call: int

    @property
    def samples(self) -> int:
        """As an offer tells it."""
        return wire.sized_samples(self.fragments, self.call, self.width)


@dataclass(frozen=True, slots=True)
class Call:
    """A call: what it offers to each of its rounds. `odd`: the host, by its index, that calls something else."""

    turns: tuple[Turn, ...]
    odd: int | None = None

    def turn(self, part: int, host: int) -> Turn:
        """What that host offers to that round of the call."""
        turn = self.turns[part]
        if host == self.odd and not part:
            return Turn(max(1, turn.fragments - 1), turn.width, turn.call ^ 1)
        return turn


@dataclass(frozen=True, slots=True)
class Section:
    """Calls on each channel of `plan`, and what all members call on all channels after them.

    `joint`: "nothing", "admit" (hosts that wait come in), "plan" (the next section's plan) or "end".
    """

    plan: tuple[ChannelPlan, ...]
    calls: tuple[tuple[Call, ...], ...]
    joint: str


class Calls:
    """All that is called, from a seed.

    Args:
        count: sections.
        hosts: that may call something else.
        most: fragments of a round at most.

    Attributes: `room`, of a round while a group has no plan: then it has one channel.
    """

    def __init__(self, seed: int, count: int, hosts: int, most: int) -> None:
        self._rng = random.Random(f"calls {seed}")
        self._sizes = [size for size in _SIZES if size <= most]
        self.room = max(self._sizes)
        self._hosts = hosts
        self._made = 0
        self.sections: list[Section] = []
        plan: tuple[ChannelPlan, ...] = () if self._rng.random() < 0.3 else self._plan()
        for number in range(count):
            last = number == count - 1
            joint = "end" if last else self._rng.choice(JOINTS)
            self.sections.append(Section(plan, self._calls(plan), joint))
            plan = self._plan() if joint == "plan" else plan

    def _plan(self) -> tuple[ChannelPlan, ...]:
        rng = self._rng
        count = rng.choice((1, 2, 2, 3, 3, 4, 8))
        urgencies = [rng.choice((channel, 7 - channel, 0)) for channel in range(count)]
        return tuple([ChannelPlan(urgency, rng.choice(self._sizes)) for urgency in urgencies])

    def _calls(self, plan: tuple[ChannelPlan, ...]) -> tuple[tuple[Call, ...], ...]:
        rooms = [channel.room for channel in plan] or [self.room]
        most = 8 if len(rooms) < 4 else 4
        return tuple(
            [tuple([self._call(room) for _ in range(self._rng.randint(0, most))]) for room in rooms]
        )

    def _call(self, room: int) -> Call:
        rng = self._rng
        count = rng.choice((1, 1, 1, 2, 3))
        odd = rng.randrange(self._hosts) if rng.random() < 0.03 else None
        return Call(tuple([self._turn(room) for _ in range(count)]), odd)

    def _turn(self, room: int) -> Turn:
        rng = self._rng
        width = rng.choice(_WIDTHS)
        width = width if room * width // 32 else 32
        self._made += 1
        return Turn(rng.randint(1, room * width // 32), width, self._made)
