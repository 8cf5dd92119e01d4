# SPDX-License-Identifier: Apache-2.0
"""A network of a published shape whose layers compute by sleeping, as a host with an accelerator waits for it.

Its gradients are of the right sizes; it learns nothing. `benchmarks.priorities` submits it. The layers of a backward
pass end as an accelerator ends them, one after the other without a pause: what the host does between two of them takes
none of its time.
"""

import time
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from benchmarks.networks import Shape
from trainer import Settings


@dataclass(frozen=True, kw_only=True)
class Sleeping(Settings):
    """network: of `benchmarks.networks`; numbers: parameters; compute: seconds of a forward and a backward pass."""

    network: str = "even"
    numbers: int = 8_000_000
    compute: float = 0.3


settings = Sleeping(
    batch=8,
    rounds=40,
    lane="i8",
    quorum=1.0,
    micro_batches=1,
    exchange="stripes",
    checkpoint_s=0,
    test_every=1_000_000,
)


def data(path):
    made = np.zeros((64, 1), np.float32)
    return {"x": made}, {"x": made[:8]}


class _Accelerator:
    """`free`, when it has done what it was given, on the monotonic clock."""

    free = 0.0


class _Sleep(torch.autograd.Function):
    """Adds nothing, and takes its time."""

    @staticmethod
    def forward(ctx, x, weight, forward, backward):
        time.sleep(forward)
        ctx.save_for_backward(weight)
        ctx.seconds = backward
        _Accelerator.free = time.monotonic()
        return x + weight[0]

    @staticmethod
    def backward(ctx, gradient):
        (weight,) = ctx.saved_tensors
        made = torch.full_like(weight, gradient.sum().item() / 64)
        _Accelerator.free += ctx.seconds
        time.sleep(max(0.0, _Accelerator.free - time.monotonic()))
        return gradient, made, None, None


class Layer(nn.Module):
    def __init__(self, numbers, forward, backward):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(numbers))
        self.seconds = forward, backward

    def forward(self, x):
        if not torch.is_grad_enabled():  # a test
            return x + self.weight[0]
        return _Sleep.apply(x, self.weight, *self.seconds)


def model():
    shape = Shape.of(settings.network, settings.numbers, settings.compute)
    layers = zip(shape.numbers, shape.forward, shape.backward, strict=True)
    return nn.Sequential(*(Layer(*each) for each in layers))


def loss(model, batch):
    return model(batch["x"]).mean()


def success(model, batch):
    return model(batch["x"])[:, 0] > 1


def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=1e-3)
