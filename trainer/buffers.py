# SPDX-License-Identifier: Apache-2.0
"""Buffers of a model: those that are averaged over the members, and what modules hold in a buffer's place."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from trainer.errors import JobError


@dataclass(frozen=True, slots=True)
class Average:
    """Averaged buffers that lie side by side: at `place` in the weights, with the value that all hosts have in common.

    `change` is their place in the vector, `span` where that is.
    """

    place: Tensor
    common: Tensor
    change: Tensor
    span: slice

    def measure(self, samples: int) -> None:
        """What this host contributes: the change since the round began, times its samples."""
        torch.sub(self.place, _finite(self.common), out=self.change)
        self.change.mul_(samples)
        torch.nan_to_num(self.change, nan=0.0, posinf=0.0, neginf=0.0, out=self.change)

    def move(self, change: Tensor) -> None:
        """The common value moves by the mean of all changes."""
        moved = _finite(self.common).add_(change)
        torch.where(change == 0, self.common, moved, out=self.common)  # NaN stays what it is

    def restore(self) -> None:
        """The buffers have the common value again; autograd, which may have kept one, does not hear of it."""
        self.place.data.copy_(self.common)


@dataclass(frozen=True, slots=True)
class Buffer:
    """A buffer by its name in the layout. `place` is where its values are kept; the module can replace it."""

    name: str
    module: nn.Module
    key: str
    place: Tensor

    @property
    def held(self) -> Tensor | None:
        """What the module has in its place now."""
        return self.module._buffers.get(self.key)

    @property
    def is_alike(self) -> bool:
        """Whether that can stand for it: a tensor of its shape and type, or nothing."""
        held, place = self.held, self.place
        return held is None or (held.shape == place.shape and held.dtype == place.dtype)

    def changed(self, common: Tensor) -> bool:
        """Whether a float32 buffer has other bits than all hosts have in common; a cache has none of theirs."""
        held = self.held
        if held is None or held.dtype != torch.float32 or not self.is_alike:
            return False
        return not torch.equal(held.view(torch.int32), common.view(torch.int32))

    def put_back(self) -> None:
        """The module holds what is in `place` again."""
        self.module._buffers[self.key] = self.place

    def take_back(self) -> None:
        """The same, with the values of the tensor that the module has put there instead of changing it.

        Raises:
            JobError: they do not fit.
        """
        held = self.held
        if held is not None and held is not self.place:
            if not self.is_alike:
                raise JobError(
                    f"buffer {self.name!r} is averaged over the hosts, and has become {held.dtype} "
                    f"{list(held.shape)}; it was {self.place.dtype} {list(self.place.shape)}"
                )
            self.place.copy_(held)
        self.put_back()


def _finite(values: Tensor) -> Tensor:
    """A copy with 0 for what is not finite."""
    return torch.nan_to_num(values, nan=0.0, posinf=0.0, neginf=0.0)
