# SPDX-License-Identifier: Apache-2.0
"""What tests of parts share: a source of sums that the test drives, random networks, and a scene of two models."""

from __future__ import annotations

import contextlib
import copy
import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop

from nicps.torch.parts import Part, Parts, cut
from nicps.torch.pending import PendingSteps


def mean(name: str, step: int, gradient: torch.Tensor) -> torch.Tensor:
    """What the members' gradients come to: of one of them, a number that depends on parameter and step."""
    factor = random.Random(f"{name} {step}").uniform(0.5, 1.5)
    return gradient * torch.tensor(factor, dtype=torch.float32)


class Source:
    """Sums that come when the test says so. Until then a part's vector holds NaN: whatever reads it too early is seen.

    Attributes: `offers`, the parts of this step in the order in which they were offered.
    """

    def __init__(self) -> None:
        self.offers: list[int] = []
        self._waits: dict[int, tuple[Part, torch.Tensor, torch.Tensor, Future[Any]]] = {}
        self._steps: dict[int, int] = {}

    def __call__(self, part: Part, vector: torch.Tensor) -> Future[Any]:
        assert part.index not in self._waits
        future: Future[Any] = Future()
        self._waits[part.index] = (part, vector, vector.clone(), future)
        vector.fill_(float("nan"))
        self.offers.append(part.index)
        return future

    def arrive(self, *indices: int) -> None:
        """The sums of these parts, in this order; default: of all."""
        for index in indices or tuple(self._waits):
            part, vector, own, future = self._waits.pop(index)
            step = self._steps[index] = self._steps.get(index, 0) + 1
            sizes = [parameter.numel() for parameter in part.parameters]
            with torch.no_grad():
                found = [
                    mean(name, step, each)
                    for name, each in zip(part.names, own.split(sizes), strict=True)
                ]
                vector.copy_(torch.cat(found))
            future.set_result(None)

    def fail(self, index: int, error: Exception) -> None:
        """The sum of that part does not come."""
        self._waits.pop(index)[3].set_exception(error)

    def cancel(self, index: int) -> None:
        """The sum of that part is given up."""
        assert self._waits.pop(index)[3].cancel()

    @property
    def missing(self) -> set[int]:
        """Parts that have not arrived."""
        return {*self._waits}

    @contextlib.contextmanager
    def late(self, order: Sequence[int]) -> Iterator[list[int]]:
        """Each time that the code in here would wait, the next sum of this order comes instead.

        Yields:
            The order less what has come.
        """
        left, wait = [*order], Parts._wait_for_change

        def arrive(parts: Parts, seen: int) -> int:
            if seen >= 0 and seen == parts._count:
                assert left, "the code waits for ever"
                self.arrive(left.pop(0))
            return wait(parts, seen)

        with patch.object(Parts, "_wait_for_change", arrive):
            yield left


class Plain:
    """The same training without parts: after backward all gradients become the means, then the whole step."""

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self.model, self.optimizer, self._step = model, optimizer, 0

    def average(self) -> None:
        """All sums at once."""
        self._step += 1
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                if parameter.grad is not None:
                    wide = mean(name, self._step, parameter.grad.float())
                    # Not in place: of two views of one tensor both gradients may have the same memory.
                    parameter.grad = torch.empty_like(parameter.grad).copy_(wide)


def named(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Those that are trained."""
    return [(name, each) for name, each in model.named_parameters() if each.requires_grad]


def pending(
    model: nn.Module, optimizer: Optimizer, cuts: Sequence[int], source: Callable[..., Any]
) -> PendingSteps:
    """Steps in parts, in the order of the model's parameters."""
    return PendingSteps(model, optimizer, cut(named(model), cuts), source)


class Twice(nn.Module):
    """A block that is called twice in a forward pass."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(torch.tanh(self.inner(x)))


class Tied(nn.Module):
    """Two modules with one weight, and a bias that is read without a module of its own."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width, bias=False)
        self.second.weight = self.first.weight
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.second(self.first(x)) + self.bias)


class Last(nn.Module):
    """The last place of a recurrent layer's output."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.GRU(width, width, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x[:, None].expand(-1, 3, -1))[0][:, -1]


class Cast(nn.Module):
    """Parameters of another type inside, and 32 bits outside."""

    def __init__(self, kind: torch.dtype, inner: nn.Module) -> None:
        super().__init__()
        self._kind, self.inner = kind, inner.to(kind)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x.to(self._kind)).float()


def network(seed: int) -> nn.Module:
    """Of random shape."""
    shape = random.Random(seed)
    torch.manual_seed(seed)
    width = shape.randint(2, 9)
    kinds: list[Callable[[], nn.Module]] = [
        *(lambda: nn.Linear(width, width), lambda: Twice(width), lambda: Tied(width)),
        *(lambda: nn.BatchNorm1d(width), lambda: nn.LayerNorm(width), lambda: Last(width)),
        lambda: nn.Sequential(
            nn.Unflatten(1, (1, width)),
            nn.Conv1d(1, 3, 3, padding=1),
            nn.Flatten(),
            nn.Linear(3 * width, width),
        ),
    ]
    blocks: list[nn.Module] = [nn.Linear(4, width)]
    for _ in range(shape.randint(1, 5)):
        blocks += [shape.choice(kinds)(), nn.Tanh()]
    return nn.Sequential(*blocks, nn.Linear(width, 1))


def random_cuts(count: int, seed: int) -> list[int]:
    """Up to eight parts of so many parameters."""
    shape = random.Random(seed)
    return sorted(shape.sample(range(1, count), min(count - 1, shape.randint(1, 7))))


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and outputs of a step."""
    made = torch.Generator().manual_seed(step)
    return torch.randn(8, 4, generator=made), torch.randn(8, 1, generator=made)


def loss(model: nn.Module, step: int) -> torch.Tensor:
    """Of a step's batch."""
    inputs, outputs = batch(step)
    return ((model(inputs) - outputs) ** 2).mean()


OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "sgd": lambda p: SGD(p, lr=0.1),
    "sgd momentum": lambda p: SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "sgd nesterov foreach": lambda p: SGD(p, lr=0.1, momentum=0.9, nesterov=True, foreach=True),
    "sgd fused": lambda p: SGD(p, lr=0.1, momentum=0.9, fused=True),
    "sgd tensor lr": lambda p: SGD(p, lr=torch.tensor(0.1), momentum=0.9),
    "adam": lambda p: Adam(p, lr=0.01, foreach=False),
    "adam foreach amsgrad": lambda p: Adam(p, lr=0.01, foreach=True, amsgrad=True),
    "adam fused": lambda p: Adam(p, lr=0.01, fused=True),
    "adamw": lambda p: AdamW(p, lr=0.01, weight_decay=0.1, foreach=False),
    "adamw foreach": lambda p: AdamW(p, lr=0.01, weight_decay=0.1, foreach=True),
    "adamw fused": lambda p: AdamW(p, lr=0.01, weight_decay=0.1, fused=True),
    "rmsprop": lambda p: RMSprop(p, lr=0.01, momentum=0.5),
    "adagrad": lambda p: Adagrad(p, lr=0.01, lr_decay=0.1),
}


def weights(model: nn.Module) -> list[torch.Tensor]:
    """Copies of all parameters and buffers."""
    return [each.detach().clone() for each in model.state_dict().values()]


def same(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> bool:
    """Bit for bit."""
    return len(one) == len(other) and all(map(torch.equal, one, other))


def states(optimizer: Optimizer) -> list[torch.Tensor]:
    """All tensors of an optimizer's state."""
    found = optimizer.state_dict()["state"]
    values = [found[index][key] for index in sorted(found) for key in sorted(found[index])]
    return [each for each in values if isinstance(each, torch.Tensor)]


def train(
    model: nn.Module, make: Any, cuts: Sequence[int], orders: Sequence[Sequence[int]]
) -> None:
    """Step by step beside a copy that makes whole steps: each loss, and in the end all weights, must be the same."""
    other = copy.deepcopy(model)
    source = Source()
    optimizer, whole = make(model.parameters()), make(other.parameters())
    steps, plain = pending(model, optimizer, cuts, source), Plain(other, whole)
    order: Sequence[int] = ()
    for step, following in enumerate(orders):
        whole.zero_grad()
        optimizer.zero_grad()
        expected = loss(other, step)
        with source.late(order):
            found = loss(model, step)
        assert torch.equal(found, expected), step
        assert not source.missing
        found.backward()
        optimizer.step()
        assert source.missing == {*range(len(cuts) + 1)}, "the step did not return at once"
        expected.backward()
        plain.average()
        whole.step()
        order = following
    with source.late(order):
        steps.wait()
    assert same(weights(model), weights(other))
    assert same(states(optimizer), states(whole))
    steps.close()


CUTS = [2, 4]
ORDER = [2, 0, 1]


def chain() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 1))


class Scene:
    """A model in three parts, and beside it one that makes whole steps of the same means."""

    def __init__(
        self,
        make: Callable[[Any], Optimizer] | None = None,
        model: nn.Module | None = None,
    ) -> None:
        make = make or (lambda found: SGD(found, lr=0.1, momentum=0.9))
        self.model, self.source = model or chain(), Source()
        self.other = copy.deepcopy(self.model)
        self.optimizer, self.whole = make(self.model.parameters()), make(self.other.parameters())
        self.steps = pending(self.model, self.optimizer, CUTS, self.source)
        self.plain = Plain(self.other, self.whole)

    def backward(self, step: int = 0) -> None:
        """Of both, from no gradient on. The plain one's are means then; those of the parts have not come."""
        self.whole.zero_grad()
        self.optimizer.zero_grad()
        loss(self.other, step).backward()
        self.plain.average()
        loss(self.model, step).backward()
        assert self.source.missing == {0, 1, 2}

    def step(self) -> None:
        """Of both. No sum has come, and so nothing is updated in parts."""
        self.whole.step()
        self.optimizer.step()
        assert self.source.missing == {0, 1, 2} and len(self.pending) == 6

    @property
    def pending(self) -> list[str]:
        """Parameters that wait for their update."""
        return [name for name, each in named(self.model) if type(each) is not nn.Parameter]

    def goes_on(self) -> None:
        """Both make another step, of the same bits."""
        self.source.arrive()
        self.backward(9)
        self.step()
        with self.source.late(ORDER):
            self.steps.wait()
        assert same(weights(self.model), weights(self.other))


@contextlib.contextmanager
def warned(why: str) -> Iterator[None]:
    with pytest.warns(UserWarning, match=f"nicps: the script {why}, so this step waits") as found:
        yield
    assert len(found) == 1


@contextlib.contextmanager
def no_other_warning() -> Iterator[None]:
    """All others than those of old ways of PyTorch are errors."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message=".*torch.jit.* is deprecated")
        yield
