# SPDX-License-Identifier: Apache-2.0
"""What trainers do around a model that is averaged in parts (docs/priorities.md), without the trainers themselves; and
uneven inputs.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from torch.distributed.algorithms.join import Join  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402
from torch.optim import SGD, Optimizer  # noqa: E402

from nicps.errors import UsageProblem  # noqa: E402
from nicps.torch import overlap  # noqa: E402
from nicps.torch.backend import ProcessGroupNicps  # noqa: E402
from nicps.torch.tcp import Tcp  # noqa: E402
from nicps.torch.trainers import unwrapped  # noqa: E402
from tests.overlapped import (  # noqa: E402
    Model,
    Slow,
    adam,
    bits,
    loss_of,
    made,
    sgd,
    train,
)

Overlap, Settings = overlap.__globals__["Overlap"], overlap.__globals__["Settings"]
pytestmark = pytest.mark.usefixtures("one_thread", "gloo")


class AcceleratedOptimizer(Optimizer):
    """As Accelerate's: its step calls that of the optimizer in it."""

    def __init__(self, optimizer: Optimizer, scaler: Any = None) -> None:
        self.optimizer, self.scaler = optimizer, scaler

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure)


class LightningOptimizer:
    """As Lightning's: it makes itself a class that derives from its optimizer's."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        bases = (type(self), type(optimizer))
        self.__class__ = type(f"Lightning{type(optimizer).__name__}", bases, {})

    @property
    def optimizer(self) -> Optimizer:
        return self._optimizer


# ---- wrapped optimizers


def test_a_scheduler_that_is_made_between_two_steps(group: Slow) -> None:
    """It calls the `step` that was there then, also when another plan is in force, or none."""
    models = [made(sgd) for _ in range(2)]
    handle = Overlap(*models[0], group, Settings(channels=2))
    for each in models:
        train(*each, 2)
    schedules = [torch.optim.lr_scheduler.StepLR(by, 2, 0.5) for _, by in models]
    handle.load_state_dict(handle.state_dict())  # which makes the parts anew
    for (model, optimizer), schedule in zip(models, schedules, strict=True):
        hook = optimizer.register_step_post_hook(lambda *_: None)  # whole steps
        train(model, optimizer, 3, schedule, first=2)
        hook.remove()
    assert handle.figures.steps == 4
    handle.close()
    for each, schedule in zip(models, schedules, strict=True):
        train(*each, 2, schedule, first=5)
    assert bits(models[0][0]) == bits(models[1][0])


def test_the_optimizer_in_a_wrapper_counts() -> None:
    _, plain = made(sgd)
    assert unwrapped(plain) is plain
    assert unwrapped(AcceleratedOptimizer(plain)) is plain
    assert unwrapped(LightningOptimizer(plain)) is plain  # type: ignore[arg-type]
    with pytest.raises(UsageProblem, match="not possible with Accelerate's own loss scaler"):
        unwrapped(AcceleratedOptimizer(plain, scaler=SimpleNamespace()))


def test_an_optimizer_of_a_part_of_the_model_is_refused_at_once(group: Slow) -> None:
    """As a trainer has it that has several."""
    model, _ = made(sgd)
    first = SGD(model.module.first.parameters(), lr=0.1)
    with pytest.raises(UsageProblem, match=r"^last.weight is not in the optimizer"):
        Overlap(model, first, group, Settings())


# ---- closures


@pytest.mark.parametrize("hook", [False, True])
def test_a_step_with_a_closure_overlaps(group: Slow, hook: bool) -> None:
    """Its forward pass begins before the rear layers' part of the step before is there, unless there is a hook."""
    model, optimizer = made(adam)
    plain, other = made(adam)
    Overlap(model, optimizer, group, Settings(cuts=(4, 8)))
    begun: list[bool] = []

    def front(*_: Any) -> None:
        begun.append(group.held[1].is_set())
        group.held[1].set()

    model.module.first.register_forward_hook(front)
    if hook:
        optimizer.register_step_post_hook(lambda *_: None)
    found: list[list[float]] = [[], []]
    for step in range(4):
        for each, by, losses in zip((model, plain), (optimizer, other), found, strict=True):

            def closure(each: Any = each, by: Any = by, step: int = step) -> Any:
                loss = loss_of(each, step)
                by.zero_grad()
                if each is model and not hook and step == 2:
                    group.held[1].clear()
                loss.backward()
                return loss

            losses.append(by.step(closure).item())
    assert begun == ([True] * 4 if hook else [True, True, True, False])
    assert found[0] == found[1] and bits(model) == bits(plain)


def test_of_a_loss_behind_the_end_of_the_handle_the_backend_tells(group: Slow) -> None:
    """DDP divides by the ranks of the beginning then."""
    ProcessGroupNicps(group, Tcp("there is none"))
    model, optimizer = made(sgd)
    handle = Overlap(model, optimizer, group, Settings(channels=2))
    train(model, optimizer, 2)
    group.size = group.world = 2
    group.names = "h1", "h2"
    for told in ("gradients are averaged over the 1 hosts", "while DDP goes on dividing by 2"):
        with pytest.warns(UserWarning, match=rf"nicps: lost h2 \(rank 1\): .*{told}") as found:
            group.on_loss((1,))
        assert len(found) == 1
        handle.close()


def test_where_a_loss_is_told_the_handle_waits_for_nothing(group: Slow) -> None:
    """The parts that it would wait for need the thread that tells."""
    model, optimizer = made(sgd)
    handle, refused = Overlap(model, optimizer, group, Settings(channels=2)), []

    def tell(_: tuple[int, ...]) -> None:
        for call in (handle.wait, handle.close):
            with pytest.raises(UsageProblem, match=r"on_loss .* nor wait for one"):
                call()
            refused.append(call.__name__)

    train(model, optimizer, 2)
    handle.on_loss = tell
    group._note_lost(())
    assert refused == ["wait", "close"]
    handle.close()


def test_a_model_comes_before_its_optimizer() -> None:
    model, optimizer = made(sgd)
    with pytest.raises(UsageProblem, match="overlap takes the model first, and then the optimizer"):
        overlap(optimizer, model)  # type: ignore[arg-type]
    with pytest.raises(UsageProblem, match="not Model: wrap the model first"):
        overlap(model.module, optimizer)


# ---- DDP's flag


def test_a_script_that_sets_the_flag_in_place_of_no_sync(group: Slow) -> None:
    model, optimizer = made(sgd)
    plain, other = made(sgd)
    handle = Overlap(model, optimizer, group, Settings(channels=2))
    for step in range(5):
        for each, by in ((model, optimizer), (plain, other)):
            by.zero_grad()
            for at in range(3):
                each.require_backward_grad_sync = at == 2
                loss_of(each, 10 * step + at).backward()
            by.step()
    assert handle.figures.steps == 4
    assert bits(model) == bits(plain)
    handle.close()
    assert model.require_backward_grad_sync is True


@pytest.mark.parametrize("flag", [True, False])
def test_no_sync_behind_a_flag_that_no_forward_pass_has_met(group: Slow, flag: bool) -> None:
    """As with DDP it holds, and behind it the flag does."""
    pairs = [made(sgd) for _ in range(2)]
    handle = Overlap(*pairs[0], group, Settings(channels=2))
    for each in pairs:
        train(*each, 2)
    for step in range(2, 5):
        for model, optimizer in pairs:
            optimizer.zero_grad()
            model.require_backward_grad_sync = flag
            with model.no_sync():
                loss_of(model, 10 * step).backward()
            if not flag:
                loss_of(model, 10 * step + 1).backward()
                model.require_backward_grad_sync = True
            loss_of(model, 10 * step + 2).backward()
            optimizer.step()
    assert handle.figures.steps == 4
    assert bits(pairs[0][0]) == bits(pairs[1][0])


@pytest.mark.parametrize("then", ["another plan", "residuals are loaded", "the end"])
def test_a_flag_counts_also_for_what_comes_after_the_parts_that_there_are(
    group: Slow, then: str
) -> None:
    pairs = [made(sgd) for _ in range(2)]
    handle = Overlap(*pairs[0], group, Settings(channels=2))
    for each in pairs:
        train(*each, 2)
    pairs[0][0].require_backward_grad_sync = pairs[1][0].require_backward_grad_sync = False
    match then:
        case "another plan":
            handle._begin(handle._run.agreed)
        case "residuals are loaded":
            handle.load_state_dict(handle.state_dict())
        case "the end":
            handle.close()
            assert pairs[0][0].require_backward_grad_sync is False
    for model, optimizer in pairs:
        optimizer.zero_grad()
        loss_of(model, 2).backward()
        model.require_backward_grad_sync = True
        loss_of(model, 3).backward()
        optimizer.step()
    assert bits(pairs[0][0]) == bits(pairs[1][0])


@pytest.mark.parametrize("first", [True, False])
def test_where_parts_are_refused_ddp_goes_on_to_average(group: Slow, first: bool) -> None:
    """A script that goes on behind the error would train another model on each host, without a word."""
    model, optimizer = made(sgd)
    handle = Overlap(model, optimizer, group, Settings(channels=2))
    if not first:
        train(model, optimizer, 2)
    model.module.first.weight.requires_grad_(False)
    with pytest.raises(UsageProblem, match=r"first\.weight must be in a part"):
        train(model, optimizer, 1) if first else handle.load_state_dict(handle.state_dict())
    assert model.require_backward_grad_sync is True
    handle.close()
    assert model.require_backward_grad_sync is True


def test_a_flag_that_is_set_behind_the_forward_pass_is_refused(group: Slow) -> None:
    """As `Accelerator.trigger_sync_in_backward` does: DDP would average beside us."""
    model, optimizer = made(sgd)
    Overlap(model, optimizer, group, Settings())
    train(model, optimizer, 2)
    optimizer.zero_grad()
    with model.no_sync():
        loss = loss_of(model, 2)
    model.require_backward_grad_sync = True
    with pytest.raises(UsageProblem, match="require_backward_grad_sync was set between"):
        loss.backward()


# ---- steps in a forward pass


class ByHand(Model):
    """Its forward pass makes the whole step, as in Lightning's `automatic_optimization = False`."""

    optimizer: Any
    around: tuple[DistributedDataParallel]  # no child of its own

    def forward(self, x: Any) -> Any:
        loss = super().forward(x).square().mean()
        self.optimizer.zero_grad()
        if torch.is_grad_enabled() and self.around[0].require_backward_grad_sync:
            self.around[0].reducer._rebuild_buckets()
            self.around[0].reducer.prepare_for_backward([])
        loss.backward()
        self.optimizer.step()
        self.around[0].require_backward_grad_sync = False


def test_steps_in_a_forward_pass(group: Slow) -> None:
    pairs = []
    for _ in range(2):
        torch.manual_seed(1)
        inner = ByHand()
        model = DistributedDataParallel(inner)
        inner.around = (model,)
        inner.optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
        pairs.append((model, inner.optimizer))
    (model, optimizer), (plain, _) = pairs
    handle = Overlap(model, optimizer, group, Settings(channels=2))
    for step in range(9):
        for each in (model, plain):
            each(torch.randn(8, 16, generator=torch.Generator().manual_seed(step)))
            each.require_backward_grad_sync = True
    assert handle.figures.steps == 8 and handle.plan[0][0].startswith("first.")
    assert handle.figures.predicted_seconds is None, "nothing is measured"
    assert torch.overrides._get_current_function_mode_stack() == []
    assert bits(model) == bits(plain)


# ---- loss scalers


class Scaler:
    scale = 1.0

    def get_scale(self) -> float:
        return self.scale


def test_residuals_follow_the_loss_scale(group: Slow) -> None:
    """And are kept as of a scale of 1."""
    model, optimizer = made(sgd)
    scaler = Scaler()
    handle = Overlap(model, optimizer, group, Settings("i8", 2), scaler)
    train(model, optimizer, 2)
    half = {name: torch.full_like(each, 0.5) for name, each in handle.state_dict().items()}
    handle.load_state_dict(half)
    seen: list[float] = []
    average = group.average

    def look(vector: Any, residual: Any, **options: Any) -> Any:
        seen.extend({float(each) for each in residual})
        residual[:] = 2.0
        return average(vector, residual.copy(), **options)

    group.average = look  # type: ignore[method-assign]
    scaler.scale = 8.0
    train(model, optimizer, 1, first=2)
    assert {*seen} == {4.0}
    seen.clear()
    scaler.scale = 4.0
    train(model, optimizer, 1, first=3)
    assert {*seen} == {1.0}
    assert all((each == 0.5).all() for each in handle.state_dict().values())


# ---- uneven inputs


@pytest.mark.parametrize("joined", [lambda model: model.join(), lambda model: Join([model])])
def test_uneven_inputs_are_refused(group: Slow, joined: Any) -> None:
    model, optimizer = made(sgd)
    Overlap(model, optimizer, group, Settings())
    train(model, optimizer, 2)
    with (
        pytest.raises(UsageProblem, match=r"^overlap is not possible with join\(\)"),
        joined(model),
    ):
        train(model, optimizer, 1, first=2)


def test_a_join_in_which_all_ranks_end_together(group: Slow) -> None:
    model, optimizer = made(sgd)
    plain, other = made(sgd)
    Overlap(model, optimizer, group, Settings())
    for each, by in ((model, optimizer), (plain, other)):
        with each.join(throw_on_early_termination=True):
            train(each, by, 3)
    assert bits(model) == bits(plain)


def test_a_join_that_is_switched_off(group: Slow) -> None:
    model, optimizer = made(sgd)
    handle = Overlap(model, optimizer, group, Settings())
    with model.join(enable=False):
        train(model, optimizer, 3)
    assert handle.figures.steps == 2


def test_uneven_inputs_once_the_handle_is_closed(group: Slow) -> None:
    """A handle that is closed leaves the model to DDP."""
    model, optimizer = made(sgd)
    handle = Overlap(model, optimizer, group, Settings())
    train(model, optimizer, 2)
    handle.close()
    with Join([model]):
        train(model, optimizer, 2, first=2)
