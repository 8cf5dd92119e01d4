# SPDX-License-Identifier: Apache-2.0
"""What `nicps.torch.overlap` refuses by name (docs/priorities.md, what a script does)."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.nn.parallel.distributed import _MixedPrecision  # noqa: E402

from nicps.errors import UsageProblem  # noqa: E402
from nicps.torch import overlap  # noqa: E402
from tests.overlapped import (  # noqa: E402
    Slow,
    bits,
    made,
    sgd,
    train,
)

Overlap, Settings = overlap.__globals__["Overlap"], overlap.__globals__["Settings"]
pytestmark = pytest.mark.usefixtures("one_thread", "gloo")


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


def test_mixed_precision_of_ddp_is_named(group: Slow) -> None:
    """It averages by a hook of its own."""
    kind = torch.bfloat16
    model, optimizer = made(sgd, mixed_precision=_MixedPrecision(kind, kind, kind))
    with pytest.raises(UsageProblem, match="overlap is not possible with mixed_precision=: leave"):
        Overlap(model, optimizer, group, Settings())


@pytest.mark.parametrize("steps", [0, 2, 4])
def test_the_ddp_model_can_be_copied_and_saved_only_once_the_handle_is_closed(
    group: Slow, steps: int
) -> None:
    """Its module can be before, without anything of this, also while steps are measured."""
    model, optimizer = made(sgd)
    handle = Overlap(model, optimizer, group, Settings(channels=2))
    train(model, optimizer, steps)
    for make in (copy.deepcopy, pickle.dumps):
        with pytest.raises((TypeError, AttributeError, pickle.PicklingError), match="pickle"):
            make(model)
    owns = copy.deepcopy(model.module), pickle.loads(pickle.dumps(model.module))
    handle.close()
    for own in owns:
        assert all(map(torch.equal, own.parameters(), model.module.parameters()))
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert bits(other) == bits(model)
    train(model, optimizer, 2, first=steps)
