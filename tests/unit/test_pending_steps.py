# SPDX-License-Identifier: Apache-2.0
"""Gradients, hyper-parameters and states of steps in parts (docs/priorities.md, what a script does)."""

from __future__ import annotations

import contextlib
import copy
import pickle
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim import optimizer as torch_optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR

from tests.pending import (
    ORDER,
    Cast,
    Scene,
    chain,
    loss,
    same,
    warned,
    weights,
)

pytestmark = pytest.mark.usefixtures("one_thread", "unwarned")


# ---- gradients


def test_clipping_by_the_global_norm_waits_for_all_sums_and_the_step_is_whole(scene: Scene) -> None:
    with warned("reads a gradient"):
        for step in range(3):  # one warning
            scene.backward(step)
            with scene.source.late(ORDER):
                found = nn.utils.clip_grad_norm_(scene.model.parameters(), 0.5)
            assert torch.equal(found, nn.utils.clip_grad_norm_(scene.other.parameters(), 0.5))
            assert scene.pending == []
            scene.optimizer.step()
            scene.whole.step()
            assert same(weights(scene.model), weights(scene.other))
    scene.goes_on()  # which is one in parts


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16])
def test_clipped_gradients_of_sixteen_bits_stay_clipped(kind: torch.dtype) -> None:
    """They have a memory of their own, beside that of the sums."""
    scene = Scene(model=Cast(kind, chain()))
    scene.backward()
    with warned("reads a gradient"), scene.source.late(ORDER):
        nn.utils.clip_grad_norm_(scene.model.parameters(), 0.01)
    nn.utils.clip_grad_norm_(scene.other.parameters(), 0.01)
    scene.optimizer.step()
    scene.whole.step()
    assert same(weights(scene.model), weights(scene.other))
    scene.goes_on()


def test_clip_grad_value_and_a_read_of_a_gradient(scene: Scene) -> None:
    scene.backward()
    with warned("reads a gradient"), scene.source.late(ORDER):
        nn.utils.clip_grad_value_(scene.model.parameters(), 0.1)
        nn.utils.clip_grad_value_(scene.other.parameters(), 0.1)
        found = [each.grad for each in scene.model.parameters()]
    assert same(found, [each.grad for each in scene.other.parameters()])
    assert {type(each) for each in found} == {torch.Tensor}
    scene.optimizer.step()
    scene.whole.step()
    scene.goes_on()


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("overflow", [False, True])
def test_a_loss_scaler_waits_for_all_sums(fused: bool, overflow: bool) -> None:
    scene = Scene(lambda found: AdamW(found, lr=0.1, fused=fused))
    scaler, other = (torch.amp.GradScaler("cpu", init_scale=1024.0) for _ in range(2))
    factor = float("inf") if overflow else 1.0
    with warned("reads a gradient"):
        for step in range(2):
            scene.optimizer.zero_grad()
            scene.whole.zero_grad()
            other.scale(loss(scene.other, step) * factor).backward()
            scene.plain.average()
            scaler.scale(loss(scene.model, step) * factor).backward()
            with scene.source.late(ORDER):
                scaler.step(scene.optimizer)
                scaler.update()
            other.step(scene.whole)
            other.update()
            assert same(weights(scene.model), weights(scene.other))
    assert scaler.get_scale() == other.get_scale()
    scene.goes_on()


@pytest.mark.parametrize("reads", [False, True])
@pytest.mark.parametrize("set_to_none", [False, True])
def test_a_backward_pass_without_a_step(scene: Scene, reads: bool, set_to_none: bool) -> None:
    """Its gradients are dropped, once they are there."""
    scene.backward()
    scene.step()
    scene.source.arrive()
    scene.backward(1)
    with scene.source.late(ORDER), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if reads:
            nn.utils.clip_grad_norm_(scene.model.parameters(), 0.5)
        scene.optimizer.zero_grad(set_to_none)
        loss(scene.model, 2).backward()
    scene.whole.zero_grad()
    loss(scene.other, 2).backward()
    scene.plain.average()
    scene.step()
    scene.goes_on()


def test_a_gradient_that_the_script_changes(scene: Scene) -> None:
    for step, change in enumerate((torch.ones(5), None)):
        scene.backward(step)
        scene.model[0].bias.grad = change
        scene.other[0].bias.grad = change
        with contextlib.ExitStack() as stack:
            if step == 0:
                stack.enter_context(warned("changes a gradient"))
            stack.enter_context(scene.source.late(ORDER))
            scene.optimizer.step()
        scene.whole.step()
        assert same(weights(scene.model), weights(scene.other)) and scene.pending == []
    scene.goes_on()


def test_a_parameter_without_momentum_is_updated_with_all_others() -> None:
    """SGD's `foreach` would give the others other bits without it."""
    left = "has left a parameter without momentum, which SGD's foreach must update with all others"
    model = Cast(torch.bfloat16, chain())
    scene = Scene(lambda found: SGD(found, lr=0.1, momentum=0.9, foreach=True), model)
    for step, why in enumerate(("changes a gradient", left)):
        scene.backward(step)
        if step == 0:
            scene.model.inner[0].bias.grad = scene.other.inner[0].bias.grad = None
        with warned(why), scene.source.late(ORDER):
            scene.optimizer.step()
        scene.whole.step()
        assert same(weights(scene.model), weights(scene.other)) and scene.pending == []
    scene.goes_on()


@pytest.mark.parametrize("foreach", [False, True])
def test_zero_grad(foreach: bool) -> None:
    """With None at once; with zeros it waits, and the next gradient is added to them."""
    scene = Scene(lambda found: SGD(found, lr=0.1, momentum=0.9, foreach=foreach))
    for step in range(3):
        scene.backward(step)
        scene.step()
        scene.optimizer.zero_grad()
        assert all(each.grad is None for each in scene.model.parameters())
        assert len(scene.pending) == 6
        scene.source.arrive()
    scene.backward(3)
    scene.step()
    with warned("reads a gradient"), scene.source.late(ORDER):
        scene.optimizer.zero_grad(set_to_none=False)
    assert scene.pending == []
    assert all(not each.grad.any() for each in scene.model.parameters())
    loss(scene.model, 4).backward()
    scene.whole.zero_grad()
    loss(scene.other, 4).backward()
    scene.plain.average()
    scene.step()
    scene.goes_on()


def test_a_gradient_that_is_kept_keeps_its_value(scene: Scene) -> None:
    kept = []
    for step in range(3):
        scene.backward(step)
        kept.append(
            ([p.grad for p in scene.model.parameters()], [p.grad for p in scene.other.parameters()])
        )
        scene.step()
        scene.source.arrive()
    scene.steps.wait()
    for found, expected in kept:
        assert same(found, expected)


def test_after_the_step_the_gradient_is_the_mean(scene: Scene) -> None:
    scene.backward()
    scene.step()
    with warned("reads a gradient"), scene.source.late(ORDER):
        found = [each.grad + 0 for each in scene.model.parameters()]
    assert same(found, [each.grad for each in scene.other.parameters()])
    assert scene.pending == []
    scene.goes_on()


def test_no_sync_adds_up_and_the_pass_without_it_exchanges_the_sum(scene: Scene) -> None:
    for step in range(3):
        scene.optimizer.zero_grad()
        scene.whole.zero_grad()
        with scene.source.late(ORDER), scene.steps.no_sync():
            loss(scene.model, step).backward()
            loss(scene.model, step + 10).backward()
        assert scene.source.missing == set()
        loss(scene.model, step + 20).backward()
        for at in (step, step + 10, step + 20):
            loss(scene.other, at).backward()
        scene.plain.average()
        scene.step()
    scene.goes_on()


def test_a_closure_is_run_first(scene: Scene) -> None:
    for step in range(2):

        def closure(step: int = step) -> torch.Tensor:
            scene.optimizer.zero_grad()
            found = loss(scene.model, step)
            found.backward()
            return found

        scene.whole.zero_grad()
        expected = loss(scene.other, step)
        expected.backward()
        scene.plain.average()
        scene.whole.step()
        with scene.source.late(ORDER):
            found = scene.optimizer.step(closure)
            assert torch.equal(found, expected)
            assert scene.source.missing, "it waits for no sum"
            assert same(weights(scene.model), weights(scene.other))
    scene.goes_on()


# ---- hyper-parameters and states


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize(
    "kind",
    [
        partial(CosineAnnealingLR, T_max=5),
        partial(OneCycleLR, max_lr=0.5, total_steps=9),  # it changes momentum too
    ],
)
def test_a_scheduler_changes_the_next_step(kind: Any, before: bool) -> None:
    schedulers: list[Any] = []

    def make(found: Any) -> Optimizer:
        optimizer = SGD(found, lr=0.3, momentum=0.9)
        if before:
            schedulers.append(kind(optimizer))
        return optimizer

    scene = Scene(make)
    if not before:
        schedulers += [kind(scene.optimizer), kind(scene.whole)]
    for step in range(4):
        with scene.source.late(ORDER):
            scene.steps.wait()
        scene.backward(step)
        scene.step()
        for scheduler in schedulers:
            scheduler.step()
        assert len(scene.pending) == 6
    scene.goes_on()


def test_a_rate_in_a_tensor_is_copied() -> None:
    scene = Scene(lambda found: SGD(found, lr=torch.tensor(0.1)))
    scene.backward()
    scene.step()
    scene.optimizer.param_groups[0]["lr"].fill_(100.0)
    with scene.source.late(ORDER):
        assert same(weights(scene.model), weights(scene.other))


STATES: dict[str, Callable[[Optimizer], Any]] = {
    "state_dict": lambda optimizer: optimizer.state_dict()["state"][0]["exp_avg"].clone(),
    "state": lambda optimizer: optimizer.state[optimizer.param_groups[0]["params"][5]]["exp_avg"],
    "values": lambda optimizer: torch.cat(
        [each["exp_avg"].view(-1) for each in optimizer.state.values()]
    ),
    "number": lambda optimizer: torch.tensor(len(optimizer.state)),
    "copy": lambda optimizer: copy.deepcopy(optimizer).state_dict()["state"][3]["exp_avg"],
    "pickle": lambda optimizer: pickle.loads(pickle.dumps(optimizer)).state_dict()["state"][3][
        "exp_avg"
    ],
}


@pytest.mark.parametrize("name", STATES)
def test_whatever_reads_the_state_waits_for_all(name: str) -> None:
    scene = Scene(lambda found: Adam(found, lr=0.1))
    for step in range(2):
        scene.backward(step)
        scene.step()
        with scene.source.late(ORDER):
            found = STATES[name](scene.optimizer)
        assert scene.pending == []
        assert torch.equal(found, STATES[name](scene.whole))
    scene.goes_on()


def test_a_state_that_is_loaded_replaces_that_of_the_step() -> None:
    scene = Scene(lambda found: Adam(found, lr=0.1))
    scene.backward()
    saved = None
    for step in range(2):
        scene.step()
        with scene.source.late(ORDER):
            saved = saved or copy.deepcopy(scene.optimizer.state_dict())
            scene.steps.wait()
        scene.backward(step)
    scene.step()
    with scene.source.late(ORDER):
        scene.optimizer.load_state_dict(saved)
    scene.whole.load_state_dict(copy.deepcopy(saved))
    assert scene.pending == []
    scene.backward(5)
    scene.step()
    with scene.source.late(ORDER):
        assert torch.equal(STATES["values"](scene.optimizer), STATES["values"](scene.whole))
    scene.goes_on()


@pytest.mark.parametrize("where", ["optimizer", "all"])
@pytest.mark.parametrize("kind", ["pre", "post"])
def test_a_hook_at_step_makes_it_whole(scene: Scene, where: str, kind: str) -> None:
    """What it does to weights must come behind all updates, and before any module reads them."""

    def clamp(optimizer: Optimizer, *_: Any) -> None:
        with torch.no_grad():
            for each in optimizer.param_groups[0]["params"]:
                each.clamp_(-0.1, 0.1)

    if where == "optimizer":
        hooks = [
            getattr(each, f"register_step_{kind}_hook")(clamp)
            for each in (scene.optimizer, scene.whole)
        ]
    else:
        module = torch_optimizer
        hooks = [getattr(module, f"register_optimizer_step_{kind}_hook")(clamp)]
    try:
        scene.backward()
        with warned("has a hook at the .*"), scene.source.late(ORDER):
            scene.optimizer.step()
        scene.whole.step()
        assert same(weights(scene.model), weights(scene.other))
    finally:
        for hook in hooks:
            hook.remove()
    scene.goes_on()


def test_where_all_sums_are_there_the_step_is_whole(scene: Scene) -> None:
    scene.backward()
    scene.source.arrive()
    scene.optimizer.step()
    scene.whole.step()
    assert scene.pending == []
    assert same(weights(scene.model), weights(scene.other))
    scene.goes_on()


def test_a_step_without_a_backward_pass_does_what_it_does_without_parts(scene: Scene) -> None:
    scene.optimizer.step()
    scene.backward()
    scene.step()
    scene.source.arrive()
    scene.optimizer.step()  # of the same means once more
    scene.whole.step()
    assert same(weights(scene.model), weights(scene.other))
