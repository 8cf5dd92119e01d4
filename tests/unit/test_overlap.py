# SPDX-License-Identifier: Apache-2.0
"""`nicps.torch.overlap` in one process, with a group of one whose sums take their time (docs/pytorch.md)."""

from __future__ import annotations

import copy
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import pytest

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402
from torch.optim import SGD, AdamW  # noqa: E402

from nicps.collective import Group  # noqa: E402
from nicps.collective.channels import plan_of  # noqa: E402
from nicps.collective.lanes import PER_FRAGMENT  # noqa: E402
from nicps.errors import JobFailed, UsageProblem  # noqa: E402
from nicps.torch import overlap  # noqa: E402

Overlap, Settings = overlap.__globals__["Overlap"], overlap.__globals__["Settings"]
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module", autouse=True)
def gloo() -> Iterator[None]:
    """DDP needs a process group: of one process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


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
    torch.manual_seed(1)
    model = DistributedDataParallel(Model(), **options)
    return model, optimizer(model.parameters())


def loss_of(model: Any, step: int) -> Any:
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(step))
    return model(x).square().mean()


def train(
    model: Any, optimizer: Any, steps: int = 6, schedule: Any = None, first: int = 0
) -> list[Any]:
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
    return [each.detach().numpy().tobytes() for each in model.state_dict().values()]


def sgd(parameters: Any) -> Any:
    return SGD(parameters, lr=0.1, momentum=0.9)


def adam(parameters: Any) -> Any:
    return AdamW(parameters, lr=0.01)


@pytest.fixture
def group() -> Iterator[Slow]:
    made = Slow()
    yield made
    for event in made.held.values():
        event.set()
    made.close()


# ---- the same bits


@pytest.mark.parametrize(
    ("optimizer", "scope", "options"),
    [
        (sgd, "channels", {}),
        (adam, "channels", {"gradient_as_bucket_view": True}),
        (sgd, "queue", {"find_unused_parameters": True}),
    ],
)
def test_weights_are_those_of_plain_ddp(
    group: Slow, optimizer: Any, scope: str, options: Any
) -> None:
    model, made_by = made(optimizer, **options)
    plain, other = made(optimizer, **options)
    handle = Overlap(model, made_by, group, Settings("i32", 3, None, scope))
    schedules = [torch.optim.lr_scheduler.StepLR(each, 2, 0.5) for each in (made_by, other)]
    assert train(model, made_by, 9, schedules[0]) == train(plain, other, 9, schedules[1])
    assert handle.figures.steps == 8, "the first step is DDP's own"
    assert bits(model) == bits(plain)
    handle.close()
    assert train(model, made_by, 2, first=9) == train(plain, other, 2, first=9)
    assert bits(model) == bits(plain)


def test_gradients_that_add_up_over_several_passes(group: Slow) -> None:
    """`no_sync` is that of the model, as with DDP."""
    model, optimizer = made(sgd)
    plain, other = made(sgd)
    Overlap(model, optimizer, group, Settings(channels=2))
    for step in range(5):
        for each, by in ((model, optimizer), (plain, other)):
            by.zero_grad()
            with each.no_sync():
                loss_of(each, 10 * step).backward()
                loss_of(each, 10 * step + 1).backward()
            loss_of(each, 10 * step + 2).backward()
            by.step()
    assert bits(model) == bits(plain)


# ---- order, and what waits


def test_front_layers_are_on_the_most_urgent_channel(group: Slow) -> None:
    """Front is what the forward pass uses first, whatever the order of the names."""
    model, optimizer = made(sgd)
    handle = Overlap(model, optimizer, group, Settings(channels=3))
    assert handle.plan == ()
    train(model, optimizer, 1)
    assert group.channels == 4
    names, channels = zip(*handle.plan, strict=True)
    assert names[0].startswith("first.") and names[-1].startswith(("middle.", "last."))
    assert list(channels) == sorted(channels, reverse=True) and {*channels} == {0, 1, 2}
    group.order.clear()
    train(model, optimizer, 1)
    handle.wait()
    assert {channel for channel, _ in group.order} == {1, 2, 3}


def test_a_queue_takes_them_from_the_rear_to_the_front(group: Slow) -> None:
    model, optimizer = made(sgd)
    handle = Overlap(model, optimizer, group, Settings(channels=3, scope="queue"))
    train(model, optimizer, 1)
    group.order.clear()
    train(model, optimizer, 1)
    handle.wait()
    assert [channel for channel, _ in group.order] == [1, 2, 3]


def test_the_forward_pass_begins_before_all_is_there(group: Slow) -> None:
    """The rear layers' part is held until the front ones have run."""
    model, optimizer = made(sgd)
    plain, other = made(sgd)
    Overlap(model, optimizer, group, Settings(cuts=(4, 8)))  # while it is measured it would wait
    train(model, optimizer, 3)
    train(plain, other, 3)
    optimizer.zero_grad()
    loss = loss_of(model, 3)
    group.held[1].clear()
    loss.backward()
    optimizer.step()
    hook = model.module.first.register_forward_hook(lambda *_: group.held[1].set())
    train(plain, other, 1, first=3)
    assert not group.held[1].is_set(), "the step itself waits for nothing"
    assert train(model, optimizer, 1, first=4) == train(plain, other, 1, first=4)
    hook.remove()
    assert bits(model) == bits(plain)


def test_a_failure_comes_out_of_the_next_forward_pass(group: Slow) -> None:
    model, optimizer = made(sgd)
    handle = Overlap(model, optimizer, group, Settings())
    train(model, optimizer, 2)
    handle.wait()
    group.fails = JobFailed("the group is over here: h2 is gone")
    with pytest.raises(JobFailed, match="h2 is gone"):
        train(model, optimizer, 2, first=2)
    with pytest.raises(JobFailed, match="h2 is gone"):
        handle.close()


# ---- need first


def test_the_first_steps_are_measured_and_their_plan_is_agreed_on(group: Slow) -> None:
    model, optimizer = made(sgd)
    plain, other = made(sgd)
    handle = Overlap(model, optimizer, group, Settings(channels=2))
    train(model, optimizer, 7)
    assert handle.figures.predicted_seconds is None
    train(model, optimizer, 3, first=7)
    assert 0 < handle.figures.predicted_seconds < 1
    train(plain, other, 10)
    assert bits(model) == bits(plain)
    assert {*dict(handle.plan).values()} <= {0, 1}


def test_cuts_by_hand_are_kept(group: Slow) -> None:
    model, optimizer = made(sgd)
    handle = Overlap(model, optimizer, group, Settings(cuts=(4, 8)))
    train(model, optimizer, 12)
    assert handle.figures.predicted_seconds is None
    names = [name for name, _ in model.module.named_parameters()]
    order = [
        name
        for prefix in ("first", "norm", "middle", "last")
        for name in names
        if name.startswith(prefix)
    ]
    assert handle.plan == ((order[0], 2), (order[4], 1), (order[8], 0))


# ---- residuals


def test_residuals_are_kept_with_a_checkpoint(group: Slow) -> None:
    model, optimizer = made(sgd)
    handle = Overlap(model, optimizer, group, Settings(lane="i8", channels=2))
    train(model, optimizer, 2)
    state = handle.state_dict()
    assert {name: each.numel() for name, each in state.items()} == {
        name: each.numel() for name, each in model.module.named_parameters()
    }
    changed = {name: torch.full_like(each, 0.5) for name, each in state.items()}
    handle.load_state_dict(changed)
    assert all((each == 0.5).all() for each in handle.state_dict().values())
    with pytest.raises(UsageProblem, match="it is that of another model"):
        handle.load_state_dict({"first.weight": torch.zeros(3)})
    train(model, optimizer, 2, first=2)


# ---- what is refused


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"lane": "i4"}, "lane must be one of i8, i16, i32, not 'i4'"),
        ({"channels": 0}, "channels must be 1 to 6, not 0"),
        ({"channels": 7}, "channels must be 1 to 6, not 7"),
        ({"cuts": (1, 2, 3, 4, 5, 6)}, "cuts must be less than 6"),
        ({"scope": "sender"}, "scope must be one of channels, queue"),
    ],
)
def test_settings_that_cannot_be_meant(settings: Any, why: str) -> None:
    with pytest.raises(UsageProblem, match=why):
        Settings(**settings)


def test_models_that_it_does_not_take(group: Slow) -> None:
    model, optimizer = made(sgd)
    with pytest.raises(UsageProblem, match="overlap takes a DistributedDataParallel, not Model"):
        overlap(model.module, optimizer)
    with pytest.raises(
        UsageProblem, match="overlap needs the backend nicps, and this model's is gloo"
    ):
        overlap(model, optimizer)
    for change, why in (
        ({"static_graph": True}, "static_graph=True"),
        ({"parameters_to_ignore": {"first.weight"}}, "DDP was told to ignore some"),
        ({"_comm_hooks": [1]}, "a hook averages the model's gradients already"),
    ):
        other = copy.copy(model)
        other.__dict__.update(change)
        with pytest.raises(UsageProblem, match=why):
            Overlap(other, optimizer, group, Settings())
    with pytest.raises(UsageProblem, match="LBFGS cannot update parameters part by part"):
        Overlap(model, torch.optim.LBFGS(model.parameters()), group, Settings())
    with pytest.raises(UsageProblem, match=r"cuts \[5, 5\] do not rise between 0 and 14"):
        Overlap(model, optimizer, group, Settings(cuts=(5, 5)))


def test_a_hook_that_comes_later_is_named(group: Slow) -> None:
    model, optimizer = made(sgd)
    Overlap(model, optimizer, group, Settings())
    train(model, optimizer, 2)
    model.register_comm_hook(None, lambda state, bucket: None)
    with pytest.raises(UsageProblem, match="a hook was registered at the model"):
        train(model, optimizer, 1, first=2)
