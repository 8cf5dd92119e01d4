# SPDX-License-Identifier: Apache-2.0
"""What `nicps.torch.overlap` refuses by name (docs/priorities.md, what a script does)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from nicps.errors import UsageProblem
from nicps.torch.parts import PartStep, cut
from nicps.torch.pending import check_cover, check_model
from nicps.torch.shares import Shares


def check(
    model: DistributedDataParallel,
    optimizer: Optimizer,
    named: Sequence[tuple[str, nn.Parameter]],
    cuts: Sequence[int] | None,
) -> None:
    """Refuse what cannot be made part by part.

    Raises:
        UsageProblem: with the reason.
    """
    if not named:
        raise UsageProblem("overlap needs a model with parameters that require a gradient")
    # DDP averages these by a hook of its own.
    if getattr(model, "mixed_precision", None) is not None:
        raise UsageProblem("overlap is not possible with mixed_precision=: leave it out")
    if model._comm_hooks:
        raise UsageProblem(
            "a hook averages the model's gradients already: leave it, or compress(), out, as overlap averages them"
        )
    if model.static_graph:
        raise UsageProblem("overlap is not possible with static_graph=True: leave it out")
    if model.parameters_to_ignore:
        raise UsageProblem(
            "overlap averages all parameters, and DDP was told to ignore some: call requires_grad_(False) for these"
        )
    check_model(model.module)
    PartStep(optimizer)
    parts = cut(named, ())
    check_cover(model.module, optimizer, {id(each) for each in parts[0].parameters})
    if cuts is not None:
        Shares.by_hand([parameter.numel() for _, parameter in named], cuts)


def check_join(model: DistributedDataParallel) -> None:
    """In front of a forward pass.

    Raises:
        UsageProblem: ranks without samples would stand in for DDP's calls, and ours are others.
    """
    config = model._join_config
    if config.enable and not config.throw_on_early_termination:
        raise UsageProblem(
            "overlap is not possible with join(), in which ranks that have no more samples go on for the others: use"
            " join(throw_on_early_termination=True), or give all ranks as many batches"
        )
