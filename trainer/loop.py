# SPDX-License-Identifier: Apache-2.0
"""A member's training loop: R8, R11 to R15 and R20 to R22, seen from the side that computes.

    train   own share of the batch in micro-batches -> contribute -> commit -> sum -> step -> digest
    test    own part of the test set -> tally
    save    write everything that another member needs to go on
    load    go on from what another member has saved

After every committed round all members hold the same weights, bit for bit: the update is made of the exact sum, and of
nothing that depends on the member. After every round each of them says what should come next (R14); only the lead's
word counts.

The loop itself knows NumPy arrays only: what computes with them is `Training`.
"""

from __future__ import annotations

import contextlib
import math
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from nicps.client import Commit, Phase, Session
from nicps.errors import NonFinite
from trainer import weights
from trainer.errors import JobError
from trainer.exchange import exchanger_of
from trainer.metrics import Metrics, save_gradients, sum_of
from trainer.pace import Pace
from trainer.records import Part, Place, Records
from trainer.settings import State
from trainer.trackers import Trackers

if TYPE_CHECKING:
    from trainer.flat import F32
    from trainer.training import Training

STATE = "state.npz"  # between members
CHECKPOINT = "checkpoint.npz"  # for after an alarm
MASK = 2**63 - 1


class Loop:
    """One member's training of one job."""

    def __init__(
        self,
        session: Session,
        training: Training,
        train: Records,
        test: Records,
        workdir: Path,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Nothing runs yet.

        Args:
            session: attached; `ready` not called yet.
            training: as it was handed out.
            train, test: the records that this host has: all of them, or with `redeal=False` its own part.
            workdir: where states and checkpoints are, and out/metrics.jsonl.
        """
        self._session = session
        session.on_keep = self._keep
        self._training = training
        self._job = training.job
        self._settings = training.job.settings
        self._model = training.model
        self._train, self._test = train, test
        self._workdir = workdir
        self._clock = clock
        self._pace = Pace(
            self._settings.microbatch_seconds,
            self._settings.slow.get(session.name, 1.0),
            clock,
            sleep,
            self._warn,
        )
        out = workdir / "out"
        self._metrics = Metrics(out / "metrics.jsonl")
        self._trackers = Trackers(self._settings, self._job.name, out, self._warn)
        self._total = np.empty(self._model.lanes, np.float32)
        self._phase = Phase("none", 0, 0, ())
        self._exchanger = exchanger_of(
            session, training, self._finished, self._save_gradients, clock
        )
        self._late_warnings: list[str] = []
        self._place = Place(0, 0, 0)
        self._part = Part(train, self._place, None, 0)
        self._began: float | None = None  # on the clock, when State.seconds was 0
        self._saved_at: float | None = None  # on the clock, when the last checkpoint was due
        self._clipped = 0
        self._life = uuid.uuid4().hex  # of what rounding leaves over

    def run(self) -> State:
        """Train until the lead ends the job; returns the final state.

        Raises:
            JobError: this member cannot go on.
            nicps.client.JobAborted: another one cannot, or the user stopped the job.
        """
        digest = weights.model_digest(self._model.layout, self._training.digest())
        self._exchanger.ready(digest)
        kinds = {
            "train": self._train_phase,
            "test": self._test_round,
            "save": self._save_phase,
            "load": self._load_phase,
        }
        with self._metrics, contextlib.closing(self._trackers):
            while (phase := self._session.next_phase()).kind != "end":
                if self._began is None:
                    self._began = self._clock() - self._training.state.seconds
                    self._saved_at = self._clock()
                kinds[phase.kind](phase)
            if self._session.lead and self._settings.checkpoint_s:
                self._checkpoint()
        return self._training.state

    # ---- training

    def _train_phase(self, phase: Phase) -> None:
        """Rounds until the next decision, on the part of the data that is now this member's (R6, R21)."""
        session, place = self._session, Place.of(self._session.number, phase.shares)
        self._phase = phase
        if place != self._place:
            self._place = place
            self._part = self._part_of(self._train, place)
        if place.share and not len(self._part):
            raise JobError(
                f"member {session.number} has no training samples: the {self._training.records} in "
                f"the job's data are fewer than the {place.count} members"
            )
        round_ = phase.first_round
        while round_:
            round_ = self._train_round(round_)

    def _part_of(self, records: Records, place: Place) -> Part:
        number = None if self._settings.redeal else self._session.number
        return Part(records, place, number, self._settings.seed)

    def _train_round(self, round_: int) -> int:
        """One step, from that round on; the round after it, or 0 when the phase is over."""
        session, model, training = self._session, self._model, self._training
        start, clipped = self._clock(), self._clipped
        try:
            samples, loss_sum = self._compute(round_)
            offered = self._clock()
            exchanged = self._exchanger.exchange(self._phase, round_, samples, self._total)
        except NonFinite as error:
            raise self._not_finite(round_, error.index) from None
        except BaseException:
            self._exchanger.give_up()
            raise
        self._say_late_warnings()
        if exchanged is None:
            model.restore()
            self._clipped = clipped  # that gradient is nobody's
            return 0
        commit, own, contribute, committed, divided = exchanged
        round_, summed = commit.round, self._clock()
        self._save_gradients(round_, own, **sum_of(commit, self._total))
        training.unit = commit.unit
        training.step(self._total, 1 if divided else commit.samples)
        session.applied(commit, training.digest())
        loss = loss_sum / samples if samples else None
        training.state = replace(
            training.state,
            loss=loss if loss is not None else training.state.loss,
            seconds=summed - (self._began or 0.0),
        )
        goes_on = self._decide_after_training(commit, self._clock() - start)
        end = self._clock()
        # What is neither converting, sending nor reading is waiting for the others.
        waiting = committed - offered - contribute
        waited = min(max(commit.seconds_waited - contribute, 0.0), waiting) if own else waiting
        self._metrics.round(
            {
                "phase": "train",
                "round": round_,
                "trained_rounds": training.state.round,
                "view": session.view,
                "loss": loss,
                "samples": commit.samples,
                "own_samples": own,
                "counted": {str(number): n for number, n in sorted(commit.counted.items())},
                "clipped": self._clipped,
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
        self._report(round_, commit.samples, end - start)
        if commit.checkpoint and session.lead:
            self._saved_at = end
            self._checkpoint()
        return round_ + 1 if goes_on else 0

    def _compute(self, round_: int) -> tuple[int, float]:
        """Work the own share in micro-batches (R13): samples done, and the sum of their losses."""
        session, training = self._session, self._training
        share, parts = self._place.share, self._settings.micro_batches
        trained = training.state.round
        training.begin(_mix(self._settings.seed, session.number, trained))
        indices = self._part.indices(trained * share, share)
        done, loss_sum = 0, 0.0
        for part in range(1, parts + 1):
            begun = self._clock()
            end = share * part // parts
            if end == done:
                continue
            if session.closed(round_):  # the others need no more: this host may catch up with them
                break
            if end == share:
                self._exchanger.begin(self._phase, round_)
            loss_sum += training.compute(self._part.take(indices[done:end]), end - done)
            done = end
            self._pace.keep(begun)
            if self._exchanger.busy:
                break
            session.progress(round_, done)
            # Enough for the quorum: what the others have ready and counted, and this (R13).
            if self._settings.quorum < 1 and 0 < session.need(round_) <= done:
                break
        return done, loss_sum

    def _finished(self, samples: int) -> F32:
        """What this member contributes."""
        model, most = self._model, self._settings.clip
        vector = model.finish(samples)
        if most is not None:
            self._clipped += model.clip(samples, most)
        return vector

    def _not_finite(self, round_: int, index: int) -> JobError:
        model = self._model
        return JobError(
            f"round {round_}: the gradient of {model.name_at(index)} is not finite "
            f"({model.vector[index]}); a smaller learning rate may help"
        )

    def _save_gradients(self, round_: int, samples: int, **sums: Any) -> None:
        """If the job says so; without `sums` the round is not committed yet."""
        if self._settings.save_gradients:
            out, values = self._workdir / "out", {"vector": self._model.vector, "samples": samples}
            save_gradients(out, round_, self._life, self._session.number, **values, **sums)

    # ---- testing

    def _test_round(self, phase: Phase) -> None:
        """R15: test the own part, tell how many succeeded and failed, learn how many did in all."""
        session, model, training = self._session, self._model, self._training
        round_, start = phase.first_round, self._clock()
        part = self._part_of(self._test, Place.of(session.number, phase.shares))
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
        ended = training.finishing or self._job.done(training.state, training.records)
        what, due = "end" if ended else "continue", self._checkpoint_is_due(0.0)
        session.decide(round_, what, checkpoint=due)
        self._metrics.round(
            {
                "phase": "test",
                "round": round_,
                "trained_rounds": training.state.round,
                "view": session.view,
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
        self._report(round_, 0, end - start, tested=True)

    # ---- state

    def _save_phase(self, phase: Phase) -> None:
        """R20: the state for a member that comes back; without it that member cannot, but the others go on."""
        training, error = self._training, ""
        try:
            training.save(self._workdir / STATE)
        except JobError as problem:
            error = str(problem)
            self._warn(error)
        self._session.saved(phase.number, training.state.round, training.digest(), error)

    def _load_phase(self, phase: Phase) -> None:
        """R20: go on from another member's state. The digest shows whether this one has it."""
        training = self._training
        try:
            training.load(self._workdir / STATE)
        except JobError as problem:
            self._warn(str(problem))
        self._began = self._clock() - training.state.seconds
        self._session.loaded(phase.number, training.digest())
        self._life = uuid.uuid4().hex

    def _checkpoint_is_due(self, seconds: float) -> bool:
        """R22, the lead only: whether one is due after another round, which takes so long."""
        every, since = self._settings.checkpoint_s, self._clock() - (self._saved_at or 0.0)
        return bool(self._session.lead and every and since + seconds >= every)

    def _keep(self) -> None:
        """R18: no majority is left, and this may be all that remains. What this member has offered stays as it is."""

        def keep() -> None:
            self._model.restore()  # its own forward passes have moved the buffers
            self._checkpoint()

        self._exchanger.aside(keep)

    def _checkpoint(self) -> None:
        """Where it cannot be written, the former one stays."""
        error = ""
        try:
            self._training.save(self._workdir / CHECKPOINT)
        except JobError as problem:
            error = str(problem)
            self._warn(f"no checkpoint: {error}")
        self._session.checkpoint(self._training.state.round, error)

    # ---- what comes next, and who watches

    def _decide_after_training(self, commit: Commit, seconds: float) -> bool:
        """R14: test at every epoch's end and at the end; True to train on.

        Args:
            seconds: that the round took.
        """
        training, settings = self._training, self._settings
        training.finishing = self._job.done(training.state, training.records)
        every = settings.rounds_between_tests(training.records)
        due = commit.samples > 0 and training.state.round % every == 0
        test = training.finishing or due
        what, due = "test" if test else "continue", self._checkpoint_is_due(seconds)
        self._session.decide(commit.round, what, checkpoint=due)
        return not (test and self._session.lead)

    def _warn(self, message: str) -> None:
        print(f"trainer: warning: {message}", file=sys.stderr, flush=True)
        if self._exchanger.busy:
            self._late_warnings.append(message)
        else:
            self._session.report({"warning": message})

    def _say_late_warnings(self) -> None:
        """What was to be said while the session was another thread's."""
        while self._late_warnings:
            self._session.report({"warning": self._late_warnings.pop(0)})

    def _report(self, round_: int, samples: int, seconds: float, *, tested: bool = False) -> None:
        state = self._training.state
        values = {
            "round": round_,
            "trained_rounds": state.round,
            "rounds_total": self._training.rounds,
            "epoch": state.epoch,
            "loss": state.loss if state.loss is None or math.isfinite(state.loss) else None,
            "accuracy": state.accuracy,
            "clipped": self._clipped if self._settings.clip is not None else None,
            "samples_per_second": samples / seconds if seconds else 0.0,
        }
        shares = self._metrics.shares(self._clock())
        if shares is not None:
            known = {key: value for key, value in values.items() if value is not None}
            self._session.report(known | shares)
            if self._session.lead:
                figures = {"accuracy": state.accuracy, "test_seconds": seconds}
                if not tested:
                    figures = {key: values[key] for key in ("loss", "epoch", "samples_per_second")}
                    figures |= shares | {"samples": samples, "round_seconds": seconds}
                self._trackers.log(state.round, figures)


def _mix(*parts: int) -> int:
    """A seed out of several."""
    return int(np.random.SeedSequence(parts).generate_state(1, np.uint64)[0]) & MASK
