# SPDX-License-Identifier: Apache-2.0
"""A script's parts on their way, each on the channel of a group: on every channel in the same order at all ranks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from nicps.collective import Group
from nicps.collective.kinds import Array
from nicps.errors import UsageProblem
from nicps.torch.parts import Part

#: The group's channel of parts on channel 0 of the plan; before it there is that of all other calls.
FIRST = 1


class Times(NamedTuple):
    """Of one part, on the clock: this rank had offered it; all had; its mean was there."""

    offered: float
    listed: float
    done: float


class _Line:
    """Parts that go out one after the other. `passed`: so many have, in this step."""

    def __init__(self, indices: Sequence[int]) -> None:
        self.indices, self.passed = indices, 0
        self.busy = False


class Flowing:
    """The parts of one step after the other.

    Args:
        channels: of each part; 0 is bulk.
        lane: of `Group.average`.
        residuals: what rounding has left over so far, by parameter, as of a loss scale of 1; zeros for those that are
            not there.
        scale: the loss scale in force.
        serial: parts go out one after the other, each once the one before is a mean: from the rear to the front, at
            all ranks that do so. It may be changed at any time, and counts from the next step on.

    Attributes: `times`, of the parts of the last step; `numbers`, exchanged so far.
    """

    def __init__(
        self,
        group: Group,
        parts: Sequence[Part],
        channels: Sequence[int],
        lane: str,
        residuals: Mapping[str, Array],
        scale: Callable[[], float] = lambda: 1.0,
        *,
        serial: bool,
    ) -> None:
        self._group, self._parts, self._channels, self._lane = group, parts, channels, lane
        self.serial, self.times, self.numbers = serial, dict[int, Times](), 0
        self._residuals = [_gathered(part, residuals) for part in parts]
        self._scale, self._scaled = scale, 1.0  # the residuals' own
        self._lock = threading.RLock()
        self._moved = threading.Condition(self._lock)  # a part is a mean, and the next has gone out
        self._whole: dict[int, tuple[Array, Future[Any]]] = {}  # not gone out yet
        self._left = 0  # parts of this step that are not means yet
        self._given = 0  # parts of it that are whole
        self._in_series, self._cut_short = False, False
        self._lines: list[_Line] = []

    def residuals(self) -> dict[str, Array]:
        """What rounding has left over, by parameter, as of a loss scale of 1; between two steps."""
        found = {}
        self._rescale(1.0)
        for part, whole in zip(self._parts, self._residuals, strict=True):
            at = 0
            for name, parameter in zip(part.names, part.parameters, strict=True):
                found[name] = whole[at : at + parameter.numel()]
                at += parameter.numel()
        return found

    def offer(self, part: Part, vector: torch.Tensor) -> Future[Any]:
        """A part's gradients are whole: what `nicps.torch.pending.PendingSteps` offers.

        Raises:
            UsageProblem: the step was cut short (`settle`).
        """
        mean = Future[Any]()
        if not self._left:
            # Parts of another model that wait for their turn go first.
            for settle in tuple(self._group.before_all):
                settle()
        with self._lock:
            if self._cut_short:
                raise _unfinished()
            if not self._left:
                self._begin()
            self._given += 1
            self._whole[part.index] = vector.numpy(), mean
            for line in self._lines:
                if part.index in line.indices:
                    self._pass_on(line)
        return mean

    def settle(self) -> None:
        """Wait until all parts that are whole have gone out: a call on all channels, or the first part of another
        model's step, must come behind them at all ranks, and at this one they may go out one after the other.

        A step some of whose gradients are still to come is cut short, as its backward pass has failed, or goes on to
        another model: those of its parts that wait for one that is not whole would not be behind that call at all
        ranks.
        """
        self.cut_short()
        with self._moved:
            self._moved.wait_for(
                lambda: not (self._whole and any(line.busy for line in self._lines))
            )

    def cut_short(self) -> None:
        """Nothing more of a step goes out whose gradients are not all there.

        Parts whose turn has come on their channel do, as at ranks that let out no part after the other. The others
        fail.
        """
        with self._lock:
            if not self._left or self._given == len(self._parts):
                return
            self._cut_short = True
            if self._in_series:
                (line,) = self._lines
                self._in_series = False
                self._lines = self._by_channel(line.indices[line.passed :])
                for line in self._lines:
                    self._pass_on(line)
            stuck, self._whole = self._whole, {}
        for _, mean in stuck.values():
            mean.set_exception(_unfinished())

    def _begin(self) -> None:
        """A step begins."""
        self._rescale(float(self._scale()))
        self._left, self._given, self._in_series = len(self._parts), 0, self.serial
        self.times = {}
        rear_first = range(len(self._parts))[::-1]
        self._lines = [_Line(rear_first)] if self._in_series else self._by_channel(rear_first)

    def _by_channel(self, indices: Sequence[int]) -> list[_Line]:
        """These parts, in a line for each channel."""
        return [
            _Line([index for index in indices if self._channels[index] == channel])
            for channel in sorted(set(self._channels))
        ]

    def _rescale(self, scale: float) -> None:
        if scale != self._scaled:
            for residual in self._residuals:
                residual *= np.float32(scale / self._scaled)
            self._scaled = scale

    def _pass_on(self, line: _Line) -> None:
        """Let parts go out, as their turn has come."""
        while line.passed < len(line.indices) and not (self._in_series and line.busy):
            index = line.indices[line.passed]
            if index not in self._whole:
                return
            vector, mean = self._whole.pop(index)
            line.passed += 1
            try:
                future = self._group.average(
                    vector,
                    self._residuals[index],
                    lane=self._lane,
                    channel=FIRST + self._channels[index],
                )
            except BaseException as error:  # the group is closed
                mean.set_exception(error)
                continue
            line.busy = True
            future.add_done_callback(partial(self._done, line, index, mean))

    def _done(self, line: _Line, index: int, mean: Future[Any], future: Future[Any]) -> None:
        """In the thread of the channel."""
        error = future.exception()
        with self._lock:
            if error is None:
                spent, now = self._group.spent(FIRST + self._channels[index]), time.monotonic()
                listed = spent.began + spent.seconds_listed
                self.times[index] = Times(spent.began, listed, now)
                self.numbers += self._parts[index].size
            self._left -= 1
            line.busy = False
        if error is None:
            mean.set_result(None)
        else:
            mean.set_exception(error)
        with self._moved:
            self._pass_on(line)
            self._moved.notify_all()


def _unfinished() -> UsageProblem:
    return UsageProblem(
        "not all gradients of this step were there when another model with overlap, or a call of all ranks, began: a"
        " backward pass has failed, or goes through two models in turn: call backward() for each by itself, or wrap"
        " both in one DistributedDataParallel; after a failure close this handle"
    )


def _gathered(part: Part, residuals: Mapping[str, Array]) -> Array:
    """Those of the part's parameters in one piece."""
    whole, at = np.zeros(part.size, np.float32), 0
    for name, parameter in zip(part.names, part.parameters, strict=True):
        if name in residuals:
            whole[at : at + parameter.numel()] = residuals[name]
        at += parameter.numel()
    return whole
