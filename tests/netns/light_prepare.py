# SPDX-License-Identifier: Apache-2.0
"""The trainer's preparation of a job for `light_trainer`, without PyTorch.

The job's functions are loaded, but of PyTorch only the layers below exist, which know their tensors and compute
nothing. The model that is tried on two samples is `light_trainer`'s. All else is the trainer's own.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

import trainer.__main__
from tests.netns.light_trainer import Job, LightTraining, Model
from trainer import job, prepare
from trainer.state import Array


class Module:
    """A layer, with its tensors by name, parameters and buffers."""

    def __init__(self) -> None:
        self.parameters: dict[str, Array] = {}
        self.buffers: dict[str, Array] = {}


class ReLU(Module):
    """Has none."""


class Linear(Module):
    """Weights of shape (outputs, inputs), and a bias, as PyTorch draws them."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        limit, draw = 1 / math.sqrt(inputs), np.random.default_rng(inputs * outputs).uniform
        self.parameters["weight"] = draw(-limit, limit, (outputs, inputs)).astype(np.float32)
        self.parameters["bias"] = draw(-limit, limit, outputs).astype(np.float32)


class BatchNorm1d(Module):
    """Weights and bias, running means and variances, and a counter."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.parameters["weight"] = np.ones(features, np.float32)
        self.parameters["bias"] = np.zeros(features, np.float32)
        self.buffers["running_mean"] = np.zeros(features, np.float32)
        self.buffers["running_var"] = np.ones(features, np.float32)
        self.buffers["num_batches_tracked"] = np.zeros((), np.int64)


class Sequential(Module):
    """Layers in a row, whose tensors are named by their place."""

    def __init__(self, *layers: Module) -> None:
        super().__init__()
        for place, layer in enumerate(layers):
            for ours, theirs in (
                (self.parameters, layer.parameters),
                (self.buffers, layer.buffers),
            ):
                ours.update({f"{place}.{name}": array for name, array in theirs.items()})


def training_of(loaded: job.Job, records: int, order: Sequence[str] = ()) -> LightTraining:
    """The model that is tried, and whose tensors are handed out, in the order of its own."""
    assert not order, "a light job packs nothing"
    module: Any = loaded.model()
    groups = {
        "parameter": module.parameters,
        "buffer": {n: a for n, a in module.buffers.items() if a.dtype == np.float32},
        "fixed": {n: a for n, a in module.buffers.items() if a.dtype != np.float32},
    }
    layout = [
        {"name": name, "kind": kind, "shape": list(array.shape), "dtype": str(array.dtype)}
        for kind, group in groups.items()
        for name, array in group.items()
    ]
    model = Model(layout, {name: a for group in groups.values() for name, a in group.items()})
    return LightTraining(Job(loaded.name, loaded.settings, {}, model), model, records)


class Torch(ModuleType):
    """Has every name of PyTorch that a job uses. Calls do nothing, except those of the layers above."""

    def __getattr__(self, name: str) -> Torch:
        if name.startswith("__"):
            raise AttributeError(name)
        return Torch(name)

    def __call__(self, *arguments: Any, **options: Any) -> Torch:
        return self


def without_torch() -> None:
    """From here on an import of PyTorch gives the layers above."""
    torch, nn = Torch("torch"), Torch("torch.nn")
    torch.Tensor, torch.nn = type("Tensor", (), {}), nn
    for layer in (Module, Linear, ReLU, BatchNorm1d, Sequential):
        setattr(nn, layer.__name__, layer)
    nn.functional = Torch("torch.nn.functional")
    sys.modules |= {module.__name__: module for module in (torch, nn, nn.functional)}


def main(entry: str) -> int:
    """As the trainer's; the job then names `entry` as the module that trains it and draws its report."""
    without_torch()
    prepare.training_of = training_of
    prepare.needed_first = lambda job, samples: []  # the order of its own
    prepare.computes_ahead = lambda job, prepared, samples: True  # which NumPy's layers do not
    code = trainer.__main__.main()
    if code == 0:
        path = Path("prepared.json")  # the agent has begun this where the files are to be
        prepared = json.loads(path.read_text()) | {"entry": entry}
        path.write_text(json.dumps(prepared, indent=1) + "\n")
    return code
