# SPDX-License-Identifier: Apache-2.0
"""What a member trains, and all that must survive: model, optimizer, scheduler, and how far they are.

Whoever loads what another member has saved goes on with the same bits (R20). A checkpoint is the same file.
"""

from __future__ import annotations

import copy
import importlib
import itertools
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer import state, weights
from trainer.buckets import Buckets
from trainer.errors import JobError
from trainer.flows import Parts
from trainer.job import Job
from trainer.settings import State, flat

if TYPE_CHECKING:
    from trainer.factors import Factors
    from trainer.flat import F32, FlatModel

#: The weights of a model of so many numbers are hashed after every so many rounds only.
_LARGE, _HASHED_EVERY = 1 << 20, 16


class Training:
    """A job's training at one member, between rounds.

    Attributes: `state`, how far it is; `finishing`, whether the last round was the last of all but the final test;
    `unit`, the log2 of the last sum's lowest bit, None before the first; `rounds`, how many are planned, or None;
    `commits`, the committed rounds behind `state`, those of earlier runs included (with servers a commit is several
    rounds of `state`);
    `factors`, as which gradients are exchanged, `buckets` or `parts`, in which they are, or None.
    """

    def __init__(self, job: Job, model: FlatModel, records: int) -> None:
        """Build optimizer and scheduler.

        Args:
            model: with the weights that were handed out.
            records: training samples of all members together.

        Raises:
            JobError: the job's functions fail.
        """
        self.job = job
        self.model = model
        self.records = records
        self.rounds = job.settings.planned_rounds(records)
        self.optimizer = job.optimizer(model.trained)
        self.scheduler = job.scheduler(self.optimizer, self.rounds)
        self.factors: Factors | None = None
        if job.settings.rank is not None:
            module = importlib.import_module("trainer.factors")  # with PyTorch's distributed part
            self.factors = module.Factors(model.layout, job.settings.rank)
        self.buckets: Buckets | None = None
        if (size := job.settings.bucket_mb) is not None and job.settings.priorities is None:
            self.buckets = Buckets(model.layout, size, job.settings.lane)
        self.parts: Parts | None = None
        if (channels := job.settings.priorities) is not None and not job.settings.served:
            of = channels, job.settings.lane, job.settings.bucket_mb, job.settings.cuts
            self.parts = Parts(model.layout, *of)
        self.state = State()
        self.finishing = False
        self.unit: int | None = None
        self.commits = 0
        self._scheduled = 0

    def begin(self, seed: int, *, ahead: bool = False) -> None:
        """A round begins: gradients are zero, buffers are those of all members, and random numbers follow `seed`.

        Args:
            ahead: the round before is not settled: see `FlatModel.begin_training`.
        """
        if ahead:
            self.model.begin_training(seed, ahead=True)
        else:
            self.model.begin_training(seed)

    def compute(
        self, batch: weights.Arrays, samples: int, between: Callable[[], None] = lambda: None
    ) -> float:
        """Add the gradient of these samples' losses, their sum and not their mean; returns that sum.

        Args:
            between: is called when the forward pass has ended, before backward.

        Raises:
            JobError: the job's `loss` fails.
        """
        loss = self.job.loss(self.model.model, self.model.tensors(batch))
        between()
        self.job.backward(loss * samples)
        return loss.item() * samples

    def test(self, batches: Iterable[weights.Arrays]) -> Iterator[tuple[int, int]]:
        """R15: how many samples of each batch succeeded, and failed.

        Raises:
            JobError: the job's `success` fails.
        """
        for batch in batches:
            with self.model.testing():
                counts = self.job.success(self.model.model, self.model.tensors(batch))
            yield counts

    def step(self, total: F32, samples: int) -> None:
        """R12: the optimizer's step along the mean over the counted samples; without any, nothing changes.

        Args:
            total: the sum, float32 (lanes,); overwritten.
        """
        if not samples:
            self.model.restore()
            return
        self.update(total, samples)
        self.count(1)

    def update(self, total: F32, samples: int) -> None:
        """The optimizer's step alone."""
        self.model.apply(total, samples)
        with self.job.blame("optimizer"):
            self.optimizer.step()

    def keep_optimizer(self) -> Callable[[], None]:
        """Copy the optimizer's state. The function that is returned restores it."""
        kept = copy.deepcopy(self.optimizer.state_dict())
        return lambda: self.optimizer.load_state_dict(kept)

    def count(self, rounds: int) -> None:
        """Count one commit, which stands for so many rounds of `state`."""
        state = self.after(rounds)
        self.schedule(state.round)
        self.state = state
        self.commits += 1

    def after(self, rounds: int) -> State:
        """The state once so many rounds more are trained."""
        trained = self.state.round + rounds
        epoch = trained * self.job.settings.batch / self.records
        return replace(self.state, round=trained, epoch=epoch)

    def schedule(self, rounds: int) -> None:
        """The scheduler has been stepped as often as so many rounds ask for; never less often than it was."""
        while self.scheduler is not None and self._scheduled < rounds:
            with self.job.blame("scheduler"):
                self.scheduler.step()
            self._scheduled += 1

    def digest(self) -> str:
        """The digest of weights, buffers, optimizer and factors, after every step the same on all members.

        With servers it is of weights and buffers: each worker has an optimizer of its own.
        """
        if self.job.settings.served:
            return state.digest(0, self.model.parts(), {"param_groups": []})
        kept = () if self.factors is None else self.factors.parts()
        parts = itertools.chain(self.model.parts(), kept)
        return state.digest(self.state.round, parts, self.optimizer.state_dict())

    def hash_weights(self, round_: int, *, last: bool) -> str:
        """The hash of the weights after this round, for metrics.jsonl; empty where a large model's is left out.

        SHA-256 takes a millisecond for each megabyte, in which no round is on its way.

        Args:
            last: of its phase.
        """
        small = len(self.model.vector) < _LARGE
        return self.model.sha256() if small or last or not round_ % _HASHED_EVERY else ""

    def save(self, path: Path) -> None:
        """Write everything into a state file, whole or not at all.

        Raises:
            JobError: it cannot be written, or the optimizer or scheduler holds what cannot be saved.
        """
        head = {
            "job": self.job.name,
            "settings": flat(self.job.settings),
            "progress": asdict(self.state),
            "finishing": self.finishing,
            "unit": self.unit,
            "commits": self.commits,
            "averaged": sorted(weights.averaged(self.model.layout)),
        }
        forms, arrays = self.packed()
        state.write(path, {**head, **forms}, arrays)

    def packed(self) -> tuple[dict[str, Any], dict[str, state.Array]]:
        """Model, optimizer and scheduler as JSON and arrays.

        Raises:
            JobError: the optimizer or the scheduler holds what cannot be saved.
        """
        arrays = {f"model/{name}": array for name, array in self.model.arrays().items()}
        scheduler = None if self.scheduler is None else self.scheduler.state_dict()
        forms = {
            "optimizer": state.pack("optimizer", self.optimizer.state_dict(), arrays),
            "scheduler": state.pack("scheduler", scheduler, arrays),
        }
        if self.factors is not None:
            forms["factors"] = state.pack("factors", self.factors.start(), arrays)
        return forms, arrays

    def load(self, path: Path) -> None:
        """Take over what `save` wrote, in the same job.

        Raises:
            JobError: the file cannot be read, or belongs to another job.
        """
        saved = state.Saved(path)
        theirs, ours = (
            saved.head.get("settings", {}),
            json.loads(json.dumps(flat(self.job.settings))),
        )
        differing = [k for k in {**theirs, **ours} if theirs.get(k, ...) != ours.get(k, ...)]
        if differing:
            key = differing[0]
            raise JobError(
                f"{path} belongs to a job with other settings: {key} is {theirs.get(key)!r} there, "
                f"{ours.get(key)!r} here"
            )
        self.take(saved, path)

    def take(self, saved: state.Saved, path: Path) -> None:
        """Take over a state, whatever the settings were that it was made under.

        Raises:
            JobError: it does not fit the model, the optimizer or the scheduler.
        """
        optimizer, scheduler = (
            saved.tree(name, self.model.tensor) for name in ("optimizer", "scheduler")
        )
        if (scheduler is None) != (self.scheduler is None):
            whose = "the job" if scheduler is None else "the state"
            raise JobError(f"{path}: only {whose} has a scheduler")
        weights.check(self.model.layout, saved.model)
        try:
            self.optimizer.load_state_dict(optimizer)
            if self.scheduler is not None:
                self.scheduler.load_state_dict(scheduler)
            progress = State(**saved.head["progress"])
            self.finishing, self.unit = bool(saved.head["finishing"]), saved.head["unit"]
        except (KeyError, ValueError, TypeError, AttributeError, RuntimeError) as error:
            raise JobError(f"{path} does not fit the job: {error}") from None
        self.model.load(saved.model)
        if self.factors is not None and "factors" in saved.head:
            self.factors.take(saved.tree("factors", self.model.tensor))
        self.state, self._scheduled = progress, progress.round
        self.commits = saved.head.get("commits", progress.round)
