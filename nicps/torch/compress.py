# SPDX-License-Identifier: Apache-2.0
"""DDP's gradients in narrow lanes with error feedback, averaged over the hosts that were counted (docs/pytorch.md).

model = DistributedDataParallel(model)
handle = nicps.torch.compress(model, lane="i8")

DDP's hooks are checked by their annotations, so this module cannot postpone the evaluation of its own.
"""

import importlib
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from nicps.collective import Group
from nicps.collective.operations import LANES
from nicps.errors import UsageProblem
from nicps.torch.backend import warn_of_loss
from nicps.torch.callbacks import callback
from nicps.torch.on_device import average

TYPES = (torch.float32, torch.float16, torch.bfloat16)
OnLoss = Callable[[tuple[int, ...]], None]


class Scaler(Protocol):
    """`torch.amp.GradScaler`, as far as its scale is needed."""

    def get_scale(self) -> float:
        """What losses are multiplied by."""


def compress(
    model: DistributedDataParallel,
    *,
    lane: str = "i8",
    rank: int | None = None,
    warmup_steps: int = 0,
    scaler: Scaler | None = None,
) -> Any:
    """Let DDP's gradients be averaged by nicps, once after the model was wrapped.

    Args:
        model: on the backend `nicps`.
        lane: "i8", "i16" or "i32": bits of a number on the wire, with error feedback.
        rank: factors of that rank are exchanged in the place of each matrix.
        warmup_steps: with `rank`, steps before the first factors; in these gradients are averaged in lanes of 8 bits.
        scaler: the loss scaler of the script, if it has one: what was left over follows its scale.

    Returns:
        `Compression`, or with `rank` what `nicps.torch.low_rank` makes.

    Raises:
        UsageProblem: the model or a setting is not suited.
    """
    group = group_of(model, "compress")
    if rank is not None:
        low_rank = importlib.import_module("nicps.torch.low_rank")
        return low_rank.LowRank(model, group, rank, scaler, warmup_steps, lane)
    if warmup_steps:
        raise UsageProblem("compress takes warmup_steps= with rank= only")
    return Compression(model, group, lane, scaler)


def _not_wrapped(given: object, what: str) -> str:
    if isinstance(given, torch.optim.Optimizer):
        return f"{what} takes the model first, and then the optimizer"
    return (
        f"{what} takes a DistributedDataParallel, not {type(given).__name__}: wrap the model first"
    )


def group_of(model: DistributedDataParallel, what: str) -> Group:
    """The group over which the model's gradients are averaged.

    Raises:
        UsageProblem: `what` cannot do anything for it.
    """
    if not isinstance(model, DistributedDataParallel):
        raise UsageProblem(_not_wrapped(model, what))
    group = getattr(model.process_group, "group", None)
    if not isinstance(group, Group):
        raise UsageProblem(
            f"{what} needs the backend nicps, and this model's is {dist.get_backend(model.process_group)}: call"
            ' dist.init_process_group("nicps")'
        )
    return group


def check_parameter(name: str, parameter: torch.nn.Parameter) -> None:
    """Refuse what `compress` cannot take.

    Raises:
        UsageProblem: with the parameter.
    """
    if parameter.requires_grad and parameter.dtype not in TYPES:
        raise UsageProblem(
            f"compress takes float32, float16 and bfloat16, and {name} is {parameter.dtype}"
        )
    if parameter.requires_grad and parameter.device.type not in ("cpu", "cuda"):
        raise UsageProblem(
            f"compress takes parameters of the processor and of CUDA, and {name} is on {parameter.device}"
        )


def check_lane(lane: object) -> None:
    """Raises UsageProblem: there is none of that name."""
    if lane not in LANES:
        raise UsageProblem(f"lane must be one of {', '.join(LANES)}, not {lane!r}")


@dataclass(slots=True)
class Figures:
    """What a handle has done. Of `seconds` some are those of the computing that went on meanwhile.

    Attributes: `buckets`, `numbers`, exchanged so far; `seconds`, from a bucket's hand-over to its mean, added up.
    """

    buckets: int = 0
    numbers: int = 0
    seconds: float = 0.0


class Losses:
    """Tells a script of lost hosts.

    Attributes: `lost`, the ranks that have left. `on_loss` is called with these in another thread when they have
    changed, in place of a warning.
    """

    _averages = True  # over the ranks that are left; otherwise DDP does what it does

    def __init__(self, group: Group) -> None:
        self._group = group
        self.on_loss: OnLoss | None = None
        self._before = group.on_loss
        # The backend's own warning is of a plain DDP, which divides by the size that it began with.
        self._of_backend = isinstance(getattr(self._before, "__self__", None), dist.ProcessGroup)
        group.on_loss = self._note

    @property
    def lost(self) -> tuple[int, ...]:
        """The ranks that have left."""
        return self._group.lost

    def _note(self, lost: tuple[int, ...]) -> None:
        if self._before is not None and not (self._of_backend and self._averages):
            self._before(lost)
        if self.on_loss is not None:
            self.on_loss(lost)
        elif lost and self._averages:
            warn_of_loss(self._group, lost, averages=True)


@dataclass(frozen=True, slots=True)
class _Bucket:
    """A bucket's residual, in which the parameters' are one behind the other, on their device."""

    names: tuple[str, ...]
    residual: torch.Tensor


class Averaging:
    """Averages a model's gradients in narrow lanes.

    Residuals belong to parameters, since DDP makes its buckets anew after the first step. Each rank has its own.

    Attributes: `lane`; `figures`.
    """

    def __init__(
        self, model: DistributedDataParallel, group: Group, lane: str, scaler: Scaler | None
    ) -> None:
        check_lane(lane)
        self._names: dict[int, str] = {}
        for name, parameter in model.module.named_parameters():
            check_parameter(name, parameter)
            self._names[id(parameter)] = name
        self._model = model  # its parameters' ids must stay theirs
        self._group = group
        self.lane, self.figures = lane, Figures()
        self._scaler = scaler
        self._residuals: dict[str, torch.Tensor] = {}  # views into those of buckets
        self._scales: dict[str, float] = {}  # under which loss scale they are
        self._buckets: dict[int, _Bucket] = {}

    # ---- with a checkpoint

    def state_dict(self) -> dict[str, torch.Tensor]:
        """This rank's residuals by the parameter's name, float32 (n,), as of a loss scale of 1. Between steps only."""
        return {
            name: residual.cpu() / self._scales[name] for name, residual in self._residuals.items()
        }

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Go on with what `state_dict` gave. Between steps only.

        Raises:
            UsageProblem: it is that of another model.
        """
        parameters = {self._names[id(p)]: p for p in self._model.module.parameters()}
        found: dict[str, torch.Tensor] = {}
        for name, tensor in state.items():
            parameter = parameters.get(name)
            if parameter is None or tensor.numel() != parameter.numel():
                size = 0 if parameter is None else parameter.numel()
                raise UsageProblem(
                    f"the residual of {name} has {tensor.numel():,} numbers, and this model's parameter"
                    f" {size:,}: it is that of another model"
                )
            flat = tensor.detach().reshape(-1)
            found[name] = flat.to(parameter.device, torch.float32, copy=True)
        self._residuals, self._buckets = found, {}
        self._scales = dict.fromkeys(found, 1.0)

    # ---- buckets

    def _scale(self) -> float:
        return float(self._scaler.get_scale()) if self._scaler is not None else 1.0

    def residual_of(self, bucket: GradBucket) -> torch.Tensor:
        """What was left over of what is in the bucket, float32 (n,), on its device, under the loss scale in force."""
        parameters, index = bucket.parameters(), bucket.index()
        names = tuple(self._names[id(parameter)] for parameter in parameters)
        known, scale = self._buckets.get(index), self._scale()
        if known is None or known.names != names:
            known = self._gather(names, parameters)
            others = {k: b for k, b in self._buckets.items() if not {*b.names} & {*names}}
            self._buckets = {**others, index: known}
        for name in names:
            if self._scales.setdefault(name, scale) != scale:
                self._residuals[name].mul_(scale / self._scales[name])
                self._scales[name] = scale
        return known.residual

    def _gather(self, names: tuple[str, ...], parameters: Sequence[torch.Tensor]) -> _Bucket:
        """The parameters' residuals in one piece. They lie in buckets of the step before, whose calls are done."""
        sizes, at = [parameter.numel() for parameter in parameters], 0
        whole = torch.zeros(sum(sizes), dtype=torch.float32, device=parameters[0].device)
        for name, size in zip(names, sizes, strict=True):
            here = whole[at : at + size]
            if name in self._residuals:
                here.copy_(self._residuals[name])
            self._residuals[name] = here
            at += size
        return _Bucket(names, whole)

    def average(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """A future of the bucket's mean."""
        buffer: torch.Tensor = bucket.buffer()
        wide, residual, began = buffer.detach(), self.residual_of(bucket), time.monotonic()
        if not buffer.is_cuda:
            wide = wide.to(torch.float32)
        future = average(self._group, wide, residual, self.lane)

        def finish() -> torch.Tensor:
            future.result()
            if wide.data_ptr() != buffer.data_ptr():
                buffer.detach().copy_(wide)
            self.figures.buckets += 1
            self.figures.numbers += len(wide)
            self.figures.seconds += time.monotonic() - began
            return buffer

        return promise(future, finish)


class Compression(Averaging, Losses):
    """The handle of a model whose gradients are compressed. Attributes: as `Averaging` and `Losses`."""

    def __init__(
        self, model: DistributedDataParallel, group: Group, lane: str, scaler: Scaler | None
    ) -> None:
        super().__init__(model, group, lane, scaler)
        model.register_comm_hook(self, _hook)
        Losses.__init__(self, group)


def promise(
    future: Future[Any], finish: Callable[[], torch.Tensor]
) -> torch.futures.Future[torch.Tensor]:
    """A future of torch for what `finish` makes once that of Python is done.

    An exception that is set in a torch future from Python ends the interpreter: it is raised in a callback.
    """
    base: torch.futures.Future[None] = torch.futures.Future()
    done = base.then(callback(finish))
    future.add_done_callback(lambda _: base.set_result(None))
    return done


def _hook(state: Compression, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """What DDP calls as a bucket becomes ready, in the middle of `backward`."""
    return state.average(bucket)
