# SPDX-License-Identifier: Apache-2.0
"""DDP's gradients as factors of low rank, in two small rounds a step (docs/pytorch.md, "Low rank").

model = DistributedDataParallel(model, bucket_cap_mb=200, gradient_as_bucket_view=True)
handle = nicps.torch.compress(model, rank=2)

DDP's hooks are checked by their annotations, so this module cannot postpone the evaluation of its own.
"""

import time
from dataclasses import dataclass

import numpy as np
import torch
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from nicps.collective import Group
from nicps.collective.lanes import PER_FRAGMENT
from nicps.collective.operations import LANES
from nicps.errors import UsageProblem
from nicps.torch.callbacks import callback
from nicps.torch.compress import Averaging, Figures, Losses, Scaler, check_lane, check_parameter
from nicps.torch.elastic import note_renewed
from nicps.torch.factors import F32, Matrix, accelerate, exchange, pays
from nicps.torch.join import too_early
from nicps.torch.staging import as_float32, write_back

_STEPS = "steps of the warm-up"  # no parameter's name


@dataclass(frozen=True, slots=True)
class _Bucket:
    """A bucket of the step that is under way; `wide` is its buffer as float32 on the host, perhaps the same memory.

    `rest` has what is exchanged as it is, with the residual of each.
    """

    buffer: torch.Tensor
    wide: torch.Tensor
    matrices: list[tuple[Matrix, torch.Tensor]]
    rest: list[tuple[torch.Tensor, torch.Tensor]]


class WarmStart:
    """What all ranks have alike. A part of `nicps.torch.State`, for ranks that come late.

    Attributes: `steps` of the warm-up so far.
    """

    def __init__(self, matrices: dict[str, Matrix]) -> None:
        self._matrices, self.steps = matrices, 0

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The Q of each matrix, float32 (rank, columns), by the parameter's name; and `steps`. Between steps only."""
        found = {name: matrix.start.clone() for name, matrix in self._matrices.items()}
        return {**found, _STEPS: torch.tensor(self.steps)}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Go on with what `state_dict` gave. Between steps only.

        Raises:
            UsageProblem: it is that of another model or rank.
        """
        into = {name: matrix.start for name, matrix in self._matrices.items()}
        _load({name: start for name, start in state.items() if name != _STEPS}, into, "Q")
        self.steps = int(state.get(_STEPS, 0))


class LowRank(Losses):
    """The handle of a model whose gradients are exchanged as factors.

    The error belongs to a parameter, since DDP makes its buckets anew after the first step. Each rank has its own.

    Attributes: as `Losses`; `rank` of the factors, and `lane`, in which they travel; `warm_start`; `figures`, whose
    seconds are those of the hook, and in the warm-up as `Averaging` has them.
    """

    alike = 0  # as `Renewed`

    def __init__(
        self,
        model: DistributedDataParallel,
        group: Group,
        rank: int,
        scaler: Scaler | None = None,
        warmup_steps: int = 0,
        lane: str = "i8",
    ) -> None:
        check_lane(lane)
        for what, value, least in (("rank", rank, 1), ("warmup_steps", warmup_steps, 0)):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise UsageProblem(f"{what} must be a whole number from {least} on, not {value!r}")
        self._matrices: dict[str, Matrix] = {}
        self._by_id: dict[int, Matrix] = {}
        #: Of what is exchanged as it is: what rounding has left over.
        self._residuals: dict[str, torch.Tensor] = {}
        self._names: dict[int, str] = {}
        for number, (name, parameter) in enumerate(model.module.named_parameters()):
            self._names[id(parameter)] = name
            if not parameter.requires_grad:
                continue
            check_parameter(name, parameter)
            rows = parameter.shape[0] if parameter.dim() > 1 else 1
            columns = parameter.numel() // max(rows, 1)
            if parameter.dim() > 1 and pays(rows, columns, rank):
                self._matrices[name] = matrix = Matrix(rows, columns, rank, number)
                self._by_id[id(parameter)] = matrix
            else:
                self._residual(parameter)
        accelerate(self._matrices.values())
        self._model = model  # its parameters' ids must stay theirs
        self._scaler, self._scale = scaler, 1.0
        self._open: list[_Bucket] = []
        self._waiting: list[torch.futures.Future[None]] = []
        self._failure: Exception | None = None
        self._warmup_steps = warmup_steps
        self._warmup = Averaging(model, group, "i8", scaler) if warmup_steps > 0 else None
        self.rank, self.lane, self.figures = rank, lane, Figures()
        if self._warmup is not None:
            self._warmup.figures = self.figures
        self.warm_start = WarmStart(self._matrices)
        model.register_comm_hook(self, hook)
        super().__init__(group)
        note_renewed(group, self)

    # ---- with a checkpoint

    def state_dict(self) -> dict[str, dict[str, torch.Tensor]]:
        """`start`, which all ranks have alike, and this rank's `error`, as of a loss scale of 1. Between steps only.

        `error` has what is left over of each parameter. In the warm-up there is also this rank's `residual`.
        """
        error = {name: here / self._scale for name, here in self._errors().items()}
        found = {"start": self.warm_start.state_dict(), "error": error}
        return found if self._warmup is None else {**found, "residual": self._warmup.state_dict()}

    def load_state_dict(self, state: dict[str, dict[str, torch.Tensor]]) -> None:
        """Go on with what `state_dict` gave. Between steps only.

        Raises:
            UsageProblem: it is that of another model or rank.
        """
        self.warm_start.load_state_dict(state["start"])
        # Older checkpoints have those of matrices only.
        rest = {name: torch.zeros_like(each) for name, each in self._residuals.items()}
        _load(rest | state["error"], self._errors(), "error")
        if self._warmup is not None:
            self._warmup.load_state_dict(state.get("residual", {}))
        self._scale = 1.0

    def forget(self) -> None:
        """As `Renewed`: what is left over here is of another model."""
        for error in self._errors().values():
            error.zero_()
        if self._warmup is not None:
            self._warmup.load_state_dict({})

    def renew(self) -> None:
        """As `Renewed`: `warm_start` has what all ranks must have alike."""

    def _residual(self, parameter: torch.Tensor) -> torch.Tensor:
        """Of one that is no matrix; it may have been frozen so far."""
        name = self._names[id(parameter)]
        if name not in self._residuals:
            size = parameter.numel()
            self._residuals[name] = torch.zeros(size, dtype=torch.float32, device="cpu")
        return self._residuals[name]

    def _errors(self) -> dict[str, torch.Tensor]:
        """What is left over of each parameter, to be read or changed."""
        return {name: each.error for name, each in self._matrices.items()} | self._residuals

    # ---- a step

    def add(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Take a bucket. With the last one all factors are exchanged, and the futures of all buckets are done."""
        if self._warmup is not None and self.warm_start.steps < self._warmup_steps:
            self.warm_start.steps += bucket.is_last()
            return self._warmup.average(bucket)
        began = time.monotonic()
        if bucket.index() == 0:
            self._open, self._waiting, self._failure = [], [], None
            self._follow_scale()
            self._end_warmup()
        buffer = bucket.buffer()
        base: torch.futures.Future[None] = torch.futures.Future()
        done = base.then(callback(lambda: self._finish(buffer)))
        try:
            self._open.append(self._split(bucket, buffer))
            if bucket.is_last():
                self._exchange()
        except Exception as error:
            self._failure = error
        self._waiting.append(base)
        if bucket.is_last():
            self._open = []
            for each in self._waiting:
                each.set_result(None)
        self.figures.seconds += time.monotonic() - began
        return done

    def _follow_scale(self) -> None:
        scale = float(self._scaler.get_scale()) if self._scaler is not None else 1.0
        if scale != self._scale:
            for error in self._errors().values():
                error.mul_(scale / self._scale)
            self._scale = scale

    def _end_warmup(self) -> None:
        """What its rounding has left over goes on as what is left over here."""
        residuals = self._warmup.state_dict() if self._warmup is not None else {}
        if not residuals:
            return
        assert self._warmup is not None
        self._warmup.load_state_dict({})
        errors = self._errors()
        for name, residual in residuals.items():
            errors[name].add_(residual.view_as(errors[name]), alpha=self._scale)

    def _split(self, bucket: GradBucket, buffer: torch.Tensor) -> _Bucket:
        wide = as_float32(buffer)
        matrices, rest, at = [], [], 0
        for parameter in bucket.parameters():
            here = wide[at : at + parameter.numel()]
            at += len(here)
            matrix = self._by_id.get(id(parameter))
            if matrix is None:
                rest.append((here, self._residual(parameter)))
            else:
                matrices.append((matrix, here.view(matrix.shape)))
        return _Bucket(buffer, wide, matrices, rest)

    def _exchange(self) -> None:
        """The two rounds."""
        if self._group.late:
            raise too_early()
        matrices = [each for bucket in self._open for each in bucket.matrices]
        rest = [(here.numpy(), left.numpy()) for bucket in self._open for here, left in bucket.rest]
        # What rounding leaves over of P is owed to nobody: P chooses a basis.
        exchange(
            matrices,
            rest,
            lambda p: self._average(p, np.zeros_like(p)),
            self._average,
            PER_FRAGMENT * 32 // LANES[self.lane],
        )
        for bucket in self._open:
            self.figures.buckets += 1
            self.figures.numbers += len(bucket.wide)
            write_back(bucket.wide, bucket.buffer)

    def _average(self, vector: F32, residual: F32) -> F32:
        return self._group.average(vector, residual, lane=self.lane).result()

    def _finish(self, buffer: torch.Tensor) -> torch.Tensor:
        """What has failed is raised here: an exception that is set in a future from Python ends the interpreter."""
        if self._failure is not None:
            raise self._failure
        return buffer


def _load(state: dict[str, torch.Tensor], into: dict[str, torch.Tensor], what: str) -> None:
    if state.keys() != into.keys():
        differ = ", ".join(sorted(state.keys() ^ into.keys()))
        raise UsageProblem(
            f"the {what} is that of another model or rank: {differ} is only in one of them"
        )
    for name, tensor in state.items():
        if tensor.shape != into[name].shape:
            raise UsageProblem(
                f"the {what} of {name} is {tuple(tensor.shape)}, and must be {tuple(into[name].shape)}:"
                " it is that of another model or rank"
            )
    for name, tensor in state.items():
        into[name].copy_(tensor)


def hook(state: LowRank, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """What DDP calls as a bucket becomes ready, in the middle of `backward`."""
    return state.add(bucket)
