# SPDX-License-Identifier: Apache-2.0
"""Pending parameters: each row of the table of scripts in docs/channels.md, with a source of sums in place of a network."""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
import random
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim import optimizer as torch_optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

from nicps.errors import JobFailed, UsageProblem
from nicps.torch.parts import cut
from nicps.torch.pending import PendingSteps
from tests.pending import Plain, Source, batch, loss, named, network, pending, same, weights

CUTS = [2, 4]
ORDER = [2, 0, 1]


def chain() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 1))


class Scene:
    """A model in three parts, and beside it one that makes whole steps of the same means."""

    def __init__(self, make: Callable[[Any], Optimizer] | None = None) -> None:
        make = make or (lambda found: SGD(found, lr=0.1, momentum=0.9))
        self.model, self.source = chain(), Source()
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


@pytest.fixture
def scene() -> Scene:
    return Scene()


@contextlib.contextmanager
def warned(why: str) -> Iterator[None]:
    with pytest.warns(UserWarning, match=f"nicps: the script {why}, so this step waits") as found:
        yield
    assert len(found) == 1


@pytest.fixture(autouse=True)
def _no_other_warning() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message=".*torch.jit.script.* is deprecated")
        yield


# ---- modules


def test_a_module_waits_for_its_own_parameters_only(scene: Scene) -> None:
    scene.backward()
    scene.step()
    scene.source.arrive(0)
    found = scene.model[0](batch(1)[0])
    assert torch.equal(found, scene.other[0](batch(1)[0]))
    assert scene.pending == ["2.weight", "2.bias", "4.weight", "4.bias"]
    with scene.source.late([2, 1]):
        scene.model[2](found)
    assert scene.pending == []  # part 2 came first, and was updated meanwhile
    scene.goes_on()


def test_a_module_that_is_evaluated_waits_for_all_below_it(scene: Scene) -> None:
    """It may read its children's parameters by a faster way of its own."""
    scene.backward()
    scene.step()
    scene.model.eval()
    scene.model.register_forward_pre_hook(lambda *_: order.append(scene.pending))
    order: list[list[str]] = []
    with scene.source.late(ORDER):
        scene.model(batch(1)[0])
    assert order == [[]]


def test_a_module_that_is_called_twice_and_shared_parameters() -> None:
    for seed in range(20):
        model, source = network(seed), Source()
        names = [name for name, _ in model.named_modules()]
        assert names
        steps = pending(model, SGD(model.parameters(), lr=0.1), [1], source)
        loss(model, 0).backward()
        assert sorted(source.offers) == [0, 1]
        source.arrive()
        steps.close()


def test_attention_reads_the_parameters_of_its_child() -> None:
    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.MultiheadAttention(4, 2, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x[None], x[None], x[None])[0][0, :, :1]

    torch.manual_seed(0)
    model, source = Attends(), Source()
    other = copy.deepcopy(model)
    optimizer, whole = SGD(model.parameters(), lr=0.1), SGD(other.parameters(), lr=0.1)
    steps, plain = pending(model, optimizer, [1, 2], source), Plain(other, whole)
    for step in range(3):
        with source.late([2, 1, 0] if step else []):
            found = loss(model, step)
        expected = loss(other, step)
        assert torch.equal(found, expected)
        optimizer.zero_grad()
        whole.zero_grad()
        found.backward()
        expected.backward()
        plain.average()
        optimizer.step()
        whole.step()
    source.arrive()
    steps.close()


# ---- what reads a parameter


def _vector(model: nn.Module) -> torch.Tensor:
    return nn.utils.parameters_to_vector(model.parameters())


def _saved(model: nn.Module) -> torch.Tensor:
    file = io.BytesIO()
    torch.save([*model.parameters()], file)
    file.seek(0)
    return torch.cat([each.view(-1) for each in torch.load(file, weights_only=False)])


def _copied(model: nn.Module) -> torch.Tensor:
    found = copy.deepcopy(model)
    assert all(type(each) is nn.Parameter for each in found.parameters())
    return _vector(found)


class _Doubles(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, value: torch.Tensor) -> torch.Tensor:
        return value * 2

    @staticmethod
    def backward(_: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 2


READS: dict[str, Callable[[nn.Module], Any]] = {
    "a list": _vector,
    "a sum of each": lambda model: sum(each.sum() for each in model.parameters()),
    "an operator": lambda model: torch.cat([(each * 2).view(-1) for each in model.parameters()]),
    "detach": lambda model: torch.cat([each.detach().view(-1) for each in model.parameters()]),
    "data": lambda model: torch.cat([each.data.view(-1) for each in model.parameters()]),
    "numpy": lambda model: torch.from_numpy(next(model.parameters()).detach().numpy().copy()),
    "item": lambda model: torch.tensor([each.view(-1)[0].item() for each in model.parameters()]),
    "norms": lambda model: torch.stack(torch._foreach_norm([*model.parameters()])),
    "a keyword": lambda model: torch.add(input=next(model.parameters()), other=1),
    "out": lambda model: torch.stack([p.detach().sum() for p in model.parameters()], out=torch.empty(0)),
    "clone": lambda model: [*model.parameters()][-1].clone(),
    "repr": lambda model: torch.tensor([ord(each) for each in repr(next(model.parameters()))]),
    "storage": lambda model: torch.tensor(next(model.parameters()).untyped_storage().tolist()),
    "bytes": lambda model: torch.tensor(
        bytearray(pickle.dumps(model.state_dict()["0.bias"].tolist()))
    ),
    "saved": _saved,
    "copied": _copied,
    "state_dict": lambda model: torch.cat([each.view(-1) for each in model.state_dict().values()]),
    "part of a state_dict": lambda model: model.get_submodule("2").state_dict()["weight"],
    "state_dict with parameters": lambda model: torch.cat(
        [each.view(-1) for each in model.state_dict(keep_vars=True).values()]
    ),
    "average": lambda model: _vector(AveragedModel(model)),
    "functional": lambda model: nn.functional.linear(
        torch.ones(1, 4), model.get_parameter("0.weight")
    ),
    "a function of one's own": lambda model: _Doubles.apply(model.get_parameter("0.weight")),
    "forward": lambda model: model(batch(3)[0]),
    "forward without hooks": lambda model: model.forward(batch(3)[0]),
    "functional_call": lambda model: torch.func.functional_call(
        model, dict(model.named_parameters()), (batch(3)[0],)
    ),
    "inference": lambda model: torch.inference_mode()(model)(batch(3)[0]).clone(),
    "grad of a sum": lambda model: torch.autograd.grad(
        (next(model.parameters()) ** 2).sum(), next(model.parameters())
    )[0],
}


@pytest.mark.parametrize("name", READS)
def test_whatever_reads_a_parameter_reads_the_final_value(scene: Scene, name: str) -> None:
    scene.backward()
    scene.step()
    with scene.source.late(ORDER):
        found = READS[name](scene.model)
    assert torch.equal(found, READS[name](scene.other))
    scene.goes_on()


WRITES: dict[str, Callable[[nn.Module], Any]] = {
    "in place": lambda model: [each.detach().mul_(0.5) for each in model.parameters()],
    "copy_": lambda model: torch.no_grad()(next(model.parameters()).copy_)(torch.ones(5, 4)),
    "data": lambda model: setattr(next(model.parameters()), "data", torch.ones(5, 4)),
    "lists": lambda model: torch.no_grad()(torch._foreach_mul_)([*model.parameters()], 0.5),
    "load_state_dict": lambda model: model.load_state_dict(
        {name: torch.ones_like(each) for name, each in model.state_dict().items()}
    ),
    "part of it": lambda model: model.get_submodule("2").load_state_dict(
        {"weight": torch.ones(5, 5), "bias": torch.ones(5)}
    ),
    "initialisation": lambda model: nn.init.ones_(model.get_parameter("4.weight")),
}


@pytest.mark.parametrize("name", WRITES)
def test_what_writes_a_parameter_writes_behind_the_update(scene: Scene, name: str) -> None:
    scene.backward()
    scene.step()
    with scene.source.late(ORDER):
        WRITES[name](scene.model)
        WRITES[name](scene.other)
        assert same(weights(scene.model), weights(scene.other))
    scene.goes_on()


def test_what_needs_no_value_does_not_wait(scene: Scene) -> None:
    scene.backward()
    scene.step()
    for one, other in zip(scene.model.parameters(), scene.other.parameters(), strict=True):
        assert one.shape == other.shape and one.dtype == other.dtype and one.device == other.device
        assert (
            one.size() == other.size() and one.numel() == other.numel() and one.dim() == other.dim()
        )
        assert one.requires_grad and one.is_leaf and isinstance(one, nn.Parameter)
        assert one.is_floating_point() and len({one: 1}) == 1
    assert sum(each.numel() for each in scene.model.parameters()) == 61
    scene.optimizer.zero_grad()
    assert len(scene.pending) == 6
    scene.source.arrive()
    scene.steps.close()


def test_an_average_of_weights_that_is_kept_as_a_list(scene: Scene) -> None:
    kept, other = [*scene.model.parameters()], [*scene.other.parameters()]
    average = AveragedModel(scene.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    expected = AveragedModel(scene.other, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    for step in range(3):
        scene.backward(step)
        scene.step()
        with scene.source.late(ORDER):
            average.update_parameters(scene.model)
        expected.update_parameters(scene.other)
        assert same(kept, other)
    assert same(weights(average), weights(expected))


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
        with scene.source.late(ORDER):
            with scene.steps.no_sync():
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

        with scene.source.late(ORDER):
            found = scene.optimizer.step(closure)
        scene.whole.zero_grad()
        expected = loss(scene.other, step)
        expected.backward()
        scene.plain.average()
        scene.whole.step()
        assert torch.equal(found, expected)
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


def test_checkpoints_of_activations(scene: Scene) -> None:
    class Saves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = chain()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.inner, x, use_reentrant=False)

    model, source = Saves(), Source()
    steps = pending(model, optimizer := SGD(model.parameters(), lr=0.1, momentum=0.9), CUTS, source)
    for step in range(3):
        scene.backward(step)
        scene.step()
        optimizer.zero_grad()
        loss(model, step).backward()
        optimizer.step()
        for each in (source, scene.source):
            each.arrive()
    # Names are others, and so are the means of the source: only that all goes its way is looked at.
    steps.close()
    assert all(torch.isfinite(each).all() for each in weights(model))


# ---- failures


def failed(call: Callable[[], Any], text: str) -> None:
    with pytest.raises(JobFailed, match=text):
        call()


def test_a_failed_sum_comes_out_of_the_next_step(scene: Scene) -> None:
    scene.backward()
    scene.source.fail(1, JobFailed("the group is over"))
    failed(scene.optimizer.step, "the group is over")
    failed(scene.optimizer.step, "the group is over")


def test_a_failed_sum_comes_out_of_every_wait_and_forward_pass(scene: Scene) -> None:
    scene.backward()
    scene.step()
    scene.source.arrive(0)
    scene.model[0](batch(0)[0])
    scene.source.fail(2, JobFailed("the group is over"))
    for call in (
        scene.steps.wait,
        lambda: scene.model(batch(0)[0]),
        lambda: scene.model[0](batch(0)[0]),
        lambda: scene.model[2].weight.sum(),
        scene.model.state_dict,
        scene.optimizer.state_dict,
        lambda: scene.optimizer.state[scene.model[0].weight],
        scene.optimizer.step,
    ):
        failed(call, "the group is over")
    failed(scene.steps.close, "the group is over")
    assert scene.pending == [] and "step" not in scene.optimizer.__dict__


def test_a_source_that_cannot_take_a_part_fails_the_backward_pass() -> None:
    def refuses(*_: Any) -> Any:
        raise JobFailed("the group is over")

    model = chain()
    optimizer = SGD(model.parameters(), lr=0.1)
    pending(model, optimizer, CUTS, refuses)
    failed(loss(model, 0).backward, "the group is over")
    failed(optimizer.step, "the group is over")
    failed(lambda: model(batch(0)[0]), "the group is over")


def test_a_copy_of_the_model_has_nothing_of_it(scene: Scene) -> None:
    """Nor has one that is saved whole. It goes on when the step that the first one waits for has failed."""
    file = io.BytesIO()
    torch.save(scene.model, file)
    file.seek(0)
    copies = [copy.deepcopy(scene.model), torch.load(file, weights_only=False)]
    scene.backward()
    scene.step()
    scene.source.fail(0, JobFailed("the group is over"))
    for each in copies:
        assert torch.isfinite(each(batch(0)[0])).all()
        each.load_state_dict(each.state_dict())


def test_close_leaves_all_as_it_was(scene: Scene) -> None:
    scene.backward()
    scene.step()
    with scene.source.late(ORDER):
        scene.steps.close()
    scene.steps.close()
    assert same(weights(scene.model), weights(scene.other)) and scene.pending == []
    assert "step" not in scene.optimizer.__dict__ and type(scene.optimizer.state) is type(
        scene.whole.state
    )
    assert not any(module._forward_pre_hooks for module in scene.model.modules())
    scene.optimizer.zero_grad()
    scene.whole.zero_grad()
    loss(scene.model, 1).backward()
    loss(scene.other, 1).backward()
    scene.optimizer.step()
    scene.whole.step()
    assert same(weights(scene.model), weights(scene.other)) and scene.source.missing == set()
    pending(scene.model, scene.optimizer, CUTS, scene.source)  # and anew


def test_close_between_backward_and_step(scene: Scene) -> None:
    scene.backward()
    with scene.source.late(ORDER):
        scene.steps.close()
    assert {type(each.grad) for each in scene.model.parameters()} == {torch.Tensor}
    scene.optimizer.step()
    scene.whole.step()
    assert same(weights(scene.model), weights(scene.other))


# ---- what is refused by name


def refused(call: Callable[[], Any], text: str) -> None:
    with pytest.raises(UsageProblem, match=text):
        call()


def test_a_parameter_without_a_gradient(scene: Scene) -> None:
    def part() -> torch.Tensor:
        return scene.model[2](scene.model[0](batch(0)[0])).sum()

    part().backward()
    for call in (scene.optimizer.step, scene.steps.wait, lambda: scene.model(batch(0)[0])):
        refused(call, r"4\.weight has no gradient in this step \(2 parameters have none\)")


def test_a_parameter_without_a_gradient_where_gradients_are_read(scene: Scene) -> None:
    scene.model[2](scene.model[0](batch(0)[0])).sum().backward()
    with warned("reads a gradient"):
        refused(
            lambda: nn.utils.clip_grad_norm_(scene.model.parameters(), 1.0),
            "4.weight has no gradient",
        )


def test_two_backward_passes_before_step(scene: Scene) -> None:
    scene.backward()
    refused(loss(scene.model, 1).backward, "has a second gradient before step")
    refused(scene.optimizer.step, "has a second gradient before step")


def test_a_gradient_in_two_pieces() -> None:
    class Pieces(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(2):
                x = checkpoint(self.inner, x.requires_grad_(), use_reentrant=True)
            return x[:, :1]

    model = Pieces()
    pending(model, SGD(model.parameters(), lr=0.1), [1], Source())
    refused(loss(model, 0).backward, r"inner\.\w+: it has a second gradient before step")


def test_accumulation_without_zero_grad(scene: Scene) -> None:
    scene.backward()
    scene.step()
    with scene.source.late(ORDER):
        found = loss(scene.model, 1)
    refused(found.backward, r"a gradient was added to the mean of the step before: call zero_grad")


def test_accumulation_without_zero_grad_after_a_whole_step(scene: Scene) -> None:
    scene.backward()
    with warned("reads a gradient"), scene.source.late(ORDER):
        nn.utils.clip_grad_norm_(scene.model.parameters(), 0.5)
    scene.optimizer.step()
    with scene.steps.no_sync():
        refused(
            loss(scene.model, 1).backward, "a gradient was added to the mean of the step before"
        )


def test_step_after_no_sync_only(scene: Scene) -> None:
    with scene.steps.no_sync():
        loss(scene.model, 0).backward()
    refused(scene.optimizer.step, r"step\(\) after no_sync\(\) only")
    scene.optimizer.zero_grad()
    scene.optimizer.step()
    scene.goes_on()


def test_a_backward_pass_through_a_graph_of_the_step_before(scene: Scene) -> None:
    found = loss(scene.model, 0)
    found.backward(retain_graph=True)
    scene.optimizer.step()
    scene.optimizer.zero_grad()
    refused(found.backward, "a gradient of the step before came before its update")


def test_gradients_with_a_graph(scene: Scene) -> None:
    with pytest.warns(UserWarning, match="create_graph"):
        refused(
            lambda: loss(scene.model, 0).backward(create_graph=True), "create_graph=True is not"
        )


def test_sparse_gradients() -> None:
    def lookup(sparse: bool) -> nn.Sequential:
        return nn.Sequential(nn.Embedding(3, 2, sparse=sparse))

    model = lookup(True)
    refused(
        lambda: pending(model, SGD(model.parameters(), lr=0.1), [], Source()),
        "module 0 has sparse gradients: leave sparse=True out",
    )
    other = lookup(False)
    pending(other, SGD(other.parameters(), lr=0.1), [], Source())
    weight = other[0].weight
    found = nn.functional.embedding(torch.tensor([1]), weight, sparse=True).sum()
    refused(found.backward, r"0\.weight: its gradient is sparse")


def test_torch_func_over_parameters_that_are_pending(scene: Scene) -> None:
    scene.backward()
    scene.step()
    scene.source.arrive()
    inputs = batch(0)[0]
    call = torch.func.vmap(lambda x: scene.model(x[None]))
    refused(lambda: call(inputs), r"torch\.func reads parameters of a step that is not done")
    scene.steps.wait()
    assert torch.allclose(call(inputs)[:, 0], scene.other(inputs))
    scene.goes_on()


def test_a_parameter_that_is_added_later(scene: Scene) -> None:
    scene.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    refused(scene.optimizer.step, "has 7 parameters that require a gradient, and had 6 when")


def test_a_parameter_that_is_frozen_later(scene: Scene) -> None:
    scene.model[0].weight.requires_grad_(False)
    refused(scene.optimizer.step, "has 5 parameters that require a gradient, and had 6 when")


def test_models_that_are_refused() -> None:
    def wrapped(model: nn.Module) -> Callable[[], Any]:
        optimizer = SGD(model.parameters(), lr=0.1)
        return lambda: pending(model, optimizer, [], Source())

    refused(
        wrapped(torch.jit.script(nn.Linear(2, 2))),
        "the model is scripted: parts take the module itself",
    )
    refused(
        wrapped(nn.Sequential(torch.jit.script(nn.Linear(2, 2)))),
        "module 0 is scripted: parts take",
    )
    refused(
        wrapped(torch.compile(nn.Linear(2, 2))),
        "the model is compiled: parts take the module itself",
    )
    compiled = nn.Sequential(nn.Linear(2, 2))
    compiled[0].compile()
    refused(wrapped(compiled), "module 0 is compiled: parts take the module itself")
    refused(wrapped(nn.DataParallel(nn.Linear(2, 2))), "the model is a DataParallel")


def test_parts_that_do_not_fit_the_optimizer() -> None:
    model = chain()
    every = named(model)
    first = cut(every[:4], [2])
    whole = SGD(model.parameters(), lr=0.1)
    refused(lambda: PendingSteps(model, whole, first, Source()), r"4\.weight must be in a part")
    less = SGD([each for _, each in every[:4]], lr=0.1)
    refused(
        lambda: PendingSteps(model, less, first, Source()), r"4\.weight is not in the optimizer"
    )
    own = nn.Parameter(torch.zeros(2))
    more = SGD([*model.parameters(), own], lr=0.1)
    refused(
        lambda: PendingSteps(model, more, cut(every, [2]), Source()),
        "the parts have 6 parameters, and the",
    )
    with_own = PendingSteps(model, more, cut([*every, ("own", own)], [6]), Source())
    with_own.close()


def test_a_step_that_another_library_has_replaced() -> None:
    model = chain()
    optimizer = SGD(model.parameters(), lr=0.1)
    optimizer.step = lambda: None  # type: ignore[method-assign,assignment]
    refused(
        lambda: pending(model, optimizer, CUTS, Source()), "`step` was replaced by another function"
    )
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_frozen_parameters_take_no_part() -> None:
    model, source = chain(), Source()
    model[0].requires_grad_(False)
    optimizer = SGD(model.parameters(), lr=0.1)
    steps = pending(model, optimizer, [2], source)
    before = model[0].weight.clone()
    loss(model, 0).backward()
    assert source.offers == [1, 0]
    optimizer.step()
    source.arrive()
    steps.close()
    assert torch.equal(model[0].weight, before)


def test_random_scripts_have_the_bits_of_whole_steps() -> None:
    """What scripts do between steps, at random."""
    for seed in range(20):
        chosen = random.Random(seed)
        scene = Scene(lambda found: AdamW(found, lr=0.05))
        for step in range(6):
            scene.backward(step)
            order = chosen.sample(range(3), 3)
            if chosen.random() < 0.3:
                with warnings.catch_warnings(), scene.source.late(order):
                    warnings.simplefilter("ignore")
                    nn.utils.clip_grad_norm_(scene.model.parameters(), 0.3)
                nn.utils.clip_grad_norm_(scene.other.parameters(), 0.3)
                scene.optimizer.step()
                scene.whole.step()
                continue
            scene.step()
            if chosen.random() < 0.5:
                for each in (scene.optimizer, scene.whole):
                    each.param_groups[0]["lr"] *= 0.5
            with scene.source.late(order):
                for name in chosen.sample(sorted(READS), 2):
                    assert torch.equal(READS[name](scene.model), READS[name](scene.other)), name
                scene.steps.wait()
            assert same(weights(scene.model), weights(scene.other))
