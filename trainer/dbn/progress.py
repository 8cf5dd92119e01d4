# SPDX-License-Identifier: Apache-2.0
"""A line an epoch, with the time that is left."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

from trainer.dbn.settings import Settings
from trainer.dbn.work import SEARCHES, Form


def costs(settings: Settings, form: Form) -> list[tuple[int, float]]:
    """Of each phase the number of epochs, and what an epoch costs: multiplications for a sample.

    One of fine-tuning takes about a third longer than one of an RBM, and a line search is about two passes.
    """
    sizes = [form.pixels, *form.layers]
    pairs = [a * b for a, b in pairwise(sizes)]
    below = [sum(pairs[:at]) for at in range(len(pairs))]
    found = [
        (settings.epochs, (3.0 + 2.0 * settings.cd) * pair + under)
        for pair, under in zip(pairs, below, strict=True)
    ]
    passes = 2.0 * SEARCHES if settings.optimizer == "cg" else 1.0
    return [*found, (settings.finetune, 4.0 * passes * (sum(pairs) + sizes[-1] * form.classes))]


class Progress:
    """Says how far a run is; the time left is worked out from what the epochs of this process took."""

    def __init__(self, settings: Settings, form: Form, say: Callable[[str], None]) -> None:
        self._plan = costs(settings, form)
        self._say = say
        self._seconds = 0.0
        self._work = 0.0

    def epoch(self, row: dict[str, Any]) -> None:
        """An epoch is over."""
        phase, epoch = row["phase"], row["epoch"]
        self._seconds += row["seconds"]
        self._work += self._plan[phase][1]
        left = (self._plan[phase][0] - epoch) * self._plan[phase][1]
        left += sum(epochs * cost for epochs, cost in self._plan[phase + 1 :])
        seconds = left * self._seconds / self._work
        last = len(self._plan) - 1
        name = "fine-tuning" if phase == last else f"layer {phase + 1}/{last}"
        found = (
            f"loss {row['loss']:.4f}  {judged(row).replace('_', ' ')} {row[judged(row)]:.2%}"
            if phase == last
            else f"reconstruction error {row['error']:.3f}"
        )
        self._say(
            f"{name}  epoch {epoch}/{self._plan[phase][0]}  {found}  {row['seconds']:.1f} s  {duration(seconds)} left"
        )


def judged(row: dict[str, Any]) -> str:
    """Which error of the classifier a row of fine-tuning has."""
    return next(name for name in ("validation_error", "test_error") if name in row)


def duration(seconds: float) -> str:
    """Short: 42 s, 3 min 20 s, 1 h 05 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02} min"
