# SPDX-License-Identifier: Apache-2.0
"""When a script's steps are measured, and the shares that need first makes of them (P2; docs/channels.md).

The lowest rank measures `nicps.measuring.STEPS` steps, once more when the shares have settled, and then every hundred
steps. After them all ranks agree on what it proposes, at the end of the same step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from nicps import measuring
from nicps.measuring import SETTLED, Measured, Review, StepTimes
from nicps.need_first import MOST_ROUNDS, calibrated, plan_for
from nicps.torch.flowing import Times
from nicps.torch.guarded import WaitingHook
from nicps.torch.shares import Shares, least_parts

_FIRST = 2  # steps that are not measured: they have more to do than others
#: From this step on once more: by then as many steps as judge the shares were not measured.
_SECOND = _FIRST + measuring.STEPS + SETTLED + 4
_EVERY = 100  # steps from one measurement to the next


def _into(steps: int) -> int:
    """How many steps a measurement was due before; below 0: so many until one is."""
    return steps - _SECOND if _SECOND <= steps < _EVERY else steps % _EVERY - _FIRST


@dataclass(frozen=True, slots=True)
class Proposal:
    """Attributes:
    seconds: of a step, as predicted.
    """

    shares: Shares
    seconds: float


class Planner:
    """One rank's.

    Args:
        named: the parameters, in the order of need, of the module.
        width: bits of a number on the line.
        channels: at most so many.
        spent: seconds so far in which the script has waited for parts, and has updated them.
    """

    def __init__(
        self,
        named: Sequence[tuple[str, nn.Parameter]],
        module: nn.Module,
        width: int,
        channels: int,
        spent: Callable[[], tuple[float, float]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._sizes = [parameter.numel() for _, parameter in named]
        self._named, self._module, self._channels = named, module, channels
        self._spent, self._clock = spent, clock
        self._measured = Measured(self._sizes, width)
        self._review = Review()
        self._next = False  # the step that comes next is measured
        self._now = False  # the one that is under way
        self._fresh = False  # its next forward pass is the first one after `step()`
        self._in_forward = False
        self._before = (0.0, 0.0)  # `spent`, as that began
        self._begun: float | None = None  # when the last backward pass did
        self._times = StepTimes()  # of steps that were not measured
        self._needed: dict[int, float] = {}
        self._hooks: list[Any] = []

    # ---- when

    def agrees(self, steps: int) -> bool:
        """All ranks agree on shares after so many steps in parts."""
        return _into(steps) == measuring.STEPS + 1

    def step(self, steps: int, hosts: int, *, first: bool) -> bool:
        """A step was made. Whether the next one is measured here, so that its parts go out one after the other.

        Args:
            steps: in parts so far.
            hosts: ranks now.
            first: this is the lowest rank.
        """
        if self._times.follow(hosts):
            self._measured.clear()
        self._next = first and 0 <= _into(steps) < measuring.STEPS
        self._fresh = True
        if self._next and not self._hooks:
            self._watch()
        elif not (self._next or self._now):
            self.stop()
        return self._next

    def stop(self) -> None:
        """Nothing is measured any more."""
        self._measured.abandon()
        self._now = self._next = False
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _watch(self) -> None:
        """See when gradients are whole, and when parameters are used."""
        place = {id(parameter): at for at, (_, parameter) in enumerate(self._named)}
        for at, (_, parameter) in enumerate(self._named):
            note: Any = partial(self._note_gradient, at)
            self._hooks.append(parameter.register_post_accumulate_grad_hook(note))  # type: ignore[no-untyped-call]
        for module in self._module.modules():
            own = [place[id(each)] for each in module.parameters(False) if id(each) in place]
            if own:
                use = WaitingHook(partial(self._note_use, own))  # a copy of the module has none
                self._hooks.append(module.register_forward_pre_hook(use, prepend=True))

    # ---- what is measured

    def _note_gradient(self, at: int, _: nn.Parameter) -> None:
        self._measured.note_gradient(at, self._clock())

    def _note_use(self, own: Sequence[int], *_: Any) -> None:
        waited, updating = self._since()
        now = self._clock() - waited - updating
        for at in own:
            self._needed.setdefault(at, now)

    def _since(self) -> tuple[float, float]:
        """Seconds waited and updating since the forward pass has begun."""
        return tuple(n - b for n, b in zip(self._spent(), self._before, strict=True))  # type: ignore[return-value]

    def begin_forward(self) -> None:
        """A forward pass begins."""
        if self._fresh:
            self._fresh, self._in_forward = False, True
            self._before, self._needed = self._spent(), {}
            self._measured.begin_forward(self._clock())

    def end_forward(self, settle: Callable[[], Mapping[int, Times]], *, begins: bool) -> None:
        """It ends.

        Args:
            settle: waits for what is left of the step before, and gives the times of its parts.
            begins: the backward pass after it is the last one of its step.
        """
        if self._in_forward and self._now:
            times = settle()
            shares = [(self._part_sizes[index], each) for index, each in times.items()]
            self._measured.end_forward(self._clock(), *self._since(), dict(self._needed), shares)
        self._in_forward = False
        if begins:
            now = self._clock()
            if self._begun is not None and not self._now:
                self._times.note(now - self._begun)
            self._measured.begin_backward(now, measures=self._next)
            self._now, self._begun = self._next, now

    # ---- the plan

    def enter(self, shares: Shares) -> None:
        """These are in force."""
        self.stop()
        self._measured.clear()
        self._begun = None
        self._times.clear()
        self._part_sizes = shares.sizes(self._sizes)

    def propose(self, shares: Shares, steps: int, hosts: int) -> Proposal | None:
        """The shares that are best by what was measured; None: not enough was.

        Args:
            shares: in force.
            steps: in parts so far.
            hosts: ranks now.
        """
        if self._measured.steps < measuring.STEPS:
            return None
        timing, line, rest = self._measured.work_out()
        self._measured.clear()
        took = None
        if self._times.settled:
            took = self._times.middle - rest
            line = calibrated(timing, line, shares.parts(timing), shares.channels, took)
        elif self._review.plan is not None:  # ranks were lost, or came, a moment ago
            return None
        self._times.clear()
        count = min(self._channels, len(self._sizes))
        plan = plan_for(
            timing,
            line,
            channels=count,
            hosts=hosts,
            rounds=MOST_ROUNDS // count * count,
            least=least_parts(self._sizes, count),
            inside=False,
        )
        fresh = Shares.of(plan.ends, plan.channels, timing.nbytes)
        found, kept = fresh.predicted(timing, line), shares.predicted(timing, line)
        better = self._review.take(steps, hosts, found, kept, took)
        if better is not None:
            fresh = Shares.of(better.ends, better.channels, timing.nbytes)
            return Proposal(fresh, better.seconds + rest)
        return Proposal(shares, kept.seconds + rest)
