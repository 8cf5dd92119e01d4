# SPDX-License-Identifier: Apache-2.0
"""A member's training loop: R11 to R15 and R20 to R22, seen from the side that computes.

    train   as the job's system has it: `trainer.ring` (R), `trainer.served` (S, B)
    test    own part of the test set -> tally
    save    write everything that another member needs to go on
    load    go on from what another member has saved

After every committed round all members hold the same weights, bit for bit. After every round each of them says what
should come next (R14); only the lead's word counts.

The loop itself knows NumPy arrays only: what computes with them is `Training`.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from nicps.client import Phase, Session
from trainer import weights
from trainer.decisions import Decisions
from trainer.errors import JobError
from trainer.journal import Journal
from trainer.records import Place, Records
from trainer.ring import Ring
from trainer.served import Served
from trainer.settings import State
from trainer.share import Share

if TYPE_CHECKING:
    from trainer.training import Training

STATE = "state.npz"  # between members
CHECKPOINT = "checkpoint.npz"  # for after an alarm
#: Phases that begin with the state of the last commit.
_OF_COMMITS = ("test", "save", "end")


class System(Protocol):
    """How members train."""

    def ready(self, digest: str) -> None:
        """The model is built; `digest` as for `Session.ready`."""

    def train(self, phase: Phase) -> None:
        """Rounds until the next decision."""

    def catch_up(self) -> None:
        """Take the state of the last commit, before it is tested or saved. Servers still answer pulls meanwhile."""

    def keep(self, save: Callable[[], None]) -> None:
        """R18: no majority is left: save the state of the last commit while this member waits, and go on as before."""

    def loaded(self) -> None:
        """Another member's state was taken over (R20)."""


class Loop:
    """One member's training of one job."""

    def __init__(
        self,
        session: Session,
        training: Training,
        train: Records,
        test: Records,
        workdir: Path,
        orders: Sequence[Sequence[str]] = (),
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        *,
        ahead: bool = False,
    ) -> None:
        """Nothing runs yet.

        Args:
            session: attached; `ready` not called yet.
            training: as it was handed out.
            train, test: the records that this host has: all of them, or with `redeal=False` its own part.
            workdir: where states and checkpoints are, and out/metrics.jsonl.
            orders: of computing, as in prepared.json (B3).
            ahead: with servers and without partners, steps may be computed while their parameters arrive.
        """
        self._session, self._training, self._test = session, training, test
        self._settings = training.job.settings
        self._workdir, self._clock = workdir, clock
        out = workdir / "out"
        self._journal = Journal(session, training, out, clock)
        self._share = Share(session, training, train, self._journal.warn, clock, sleep)
        checkpoint = workdir / CHECKPOINT
        self._decisions = Decisions(session, training, self._journal, checkpoint, clock)
        parts = session, training, self._share, self._journal, self._decisions
        self._system: System
        if not self._settings.served:
            self._system = Ring(*parts, out, clock)
        elif self._settings.packed or ahead:
            partnered = importlib.import_module("trainer.partnered")  # with PyTorch
            ahead = partial(partnered.Ahead, training, self._share, orders, clock)
            self._system = Served(*parts, clock, ahead)
        else:
            self._system = Served(*parts, clock)
        session.on_keep = lambda: self._system.keep(self._decisions.checkpoint)
        session.on_phase = self._leave

    @property
    def figures(self) -> dict[str, Any]:
        """As `trainer.metrics.Steps` has them."""
        return self._journal.steps.figures

    def run(self) -> State:
        """Train until the lead ends the job; returns the final state.

        Raises:
            JobError: this member cannot go on.
            nicps.client.JobAborted: another one cannot, or the user stopped the job.
        """
        training = self._training
        self._system.ready(weights.model_digest(training.model.layout, training.digest()))
        kinds = {
            "train": self._train_phase,
            "test": self._test_round,
            "save": self._save_phase,
            "load": self._load_phase,
        }
        with self._journal:
            while (phase := self._session.next_phase()).kind != "end":
                if self._journal.began is None:
                    self._journal.begin()
                    self._decisions.begin()
                kinds[phase.kind](phase)
            if self._session.lead and self._settings.checkpoint_s:
                self._decisions.checkpoint()
        return training.state

    def _leave(self, kind: str) -> None:
        """The session calls this before a phase of that kind begins."""
        if kind in _OF_COMMITS:
            self._system.catch_up()

    def _train_phase(self, phase: Phase) -> None:
        """Rounds until the next decision, on the part of the data that is now this member's (R6, R21)."""
        self._share.enter(phase)
        self._system.train(phase)

    def _test_round(self, phase: Phase) -> None:
        """R15: test the own part, tell how many succeeded and failed, learn how many did in all."""
        session, model, training = self._session, self._training.model, self._training
        round_, start = phase.first_round, self._clock()
        part = self._share.part_of(self._test, Place.of(session.number, phase.shares))
        succeeded = failed = 0
        for counts in training.test(part.batches(self._settings.test_batch)):
            succeeded, failed = succeeded + counts[0], failed + counts[1]
            session.alive()
        model.restore()
        offered = self._clock()
        totals = session.tally(round_, succeeded, failed)
        if totals is None:
            return
        end = self._clock()
        accuracy = totals[0] / max(1, sum(totals))
        best = max(accuracy, training.state.best or 0.0)
        training.state = replace(training.state, accuracy=accuracy, best=best)
        self._decisions.after_test(round_)
        self._journal.round(
            {
                "phase": "test",
                "round": round_,
                "loss": None,
                "samples": sum(totals),
                "succeeded": totals[0],
                "failed": totals[1],
                "accuracy": accuracy,
                "weights_sha256": model.sha256(),
                "seconds_compute": offered - start,
                "seconds_wait": end - offered,
                "seconds_network": 0.0,
                "t_start": start,
                "t_offer": offered,
                "t_commit": end,
                "t_end": end,
            }
        )
        self._journal.report(round_, 0, end - start, self._share.clipped, tested=True)

    def _save_phase(self, phase: Phase) -> None:
        """R20: the state for a member that comes back; without it that member cannot, but the others go on."""
        training, error = self._training, ""
        try:
            training.save(self._workdir / STATE)
        except JobError as problem:
            error = str(problem)
            self._journal.warn(error)
        self._session.saved(phase.number, training.state.round, training.digest(), error)

    def _load_phase(self, phase: Phase) -> None:
        """R20: go on from another member's state. The digest shows whether this one has it."""
        training = self._training
        try:
            training.load(self._workdir / STATE)
        except JobError as problem:
            self._journal.warn(str(problem))
        self._journal.begin()
        self._session.loaded(phase.number, training.digest())
        self._system.loaded()
