# SPDX-License-Identifier: Apache-2.0
"""System R, the ring: all members add up their gradients round by round, and each makes the same step (R8, R12, R13).

After every committed round all members hold the same weights, bit for bit: the update is made of the exact sum, and of
nothing that depends on the member.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from nicps.client import Phase, Session
from nicps.errors import NonFinite
from trainer.decisions import Decisions
from trainer.errors import JobError
from trainer.exchange import exchanger_of
from trainer.journal import Journal
from trainer.metrics import save_gradients, sum_of
from trainer.share import Share

if TYPE_CHECKING:
    from trainer.training import Training


class Ring:
    """One member's rounds of training."""

    def __init__(
        self,
        session: Session,
        training: Training,
        share: Share,
        journal: Journal,
        decisions: Decisions,
        out: Path,
        clock: Callable[[], float],
    ) -> None:
        """Nothing is exchanged yet.

        Args:
            out: the folder for what this member leaves of the run.
        """
        self._session, self._training, self._model = session, training, training.model
        self._share, self._journal, self._decisions = share, journal, decisions
        self._out, self._clock = out, clock
        self._total = np.empty(self._model.lanes, np.float32)
        self._phase = Phase("none", 0, 0, ())
        self._exchanger = exchanger_of(session, training, share.finish, self._save, clock)
        journal.busy = lambda: self._exchanger.busy
        self._life = uuid.uuid4().hex  # of what rounding leaves over

    def ready(self, digest: str) -> None:
        """The model is built; `digest` as for `Session.ready`."""
        self._exchanger.ready(digest)

    def train(self, phase: Phase) -> None:
        """Rounds until the next decision."""
        self._phase = phase
        round_ = phase.first_round
        while round_:
            round_ = self._round(round_)

    def keep(self, save: Callable[[], None]) -> None:
        """R18: no majority is left, and this may be all that remains. What this member has offered stays as it is."""

        def keep() -> None:
            self._model.restore()  # its own forward passes have moved the buffers
            save()

        self._exchanger.aside(keep)

    def loaded(self) -> None:
        """Another member's state was taken over (R20): the residual is forgotten."""
        self._life = uuid.uuid4().hex

    def catch_up(self) -> None:
        """The weights are those of the last commit always."""

    def _round(self, round_: int) -> int:
        """One step, from that round on; the round after it, or 0 when the phase is over."""
        session, model, training = self._session, self._model, self._training
        share, start = self._share, self._clock()
        clipped = share.clipped
        try:
            samples, loss_sum = self._compute(round_)
            offered = self._clock()
            exchanged = self._exchanger.exchange(self._phase, round_, samples, self._total)
        except NonFinite as error:
            raise self._not_finite(round_, error.index) from None
        except BaseException:
            self._exchanger.give_up()
            raise
        self._journal.catch_up()
        if exchanged is None:
            model.restore()
            share.clipped = clipped  # that gradient is nobody's
            return 0
        commit, own, contribute, committed, divided = exchanged
        round_, summed = commit.round, self._clock()
        self._save(round_, own, **sum_of(commit, self._total))
        training.unit, before = commit.unit, training.state.round
        training.step(self._total, 1 if divided else commit.samples)
        session.applied(commit, training.digest())
        loss = loss_sum / samples if samples else None
        training.state = replace(
            training.state,
            loss=loss if loss is not None else training.state.loss,
            seconds=self._journal.seconds(summed),
        )
        test = self._decisions.is_test_due(before)
        goes_on = self._decisions.after_training(commit, test, self._clock() - start)
        end = self._clock()
        # What is neither converting, sending nor reading is waiting for the others.
        waiting = committed - offered - contribute
        waited = min(max(commit.seconds_waited - contribute, 0.0), waiting) if own else waiting
        self._journal.round(
            {
                "phase": "train",
                "round": round_,
                "loss": loss,
                "samples": commit.samples,
                "own_samples": own,
                "counted": {str(number): n for number, n in sorted(commit.counted.items())},
                "clipped": share.clipped,
                "saturated": session.saturated,
                "weights_sha256": model.sha256(),
                "seconds_compute": (offered - start) + (end - summed),
                "seconds_wait": waited,
                "seconds_network": summed - offered - waited,
                "t_start": start,
                "t_offer": offered,
                "t_commit": committed,
                "t_end": end,
            }
        )
        self._journal.report(round_, commit.samples, end - start, share.clipped)
        self._decisions.committed(commit, end)
        return round_ + 1 if goes_on else 0

    def _compute(self, round_: int) -> tuple[int, float]:
        """This member's gradient: samples done, and the sum of their losses."""
        exchanger, trained = self._exchanger, self._training.state.round

        def last() -> None:
            exchanger.begin(self._phase, round_)

        return self._share.compute(round_, trained, last, lambda: exchanger.busy)

    def _not_finite(self, round_: int, index: int) -> JobError:
        model = self._model
        return JobError(
            f"round {round_}: the gradient of {model.name_at(index)} is not finite "
            f"({model.vector[index]}); a smaller learning rate may help"
        )

    def _save(self, round_: int, samples: int, **sums: Any) -> None:
        """Keep the gradient, if the job says so; without `sums` the round is not committed yet."""
        if self._training.job.settings.save_gradients:
            values = {"vector": self._model.vector, "samples": samples}
            save_gradients(self._out, round_, self._life, self._session.number, **values, **sums)
