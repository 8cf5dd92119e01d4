# SPDX-License-Identifier: Apache-2.0
"""How a member's gradient becomes the sum over all: whole in one round, as factors, or in buckets (docs/jobs.md).

By a plan, on several channels: `trainer.flows`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from nicps.client import Phase, Session
from nicps.errors import NonFinite
from nicps.steps import Step, StepEnded
from trainer.buckets import Buckets, Overlap
from trainer.exchanger import Exchanged, Exchanger
from trainer.flows import InFlows

if TYPE_CHECKING:
    from trainer.factors import Factors
    from trainer.flat import F32
    from trainer.training import Training

Clock = Callable[[], float]
Finish = Callable[[int], "F32"]  # what the member contributes, of so many samples
Save = Callable[[int, int], None]  # that, of a round and so many samples


class Whole:
    """One round a step; with a quorum below 1 it may close without this member (R13)."""

    busy = False

    def __init__(
        self, session: Session, training: Training, finish: Finish, save: Save, clock: Clock
    ) -> None:
        self._session, self._lanes = session, training.model.lanes
        self._finish, self._save, self._clock = finish, save, clock

    def ready(self, digest: str) -> None:
        """As `Exchanger`."""
        self._session.ready(self._lanes, digest)

    def begin(self, phase: Phase, round_: int) -> None:
        """Nothing goes out before the gradient is whole."""

    def exchange(self, phase: Phase, round_: int, samples: int, out: F32) -> Exchanged | None:
        """As `Exchanger`."""
        session, offered = self._session, self._clock()
        contribute, own = 0.0, 0
        if samples and not session.closed(round_):
            own, vector = samples, self._finish(samples)
            self._save(round_, samples)  # counted it may be even if this member dies
            session.contribute(round_, vector, samples)
            contribute = self._clock() - offered
        commit = session.wait_commit(round_, out)
        if commit is None:
            return None
        committed = self._clock()
        session.sum(commit, out)
        return Exchanged(commit, own, contribute, committed)

    def aside(self, work: Callable[[], None]) -> None:
        """As `Exchanger`."""
        work()

    def give_up(self) -> None:
        """Nothing is under way."""


class AsFactors:
    """Two rounds a step or more, with all members, once the gradient is whole."""

    busy = False

    def __init__(self, session: Session, factors: Factors, finish: Finish, clock: Clock) -> None:
        self._session, self._factors = session, factors
        self._finish, self._clock = finish, clock

    def ready(self, digest: str) -> None:
        """As `Exchanger`."""
        factors = self._factors
        self._session.ready(factors.room, digest, residual=factors.error, settle=factors.settle)

    def begin(self, phase: Phase, round_: int) -> None:
        """Nothing goes out before the gradient is whole."""

    def exchange(self, phase: Phase, round_: int, samples: int, out: F32) -> Exchanged | None:
        """As `Exchanger`."""
        step = Step(self._session, phase, round_, self._factors.room)
        vector = self._finish(samples)
        finite = np.isfinite(vector)
        if not finite.all():
            index = int(np.argmin(finite))
            raise NonFinite(index, float(vector[index]))
        try:
            self._factors.exchange(vector, out, step.add)
        except StepEnded:
            return None
        assert step.commit is not None
        return Exchanged(step.commit, samples, 0.0, self._clock())

    def aside(self, work: Callable[[], None]) -> None:
        """As `Exchanger`."""
        work()

    def give_up(self) -> None:
        """Nothing is under way."""


class InBuckets:
    """A round a bucket or more, with all members. Buckets go out in a thread while backward makes those after them."""

    def __init__(
        self, session: Session, training: Training, buckets: Buckets, finish: Finish, clock: Clock
    ) -> None:
        self._session, self._model, self._buckets = session, training.model, buckets
        self._finish, self._clock = finish, clock
        self._overlap: Overlap | None = None

    @property
    def busy(self) -> bool:
        """As `Exchanger`."""
        return self._overlap is not None

    def ready(self, digest: str) -> None:
        """As `Exchanger`."""
        self._model.on_gradient(self._note_gradient)
        self._session.ready(self._buckets.room, digest, residual=self._buckets.residual)

    def begin(self, phase: Phase, round_: int) -> None:
        """As `Exchanger`."""
        buckets = self._buckets
        step = Step(self._session, phase, round_, buckets.room, buckets.width)
        self._overlap = Overlap(buckets, self._model.vector, step)

    def _note_gradient(self, parameter: int) -> None:
        if self._overlap is not None:
            self._overlap.note_gradient(parameter)

    def exchange(self, phase: Phase, round_: int, samples: int, out: F32) -> Exchanged | None:
        """As `Exchanger`."""
        overlap = self._overlap
        if overlap is None:  # called away before the last micro-batch
            self._session.wait_commit(round_)
            return None
        try:
            vector = self._finish(samples)
            overlap.finish()
        except StepEnded:
            return None
        except BaseException:
            overlap.give_up()
            raise
        finally:
            self._overlap = None
        assert overlap.step.commit is not None
        np.copyto(out, vector)
        return Exchanged(overlap.step.commit, samples, 0.0, self._clock(), divided=True)

    def aside(self, work: Callable[[], None]) -> None:
        """As `Exchanger`. Backward may be under way."""
        if self._overlap is not None:
            self._overlap.aside(work)
        else:
            work()

    def give_up(self) -> None:
        """As `Exchanger`."""
        if self._overlap is not None:
            self._overlap.give_up()


def exchanger_of(
    session: Session,
    training: Training,
    finish: Finish,
    save: Save,
    clock: Clock = time.monotonic,
) -> Exchanger:
    """The one that the job's settings ask for.

    Args:
        finish: the member's vector of so many samples, float32 (lanes,).
        save: keeps it, of that round and so many samples, if the job says so.
    """
    if training.factors is not None:
        return AsFactors(session, training.factors, finish, clock)
    if training.buckets is not None:
        return InBuckets(session, training, training.buckets, finish, clock)
    if training.parts is not None:
        together = training.job.settings.priority_scope != "queue"
        of = session, training.model, training.parts, finish
        return InFlows(*of, together=together, clock=clock)
    return Whole(session, training, finish, save, clock)
