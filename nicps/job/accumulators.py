# SPDX-License-Identifier: Apache-2.0
"""Which accumulators of the kernel's a job uses: their size, and whether they are a hand-out's."""

from __future__ import annotations

from collections.abc import Callable

from nicps import wire
from nicps.job.actions import (
    BeginTask,
    DropAccumulators,
    RenewAccumulators,
    ReserveAccumulators,
    UseAccumulators,
)
from nicps.job.orders import Orders
from nicps.job.tasks import Tasks
from nicps.protocol import Phase


class Accumulators:
    """Those that are in use.

    A hand-out has its own, also where those of training have the size: a training program may still be reading the
    last sum there, or the disk the last window, when the next phase writes to that bank.
    """

    def __init__(self, tasks: Tasks, owner: object) -> None:
        self._tasks, self._owner = tasks, owner
        self.blocks = 0  # in a bank
        self._of_hand_out = False

    def fit(self, phase: Phase) -> bool:
        """Whether the phase can use them."""
        return not phase.blocks or (self.blocks, self._of_hand_out) == _needs(phase)

    def reserve(self, phase: Phase, then: Callable[[float, int], Orders]) -> BeginTask:
        """Make others for the phase; `then` takes their number."""
        return self._tasks.begin(self._owner, ReserveAccumulators(phase.blocks), then)

    def use(self, phase: Phase, number: int) -> Orders:
        """Those that were reserved come into use."""
        self.blocks, self._of_hand_out = _needs(phase)
        return [UseAccumulators(number)]

    def drop(self, number: int) -> Orders:
        """The phase that they were reserved for does not come."""
        return [DropAccumulators(number)]

    def renew(self, phase: Phase) -> Orders:
        """The phase goes on at once: others, where these do not fit."""
        if self.fit(phase):
            return []
        self.blocks, self._of_hand_out = _needs(phase)
        return [RenewAccumulators(phase.blocks)]


def _needs(phase: Phase) -> tuple[int, bool]:
    return phase.blocks, phase.kind is wire.PhaseKind.HANDOUT
