# SPDX-License-Identifier: Apache-2.0
"""The lead measures its steps, and works out which parameters travel in which round, on which channel (P2).

docs/channels.md, "Need first", has the figures; `nicps.measuring` what is measured, and `nicps.need_first` the
arithmetic.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from nicps import measuring, need_first
from nicps.measuring import Measured, Review, StepTimes
from nicps.need_first import Part, Plan, Timing
from trainer.percents import percents

if TYPE_CHECKING:
    from nicps.flows import Times
    from trainer.flows import Parts, Piece

_LEAST_LEFT = 20  # steps, or a plan does not pay any more


class Planner:
    """One member's, of one job.

    Args:
        parts: the first ones.
        channels: at most so many.
        rounds: of training in all, None if unknown.

    Attributes: `predicted`, seconds of a step with the plan that is in force; None: not known.
    """

    def __init__(self, parts: Parts, channels: int, rounds: int | None) -> None:
        self._parts, self._channels, self._rounds = parts, channels, rounds
        self._review = Review()
        self._measured = Measured(parts.sizes, parts.width)
        self._times = StepTimes()
        self._rest = 0.0
        self.predicted: float | None = None
        # Rounds of the plan that was proposed last, and seconds of a step with it.
        self._proposed: tuple[list[list[int]], float] | None = None
        self._undescribed: Plan | None = None

    # ---- what is measured

    def enter(self, parts: Parts) -> None:
        """A phase begins, with these."""
        self._measured.abandon()
        if parts is not self._parts:
            rounds, seconds = self._proposed or ([], None)
            self.predicted = seconds if parts.fragments == rounds else None
            self._parts = parts
            self._measured.clear()
            self._times.clear()

    def measures(self, trained: int, hosts: int) -> bool:
        """Whether the step that begins is measured.

        Args:
            trained: steps before it.
            hosts: members now.
        """
        if self._times.follow(hosts):
            self._measured.clear()
        left = _LEAST_LEFT if self._rounds is None else self._rounds - trained
        if left < _LEAST_LEFT and not self._measured.steps:
            return False
        # The first step of a phase has more to do than others. A plan is judged by many.
        if not (self._times.settled or (self._times and self._review.plan is None)):
            return False
        return self._review.asks(trained, hosts, self._times.middle - self._rest)

    def begin_backward(self, now: float, *, measures: bool) -> None:
        """As `Measured`."""
        self._measured.begin_backward(now, measures=measures)

    def note_gradient(self, parameter: int, now: float) -> None:
        """As `Measured`."""
        self._measured.note_gradient(parameter, now)

    def begin_forward(self, now: float) -> None:
        """As `Measured`."""
        self._measured.begin_forward(now)

    def end_forward(
        self,
        now: float,
        waited: float,
        updating: float,
        needed: Mapping[int, float],
        rounds: Sequence[tuple[Piece, Times]],
    ) -> None:
        """As `Measured`.

        Args:
            rounds: of all pieces.
        """
        sizes = [(_size(piece), times) for piece, times in rounds]
        self._measured.end_forward(now, waited, updating, needed, sizes)

    def note_step(self, seconds: float) -> None:
        """A step took so long."""
        self._times.note(seconds)

    # ---- the plan

    def propose(self, trained: int, hosts: int) -> list[list[int]]:
        """The rounds of another plan, in fragments, by channel; empty: it stays as it is.

        Whether they come into force others decide, too: `enter` tells.

        Args:
            trained, hosts: as `measures`.
        """
        if self._measured.steps < measuring.STEPS:
            return []
        timing, line, self._rest = self._measured.work_out()
        self._measured.clear()
        parts = self._parts
        grain = parts.fragment_bytes
        cut, channels = self._in_force(timing)
        took = None
        if self._times.settled:
            took = self._times.middle - self._rest
            line = need_first.calibrated(timing, line, cut, channels, took)
        plan = need_first.plan_for(
            timing,
            line,
            channels=self._channels,
            hosts=hosts,
            rounds=parts.most,
            least=parts.least,
            grain=grain,
        )
        kept = need_first.planned(timing, line, cut, channels)
        plan = self._review.take(trained, hosts, plan, kept, took) or kept
        self._undescribed, seconds = plan, plan.seconds + self._rest
        rounds = parts.rounds_of(plan)
        if rounds != parts.fragments:
            self._proposed = rounds, seconds
            return rounds
        self._proposed, self.predicted = None, seconds
        return []

    def _in_force(self, timing: Timing) -> tuple[list[Part], tuple[int, ...]]:
        """The parts of the plan in force, and their channels, in the order of need."""
        pieces = sorted(
            (piece for piece in self._parts.pieces if piece.missing),
            key=lambda piece: piece.here.start,
        )
        ends = [piece.here.stop * self._parts.width // 8 for piece in pieces]
        return need_first.parts_at(timing, ends), tuple(piece.channel for piece in pieces)

    @property
    def described(self) -> str:
        """What was worked out last, for people; empty once it was asked for."""
        plan, self._undescribed = self._undescribed, None
        if plan is None:
            return ""
        shares = " ".join(percents(plan.shares))
        how = "one channel" if len(plan.shares) == 1 else f"{len(plan.shares)} channels"
        return (
            f"need first: {len(plan.ends)} rounds a step on {how} (bulk first, of the bytes: {shares}); a step should"
            f" take {plan.seconds + self._rest:.3f} s, and {plan.single + self._rest:.3f} s on one channel"
        )


def _size(piece: Piece) -> int:
    return piece.here.stop - piece.here.start
