# SPDX-License-Identifier: Apache-2.0
"""What should come next (R14), and the checkpoints that the lead writes (R22)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from nicps.client import Commit, Session
from nicps.flows import ChannelPlan
from trainer.errors import JobError
from trainer.journal import Journal
from trainer.settings import State

if TYPE_CHECKING:
    from trainer.training import Training


class Foreseen(NamedTuple):
    """`ends`: training ends after a round, with a test. `test`: a test is due."""

    ends: bool
    test: bool


class Decisions:
    """One member's. Every member decides after every round; only the lead's word counts.

    Attributes: `untested`, whether a test has been due, as this member has counted, and has not come.
    """

    def __init__(
        self,
        session: Session,
        training: Training,
        journal: Journal,
        checkpoint: Path,
        clock: Callable[[], float],
    ) -> None:
        """Nothing is decided yet.

        Args:
            checkpoint: the file.
        """
        self._session, self._training, self._journal = session, training, journal
        self._path, self._clock = checkpoint, clock
        self._settings = training.job.settings
        self._saved_at = 0.0  # on the clock, when the last checkpoint was due
        self.untested = False

    def begin(self) -> None:
        """The first phase begins."""
        self._saved_at = self._clock()

    def after_training(
        self, commit: Commit, test: bool, seconds: float, plan: Sequence[ChannelPlan] = ()
    ) -> bool:
        """R14: test, or train on; whether to train on in the same phase. Without a word that counts all do.

        Args:
            test: whether that is due (`foresee`).
            seconds: that the round took.
            plan: another one of a step, if there is no test.
        """
        due, plan = self._is_due(seconds), () if test else plan
        what = "test" if test else "plan" if plan else "continue"
        more = {"plan": plan} if plan else {}
        counts = self._session.decide(commit.round, what, checkpoint=due, **more)
        return not ((test or plan) and counts)

    def is_test_due(self, before: int) -> bool:
        """Whether a test is due after the last round, where `before` rounds had been trained before it."""
        foreseen = self.foresee(before, self._training.state)
        self._training.finishing = foreseen.ends
        self.untested |= foreseen.test
        return foreseen.test

    def foresee(self, before: int, state: State) -> Foreseen:
        """What comes after a round, with that state: a test at every epoch's end and at the end.

        Args:
            before: so many rounds had been trained before.
        """
        ends = self._training.job.done(state, self._training.records)
        every = self._settings.rounds_between_tests(self._training.records)
        return Foreseen(ends, ends or state.round // every > before // every)

    def after_test(self, round_: int) -> None:
        """R14: the end, or more training."""
        training, self.untested = self._training, False
        ended = training.finishing or training.job.done(training.state, training.records)
        what = "end" if ended else "continue"
        self._session.decide(round_, what, checkpoint=self._is_due(0.0))

    def _is_due(self, seconds: float) -> bool:
        """Whether this member leads, and a checkpoint is due after another round, which takes so long."""
        every, since = self._settings.checkpoint_s, self._clock() - self._saved_at
        return bool(self._session.lead and every and since + seconds >= every)

    def committed(self, commit: Commit, now: float) -> None:
        """A round is whole here: the lead writes the checkpoint that all have heard of."""
        if commit.checkpoint and self._session.lead:
            self._saved_at = now
            self.checkpoint()

    def checkpoint(self) -> None:
        """Write one. Where it cannot be written, the former one stays."""
        error = ""
        try:
            self._training.save(self._path)
        except JobError as problem:
            error = str(problem)
            self._journal.warn(f"no checkpoint: {error}")
        self._session.checkpoint(self._training.state.round, error)
