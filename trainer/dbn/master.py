# SPDX-License-Identifier: Apache-2.0
"""The master (H1, H2): it hands out weights, makes the mean of what comes back, layer by layer, then with labels."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import torch

from trainer.dbn import network, rbm, shards
from trainer.dbn.checkpoint import Row, State
from trainer.dbn.reduce import Reducer
from trainer.dbn.settings import Settings
from trainer.dbn.shards import Data, Shard
from trainer.dbn.vectors import Means, Vector, pack
from trainer.dbn.work import Form, Frame, predictions
from trainer.errors import JobError

PRETRAINED_SCALE = 0.01  # of an RBM's first weights


def form_of(settings: Settings, data: Data) -> Form:
    """The sizes of all layers."""
    return Form(data.train.images.shape[1], settings.layers, data.classes)


def begin(state: State, form: Form) -> Vector:
    """The parameters that a phase begins with."""
    settings, phase = state.settings, state.phase
    random = shards.generator(settings.seed, shards.START, phase)
    if phase == form.tuning:
        model = network.unroll(form.stack(state.done), form.classes, random)
        return pack(part for layer in model for part in layer)
    (below, above), *_ = form.shapes(phase)
    scale = PRETRAINED_SCALE if settings.epochs else network.untrained_scale(below, above)
    return pack(rbm.start(below, above, scale, random))


def train(
    state: State, data: Data, reducer: Reducer, after_epoch: Callable[[State], None]
) -> Vector:
    """Take a run from its state to its end; the classifier's parameters.

    Args:
        after_epoch: called with the state after each epoch, which is what a run can go on from.

    Raises:
        JobError: training diverges.
    """
    form = form_of(state.settings, data)
    while True:
        tuning = state.phase == form.tuning
        _phase(state, form, data, reducer, after_epoch)
        assert state.mean is not None
        found = state.mean[: form.size(state.phase)]
        if tuning:
            return found
        state.done.append(found)
        state.phase, state.epoch = state.phase + 1, 0
        state.mean = state.previous = None


def _phase(
    state: State, form: Form, data: Data, reducer: Reducer, after_epoch: Callable[[State], None]
) -> None:
    settings, phase = state.settings, state.phase
    tuning = phase == form.tuning
    size = form.size(phase)
    if state.mean is None:
        state.mean = begin(state, form)
        if settings.velocity == "average" and not (tuning and settings.optimizer == "cg"):
            state.mean = np.concatenate([state.mean, np.zeros(size, np.float32)])
    epochs = settings.finetune if tuning else settings.epochs
    if state.epoch == epochs:
        return
    reducer.begin(Frame(settings, form, () if tuning else tuple(state.done)))
    while state.epoch < epochs:
        began = time.monotonic()
        try:
            means, error = reducer.epoch(phase, state.epoch, Means(state.mean, state.previous))
        except JobError as reason:
            name = "fine-tuning" if tuning else f"layer {phase + 1}"
            raise JobError(f"{name}, epoch {state.epoch + 1}: {reason}") from None
        state.mean, state.previous = means.last, means.previous
        state.epoch += 1
        row: Row = {"phase": phase, "epoch": state.epoch, "loss" if tuning else "error": error}
        if tuning:
            name = "test_error" if data.held_out is None else "validation_error"
            row[name] = share_wrong(form, state.mean, data.judges)
        row["seconds"] = time.monotonic() - began
        state.rows.append(row)
        state.seconds += row["seconds"]
        after_epoch(state)


def share_wrong(form: Form, vector: Vector, shard: Shard) -> float:
    """The share of these pictures that the classifier gets wrong."""
    found = predictions(form.classifier(vector), shard).argmax(1)
    return float((found != shard.answers(slice(None))).to(torch.float64).mean())
