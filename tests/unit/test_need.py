# SPDX-License-Identifier: Apache-2.0
"""The order in which the forward pass needs a model's tensors."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from nicps.torch.need import order_of_need

pytestmark = pytest.mark.unit


def order(model: nn.Module, *shape: int) -> list[str]:
    return order_of_need(model, lambda called: called(torch.zeros(shape)))


class Crossed(nn.Module):
    """Built in another order than it is called, with a module that is called twice and one that is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(4, 4)
        self.last = nn.Linear(4, 2)
        self.first = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.last(self.first(self.norm(self.first(x))))
        return found


def test_the_first_use_counts() -> None:
    names, model = order(Crossed(), 3, 4), Crossed()
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    assert sorted(names) == sorted([*parameters, *buffers])
    assert [name for name in names if name.endswith("weight")] == [
        f"{module}.weight" for module in ("first", "norm", "last", "unused")
    ]
    assert all(names.index(name) < names.index("last.weight") for name in buffers)
    assert names[-2:] == ["unused.weight", "unused.bias"]


class Taken(nn.Module):
    """The embedding's weights are the output layer's, too, which takes them before anything is looked up."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.output = nn.Linear(4, 5, bias=False)
        self.output.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.ones(()))
        self.other = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        assert self.other.weight.shape == (4, 4) and self.other.weight.device.type == "cpu"
        mixed = functional.linear(self.embedding(x.long()), self.other.weight) * self.scale
        found: Tensor = self.output(mixed)
        return found


def test_what_a_module_takes_from_another_is_used_there() -> None:
    """Though its module is never called; a shape and a device are no use."""
    assert order(Taken(), 3) == ["embedding.weight", "other.weight", "scale", "other.bias"]


def test_layers_inside_pytorch() -> None:
    """A transformer's layers, whose attention is one function of many tensors, and an LSTM's."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    names = order(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), 2, 3, 8)
    assert [name.split(".")[1] for name in names] == ["0"] * 12 + ["1"] * 12
    assert names[0] == "layers.0.self_attn.in_proj_weight"
    names = order(nn.LSTM(4, 3, 2), 5, 2, 4)
    assert sorted(names) == sorted(dict(nn.LSTM(4, 3, 2).named_parameters()))


def test_it_computes_as_always() -> None:
    torch.manual_seed(1)
    model, x = Crossed().eval(), torch.randn(3, 4)
    found: list[Tensor] = []
    order_of_need(model, lambda called: found.append(called(x)))
    assert torch.equal(found[0], model(x))
