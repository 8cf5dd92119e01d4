# SPDX-License-Identifier: Apache-2.0
"""A PyTorch model laid out flat: its weights are one vector, its gradient another; no copies.

weights   [ parameters that are trained | float32 buffers ]   what the optimizer works on
vector    [ sum of the gradients        | samples * change of the buffers ]   what goes out (R13)

Buffers (BatchNorm's statistics) are averaged through the same sums; what is neither a float32
parameter nor a float32 buffer stays as it was handed out.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from trainer import weights
from trainer.errors import JobError

F32 = npt.NDArray[np.float32]


class FlatModel:
    """Owns the flat storage of a model's tensors.

    Attributes: `model`; `layout` as in prepared.json; `lanes`, the vector's length; `vector`, this
    member's contribution as float32 (lanes,), the same memory as the parameters' `.grad`.
    """

    def __init__(self, model: nn.Module) -> None:
        """Move the model's tensors into flat storage.

        Raises:
            JobError: a parameter is not float32 on the CPU, or nothing is trained.
        """
        self.model = model
        trained, buffers, fixed = _sort(model)
        self.trained = [parameter for _, parameter in trained]
        self.layout = [
            {
                "name": name,
                "kind": kind,
                "shape": list(tensor.shape),
                "dtype": str(tensor.dtype).removeprefix("torch."),
            }
            for kind, group in (("parameter", trained), ("buffer", buffers), ("fixed", fixed))
            for name, tensor in group
        ]
        self.lanes = weights.lanes(self.layout)
        self._parameters = sum(parameter.numel() for parameter in self.trained)
        self._weights = torch.empty(self.lanes)
        self._vector = torch.zeros(self.lanes)
        self.vector: F32 = self._vector.numpy()
        self._ends = np.cumsum([tensor.numel() for _, tensor in (*trained, *buffers)])
        self._gradients: list[Tensor] = []
        self._buffers: list[tuple[nn.Module, str, Tensor]] = []
        self._tensors: dict[str, Tensor] = {}
        first = 0
        for name, parameter in trained:
            place = self._place(first, parameter)
            parameter.data = place
            gradient = self._vector[first : first + place.numel()].view(place.shape)
            parameter.grad = gradient
            self._gradients.append(gradient)
            self._tensors[name] = place
            first += place.numel()
        moved = {}
        for name, buffer in buffers:
            moved[id(buffer)] = self._tensors[name] = self._place(first, buffer)
            first += buffer.numel()
        for name, tensor in fixed:
            self._tensors[name] = moved[id(tensor)] = tensor.data
        for module in model.modules():  # also those that share a buffer with another
            for key, held in module._buffers.items():
                if held is not None:
                    module._buffers[key] = moved[id(held)]
                    self._buffers.append((module, key, moved[id(held)]))
        self._fixed = [self._tensors[name] for name, _ in fixed]
        self._fixed_common = [tensor.clone() for tensor in self._fixed]
        self._common = self._weights[self._parameters :].clone()

    def _place(self, first: int, tensor: Tensor) -> Tensor:
        place = self._weights[first : first + tensor.numel()].view(tensor.shape)
        place.copy_(tensor.detach())
        return place

    # ---- a round

    @torch.no_grad()
    def begin(self) -> None:
        """A round begins: gradients are zero, and buffers are what all members have in common."""
        self._vector.zero_()
        self.restore()
        for parameter, gradient in zip(self.trained, self._gradients, strict=True):
            parameter.grad = gradient

    @torch.no_grad()
    def finish(self, samples: int) -> F32:
        """The contribution for `samples` samples: `vector`, kept until `apply` or `begin`."""
        for parameter, gradient in zip(self.trained, self._gradients, strict=True):
            if parameter.grad is not gradient:  # somebody replaced it: a hook, or zero_grad()
                gradient.zero_()
                if parameter.grad is not None:
                    gradient.copy_(parameter.grad)
                parameter.grad = gradient
        for module, key, place in self._buffers:
            held = module._buffers[key]
            if held is not place:  # replaced instead of changed
                if held is not None:
                    place.copy_(held)
                module._buffers[key] = place
        change = self._vector[self._parameters :]
        torch.sub(self._weights[self._parameters :], self._common, out=change)
        change.mul_(samples)
        return self.vector

    @torch.no_grad()
    def clip(self, samples: int, most: float) -> bool:
        """Scale this member's gradient, the mean over its `samples`, to an L2 norm of `most`; whether it was larger."""
        gradient = self._vector[: self._parameters]
        norm = float(torch.linalg.vector_norm(gradient, dtype=torch.float64)) / samples
        if not most < norm < math.inf:  # what is not finite is refused later, by name
            return False
        gradient.mul_(most / norm)
        return True

    @torch.no_grad()
    def apply(self, total: F32, samples: int) -> None:
        """Turn the sum over all members into `.grad` and new buffers; the optimizer steps after it.

        Args:
            total: float32 (lanes,), overwritten with the mean.
            samples: how many samples are in it (n in R12), at least 1.
        """
        mean = torch.from_numpy(total)
        mean.div_(samples)
        self._vector[: self._parameters] = mean[: self._parameters]
        for parameter, gradient in zip(self.trained, self._gradients, strict=True):
            parameter.grad = gradient
        self._common.add_(mean[self._parameters :])
        self.restore()

    @torch.no_grad()
    def restore(self) -> None:
        """Give buffers and everything fixed the values that all members have in common."""
        self._weights[self._parameters :] = self._common
        for tensor, common in zip(self._fixed, self._fixed_common, strict=True):
            tensor.copy_(common)
        for module, key, place in self._buffers:
            module._buffers[key] = place

    # ---- state

    def sha256(self) -> str:
        """The digest of all weights and buffers, as `weights.weights_sha256` has it."""
        sha = hashlib.sha256()
        for part in self.parts():
            sha.update(part)
        return sha.hexdigest()

    def parts(self) -> Iterator[memoryview]:
        """The bytes of all tensors in the layout's order, in few parts."""
        yield self._weights.numpy().data.cast("B")
        for tensor in self._fixed:
            yield tensor.contiguous().view(-1).view(torch.uint8).numpy().data

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """All tensors by name in the layout's order, as views."""
        return {name: tensor.numpy() for name, tensor in self._tensors.items()}

    @torch.no_grad()
    def load(self, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        """Take the weights that were handed out.

        Raises:
            JobError: names, shapes or dtypes differ.
        """
        weights.check(self.layout, arrays)
        for name, tensor in self._tensors.items():
            tensor.copy_(torch.from_numpy(arrays[name]))
        self._common.copy_(self._weights[self._parameters :])
        for tensor, common in zip(self._fixed, self._fixed_common, strict=True):
            common.copy_(tensor)

    def name_at(self, index: int) -> str:
        """What the vector's lane `index` belongs to: `parameter '0.weight'`."""
        entry = self.layout[int(np.searchsorted(self._ends, index, side="right"))]
        return f"{entry['kind']} {entry['name']!r}"


Named = list[tuple[str, Tensor]]


def _sort(model: nn.Module) -> tuple[list[tuple[str, nn.Parameter]], Named, Named]:
    """Parameters that are trained; float32 buffers; the rest."""
    trained: list[tuple[str, nn.Parameter]] = []
    buffers: Named = []
    fixed: Named = []
    for name, parameter in model.named_parameters():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise JobError(f"parameter {name!r} has no shape yet: give lazy layers their sizes")
        if parameter.device.type != "cpu":
            raise JobError(f"parameter {name!r} is on {parameter.device}; nicps trains on the CPU")
        if not parameter.requires_grad:
            fixed.append((name, parameter))
        elif parameter.dtype != torch.float32:
            raise JobError(f"parameter {name!r} is {parameter.dtype}; nicps trains torch.float32")
        else:
            trained.append((name, parameter))
    if not trained:
        raise JobError("the model has no parameter to train")
    for name, buffer in model.named_buffers():
        (buffers if buffer.dtype == torch.float32 else fixed).append((name, buffer))
    return trained, buffers, fixed
