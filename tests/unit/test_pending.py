# SPDX-License-Identifier: Apache-2.0
"""Pending parameters: whatever reads or writes one waits for its update. A test says when sums come."""

from __future__ import annotations

import copy
import io
import pickle
import random
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

from tests.pending import (
    CUTS,
    OPTIMIZERS,
    ORDER,
    Scene,
    Source,
    Tied,
    Twice,
    batch,
    chain,
    named,
    pending,
    same,
    train,
    weights,
)

pytestmark = pytest.mark.usefixtures("one_thread", "unwarned")


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


def test_a_module_around_others_does_not_wait_for_theirs(scene: Scene) -> None:
    scene.backward()
    scene.step()
    seen: list[int] = []
    for module in scene.model:
        module.register_forward_hook(lambda *_: seen.append(len(scene.pending)))
    with scene.source.late([0, 1, 2]):
        scene.model(batch(1)[0])
    assert seen == [4, 4, 2, 2, 0]


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


def test_a_shared_weight_is_there_for_the_first_module_that_has_it() -> None:
    model, source = Tied(4), Source()
    optimizer = SGD(model.parameters(), lr=0.1)
    pending(model, optimizer, [2], source)
    model(batch(0)[0]).sum().backward()
    assert source.offers == [1, 0]
    optimizer.step()
    with source.late([0, 1]) as left:
        model.second(batch(0)[0])
    assert left == [1]
    assert type(model.first.weight) is nn.Parameter is not type(model.first.bias)


@pytest.mark.parametrize("kind", [Twice, Tied])
def test_modules_that_are_called_twice_and_shared_parameters(kind: type[Any]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(kind(4), nn.Linear(4, 1))
    cuts = [*range(1, len(named(model)))]
    train(model, OPTIMIZERS["adam"], cuts, [[*range(len(cuts) + 1)]] * 3)


def test_attention_reads_the_parameters_of_its_child() -> None:
    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.MultiheadAttention(4, 2, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x[None], x[None], x[None])[0][0, :, :1]

    torch.manual_seed(0)
    train(Attends(), OPTIMIZERS["sgd momentum"], [1, 2], [[2, 1, 0]] * 3)


def test_checkpoints_of_activations() -> None:
    class Saves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = chain()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.inner, x, use_reentrant=False)

    train(Saves(), OPTIMIZERS["sgd momentum"], CUTS, [ORDER] * 3)


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
    "out": lambda model: torch.stack(
        [p.detach().sum() for p in model.parameters()], out=torch.empty(0)
    ),
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


def test_what_reads_a_parameter_without_python_finds_no_value(scene: Scene) -> None:
    """There nothing can wait: but no value of the step before is taken for a new one."""
    weight = scene.model[0].weight
    scripted = torch.jit.trace(lambda x: x * 2, (torch.ones(5, 4),))
    reads: list[Callable[[], torch.Tensor]] = [
        lambda: torch.tensor(weight),
        lambda: torch.from_dlpack(torch.utils.dlpack.to_dlpack(weight)),
        lambda: torch.func.grad(lambda x: (x * x).sum())(weight),
        lambda: scripted(weight),
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scene.backward()
        before = [read().detach().clone() for read in reads]
        scene.step()
        assert all(read().isnan().all() for read in reads)
        assert len(scene.pending) == 6
        with scene.source.late(ORDER):
            scene.steps.wait()
        weight = scene.other[0].weight
        expected = [read().detach().clone() for read in reads]
        weight = scene.model[0].weight
        assert same([read() for read in reads], expected) and not same(before, expected)
    scene.goes_on()


def test_a_view_that_was_made_before_is_one_afterwards(scene: Scene) -> None:
    views = [each.detach().numpy() for each in scene.model.parameters()]
    addresses = [each.data_ptr() for each in scene.model.parameters()]
    scene.backward()
    scene.step()
    with scene.source.late(ORDER):
        scene.steps.wait()
    assert [each.data_ptr() for each in scene.model.parameters()] == addresses
    assert same([torch.from_numpy(each) for each in views], [*scene.other.parameters()])


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
