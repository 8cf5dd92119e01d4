# SPDX-License-Identifier: Apache-2.0
"""What steps in parts refuse by name, and how they fail (docs/priorities.md, what a script does)."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.utils.checkpoint import checkpoint

from nicps.errors import JobFailed, UsageProblem
from nicps.torch.parts import cut
from nicps.torch.pending import PendingSteps
from tests.pending import (
    CUTS,
    ORDER,
    Scene,
    Source,
    batch,
    chain,
    loss,
    named,
    pending,
    same,
    warned,
    weights,
)

pytestmark = pytest.mark.usefixtures("one_thread", "unwarned")


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
    assert all(torch.isfinite(each).all() for each in weights(scene.model))


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
    refused(scene.optimizer.step, "has 7 parameters that require a gradient, and had 6 at first")


def test_a_parameter_that_is_frozen_later(scene: Scene) -> None:
    scene.model[0].weight.requires_grad_(False)
    refused(scene.optimizer.step, "has 5 parameters that require a gradient, and had 6 at first")


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


def test_a_parameter_made_of_one_that_is_pending(scene: Scene) -> None:
    """`nn.Parameter(p)` has waited then, so `p` is of another class than PyTorch saw before; detached it works."""
    scene.backward()
    scene.step()
    with scene.source.late([0, 1, 2]) as left:
        with pytest.raises(RuntimeError, match="from an instance of type Parameter requires"):
            nn.Parameter(scene.model[2].weight)
        assert left == [2], "it has waited for its own part only"
        other = nn.Parameter(scene.model[4].weight.detach())
        assert not left
    assert torch.equal(other, scene.other[4].weight)
    assert same(weights(scene.model), weights(scene.other))
    assert torch.equal(nn.Parameter(scene.model[2].weight), scene.other[2].weight)
