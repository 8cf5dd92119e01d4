# SPDX-License-Identifier: Apache-2.0
"""A PyTorch model laid out flat: its weights are one vector, its gradient another; no copies.

weights   [ parameters that are trained | averaged buffers ]   what the optimizer works on
vector    [ sum of the gradients        | samples * change of the buffers ]   what goes out (R13)

The layout can have them in another order (B1: buffers and parameters of set 1, then those of set 2).

Float32 buffers that training changes (BatchNorm's statistics) are averaged through the same sums. Which ones these are
is found once, when the job is prepared, and handed out with the layout: so the vector is the same on every host.
Everything else stays as it was handed out: frozen parameters, buffers of other types, buffers that do not change.

An average has no place for numbers that are not finite. Such a number contributes 0 and counts as 0 where another host
has a finite one; if nobody contributes, the common value stays, bit for bit (`docs/jobs.md`).
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from trainer import weights
from trainer.buffers import Average, Buffer
from trainer.errors import JobError

F32 = npt.NDArray[np.float32]


class FlatModel:
    """Owns the flat storage of a model's tensors.

    Attributes: `model`; `layout` as in prepared.json; `lanes`, the vector's length; `vector`, this
    member's contribution as float32 (lanes,), the same memory as the parameters' `.grad`; `weights`, float32
    (lanes,), the memory of parameters and averaged buffers in the same order; `trained`, the parameters
    in the model's order, whatever the layout's is: so an optimizer's state fits any layout.
    """

    def __init__(
        self,
        model: nn.Module,
        averaged: Collection[str] | None = None,
        order: Sequence[str] = (),
    ) -> None:
        """Move the model's tensors into flat storage.

        Args:
            averaged: names of the buffers that are averaged; all float32 buffers by default.
            order: names of parameters and averaged buffers as they lie in the vector. What it does not name comes
                behind them: parameters, then buffers, in the model's order.

        Raises:
            JobError: a parameter is not float32 on the CPU, or nothing is trained.
        """
        self.model = model
        trained, buffers, fixed = _sort(model, averaged)
        self.trained = [parameter for _, parameter in trained]
        rank = {name: at for at, name in enumerate(order)}
        inside = [("parameter", *pair) for pair in trained] + [
            ("buffer", *pair) for pair in buffers
        ]
        inside.sort(key=lambda entry: rank.get(entry[1], len(rank)))
        self.layout = [
            {
                "name": name,
                "kind": kind,
                "shape": list(tensor.shape),
                "dtype": str(tensor.dtype).removeprefix("torch."),
            }
            for kind, name, tensor in (*inside, *(("fixed", *pair) for pair in fixed))
        ]
        self.lanes = weights.lanes(self.layout)
        self._weights = torch.empty(self.lanes)
        self._vector = torch.zeros(self.lanes)
        self.weights: F32 = self._weights.numpy()
        self.vector: F32 = self._vector.numpy()
        self._ends = np.cumsum([tensor.numel() for _, _, tensor in inside])
        self._tensors: dict[str, Tensor] = {}
        self._in_vector: list[tuple[nn.Parameter, Tensor]] = []  # parameters with their gradients
        names: dict[int, str] = {}
        first = 0
        for _, name, tensor in inside:
            place = self._tensors[name] = self._place(first, tensor)
            if isinstance(tensor, nn.Parameter):
                tensor.data = place
                gradient = self._vector[first : first + place.numel()].view(place.shape)
                tensor.grad = gradient
                self._in_vector.append((tensor, gradient))
            else:
                names[id(tensor)] = name
            first += place.numel()
        for name, tensor in fixed:
            # Contiguous: what was expanded cannot be restored. A parameter's memory stays its own.
            is_buffer = not isinstance(tensor, nn.Parameter)
            self._tensors[name] = tensor.data.contiguous() if is_buffer else tensor.data
            names[id(tensor)] = name
        self._buffers: list[Buffer] = []  # a buffer that modules share is in it more than once
        for module in model.modules():
            for key, held in module._buffers.items():
                if held is not None:
                    name = names[id(held)]
                    place = module._buffers[key] = self._tensors[name]
                    self._buffers.append(Buffer(name, module, key, place))
        self._fixed_common = {name: self._tensors[name].clone() for name, _ in fixed}
        self._averaged = {name for name, _ in buffers}
        self._gradients = [self._vector[span] for span in self._spans("parameter")]
        self._averages = [
            Average(self._weights[span], self._weights[span].clone(), self._vector[span], span)
            for span in self._spans("buffer")
        ]

    def _spans(self, kind: str) -> Iterator[slice]:
        """Where tensors of that kind lie in the vector, those side by side in one."""
        at = 0
        for same, entries in itertools.groupby(self.layout, key=lambda entry: entry["kind"]):
            first, at = at, at + sum(map(weights.size, entries))
            if same == kind and at > first:
                yield slice(first, at)

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
        for parameter, gradient in self._in_vector:
            parameter.grad = gradient

    def begin_training(self, seed: int, *, ahead: bool = False) -> None:
        """`begin`, for a round in whose training random numbers follow `seed`.

        Args:
            ahead: the means of the round before are still on their way (`trainer.updates`). So gradients and averaged
                buffers stay as they are; each is put right as its mean comes.
        """
        torch.manual_seed(seed)
        if ahead:
            self._restore_rest()
        else:
            self.begin()
        self.model.train()

    @contextlib.contextmanager
    def testing(self) -> Iterator[None]:
        """The model is tested: no dropout, no gradients."""
        self.model.eval()
        with torch.no_grad():
            yield

    @staticmethod
    def tensor(array: npt.NDArray[Any]) -> Tensor:
        """A tensor in the array's memory."""
        return torch.from_numpy(array)

    @classmethod
    def tensors(cls, arrays: Mapping[str, npt.NDArray[Any]]) -> dict[str, Tensor]:
        """Tensors in the arrays' memory, by name."""
        return {name: cls.tensor(array) for name, array in arrays.items()}

    @torch.no_grad()
    def finish(self, samples: int) -> F32:
        """The contribution for `samples` samples: `vector`, kept until `apply` or `begin`.

        Raises:
            JobError: a buffer that is not averaged has changed, or one that is has another shape.
        """
        for parameter, gradient in self._in_vector:
            _collect(parameter, gradient)
        for buffer in self._buffers:
            if buffer.name in self._averaged:
                buffer.take_back()
            elif buffer.changed(self._fixed_common[buffer.name]):
                raise JobError(
                    f"buffer {buffer.name!r} has changed, but did not when the job was tried: it is not averaged; "
                    "set average_all_buffers=true"
                )
        for average in self._averages:
            average.measure(samples)
        return self.vector

    def on_gradient(self, note: Callable[[int], None]) -> None:
        """Tell of each parameter, by its place in the layout, when a backward pass has made its gradient.

        It lies in `vector` then.
        """

        def made(parameter: Tensor, index: int, gradient: Tensor) -> None:
            with torch.no_grad():
                _collect(parameter, gradient)
            note(index)

        for index, (parameter, gradient) in enumerate(self._in_vector):
            hook = partial(made, index=index, gradient=gradient)
            parameter.register_post_accumulate_grad_hook(hook)

    @torch.no_grad()
    def changed_buffers(self) -> frozenset[str]:
        """Float32 buffers that the model has changed since `begin`, and the others of the same modules.

        A module whose statistics begin to move later (those of a layer that gives only zeros at first) has others that
        move at once. What was replaced by a tensor of another shape is a cache: it is put back, and does not count.
        """
        modules, common = set(), dict(self._fixed_common)
        whole = self._weights.clone()
        for average in self._averages:
            whole[average.span] = average.common
        for end, (name, place) in zip(self._ends, self._tensors.items(), strict=False):
            common[name] = whole[end - place.numel() : end].view(place.shape)
        for buffer in self._buffers:
            if buffer.changed(common[buffer.name]):
                modules.add(buffer.module)
            elif not buffer.is_alike:
                buffer.put_back()
        return frozenset(
            buffer.name
            for buffer in self._buffers
            if buffer.module in modules and buffer.place.dtype == torch.float32
        )

    @torch.no_grad()
    def clip(self, samples: int, most: float) -> bool:
        """Scale this member's gradient, the mean over its `samples`, to an L2 norm of `most`; whether it was larger."""
        norms = (torch.linalg.vector_norm(part, dtype=torch.float64) for part in self._gradients)
        norm = math.hypot(*map(float, norms)) / samples
        if not most < norm < math.inf:  # what is not finite is refused later, by name
            return False
        for gradient in self._gradients:
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
        for span in self._spans("parameter"):
            self._vector[span] = mean[span]
        for parameter, gradient in self._in_vector:
            parameter.grad = gradient
        for average in self._averages:
            average.move(mean[average.span])
        self.restore()

    @torch.no_grad()
    def move_buffers(self) -> None:
        """Averaged buffers become new common values, by the mean that is in the vector."""
        for average in self._averages:
            average.move(average.change)
            average.restore()

    @property
    def in_vector(self) -> Sequence[tuple[nn.Parameter, Tensor]]:
        """Parameters that are trained, in the layout's order, with their gradients in the vector."""
        return self._in_vector

    @property
    def averaged(self) -> list[Tensor]:
        """Averaged buffers, as modules have them when a round begins."""
        return [self._tensors[name] for name in sorted(self._averaged)]

    @torch.no_grad()
    def adopt(self) -> None:
        """What is in `weights` now is what all members have in common."""
        for average in self._averages:
            average.common.copy_(average.place)
        self.restore()

    @torch.no_grad()
    def restore(self) -> None:
        """Give buffers and everything fixed the values that all members have in common."""
        for average in self._averages:
            average.restore()
        self._restore_rest()

    def _restore_rest(self) -> None:
        """The same, but for averaged buffers."""
        for name, common in self._fixed_common.items():
            self._tensors[name].data.copy_(common)
        for buffer in self._buffers:
            buffer.put_back()

    @contextlib.contextmanager
    def at_rest(self) -> Iterator[None]:
        """Meanwhile all is as all members have it in common, though a forward pass has changed buffers already.

        What is pending (`trainer.updates`) is read as it is.
        """
        changed = [average.place for average in self._averages]
        changed += [self._tensors[name] for name in self._fixed_common]
        kept = [(place.data, place.data.clone()) for place in changed]
        held = [(buffer, buffer.held) for buffer in self._buffers]
        self.restore()
        try:
            with torch._C.DisableTorchFunctionSubclass():
                yield
        finally:
            for place, values in kept:
                place.copy_(values)
            for buffer, tensor in held:
                buffer.module._buffers[buffer.key] = tensor

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
        for name in self._fixed_common:
            yield self._tensors[name].contiguous().view(-1).view(torch.uint8).numpy().data

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
        for average in self._averages:
            average.common.copy_(average.place)
        for name, common in self._fixed_common.items():
            common.copy_(self._tensors[name])

    def name_at(self, index: int) -> str:
        """What the vector's lane `index` belongs to: `parameter '0.weight'`."""
        return self.place_of(index)[0]

    def place_of(self, index: int) -> tuple[str, int]:
        """The same, and the lane's index in that tensor, flattened."""
        at = int(np.searchsorted(self._ends, index, side="right"))
        entry = self.layout[at]
        return f"{entry['kind']} {entry['name']!r}", index - int(self._ends[at - 1] if at else 0)


def _collect(parameter: Tensor, gradient: Tensor) -> None:
    """Give a parameter its place for gradients again, with what it has now."""
    if parameter.grad is gradient:
        return
    gradient.zero_()  # somebody replaced it: a hook, or zero_grad()
    if parameter.grad is not None:
        gradient.copy_(parameter.grad)
    parameter.grad = gradient


Named = list[tuple[str, Tensor]]


def _sort(
    model: nn.Module, averaged: Collection[str] | None
) -> tuple[list[tuple[str, nn.Parameter]], Named, Named]:
    """Parameters that are trained; buffers that are averaged; the rest, its float32 buffers last."""
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
    constant: Named = []
    for name, buffer in model.named_buffers():
        if buffer.dtype != torch.float32:
            fixed.append((name, buffer))
        elif averaged is None or name in averaged:
            buffers.append((name, buffer))
        else:
            constant.append((name, buffer))
    return trained, buffers, fixed + constant
