# SPDX-License-Identifier: Apache-2.0
"""What a member says of its training: metrics.jsonl, trackers, live progress, warnings."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from nicps.client import Session
from trainer.metrics import Metrics, Steps
from trainer.trackers import Trackers

if TYPE_CHECKING:
    from trainer.training import Training


class Journal:
    """One member's, of one job.

    Attributes: `steps`, what came of them in time; `began`, on the clock, when `State.seconds` was 0, or None before
    the first phase; `busy`, whether the session is another thread's: no message may be sent.
    """

    def __init__(
        self, session: Session, training: Training, out: Path, clock: Callable[[], float]
    ) -> None:
        """Nothing is written yet.

        Args:
            out: the folder for what this member leaves of the run.
        """
        self._session, self._training, self._clock = session, training, clock
        self._settings = training.job.settings
        self._metrics = Metrics(out / "metrics.jsonl")
        self._trackers = Trackers(self._settings, training.job.name, out, self.warn)
        self._late: list[str] = []
        self.began: float | None = None
        self.steps = Steps()
        self.busy: Callable[[], bool] = lambda: False

    def __enter__(self) -> Self:
        self._metrics.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._trackers.close()
        self._metrics.__exit__(kind, error, trace)

    def begin(self) -> None:
        """The state is what it is now, and time goes on from there."""
        self.began = self._clock() - self._training.state.seconds

    def seconds(self, now: float) -> float:
        """`State.seconds` at that time on the clock."""
        return now - (self.began or 0.0)

    def round(self, values: Mapping[str, Any], *, step: bool = True) -> None:
        """Write a row of metrics.jsonl, with what is the same in all of them.

        Args:
            step: whether this member has trained in it, if it is one of training.

        Raises:
            JobError: the disk is full, or gone.
        """
        state = self._training.state
        common = {"trained_rounds": state.round, "view": self._session.view}
        self._metrics.round(values | common)
        if step and values["phase"] != "test":
            self.steps.note(values)

    def report(
        self, round_: int, samples: int, seconds: float, clipped: int, *, tested: bool = False
    ) -> None:
        """Tell how far training is, if that has not been told just now.

        Args:
            samples: that were counted in the last round, which took so many `seconds`.
            clipped: of this member's gradients so far.
            tested: it was a test.
        """
        state, planned = self._training.state, self._training.rounds
        values = {
            "round": round_,
            # With servers the last synchronisation may have more pushes than were planned.
            "trained_rounds": state.round if planned is None else min(state.round, planned),
            "rounds_total": planned,
            "epoch": state.epoch,
            "loss": state.loss if state.loss is None or math.isfinite(state.loss) else None,
            "accuracy": state.accuracy,
            "clipped": clipped if self._settings.clip is not None else None,
            "samples_per_second": samples / seconds if seconds else 0.0,
        }
        shares = self._metrics.shares(self._clock())
        if shares is not None:
            if self.steps.planned:
                values |= self.steps.lately
            known = {key: value for key, value in values.items() if value is not None}
            self._session.report(known | shares)
            if self._session.lead:
                figures = {"accuracy": state.accuracy, "test_seconds": seconds}
                if not tested:
                    figures = {key: values[key] for key in ("loss", "epoch", "samples_per_second")}
                    figures |= shares | {"samples": samples, "round_seconds": seconds}
                self._trackers.log(state.round, figures)

    def note(self, message: str) -> None:
        """Put it into this host's log."""
        if message:
            print(f"trainer: {message}", file=sys.stderr, flush=True)

    def warn(self, message: str) -> None:
        """Say it, and tell the agent, or do so in `catch_up` where that cannot be now."""
        print(f"trainer: warning: {message}", file=sys.stderr, flush=True)
        if self.busy():
            self._late.append(message)
        else:
            self._session.report({"warning": message})

    def catch_up(self) -> None:
        """Tell what was to be told while the session was another thread's."""
        while self._late:
            self._session.report({"warning": self._late.pop(0)})
