# SPDX-License-Identifier: Apache-2.0
"""What a training program is told to do, and what has come of a round."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from nicps.exchange import Exchange
from nicps.session import shared_form


@dataclass(frozen=True, slots=True)
class Phase:
    """What to do next: "train", "test" (one round), "save" or "load" the state, or "end".

    `shares` are the members' parts of a round by number, in samples; 0 for who is not counted. `exchange`
    makes one sum of a round's contributions. `channels`: the plan of a step, where steps have one.
    """

    kind: str
    first_round: int
    number: int
    shares: tuple[int, ...]
    exchange: Exchange = Exchange.BROADCAST
    channels: tuple[shared_form.PhaseChannel, ...] = ()

    def share_of(self, number: int) -> int:
        """A member's part of a round, in samples."""
        return self.shares[number - 1] if number <= len(self.shares) else 0


@dataclass(frozen=True, slots=True)
class Commit:
    """A round that everybody has. `counted` maps member numbers to samples; `samples` is their sum (n in R12).

    `seconds_waited` is what passed from this member's offer to the commit, its own sending left out. `members`: of so
    many a switch would add the lanes (`LaneFormat`); 0 if the kernel adds. `exchange` has made the sum.
    In stripes: `view` is the one in which it was made, and `aggregators` are those who made it, in order of rank.
    `checkpoint`: the lead writes a checkpoint of the state after the round (R22).
    """

    round: int
    samples: int
    counted: Mapping[int, int]
    unit: int
    seconds_waited: float = 0.0
    members: int = 0
    exchange: Exchange = Exchange.BROADCAST
    left_out: bool = False
    view: int = 0
    aggregators: tuple[int, ...] = ()
    checkpoint: bool = False

    @classmethod
    def of(
        cls,
        message: shared_form.Committed,
        *,
        offered: bool,
        members: int = 0,
        left_out: bool = False,
    ) -> Commit:
        """What an agent has told; `offered`: this member has offered to the round."""
        return cls(
            message.round,
            sum(message.counted.values()),
            message.counted,
            message.unit,
            message.seconds_waited if offered else 0.0,
            members,
            message.exchange,
            left_out,
            message.view,
            message.aggregators,
            message.checkpoint,
        )
