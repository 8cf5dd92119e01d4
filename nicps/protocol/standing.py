# SPDX-License-Identifier: Apache-2.0
"""Where a member stands in a view, as it tells with its promise to follow a proposal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nicps import wire
from nicps.protocol.ring import Ring
from nicps.protocol.view import rounds_of

#: What a vote's `complete` says.
COMPLETE, ENDED, LEARNS, DONE, SAVES, SAVED = 1, 2, 4, 8, 16, 32


@dataclass(frozen=True, slots=True)
class Standing:
    """Where a member stands in the view: what its promise tells.

    `others`: the round and whether it is complete, of channels 1 and up. `saves`: the lead has said that it writes a
    checkpoint of the state after the open round; `saved`: after the round before.
    """

    phase: int = 0
    round: int = 0
    complete: bool = False
    decided: int = 0
    learns: bool = False
    others: tuple[tuple[int, bool], ...] = ()
    saves: bool = False
    saved: bool = False

    @classmethod
    def of(cls, frame: wire.Frame) -> Standing:
        """Out of a VOTE.

        Raises:
            WireError: it cannot be meant.
        """
        vote, others = frame.body, frame.items[3]
        assert isinstance(vote, wire.Vote)
        complete = [bool(o.complete) for o in others if isinstance(o, wire.Standing)]
        return cls(
            vote.phase,
            vote.round,
            bool(vote.complete & COMPLETE),
            vote.decided,
            bool(vote.complete & LEARNS),
            tuple(zip(rounds_of(others), complete, strict=True)),
            bool(vote.complete & SAVES),
            bool(vote.complete & SAVED),
        )

    @property
    def flags(self) -> int:
        """What a vote's `complete` says of it."""
        said = COMPLETE * self.complete | LEARNS * self.learns
        return said | SAVES * self.saves | SAVED * self.saved

    def saves_before(self, phase: int, round_: int) -> bool:
        """It says that the lead writes a checkpoint of the state before that round of that phase."""
        if self.phase != phase:
            return False
        return (self.saves and round_ == self.round + 1) or (self.saved and round_ == self.round)

    def places(self, phase: int, first_rounds: Sequence[int]) -> tuple[tuple[int, bool], ...]:
        """The same of each channel of that phase, which begins with these rounds.

        A member that has not seen the phase's first token has nothing of it.
        """
        if self.phase != phase or len(self.others) != len(first_rounds) - 1:
            return tuple((first, False) for first in first_rounds)
        return ((self.round, self.complete), *self.others)


@dataclass(frozen=True, slots=True)
class Place:
    """Where this member stands, and the rings that it is in or prepared for, by the numbers of their phases.

    `unit`: of the open round, as the view began.
    """

    standing: Standing
    rings: Mapping[int, Ring]
    unit: int = 0
