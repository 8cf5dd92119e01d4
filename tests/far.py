# SPDX-License-Identifier: Apache-2.0
"""Tensors that say they are a GPU's, on machines without one, and their way to the host and back."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nicps.torch import staging


class Far(torch.Tensor):
    """One in the host's memory that must not be used as such; all that is made of it is such a tensor, too."""

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True

    def numpy(self, *_: object, **__: object) -> Any:  # type: ignore[override]
        raise TypeError("can't convert a tensor of a GPU to numpy")


def stage(monkeypatch: pytest.MonkeyPatch) -> list[torch.dtype]:
    """Let them be copied without pinned memory; return the types of what is copied, to the host or back."""
    copied: list[torch.dtype] = []

    def to_host(tensor: torch.Tensor) -> torch.Tensor:
        copied.append(tensor.dtype)
        return tensor.as_subclass(torch.Tensor).clone()

    def to_device(found: torch.Tensor, tensor: torch.Tensor) -> None:
        assert type(found) is torch.Tensor and found.dtype == tensor.dtype
        copied.append(tensor.dtype)
        tensor.as_subclass(torch.Tensor).copy_(found)

    monkeypatch.setattr(staging, "to_host", to_host)
    monkeypatch.setattr(staging, "to_device", to_device)
    return copied
