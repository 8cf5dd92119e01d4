# SPDX-License-Identifier: Apache-2.0
"""The lead measures its steps, and works out which parameters travel in which round, on which channel (P2).

A step is measured from the beginning of one backward pass to that of the next. While the lead measures it lets its
rounds out one after the other, so that each has the line alone: a round waits for the offers of all. docs/channels.md,
"Need first", has the figures; `nicps.need_first` the arithmetic.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from statistics import median
from typing import TYPE_CHECKING

from nicps import need_first
from nicps.need_first import Line, Plan, Review, Timing

if TYPE_CHECKING:
    from nicps.flows import Times
    from trainer.flows import Parts, Piece

_MEASURED = 4  # steps
_NOISE = 0.1  # of a backward pass: a member that is later than that is slower
_UNEQUAL = (
    1.5  # largest to smallest round, from which on a line through them tells latency and pace apart
)
_LEAST_LEFT = 20  # steps, or a plan does not pay any more


@dataclass(slots=True)
class _Step:
    """Times on the clock, and spans without what the thread that computes has waited and updated.

    Attributes: `made`, when each parameter's gradient was whole; `forward`, when the next forward pass began; `ended`,
    when that had ended and all was updated; `waited` and `updating` seconds in between; `needed`, after so many seconds
    of it each parameter was used first; `rounds`, by piece.
    """

    backward: float
    made: dict[int, float] = field(default_factory=dict)
    forward: float = 0.0
    ended: float = 0.0
    waited: float = 0.0
    updating: float = 0.0
    needed: Mapping[int, float] = field(default_factory=dict)
    rounds: Sequence[tuple[Piece, Times]] = ()


@dataclass(frozen=True, slots=True)
class _Spans:
    """One measured step, in seconds; `rest`: what is neither of its passes."""

    released: tuple[float, ...]
    needed: tuple[float, ...]
    backward: float
    forward: float
    rest: float
    updating: float
    rounds: tuple[tuple[int, float], ...]  # numbers and seconds
    answer: float  # from an offer until all have offered, where nobody is late
    slower: float  # so many times as long do the slowest member's passes take


class Planner:
    """One member's, of one job.

    Args:
        parts: the first ones.
        channels: at most so many.
        rounds: of training in all, None if unknown.

    Attributes: `predicted`, seconds of a step with the plan that is in force, or is about to be; None: not known.
    """

    def __init__(self, parts: Parts, channels: int, rounds: int | None) -> None:
        self._parts, self._channels, self._rounds = parts, channels, rounds
        self._review = Review()
        self._step: _Step | None = None
        self._spans: list[_Spans] = []
        self._seconds: list[float] = []  # of the steps since the phase has begun
        self._rest = 0.0
        self.predicted: float | None = None
        self._news: Plan | None = None

    # ---- what is measured

    def enter(self, parts: Parts) -> None:
        """A phase begins, with these."""
        self._step = None
        if parts is not self._parts:
            self._parts = parts
            self._spans.clear()
            self._seconds.clear()

    def measures(self, trained: int, hosts: int) -> bool:
        """Whether the step that begins is measured.

        Args:
            trained: steps before it.
            hosts: members now.
        """
        left = _LEAST_LEFT if self._rounds is None else self._rounds - trained
        if not self._seconds or (left < _LEAST_LEFT and not self._spans):
            return False  # the first step of a phase has more to do than others
        return self._review.asks(trained, hosts, median(self._seconds) - self._rest)

    def begin_backward(self, now: float, *, measures: bool) -> None:
        """A step's last backward pass begins; the one before is whole, if it was settled in a forward pass.

        Args:
            measures: this step is measured.
        """
        step = self._step
        if step is not None and step.ended:
            self._spans.append(self._spans_of(step, now))
        self._step = _Step(now) if measures else None

    def note_gradient(self, parameter: int, now: float) -> None:
        """That one's is whole."""
        if self._step is not None:
            self._step.made[parameter] = now

    def begin_forward(self, now: float) -> None:
        """The next step's first forward pass begins."""
        if self._step is not None:
            self._step.forward = now

    def end_forward(
        self,
        now: float,
        waited: float,
        updating: float,
        needed: Mapping[int, float],
        rounds: Sequence[tuple[Piece, Times]],
    ) -> None:
        """It has ended, and the step is settled.

        Args:
            needed: when each parameter was used first, on the clock, less what was waited and updated before.
            rounds: of all pieces.
        """
        step = self._step
        if step is not None and step.forward:
            step.ended, step.waited, step.updating = now, waited, updating
            step.needed, step.rounds = needed, rounds

    def note_step(self, seconds: float) -> None:
        """A step took so long."""
        self._seconds.append(seconds)

    def _spans_of(self, step: _Step, now: float) -> _Spans:
        count, begun = len(self._parts.names), step.backward
        made = [step.made.get(at, step.forward) - begun for at in range(count)]
        uses = [step.needed.get(at, 0.0) - step.forward for at in range(count)]
        needed = accumulate((max(0.0, use) for use in uses), max)  # in the order of need
        waits = [times.listed - times.offered for _, times in step.rounds]
        answer = min(waits)
        noise = _NOISE * (step.forward - begun)
        late = [
            (times.listed - answer - begun) / (times.offered - begun)
            for _, times in step.rounds
            if times.offered - begun > noise and times.listed - answer - times.offered > noise
        ]
        forward = step.ended - step.forward - step.waited - step.updating
        return _Spans(
            tuple(made),
            tuple(needed),
            step.forward - begun,
            forward,
            now - step.ended,
            step.updating,
            tuple((_size(piece), times.done - times.listed) for piece, times in step.rounds),
            answer,
            max(late, default=1.0),
        )

    # ---- the plan

    def propose(self, trained: int, hosts: int) -> list[list[int]]:
        """The rounds of another plan, in fragments, by channel; empty: it stays as it is.

        Args:
            trained, hosts: as `measures`.
        """
        if len(self._spans) < _MEASURED:
            return []
        timing, line = self._measured()
        self._spans.clear()
        parts = self._parts
        grain = parts.fragment_bytes
        plan = need_first.plan_for(
            timing,
            line,
            channels=self._channels,
            hosts=hosts,
            rounds=parts.most,
            least=parts.least,
            grain=grain,
        )
        kept = self._kept(timing, line)
        self._review.plan = kept  # as it is measured now
        if not self._review.take(trained, hosts, plan, kept.seconds):
            plan = kept
        self.predicted, self._news = plan.seconds + self._rest, plan
        rounds = parts.rounds_of(plan)
        return rounds if rounds != parts.fragments else []

    def _measured(self) -> tuple[Timing, Line]:
        steps = self._spans
        slower = median(each.slower for each in steps)

        def middle(values: Sequence[Sequence[float]]) -> tuple[float, ...]:
            return tuple(slower * median(each) for each in zip(*values, strict=True))

        width = self._parts.width // 8
        timing = Timing(
            tuple(size * width for size in self._parts.sizes),
            middle([each.released for each in steps]),
            middle([each.needed for each in steps]),
            slower * median(each.backward for each in steps),
            slower * median(each.forward for each in steps),
        )
        self._rest = slower * median(each.rest for each in steps)
        total = sum(timing.nbytes)
        update = median(each.updating for each in steps) / total
        rounds = [(size * width, seconds) for each in steps for size, seconds in each.rounds]
        answer = median(each.answer for each in steps)
        return timing, _line(rounds, answer, update)

    def _kept(self, timing: Timing, line: Line) -> Plan:
        """The plan in force, by that measurement."""
        pieces = sorted(
            (piece for piece in self._parts.pieces if piece.missing),
            key=lambda piece: piece.here.start,
        )
        ends = [piece.here.stop * self._parts.width // 8 for piece in pieces]
        channels = tuple(piece.channel for piece in pieces)
        parts = need_first.parts_at(timing, ends)
        seconds = need_first.step_seconds(timing, line, parts, channels)
        single = need_first.step_seconds(timing, line, parts, (0,) * len(parts))
        return Plan(tuple(ends), channels, seconds, single)

    @property
    def described(self) -> str:
        """What was worked out last, for people; empty once it was asked for."""
        plan, self._news = self._news, None
        if plan is None or self.predicted is None:
            return ""
        shares = " ".join(f"{share:.0%}" for share in plan.shares)
        how = "one channel" if len(plan.shares) == 1 else f"{len(plan.shares)} channels"
        return (
            f"need first: {len(plan.ends)} rounds a step on {how} (bulk first, of the bytes: {shares}); a step should"
            f" take {self.predicted:.3f} s, and {plan.single + self._rest:.3f} s on one channel"
        )


def _line(rounds: Sequence[tuple[int, float]], answer: float, update: float) -> Line:
    """The line, by bytes and seconds of rounds from their closed lists on; `answer` comes before.

    Rounds of about the same size do not say what a round costs beside its bytes. Then the marks, which are what the
    offers were, are taken to take as long as these.
    """
    sizes = [nbytes for nbytes, _ in rounds]
    if max(sizes) > _UNEQUAL * min(sizes):
        line = Line.fitted(rounds)
        return Line(line.latency + answer, line.pace, update)
    whole = sum(max(0.0, seconds - answer) for _, seconds in rounds)
    return Line(2 * answer, whole / sum(sizes), update)


def _size(piece: Piece) -> int:
    return piece.here.stop - piece.here.start
