# SPDX-License-Identifier: Apache-2.0
"""What trainers, and scripts, do around a model whose steps are made part by part (docs/pytorch.md): an optimizer in a
wrapper, DDP's flag, uneven inputs.
"""

from __future__ import annotations

from typing import Any

from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from nicps.errors import UsageProblem

#: Wrappers whose `step` calls the one of the optimizer in them as it is then.
_WRAPPERS = ("AcceleratedOptimizer", "LightningOptimizer")


def unwrapped(optimizer: Optimizer) -> Optimizer:
    """The optimizer itself, where Accelerate or Lightning has put a wrapper around it.

    Raises:
        UsageProblem: the wrapper calls another `step` than the optimizer's present one.
    """
    kinds = {kind.__name__ for kind in type(optimizer).__mro__}
    if kinds.isdisjoint(_WRAPPERS):
        return optimizer
    wrapper: Any = optimizer
    if wrapper.__dict__.get("scaler") is not None:
        raise UsageProblem(
            "overlap is not possible with Accelerate's own loss scaler, which calls the optimizer's step of before:"
            ' leave mixed_precision="fp16" out'
        )
    inner: Optimizer = wrapper.optimizer
    return unwrapped(inner)


class _NotDDP:
    """False, and known from what a script sets."""

    def __bool__(self) -> bool:
        return False

    def __repr__(self) -> str:
        return "False, as nicps.torch.overlap averages gradients"


_NOT_DDP: Any = _NotDDP()


class Flag:
    """`require_backward_grad_sync` of a model that DDP does not average any more.

    Scripts set it in front of a forward pass, in place of `no_sync`. Trainers set it too. DDP looks at it in its
    forward pass, and would average gradients beside us if it were true.

    Attributes: `said`, what the script has set last.
    """

    def __init__(self, model: DistributedDataParallel) -> None:
        self._model: Any = model
        self.said = bool(self._model.require_backward_grad_sync)
        self._model.require_backward_grad_sync = _NOT_DDP

    def take(self) -> bool | None:
        """In front of a forward pass: what the script has set since the last one; None: nothing."""
        found = self._model.require_backward_grad_sync
        if found is _NOT_DDP:
            return None
        self._model.require_backward_grad_sync = _NOT_DDP
        self.said = bool(found)
        return self.said

    def check(self) -> None:
        """In a backward pass.

        Raises:
            UsageProblem: DDP was told after the forward pass that it averages these gradients.
        """
        if self._model.require_backward_grad_sync:
            raise UsageProblem(
                "require_backward_grad_sync was set between a forward pass and its backward pass, as Accelerate's"
                " trigger_sync_in_backward does: set it before the forward pass, or use no_sync()"
            )

    def give_back(self) -> None:
        """DDP averages again, or parts of another plan do: what the script has set goes on to count."""
        self.take()
        self._model.require_backward_grad_sync = self.said
