# SPDX-License-Identifier: Apache-2.0
"""Parameters that are updated part by part have the bits of a whole step (docs/channels.md, P2 and P3)."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, Optimizer
from torch.optim import optimizer as torch_optimizer
from torch.overrides import TorchFunctionMode

from nicps.errors import JobFailed, UsageProblem
from nicps.torch.parts import Due, Part, Parts, PartStep, Settings, cut
from tests.pending import OPTIMIZERS, named, network, random_cuts, same, states, train

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS = 4


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_twenty_networks_have_the_bits_of_whole_steps(name: str) -> None:
    for seed in range(20):
        model, shuffled = network(seed), random.Random(seed)
        cuts = random_cuts(len(named(model)), seed)
        orders = [shuffled.sample(range(len(cuts) + 1), len(cuts) + 1) for _ in range(STEPS)]
        train(model, OPTIMIZERS[name], cuts, orders)


@pytest.mark.parametrize("name", ["sgd momentum", "adamw"])
def test_every_order_of_arrival(name: str) -> None:
    for order in itertools.permutations(range(4)):
        train(network(7), OPTIMIZERS[name], [1, 3, 5], [order] * 3)


def test_a_parameter_in_another_order_of_memory() -> None:
    class Images(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Conv2d(2, 3, 2), nn.Flatten(), nn.Linear(3, 1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            images = torch.cat([x, x], 1).view(-1, 2, 2, 2)
            return self.inner(images.contiguous(memory_format=torch.channels_last))

    torch.manual_seed(0)
    model = Images().to(memory_format=torch.channels_last)
    assert not next(model.parameters()).is_contiguous()
    train(model, OPTIMIZERS["adam"], [2], [[1, 0]] * 3)


def test_groups_have_hyper_parameters_of_their_own() -> None:
    def make(parameters: Any) -> Optimizer:
        every = [*parameters]
        groups = [{"params": every[::2], "lr": 0.3}, {"params": every[1::2], "momentum": 0.8}]
        return SGD(groups, lr=0.05)

    train(network(3), make, [1, 4], [[2, 1, 0]] * 3)


def test_gradients_that_share_memory_do_not_mix() -> None:
    """Two views of one tensor get one gradient, of which both may hold the memory."""

    class Views(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = (nn.Parameter(torch.ones(4, 1)) for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ (self.first.view(-1) + self.second.view(-1)).view(4, 1)

    train(Views(), OPTIMIZERS["sgd momentum"], [1], [[0, 1]] * 3)


# ---- parts


def parameters(count: int) -> list[tuple[str, nn.Parameter]]:
    return [(f"p{i}", nn.Parameter(torch.full((i + 1,), float(i)))) for i in range(count)]


def test_cut_deals_out_in_order() -> None:
    found = cut(parameters(5), [1, 3])
    assert [part.names for part in found] == [("p0",), ("p1", "p2"), ("p3", "p4")]
    assert [part.index for part in found] == [0, 1, 2]
    assert [part.size for part in found] == [1, 5, 9]


@pytest.mark.parametrize("cuts", [[0], [2, 2], [3, 1], [5], [-1]])
def test_cuts_that_make_an_empty_part_are_refused(cuts: list[int]) -> None:
    with pytest.raises(UsageProblem, match=r"do not rise between 0 and 5"):
        cut(parameters(5), cuts)


def refused(parameter: Any, why: str) -> None:
    with pytest.raises(UsageProblem, match=why):
        cut([("a", nn.Parameter(torch.zeros(2))), ("odd", parameter)], [1])


def test_parameters_that_are_refused() -> None:
    class Other(nn.Parameter):
        pass

    refused(Other(torch.zeros(2)), "odd is a Other: parts take plain nn.Parameters only")
    refused(nn.UninitializedParameter(), "odd is a UninitializedParameter")
    refused(nn.Parameter(torch.zeros(2, dtype=torch.float64)), r"odd is torch\.float64")
    refused(nn.Parameter(torch.zeros(2, dtype=torch.complex64)), r"odd is torch\.complex64")
    refused(nn.Parameter(torch.zeros(2, device="meta")), "odd is on meta")


def test_parameters_that_share_memory_are_refused() -> None:
    whole = torch.zeros(10)
    one, other = nn.Parameter(whole[:6]), nn.Parameter(whole[5:])
    with pytest.raises(UsageProblem, match="one and other share memory"):
        cut([("one", one), ("other", other)], [1])
    cut([("one", nn.Parameter(whole[:5])), ("other", nn.Parameter(whole[5:]))], [1])


# ---- updates, each exactly once


class Recorder:
    """Takes the place of an optimizer's step."""

    def __init__(self) -> None:
        self.made: list[tuple[str, ...]] = []
        self.before: Any = lambda: None

    def __call__(self, found: Sequence[nn.Parameter], gradients: Any, settings: Settings) -> None:
        self.before()
        self.made.append(tuple(str(each.numel() - 1) for each in found))


def due(part: Part, future: Future[Any]) -> Due:
    places = [torch.zeros(each.shape) for each in part.parameters]
    return Due(part, places, places, future)


NONE = Settings((), {})


class Scene:
    """Three parts that are promised, and their futures."""

    def __init__(self, promised: bool = True) -> None:
        self.recorder = Recorder()
        self.parts = Parts(self.recorder, cut(parameters(3), [1, 2]))
        self.futures: list[Future[Any]] = [Future() for _ in range(3)]
        for part, future in zip(self.parts.parts, self.futures, strict=True):
            self.parts.offer(due(part, future))
        if promised:
            self.parts.promise(NONE)

    @property
    def made(self) -> str:
        return "".join(each[0] for each in self.recorder.made)


def test_what_is_waited_for_goes_first_then_the_order_of_need() -> None:
    scene = Scene()
    scene.futures[0].set_result(None)
    scene.futures[1].set_result(None)
    scene.parts.wait([1])
    assert scene.made == "1"
    scene.futures[2].set_result(None)
    scene.parts.wait()
    scene.parts.wait()
    assert scene.made == "102"


def test_a_wait_updates_what_comes_meanwhile() -> None:
    scene = Scene()
    waiting = threading.Thread(target=scene.parts.wait, args=([2],))
    waiting.start()
    updated = threading.Event()
    scene.recorder.before = updated.set
    scene.futures[1].set_result(None)
    assert updated.wait(60)
    assert waiting.is_alive()
    scene.futures[2].set_result(None)
    waiting.join(60)
    assert scene.made == "12"


def test_nothing_is_updated_before_step() -> None:
    scene = Scene(promised=False)
    for future in scene.futures:
        future.set_result(None)
    scene.parts.wait()
    assert scene.made == ""
    assert len(scene.parts.wait_for_sums()) == 3
    scene.parts.drop()
    scene.parts.promise(NONE)
    scene.parts.wait()
    assert scene.made == ""


def test_threads_update_each_part_once_and_none_sees_a_half() -> None:
    """The second thread waits for the same part while the first one is in its update."""
    scene = Scene()
    inside, goes_on, passed = threading.Event(), threading.Event(), threading.Event()

    def before() -> None:
        inside.set()
        assert goes_on.wait(60)

    def second() -> None:
        scene.parts.wait([0])
        passed.set()

    scene.recorder.before = before
    scene.futures[0].set_result(None)
    threads = [
        threading.Thread(target=scene.parts.wait, args=([0],)),
        threading.Thread(target=second),
    ]
    threads[0].start()
    assert inside.wait(60)
    threads[1].start()
    assert not passed.wait(0.2)
    goes_on.set()
    for thread in threads:
        thread.join(60)
    assert passed.is_set() and scene.made == "0"


def test_a_future_ends_while_an_update_is_under_way() -> None:
    """Its thread must not wait for the update: it has the next sum to bring."""
    scene = Scene()

    def before() -> None:
        thread = threading.Thread(target=scene.futures[1].set_result, args=(None,))
        thread.start()
        thread.join(60)
        assert not thread.is_alive()

    scene.recorder.before = before
    scene.futures[0].set_result(None)
    scene.parts.wait([0])
    assert scene.made == "0"


# ---- failures


def test_a_failed_sum_comes_out_of_every_call_after_it() -> None:
    scene = Scene()
    scene.futures[2].set_exception(JobFailed("the group is over"))
    for call in (scene.parts.check, scene.parts.wait, scene.parts.wait_for_sums):
        with pytest.raises(JobFailed, match="the group is over"):
            call()
    scene.futures[0].set_result(None)
    with pytest.raises(JobFailed, match="the group is over"):
        scene.parts.wait([0])
    assert scene.made == ""


def test_a_failure_wakes_who_waits() -> None:
    scene, found = Scene(), []

    def wait() -> None:
        try:
            scene.parts.wait([0])
        except JobFailed as error:
            found.append(str(error))

    thread = threading.Thread(target=wait)
    thread.start()
    scene.futures[1].set_exception(JobFailed("the group is over"))
    thread.join(60)
    assert found == ["the group is over"]


def test_a_sum_that_is_given_up() -> None:
    scene = Scene()
    scene.futures[1].cancel()
    with pytest.raises(JobFailed, match="the sum of a part was cancelled"):
        scene.parts.wait()


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("odd"), "odd"),
        (
            KeyboardInterrupt(),
            "the update of p1 was interrupted: the weights are between two steps",
        ),
    ],
)
def test_a_failed_update_fails_the_step(error: BaseException, text: str) -> None:
    scene = Scene()

    def before() -> None:
        raise error

    for future in scene.futures:
        future.set_result(None)
    scene.recorder.before = before
    with pytest.raises(type(error)):
        scene.parts.wait([1])
    scene.recorder.before = lambda: None
    for _ in range(2):
        with pytest.raises(Exception, match=text):
            scene.parts.wait([0])
    assert scene.made == ""


def test_an_interrupt_while_nothing_is_updated_is_no_failure() -> None:
    scene = Scene()

    def interrupt(seen: int) -> int:
        raise KeyboardInterrupt

    scene.parts._wait_for_change, wait = interrupt, scene.parts._wait_for_change  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        scene.parts.wait()
    scene.parts._wait_for_change = wait  # type: ignore[method-assign]
    for future in scene.futures:
        future.set_result(None)
    scene.parts.wait()
    assert scene.made == "012"


# ---- an optimizer's step of some parameters


def test_optimizers_that_are_refused() -> None:
    class Own(SGD):
        pass

    weight = [nn.Parameter(torch.zeros(2))]
    with pytest.raises(UsageProblem, match="LBFGS cannot update parameters part by part"):
        PartStep(torch.optim.LBFGS(weight))
    with pytest.raises(UsageProblem, match="Own cannot update parameters part by part"):
        PartStep(Own(weight))
    with pytest.raises(UsageProblem, match=r"SGD\(differentiable=True\) cannot"):
        PartStep(SGD(weight, differentiable=True))
    with pytest.raises(UsageProblem, match=r"Adam\(capturable=True\) cannot"):
        PartStep(Adam(weight, capturable=True))
    optimizer = Adam(weight)
    step = PartStep(optimizer)
    optimizer.param_groups[0]["capturable"] = True
    with pytest.raises(UsageProblem, match=r"Adam\(capturable=True\) cannot"):
        step.settings()


def test_settings_are_copies() -> None:
    weight = nn.Parameter(torch.zeros(2))
    rate = torch.tensor(0.5)
    optimizer = SGD([weight], lr=rate)
    step = PartStep(optimizer)
    settings = step.settings()
    rate.fill_(7.0)
    optimizer.param_groups[0]["momentum"] = 0.9
    step([weight], [torch.ones(2)], settings)
    assert weight.tolist() == [-0.5, -0.5] and not optimizer.state[weight].get("momentum_buffer")


def test_the_gradient_of_the_script_stays() -> None:
    weight = nn.Parameter(torch.zeros(2))
    weight.grad = own = torch.full((2,), 5.0)
    step = PartStep(SGD([weight], lr=1.0))
    step([weight], [torch.ones(2)], step.settings())
    assert weight.tolist() == [-1.0, -1.0] and weight.grad is own


def test_hooks_of_all_optimizers_do_not_run_for_a_part() -> None:
    weight = nn.Parameter(torch.zeros(2))
    optimizer = SGD([weight], lr=1.0)
    called: list[Any] = []
    hook = torch_optimizer.register_optimizer_step_post_hook(lambda *_: called.append(1))
    step = PartStep(optimizer)
    step([weight], [torch.ones(2)], step.settings())
    hook.remove()
    assert weight.tolist() == [-1.0, -1.0] and not called


class Refuses(TorchFunctionMode):
    """No function of tensors may be called in it."""

    def __torch_function__(self, func: Any, *_: Any) -> Any:
        raise AssertionError(func)


@pytest.mark.parametrize("around", ["inference", "functions"])
def test_an_update_does_not_see_what_the_thread_has_set(around: str) -> None:
    """It is carried out in the middle of a forward pass."""
    contexts: dict[str, Any] = {
        "inference": torch.inference_mode(),
        "functions": Refuses(),
    }
    weight, other = (nn.Parameter(torch.tensor([0.3, 0.7])) for _ in range(2))
    optimizer, whole = Adam([weight], lr=0.1), Adam([other], lr=0.1)
    step = PartStep(optimizer)
    for _ in range(2):
        gradient = torch.tensor([0.1, 0.2])
        other.grad = gradient.clone()
        whole.step()
        with contexts[around]:
            step([weight], [gradient], step.settings())
    assert torch.equal(weight, other)
    assert not any(each.is_inference() for each in states(optimizer))
    assert same(states(optimizer), states(whole))
