# SPDX-License-Identifier: Apache-2.0
"""What a reducer is: it hands weights to workers, and makes the mean of what they return (H1)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Protocol

from trainer.dbn.vectors import Mean, Means, Vector, ahead
from trainer.dbn.work import Frame, Task


class Reducer(Protocol):
    """What the master trains with."""

    def begin(self, frame: Frame) -> None:
        """A phase begins."""

    def epoch(self, phase: int, epoch: int, means: Means) -> tuple[Means, float]:
        """One pass over all data; the means after it, and the mean error of a sample.

        Raises:
            JobError: training diverges.
        """

    def close(self) -> None:
        """The workers are needed no more."""


class ByParts(ABC):
    """An epoch of as many parts as there are means in it."""

    frame: Frame

    @abstractmethod
    def reduce(self, task: Task, start: Vector) -> Mean:
        """All workers do their part of a task."""

    def epoch(self, phase: int, epoch: int, means: Means) -> tuple[Means, float]:
        """See `Reducer`."""
        settings, size = self.frame.settings, self.frame.form.size(phase)
        total = 0.0
        for part in range(settings.averages):
            start = ahead(means.last, means.previous, settings.momentum_of_master, size)
            found = self.reduce(Task(phase, epoch, part), start)
            means = Means(found.vector, means.last)
            total += found.error
        return means, total / settings.averages
