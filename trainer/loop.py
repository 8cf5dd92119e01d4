# SPDX-License-Identifier: Apache-2.0
"""A member's training loop: R8 and R11 to R15, seen from the side that computes.

    train round   own share of the batch in micro-batches -> contribute -> commit -> sum -> step
    test round    own part of the test set -> tally
    node 1        decides after every round what comes next (R14)

After every committed round all members hold the same weights, bit for bit: the update is made of
the exact sum, and of nothing that depends on the member.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nicps.client import Commit, NonFinite, Session
from trainer import weights
from trainer.errors import JobError
from trainer.flat import FlatModel
from trainer.job import Job
from trainer.metrics import Metrics, save_gradients
from trainer.pace import Pace
from trainer.records import Order, Records, shard
from trainer.settings import State

MASK = 2**63 - 1


class Loop:
    """One member's training of one job.

    Attributes: `state`, how far it is.
    """

    def __init__(
        self,
        session: Session,
        job: Job,
        model: FlatModel,
        train: Records,
        test: Records,
        records: int,
        out: Path,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Build the optimizer; nothing runs yet.

        Args:
            session: attached; `ready` not called yet.
            model: with the weights that were handed out.
            train, test: this member's shards.
            records: training samples of all members together.
            out: folder for metrics.jsonl.
        """
        self.state = State()
        self._session = session
        self._job = job
        self._settings = job.settings
        self._model = model
        self._train = train
        self._test = test
        self._records = records
        self._out = out
        self._clock = clock
        self._optimizer = job.optimizer(model.trained)
        self._rounds = job.settings.planned_rounds(records)
        self._scheduler = job.scheduler(self._optimizer, self._rounds)
        # a batch is dealt out like the records are (equal shares)
        first, end = shard(job.settings.batch, session.number, session.members)
        self._share = end - first
        self._order = Order(len(train), job.settings.seed, session.number)
        self._pace = Pace(
            job.settings.microbatch_seconds,
            job.settings.slow.get(session.name, 1.0),
            clock,
            sleep,
            self._warn,
        )
        self._metrics = Metrics(out / "metrics.jsonl")
        self._total = np.empty(model.lanes, np.float32)
        self._began: float | None = None
        self._finishing = False

    def run(self) -> State:
        """Train until node 1 ends the job; returns the final state.

        Raises:
            JobError: this member cannot go on.
            nicps.client.JobAborted: another one cannot, or the user stopped the job.
        """
        if self._share and not len(self._train):
            raise JobError(
                f"member {self._session.number} has no training samples: the {self._records} in "
                f"the job's data are fewer than the {self._session.members} members"
            )
        digest = weights.model_digest(self._model.layout, self._model.arrays())
        self._session.ready(self._model.lanes, digest)
        with self._metrics:
            while (phase := self._session.next_phase()).kind != "end":
                self._began = self._clock() if self._began is None else self._began
                if phase.kind == "test":
                    self._test_round(phase.first_round)
                else:
                    round_ = phase.first_round
                    while self._train_round(round_):
                        round_ += 1
        return self.state

    # ---- training

    def _train_round(self, round_: int) -> bool:
        """One round; False when the phase is over."""
        session, model = self._session, self._model
        start = self._clock()
        samples, loss_sum = self._compute(round_)
        offered = self._clock()
        contribute, own = 0.0, 0
        if samples and not session.closed(round_):
            own = samples
            try:
                session.contribute(round_, model.finish(samples), samples)
            except NonFinite as error:
                raise JobError(
                    f"round {round_}: the gradient of {model.name_at(error.index)} is not finite "
                    f"({model.vector[error.index]}); a smaller learning rate may help"
                ) from None
            contribute = self._clock() - offered
        commit = session.wait_commit(round_, self._total)
        if commit is None:
            model.restore()
            return False
        committed = self._clock()
        total = session.sum(commit, self._total)
        summed = self._clock()
        if self._settings.save_gradients:
            save_gradients(self._out, commit, model.vector, total, own)
        self._step(commit, total)
        loss = loss_sum / samples if samples else None
        self.state = replace(
            self.state,
            # Where nobody was counted the weights stay, and the same samples come again.
            round=self.state.round + bool(commit.samples),
            epoch=(self.state.round + bool(commit.samples)) * self._settings.batch / self._records,
            loss=loss if loss is not None else self.state.loss,
            seconds=summed - (self._began or start),
        )
        end = self._clock()
        # What is neither converting, sending nor reading is waiting for the others.
        waiting = committed - offered - contribute
        waited = min(max(commit.seconds_waited - contribute, 0.0), waiting) if own else waiting
        self._metrics.round(
            {
                "phase": "train",
                "round": round_,
                "view": session.view,
                "loss": loss,
                "samples": commit.samples,
                "own_samples": own,
                "counted": {str(number): n for number, n in sorted(commit.counted.items())},
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
        self._report(round_, commit.samples, end - start)
        return self._decide_after_training(commit)

    def _compute(self, round_: int) -> tuple[int, float]:
        """Work the own share in micro-batches (R13): samples done, and the sum of their losses."""
        session, model, job = self._session, self._model, self._job
        share, parts = self._share, self._settings.micro_batches
        torch.manual_seed(_mix(self._settings.seed, session.number, self.state.round))
        model.begin()
        model.model.train()
        indices = self._order.take(self.state.round * share, share)
        done, loss_sum = 0, 0.0
        for part in range(1, parts + 1):
            begun = self._clock()
            end = share * part // parts
            if end == done:
                continue
            batch = _tensors(self._train, indices[done:end])
            loss = job.loss(model.model, batch)
            job.backward(loss * (end - done))  # the sum over the samples goes out, not the mean
            loss_sum += loss.item() * (end - done)
            done = end
            self._pace.keep(begun)
            session.progress(round_, done)
            if session.closed(round_):
                return done, loss_sum
            # Enough for the quorum: what the others have ready and counted, and this (R13).
            if self._settings.quorum < 1 and 0 < session.need(round_) <= done:
                break
        return done, loss_sum

    def _step(self, commit: Commit, total: Any) -> None:
        """R12: the optimizer's step along the mean over the counted samples."""
        if not commit.samples:
            self._model.restore()
            return
        self._model.apply(total, commit.samples)
        with self._job.blame("optimizer"):
            self._optimizer.step()
        if self._scheduler is not None:
            with self._job.blame("scheduler"):
                self._scheduler.step()

    # ---- testing

    def _test_round(self, round_: int) -> None:
        """R15: test the own part, tell how many succeeded and failed, learn how many did in all."""
        start = self._clock()
        self._model.model.eval()
        succeeded = failed = 0
        with torch.no_grad():
            for first in range(0, len(self._test), self._settings.test_batch):
                batch = _tensors(self._test, slice(first, first + self._settings.test_batch))
                counts = self._job.success(self._model.model, batch)
                succeeded, failed = succeeded + counts[0], failed + counts[1]
        self._model.restore()
        offered = self._clock()
        total_succeeded, total_failed = self._session.tally(round_, succeeded, failed)
        end = self._clock()
        accuracy = total_succeeded / max(1, total_succeeded + total_failed)
        best = max(accuracy, self.state.best or 0.0)
        self.state = replace(self.state, accuracy=accuracy, best=best)
        self._metrics.round(
            {
                "phase": "test",
                "round": round_,
                "trained_rounds": self.state.round,
                "view": self._session.view,
                "loss": None,
                "samples": total_succeeded + total_failed,
                "succeeded": total_succeeded,
                "failed": total_failed,
                "accuracy": accuracy,
                "weights_sha256": self._model.sha256(),
                "seconds_compute": offered - start,
                "seconds_wait": end - offered,
                "seconds_network": 0.0,
                "t_start": start,
                "t_offer": offered,
                "t_commit": end,
                "t_end": end,
            }
        )
        self._report(round_, 0, end - start)
        if self._session.number == 1:
            ended = self._finishing or self._job.done(self.state, self._records)
            self._session.decide(round_, "end" if ended else "continue")

    # ---- node 1, and who watches

    def _decide_after_training(self, commit: Commit) -> bool:
        """R14, node 1 only: test at every epoch's end and at the end; True to train on."""
        if self._session.number != 1:
            return True
        self._finishing = self._job.done(self.state, self._records)
        every = self._settings.rounds_between_tests(self._records)
        due = commit.samples > 0 and self.state.round % every == 0
        test = self._finishing or due
        self._session.decide(commit.round, "test" if test else "continue")
        return not test

    def _warn(self, message: str) -> None:
        print(f"trainer: warning: {message}", file=sys.stderr, flush=True)
        self._session.report({"warning": f"{self._session.name}: {message}"})

    def _report(self, round_: int, samples: int, seconds: float) -> None:
        state = self.state
        values = {
            "round": round_,
            "trained_rounds": state.round,
            "rounds_total": self._rounds,
            "epoch": state.epoch,
            "loss": state.loss if state.loss is None or math.isfinite(state.loss) else None,
            "accuracy": state.accuracy,
            "samples_per_second": samples / seconds if seconds else 0.0,
        }
        shares = self._metrics.shares(self._clock())
        if shares is not None:
            known = {key: value for key, value in values.items() if value is not None}
            self._session.report(known | shares)


def _tensors(records: Records, index: Any) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(array) for name, array in records.take(index).items()}


def _mix(*parts: int) -> int:
    """A seed out of several."""
    return int(np.random.SeedSequence(parts).generate_state(1, np.uint64)[0]) & MASK
