# SPDX-License-Identifier: Apache-2.0
"""Parameters of 16 bits that are updated part by part have the bits of a whole step (docs/channels.md, P3)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, Optimizer

from nicps.errors import UsageProblem
from nicps.torch.parts import PartStep
from tests.pending import OPTIMIZERS, Cast, train

pytestmark = pytest.mark.usefixtures("one_thread")

HALF, BRAIN = torch.float16, torch.bfloat16


def wide_enough(kind: torch.dtype) -> nn.Module:
    """A network of that type, of several registers' width: what is left over is updated by other code."""
    torch.manual_seed(0)
    layers = [nn.Linear(4, 40), nn.Tanh(), nn.Linear(40, 33), nn.Tanh(), nn.Linear(33, 1)]
    return Cast(kind, nn.Sequential(*layers))


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *((BRAIN, name) for name in OPTIMIZERS if name != "sgd fused"),
        *((HALF, name) for name in ("sgd momentum", "sgd nesterov foreach")),
        *((HALF, name) for name in ("adam fused", "adamw fused")),
    ],
)
def test_parameters_of_sixteen_bits(kind: torch.dtype, name: str) -> None:
    """Their gradients travel in 32 bits, and are rounded once."""
    orders = [[2, 1, 0, 3], [3, 2, 1, 0], [0, 1, 2, 3], [1, 3, 0, 2]]
    train(wide_enough(kind), OPTIMIZERS[name], [1, 2, 4], orders)


@pytest.mark.parametrize("foreach", [False, True])
def test_adam_with_an_eps_that_float16_can_name(foreach: bool) -> None:
    """With 1e-8, which is 0 there, plain steps are NaN, too."""

    def make(found: Any) -> Optimizer:
        return Adam(found, lr=0.01, eps=1e-4, foreach=foreach)

    train(wide_enough(HALF), make, [1, 2, 4], [[2, 1, 0, 3], [3, 2, 1, 0], [0, 1, 2, 3]])


@pytest.mark.parametrize("kind", [HALF, BRAIN])
def test_fused_sgd_of_sixteen_bits_is_refused(kind: torch.dtype) -> None:
    """PyTorch does not update these on the CPU, but for what is left over of the processor's registers."""
    wide = nn.Parameter(torch.ones(640, dtype=kind))
    optimizer = SGD([nn.Parameter(torch.zeros(2)), wide], lr=0.5, momentum=0.9, fused=True)
    with pytest.raises(UsageProblem, match=rf"SGD\(fused=True\) leaves most numbers of {kind}"):
        PartStep(optimizer)
    optimizer = SGD([wide], lr=0.5)
    step = PartStep(optimizer)
    optimizer.param_groups[0]["fused"] = True
    with pytest.raises(UsageProblem, match=r"SGD\(fused=True\) leaves"):
        step.settings()
    PartStep(SGD([nn.Parameter(torch.zeros(2))], lr=0.5, fused=True))
    PartStep(Adam([wide], fused=True))
    wide.grad = torch.ones_like(wide)
    SGD([wide], lr=0.5, fused=True).step()
    assert (wide == 1.0).all(), (
        "PyTorch updates them: take the refusal back, and docs/priorities.md"
    )
