# SPDX-License-Identifier: Apache-2.0
"""The plan of a phase with channels: the rounds of a training step on each of them (docs/channels.md, "Steps")."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from nicps import wire

#: Urgencies are below this.
URGENCIES = 8


@dataclass(frozen=True, slots=True)
class ChannelPlan:
    """What a phase fixes of one channel.

    Attributes:
        urgency: the channel's rank on the wire; what has a larger one goes first.
        room: fragments of its largest round.
        rounds: the fragments of each of its rounds of a step, in order. Empty where every round has a size of its own.
    """

    urgency: int
    room: int
    rounds: tuple[int, ...] = ()

    def to_json(self) -> list[Any]:
        """As it lies in a decision's settings."""
        return [self.urgency, self.room, list(self.rounds)]

    @classmethod
    def from_json(cls, value: Any) -> ChannelPlan:
        """From what `to_json` made.

        Raises:
            ValueError, TypeError: it is not that.
        """
        urgency, room, rounds = value
        if any(type(number) is not int for number in (urgency, room, *rounds)):
            raise ValueError("a channel's plan of the wrong type")
        return cls(urgency, room, tuple(rounds))

    @property
    def rounds_per_step(self) -> int:
        """How many of its rounds a step has; 1 where no step binds the channels together."""
        return len(self.rounds) or 1

    def fits(self, limit: int) -> bool:
        """Whether it can be meant, with so many fragments in a round at most."""
        in_range = 0 <= self.urgency < URGENCIES and 0 < self.room <= limit
        return in_range and all(0 < fragments <= self.room for fragments in self.rounds)


def fits(channels: Sequence[ChannelPlan], limit: int, *, sized: bool) -> bool:
    """Whether a phase can have these channels; none stands for one channel with one round a step.

    Args:
        limit: fragments of a round at most.
        sized: every round has a size of its own, so a plan has no rounds.
    """
    if len(channels) > wire.MAX_CHANNELS or not all(plan.fits(limit) for plan in channels):
        return False
    planned = [len(plan.rounds) for plan in channels]
    if sized:
        return not any(planned)
    if not all(plan.room == max(plan.rounds, default=0) for plan in channels):
        return False
    return sum(planned) <= wire.MOST_ROUNDS
