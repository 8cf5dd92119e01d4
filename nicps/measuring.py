# SPDX-License-Identifier: Apache-2.0
"""Times of training steps, as one member sees them, what follows from them for `nicps.need_first`, and whether its plan
replaces the one in force.

A step is measured from the beginning of one backward pass to that of the next. While a member measures it lets its
rounds out one after the other, so that each has the line alone: a round waits for the offers of all. docs/channels.md,
"Need first", has the figures.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from statistics import median
from typing import Protocol

from nicps.need_first import Line, Plan, Timing

#: So many steps are measured.
STEPS = 4
_NOISE = 0.1  # of a backward pass: a member that is later than that is slower
_UNEQUAL = (
    1.5  # largest to smallest round, from which on a line through them tells latency and pace apart
)
SETTLED = 20  # steps until a plan is judged
_LAST = 100  # steps, at most, whose median is a step's time
_REST = 100  # steps from one judgement to the next measurement
_OFF = 0.15  # a step this far from its prediction is measured again
_BETTER = 1.02  # by so much another plan must be better than the one in force


class Times(Protocol):
    """Of one round, on the clock: this member had offered; all had; its mean was there."""

    @property
    def offered(self) -> float: ...

    @property
    def listed(self) -> float: ...

    @property
    def done(self) -> float: ...


@dataclass(slots=True)
class _Step:
    """Times on the clock, and spans without what the thread that computes has waited and updated.

    Attributes: `made`, when each parameter's gradient was whole; `forward`, when the next forward pass began; `ended`,
    when that had ended and all was updated; `waited` and `updating` seconds in between; `needed`, after so many seconds
    of it each parameter was used first; `rounds`, numbers and times of each.
    """

    backward: float
    made: dict[int, float] = field(default_factory=dict)
    forward: float = 0.0
    ended: float = 0.0
    waited: float = 0.0
    updating: float = 0.0
    needed: Mapping[int, float] = field(default_factory=dict)
    rounds: Sequence[tuple[int, Times]] = ()


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


class Measured:
    """Steps that were measured.

    Args:
        sizes: numbers of each parameter, in the order of need.
        width: bits of a number on the line.
    """

    def __init__(self, sizes: Sequence[int], width: int) -> None:
        self._sizes, self._bytes = sizes, width // 8
        self._step: _Step | None = None
        self._spans: list[_Spans] = []

    @property
    def steps(self) -> int:
        """How many."""
        return len(self._spans)

    def clear(self) -> None:
        """Forget them."""
        self._spans.clear()

    def abandon(self) -> None:
        """The step that is being measured does not count."""
        self._step = None

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
        rounds: Sequence[tuple[int, Times]],
    ) -> None:
        """It has ended, and the step is settled.

        Args:
            needed: when each parameter was used first, on the clock, less what was waited and updated before.
            rounds: numbers and times of each.
        """
        step = self._step
        if step is not None and step.forward:
            step.ended, step.waited, step.updating = now, waited, updating
            step.needed, step.rounds = needed, rounds

    def _spans_of(self, step: _Step, now: float) -> _Spans:
        count, begun = len(self._sizes), step.backward
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
            tuple((size, times.done - times.listed) for size, times in step.rounds),
            answer,
            max(late, default=1.0),
        )

    def work_out(self) -> tuple[Timing, Line, float]:
        """The model's times, those of rounds, and the seconds of a step that are in neither of its passes."""
        steps = self._spans
        slower = median(each.slower for each in steps)

        def middle(values: Sequence[Sequence[float]]) -> tuple[float, ...]:
            return tuple(slower * median(each) for each in zip(*values, strict=True))

        timing = Timing(
            tuple(size * self._bytes for size in self._sizes),
            middle([each.released for each in steps]),
            middle([each.needed for each in steps]),
            slower * median(each.backward for each in steps),
            slower * median(each.forward for each in steps),
        )
        rest = slower * median(each.rest for each in steps)
        update = median(each.updating for each in steps) / sum(timing.nbytes)
        rounds = [(size * self._bytes, seconds) for each in steps for size, seconds in each.rounds]
        answer = median(each.answer for each in steps)
        return timing, _line(rounds, answer, update), rest


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


class StepTimes:
    """How long the last steps took, with the same parts and as many members."""

    def __init__(self) -> None:
        self._seconds: deque[float] = deque(maxlen=_LAST)
        self._hosts = 0

    def __len__(self) -> int:
        return len(self._seconds)

    def note(self, seconds: float) -> None:
        """A step took so long."""
        self._seconds.append(seconds)

    def clear(self) -> None:
        """Other parts are in force."""
        self._seconds.clear()

    def follow(self, hosts: int) -> bool:
        """So many members there are now. Whether there were others before, so that what was measured does not count."""
        changed = self._hosts not in (0, hosts)
        if changed:
            self.clear()
        self._hosts = hosts
        return changed

    @property
    def middle(self) -> float:
        """Their median, in seconds."""
        return median(self._seconds)

    @property
    def settled(self) -> bool:
        """A plan can be judged by them."""
        return len(self) >= SETTLED


@dataclass(slots=True)
class Review:
    """When the lead measures again, and whether another plan takes the place of the one in force.

    Attributes: `plan`, None before there is one; `hosts`, that it was made for; `judged`, the step of the last
    measurement at which it was known how long its steps take; `seen`, plans that were in force, with the seconds that
    their steps took.
    """

    plan: Plan | None = None
    hosts: int = 0
    judged: int | None = None
    seen: dict[tuple[Sequence[int], ...], Plan] = field(default_factory=dict)

    def asks(self, step: int, hosts: int, seconds: float) -> bool:
        """Whether to measure from this step on.

        Args:
            hosts: members now.
            seconds: of a step, the median since the plan is in force.
        """
        if self.plan is None:
            return True
        if self.judged is not None and step - self.judged < _REST:
            return False
        off = abs(seconds - self.plan.seconds) > _OFF * self.plan.seconds
        others = (plan for plan in self.seen.values() if plan.rounds != self.plan.rounds)
        worse = any(seconds > plan.seconds * _BETTER for plan in others)
        return off or worse or hosts != self.hosts

    def take(
        self, step: int, hosts: int, fresh: Plan, kept: Plan, took: float | None = None
    ) -> Plan | None:
        """The plan that replaces the one in force, or None: a plan made from a measurement at this step, or one of
        those that were in force before.

        Args:
            fresh: the plan of the measurement; `kept`, the plan in force, as predicted by the same measurement.
            took: seconds of a step with the plan in force, the median; None: it is not known yet.
        """
        before = self.seen.get(kept.rounds)
        if hosts != self.hosts or (
            took and before and abs(took - before.seconds) > _OFF * before.seconds
        ):
            self.seen.clear()  # of other conditions
        self.plan, self.hosts = kept, hosts
        if took:
            self.judged = step
            self.plan = self.seen[kept.rounds] = replace(kept, seconds=took)
        best = min(
            (self.seen.get(fresh.rounds, fresh), *self.seen.values()), key=lambda plan: plan.seconds
        )
        if self.plan.seconds < best.seconds * _BETTER:
            return None
        self.plan = best
        return best
