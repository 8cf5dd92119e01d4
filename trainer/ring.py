# SPDX-License-Identifier: Apache-2.0
"""System R, the ring: all members add up their gradients round by round, and each makes the same step (R8, R12, R13).

After every committed round all members hold the same weights, bit for bit: the update is made of the exact sum, and of
nothing that depends on the member.
"""

from __future__ import annotations

import contextlib
import importlib
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from nicps.client import Phase, Session
from nicps.errors import NetworkProblem, NonFinite
from nicps.flows import ChannelPlan
from nicps.steps import StepEnded
from trainer.decisions import Decisions, Foreseen
from trainer.errors import JobError
from trainer.exchange import exchanger_of
from trainer.exchanger import Exchanged
from trainer.flows import InFlows
from trainer.journal import Journal
from trainer.metrics import save_gradients, sum_of
from trainer.planner import Planner
from trainer.share import Share

if TYPE_CHECKING:
    from trainer.training import Training
    from trainer.updates import Updates


@dataclass(slots=True)
class _Step:
    """One of this member's steps, in seconds on the clock.

    Attributes: `start`; `offered`, when its gradient had gone out; `clipped`, gradients before it that were too long;
    `samples` that it has worked, and the sum of their losses; `foreseen`, what comes after it, where that is known
    before its sum is there; `spans`, what goes into its row about the next step's forward pass.
    """

    start: float
    clipped: int
    samples: int = 0
    loss_sum: float = 0.0
    offered: float = 0.0
    foreseen: Foreseen | None = None
    spans: dict[str, Any] = field(default_factory=dict)

    @property
    def loss(self) -> float | None:
        """This member's own; None where it has worked no sample."""
        return self.loss_sum / self.samples if self.samples else None


class Ring:
    """One member's rounds of training.

    Where a step has a plan, the next step's forward pass begins as soon as this one's gradient has gone out. Each
    module waits for its own parameters, and the step is settled between that forward pass and backward (P3).
    """

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
        self._updates: Updates | None = None
        self._planner: Planner | None = None
        self._plan: tuple[ChannelPlan, ...] = ()  # that the lead decides on after this step
        self._step = _Step(0.0, 0)  # that is computed
        self._before: _Step | None = None  # the one before it, whose sums are on their way
        self._torn = False

    def ready(self, digest: str) -> None:
        """The model is built; `digest` as for `Session.ready`."""
        self._exchanger.ready(digest)
        if isinstance(self._exchanger, InFlows):
            self._updates = self._updates_of(self._exchanger)
            self._planner = self._planner_of(self._exchanger)

    def _updates_of(self, exchanger: InFlows) -> Updates | None:
        """Updates part by part, where model and optimizer allow them."""
        module = importlib.import_module("trainer.updates")  # with PyTorch's distributed part
        made: Updates | str = module.updates_of(
            self._training, exchanger.parts.units(), exchanger.attend
        )
        if isinstance(made, str):
            self._journal.warn(f"the forward pass waits for all parameters: {made}")
            return None
        return made

    def _planner_of(self, exchanger: InFlows) -> Planner | None:
        """Where forward passes overlap with the exchange, and no plan was made by hand."""
        settings = self._training.job.settings
        if self._updates is None or settings.priority_cuts:
            return None
        planner = Planner(exchanger.parts, settings.priorities or 1, self._training.rounds)
        exchanger.noted = lambda parameter: planner.note_gradient(parameter, self._clock())
        return planner

    def train(self, phase: Phase) -> None:
        """Rounds until the next decision."""
        self.catch_up()
        self._phase = phase
        if isinstance(self._exchanger, InFlows):
            self._enter(self._exchanger, phase)
        round_ = phase.first_round
        while round_:
            round_ = self._round(round_)

    def _enter(self, exchanger: InFlows, phase: Phase) -> None:
        if exchanger.enter(phase) and self._updates is not None:
            self._updates.close()
            self._updates = self._updates_of(exchanger)
        if self._planner is not None:
            self._planner.enter(exchanger.parts)

    def keep(self, save: Callable[[], None]) -> None:
        """R18: no majority is left, and this may be all that remains. What this member has offered stays as it is."""

        def keep() -> None:
            if self._before is None:
                self._model.restore()  # its own forward passes have moved the buffers
                save()
            elif self._updates is not None and self._updates.begun:
                why = "some parameters are of the step that is under way, and others are not"
                self._session.checkpoint(self._training.state.round, why)
            else:
                with self._model.at_rest():
                    save()

        self._exchanger.aside(keep)

    def loaded(self) -> None:
        """Another member's state was taken over (R20): the residual is forgotten."""
        self._life = uuid.uuid4().hex
        self._torn = False

    def catch_up(self) -> None:
        """The weights are those of the last commit.

        Raises:
            NetworkProblem: they are not, and never will be.
        """
        if self._torn:
            raise NetworkProblem(
                "the last step has ended in its middle here, so this host's weights are between two steps: it needs"
                " the state of the others"
            )

    def _round(self, round_: int) -> int:
        """One step, from that round on; the round after it, or 0 when the phase is over."""
        model, share, exchanger = self._model, self._share, self._exchanger
        step = self._step = _Step(self._clock(), share.clipped)
        if self._planner is not None and self._before is not None:
            self._planner.begin_forward(step.start)
        exchanged: Exchanged | None = None
        try:
            step.samples, step.loss_sum = self._compute(round_)
            self._settle()  # where there was no forward pass
            step.offered = self._clock()
            if isinstance(exchanger, InFlows) and self._goes_ahead(step, exchanger):
                return self._leave(exchanger, round_)
            exchanged = exchanger.exchange(self._phase, round_, step.samples, self._total)
        except StepEnded:
            self._drop()
        except NonFinite as error:
            raise self._not_finite(round_, error.index) from None
        except BaseException:
            exchanger.give_up()
            raise
        self._journal.catch_up()
        if exchanged is None:
            model.restore()
            share.clipped = step.clipped  # that gradient is nobody's
            return 0
        commit, own, contribute, committed, divided = exchanged
        summed = self._clock()
        self._save(commit.round, own, **sum_of(commit, self._total))
        before = self._training.state.round
        self._training.step(self._total, 1 if divided else commit.samples)
        # What is neither converting, sending nor reading is waiting for the others.
        waiting = committed - step.offered - contribute
        waited = min(max(commit.seconds_waited - contribute, 0.0), waiting) if own else waiting
        network = summed - step.offered - waited
        return self._end(step, exchanged, before, summed, waited, network)

    # ---- a step that is settled in the next one's forward pass

    def _goes_ahead(self, step: _Step, exchanger: InFlows) -> bool:
        """Whether the next step's forward pass may begin before this one's sums are there."""
        self._plan = ()
        if self._updates is None or self._updates.whole:
            return False
        training = self._training
        state = training.after(1)
        loss = step.loss if step.loss is not None else state.loss
        state = replace(state, loss=loss, seconds=self._journal.seconds(step.offered))
        step.foreseen = self._decisions.foresee(training.state.round, state)
        if self._planner is not None and self._session.lead and not step.foreseen.test:
            rounds = self._planner.propose(state.round, len(self._session.live))
            self._plan = exchanger.plan(rounds)
            self._journal.note(self._planner.described)
        return not step.foreseen.test and not self._plan

    def _leave(self, exchanger: InFlows, round_: int) -> int:
        assert self._updates is not None
        step = self._step
        self._updates.promise(exchanger.offer(self._phase, round_, step.samples))
        self._before = step
        self._journal.catch_up()
        return exchanger.next_round

    def _settle(self) -> None:
        """The step before has its sums, and all parameters are updated.

        Raises:
            StepEnded: it comes to nothing.
        """
        step, exchanger = self._before, self._exchanger
        if step is None:
            return
        assert self._updates is not None and isinstance(exchanger, InFlows)
        self._updates.wait()
        exchanged = exchanger.collect()
        step.spans = self._updates.describe_spans(exchanger.parts)
        if self._planner is not None:
            of = self._updates.waited, self._updates.updating, self._updates.needed
            self._planner.end_forward(self._clock(), *of, exchanger.times)
        before = self._training.state.round
        self._training.count(1)
        with self._model.at_rest():  # the forward pass has moved buffers
            self._end(step, exchanged, before, self._clock(), self._updates.waited, 0.0)
        self._before = None
        self._step.start = self._clock()

    def _drop(self) -> None:
        """The phase has ended before the sums of a step were there: it was nobody's."""
        assert self._updates is not None and isinstance(self._exchanger, InFlows)
        with contextlib.suppress(StepEnded):
            self._exchanger.collect()
        self._torn, self._before = self._updates.begun, None
        self._updates.drop()

    # ---- its end

    def _end(
        self,
        step: _Step,
        exchanged: Exchanged,
        before: int,
        summed: float,
        waited: float,
        network: float,
    ) -> int:
        """All hold the weights after the step. What comes next, and what is written down of it; as `_round`.

        Args:
            before: so many rounds had been trained.
            summed: when its sum was there.
            waited, network: seconds for other members, and for the sum.
        """
        session, training, share = self._session, self._training, self._share
        commit, own, loss = exchanged.commit, exchanged.own, step.loss
        training.unit = commit.unit
        digest = training.digest()
        session.applied(commit, digest)
        training.state = replace(
            training.state,
            loss=loss if loss is not None else training.state.loss,
            seconds=self._journal.seconds(summed),
        )
        foreseen = step.foreseen or self._decisions.foresee(before, training.state)
        training.finishing = foreseen.ends
        took = self._clock() - step.start
        goes_on = self._decisions.after_training(commit, foreseen.test, took, self._plan)
        end = self._clock()
        planned: dict[str, Any] = {}
        if isinstance(self._exchanger, InFlows):
            planned = {"channels": len(self._exchanger.parts.channels), "predicted_seconds": None}
        if self._planner is not None:
            planned["predicted_seconds"] = self._planner.predicted
            self._planner.note_step(end - step.start)
        self._journal.round(
            {
                "phase": "train",
                "round": commit.round,
                "loss": loss,
                "samples": commit.samples,
                "own_samples": own,
                "counted": {str(number): n for number, n in sorted(commit.counted.items())},
                "clipped": share.clipped,
                "saturated": session.saturated,
                "weights_sha256": training.hash_weights(commit.round, last=not goes_on),
                "digest": digest,
                "seconds_compute": end - step.start - waited - network,
                "seconds_wait": waited,
                "seconds_network": network,
                "t_start": step.start,
                "t_offer": step.offered,
                "t_commit": exchanged.committed,
                "t_end": end,
                **planned,
                **step.spans,
            }
        )
        self._journal.report(commit.round, commit.samples, end - step.start, share.clipped)
        self._decisions.committed(commit, end)
        return commit.round + 1 if goes_on else 0

    def _compute(self, round_: int) -> tuple[int, float]:
        """This member's gradient: samples done, and the sum of their losses."""
        exchanger, ahead = self._exchanger, self._before is not None

        def between(last: bool) -> None:
            self._settle()
            if last:
                self._begin_backward()
                exchanger.begin(self._phase, round_)

        trained = self._training.state.round + ahead
        busy = lambda: exchanger.busy  # noqa: E731
        return self._share.compute(round_, trained, between, busy, ahead=ahead)

    def _begin_backward(self) -> None:
        planner, exchanger = self._planner, self._exchanger
        if planner is None or not isinstance(exchanger, InFlows):
            return
        trained, hosts = self._training.state.round, len(self._session.live)
        exchanger.alone = self._session.lead and planner.measures(trained, hosts)
        planner.begin_backward(self._clock(), measures=exchanger.alone)

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
