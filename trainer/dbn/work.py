# SPDX-License-Identifier: Apache-2.0
"""What a worker does: one pass, or a part of one, over its split (H1, H2). A pure function of what it is given.

A worker that is lost has told nobody anything, and another that does its work again returns the same bits. For that the
processor must be of the same kind, PyTorch of the same version, and the calling thread must use one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trainer.dbn import network, rbm, shards
from trainer.dbn.network import Descent, Drop, Layer, Network
from trainer.dbn.rbm import Rates, Rbm
from trainer.dbn.settings import Settings
from trainer.dbn.shards import Shard
from trainer.dbn.vectors import Shape, Update, Vector, pack, unpack

Rows = npt.NDArray[np.int64]

BLOCK = 1000  # samples that go up through the layers below at a time
SEARCHES = 3  # line searches of conjugate gradients on a mini-batch: the program of [HS06] (trainer/dbn/network.py)


@dataclass(frozen=True)
class Form:
    """What the vectors of each phase hold. Phases count from 0: a layer each, then the classifier."""

    pixels: int
    layers: tuple[int, ...]
    classes: int

    @property
    def tuning(self) -> int:
        """The number of the last phase."""
        return len(self.layers)

    def shapes(self, phase: int) -> list[Shape]:
        """Of the parameters."""
        sizes = [self.pixels, *self.layers]
        if phase < self.tuning:
            below, above = sizes[phase], sizes[phase + 1]
            return [(below, above), (below,), (above,)]
        ends = [*sizes[1:], self.classes]
        return [shape for a, b in zip(sizes, ends, strict=True) for shape in ((a, b), (b,))]

    def size(self, phase: int) -> int:
        """How many parameters there are."""
        return sum(int(np.prod(shape)) for shape in self.shapes(phase))

    def machine(self, phase: int, vector: Vector) -> Rbm:
        """The RBM of a phase, from a vector that begins with its parameters."""
        return Rbm(*unpack(vector[: self.size(phase)], self.shapes(phase)))

    def stack(self, vectors: Sequence[Vector]) -> list[Rbm]:
        """RBMs from the first one up."""
        return [self.machine(phase, vector) for phase, vector in enumerate(vectors)]

    def classifier(self, vector: Vector) -> Network:
        """From a vector that begins with its parameters."""
        parts = unpack(vector[: self.size(self.tuning)], self.shapes(self.tuning))
        return tuple(Layer(parts[at], parts[at + 1]) for at in range(0, len(parts), 2))


@dataclass(frozen=True)
class Task:
    """A part of an epoch of a phase; all count from 0."""

    phase: int
    epoch: int
    part: int


@dataclass(frozen=True)
class Frame:
    """What is the same for all workers, through a phase."""

    settings: Settings
    form: Form
    below: tuple[Vector, ...]  # the RBMs that are trained already; of the classifier none


#: What a worker does with a frame, a task, its start, the number of a split and the split.
Work = Callable[[Frame, Task, Vector, int, Shard], Update]


def work(frame: Frame, task: Task, start: Vector, split: int, shard: Shard) -> Update:
    """Take the start's parameters over a part of the split; what they are then.

    Args:
        start: parameters, then velocities where the settings average them.

    Returns:
        The same, the samples, and the sum of their errors: the squared error of the reconstructions of an RBM, the
        cross-entropy in nats of the classifier.
    """
    settings = frame.settings
    rows = shards.rows_of(settings, split, len(shard), task.phase, task.epoch, task.part)
    size = frame.form.size(task.phase)
    moving = start[size:] if len(start) > size else np.zeros(size, np.float32)
    tune = task.phase == frame.form.tuning
    random = shards.generator(settings.seed, shards.WORK, task.phase, task.epoch, task.part, split)
    model, velocity, error = (_tune if tune else _contrast)(
        frame, task, start, moving, shard, rows, random
    )
    return Update(pack([*model, *velocity] if len(start) > size else model), len(rows), error)


def _pieces(rows: Rows, size: int) -> Iterator[Rows]:
    return (rows[at : at + size] for at in range(0, len(rows), size))


def _contrast(
    frame: Frame,
    task: Task,
    start: Vector,
    moving: Vector,
    shard: Shard,
    rows: Rows,
    random: torch.Generator,
) -> tuple[list[Tensor], list[Tensor], float]:
    settings, form = frame.settings, frame.form
    below = form.stack(frame.below)
    machine, velocity = form.machine(task.phase, start), form.machine(task.phase, moving)
    kind = settings.visible if task.phase == 0 else "binary"
    rates = Rates(
        settings.pretrain_lr,
        settings.pretrain_momentum_in(task.epoch),
        settings.pretrain_decay,
    )
    error = 0.0
    for block in _pieces(rows, settings.batch * max(1, BLOCK // settings.batch)):
        for v in network.up(below, shard.inputs(block)).split(settings.batch):
            found = rbm.diverge(machine, v, settings.cd, kind, random)
            machine, velocity = rbm.step(machine, velocity, found.gradient, rates)
            error += float(found.error)
    return list(machine), list(velocity), error


def _tune(
    frame: Frame,
    task: Task,
    start: Vector,
    moving: Vector,
    shard: Shard,
    rows: Rows,
    random: torch.Generator,
) -> tuple[list[Tensor], list[Tensor], float]:
    settings, form = frame.settings, frame.form
    model, velocity = form.classifier(start), form.classifier(moving)
    frozen = settings.frozen_in(task.epoch, len(model))
    rates = Descent(
        settings.lr_at(task.epoch, task.part),
        settings.momentum,
        settings.weight_decay,
        settings.max_norm,
    )
    drop = Drop(settings.input_dropout, settings.dropout)
    if drop == Drop(0.0, 0.0):
        drop = None
    error = 0.0
    for batch in _pieces(rows, settings.batch):
        v, labels = shard.inputs(batch), shard.answers(batch)
        if settings.optimizer == "cg":
            model, loss = network.conjugate(model, v, labels, SEARCHES, frozen=frozen)
        else:
            found, loss = network.slope(model, v, labels, drop, random, frozen=frozen)
            model, velocity = network.descend(model, velocity, found, rates, frozen=frozen)
        error += loss * len(batch)
    return [*chain(*model)], [*chain(*velocity)], error


def predictions(model: Network, shard: Shard, rows: int = 1000) -> torch.Tensor:
    """N x C: the probability of each class."""
    parts = [
        torch.softmax(network.scores(model, shard.inputs(slice(at, at + rows))), 1)
        for at in range(0, len(shard), rows)
    ]
    return torch.cat(parts)
