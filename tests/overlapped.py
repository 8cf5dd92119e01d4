# SPDX-License-Identifier: Apache-2.0
"""What tests of `nicps.torch.overlap` in one process share: a group of one whose sums take their time, and a model."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW

from nicps.collective import Group
from nicps.collective.channels import plan_of
from nicps.collective.lanes import PER_FRAGMENT


@contextmanager
def process_group() -> Iterator[None]:
    """DDP needs one: of one process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@contextmanager
def slow_group() -> Iterator[Slow]:
    """A group of one, in which nothing is held at the end."""
    made = Slow()
    yield made
    for event in made.held.values():
        event.set()
    made.close()


class Slow(Group):
    """A group of one: its means are what was given, after a while. `order`: of the first numbers of vectors, as their
    exchanges began; `held`: channels on which nothing ends.
    """

    def __init__(self) -> None:
        super().__init__(None, 0, 30.0)
        self.order: list[tuple[int, int]] = []
        self.held = {channel: threading.Event() for channel in range(8)}
        for event in self.held.values():
            event.set()
        self.fails: Exception | None = None
        self._random = random.Random(5)

    def average(
        self, vector: Any, residual: Any, *, lane: str = "i8", channel: int = 0
    ) -> Future[Any]:
        pause = self._random.choice([0.0, 0.0, 0.002])

        def wait() -> Any:
            self.order.append((channel, len(vector)))
            assert self.held[channel].wait(20)
            time.sleep(pause)
            if self.fails is not None:
                raise self.fails
            return super(Slow, self).average(vector, residual, lane=lane).result()

        return self._workers.put(channel, wait)

    def plan(self, urgencies: Any, rooms: Any = None) -> Any:
        """What a group with agents would refuse is refused."""
        plan_of(urgencies, rooms, PER_FRAGMENT, 8000)
        return super().plan(urgencies, rooms)

    def spent(self, channel: int) -> Any:
        return super().spent(0)


class Model(nn.Module):
    """It uses its layers in another order than that in which it names them."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(40, 4)
        self.norm = nn.BatchNorm1d(40)
        self.middle = nn.ModuleList(nn.Linear(40, 40) for _ in range(4))
        self.first = nn.Linear(16, 40)

    def forward(self, x: Any) -> Any:
        x = torch.tanh(self.norm(self.first(x)))
        for each in self.middle:
            x = torch.tanh(each(x))
        return self.last(x)


def made(optimizer: Callable[[Any], Any], **options: Any) -> tuple[Any, Any]:
    """The model, and its optimizer."""
    torch.manual_seed(1)
    model = DistributedDataParallel(Model(), **options)
    return model, optimizer(model.parameters())


def loss_of(model: Any, step: int) -> Any:
    """Of that step's samples."""
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(step))
    return model(x).square().mean()


def train(
    model: Any, optimizer: Any, steps: int = 6, schedule: Any = None, first: int = 0
) -> list[Any]:
    """The losses of these steps."""
    losses = []
    for step in range(first, first + steps):
        optimizer.zero_grad()
        loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        if schedule is not None:
            schedule.step()
        losses.append(loss.item())
    return losses


def bits(model: Any) -> list[bytes]:
    """All that it has."""
    return [each.detach().numpy().tobytes() for each in model.state_dict().values()]


def sgd(parameters: Any) -> Any:
    """With momentum."""
    return SGD(parameters, lr=0.1, momentum=0.9)


def adam(parameters: Any) -> Any:
    """AdamW."""
    return AdamW(parameters, lr=0.01)
