# SPDX-License-Identifier: Apache-2.0
"""Local SGD in narrow lanes: the changes of the ranks' models are averaged, with error feedback (docs/pytorch.md).

averager = nicps.torch.ChangeAverager(period=8, warmup_steps=50)

It takes the place of PyTorch's `PeriodicModelAverager`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

from nicps.collective import Group
from nicps.collective.operations import LANES
from nicps.errors import UsageProblem
from nicps.torch.compress import TYPES
from nicps.torch.elastic import note_renewed
from nicps.torch.on_device import average

Parameters = Iterable[torch.nn.Parameter] | Iterable[Mapping[str, Any]]


class ChangeAverager(PeriodicModelAverager):
    """Averages models every `period` steps, after the first `warmup_steps`, as `PeriodicModelAverager` does.

    What travels is each model's change since the last average. Changes are small beside weights, so 8 bits a number are
    enough for them, and what rounding leaves over is added to the next ones. All ranks add the same mean to the same
    weights, so all have the same bits. The first average, and the first after hosts have come in, is of the parameters
    themselves, in lanes of 32 bits. The mean is over the hosts that are there.

    Args:
        period: steps from one average to the next.
        warmup_steps: steps before; in these the script averages gradients (`post_localSGD_hook`, or `compress`).
        process_group: the default one, if None.
        lane: "i8", "i16" or "i32": bits of a number of a change on the wire.

    Raises:
        UsageProblem: there is no such lane, or the process group is none of nicps's.
        ValueError: a number is too small.
    """

    alike = 0  # as `Renewed`
    _known: torch.Tensor | None = None  # float32 (n,): what all ranks had after the last average
    _residual: torch.Tensor | None = None

    def __init__(
        self,
        period: int,
        warmup_steps: int = 0,
        process_group: dist.ProcessGroup | None = None,
        *,
        lane: str = "i8",
    ) -> None:
        if lane not in LANES:
            raise UsageProblem(f"lane must be one of {', '.join(LANES)}, not {lane!r}")
        super().__init__(period, warmup_steps, process_group)
        group = getattr(self.process_group, "group", None)
        if not isinstance(group, Group):
            raise UsageProblem(
                'ChangeAverager needs the process group of nicps: dist.init_process_group("nicps")'
            )
        self.lane = lane
        self._group = group
        note_renewed(group, self)

    @property
    def step(self) -> int:
        """How many there were so far. Who sets it has loaded another model: the next average is of the parameters."""
        return self._step

    @step.setter
    def step(self, step: int) -> None:
        self._step = step
        self.renew()

    @property
    def local(self) -> bool:
        """Whether the next step's gradients are this rank's own."""
        return bool(self._step >= self.warmup_steps)

    def average_parameters(self, params: Parameters) -> None:
        """Average, if the period is over. To be called after each step of the optimizer.

        Args:
            params: a model's parameters, or an optimizer's parameter groups.
        """
        if self.local and (self.step - self.warmup_steps) % self.period == 0:
            self.average(params)
        self._step += 1

    @torch.no_grad()
    def average(self, params: Parameters) -> None:
        """Average now, before a test or a checkpoint, say. All ranks call it at the same point.

        Raises:
            NicpsError: the group is over.
            UsageProblem: parameters are of other types, or on several devices.
        """
        parameters = _trained(params)
        vector = torch.cat([each.detach().reshape(-1).to(torch.float32) for each in parameters])
        known = self._known
        if known is None or self._residual is None or len(known) != len(vector):
            average(self._group, vector, torch.zeros_like(vector), "i32").result()
            self._residual = torch.zeros_like(vector)
        else:
            vector.sub_(known)
            average(self._group, vector, self._residual, self.lane).result()
            vector.add_(known)
        # In the warm-up models are the same, and what is not finite must not stay; all ranks see the same bits.
        self._known = vector if self.local and bool(vector.isfinite().all()) else None
        means = torch.split(vector, [each.numel() for each in parameters])
        for parameter, mean in zip(parameters, means, strict=True):
            parameter.copy_(mean.view_as(parameter))

    # ---- hosts that come in

    def state_dict(self) -> dict[str, int]:
        """What `State` gives to hosts that come in, and a checkpoint keeps."""
        return {"step": self.step}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on from that step; the next average is of the parameters themselves."""
        self.step = state["step"]

    def forget(self) -> None:
        """As `Renewed`: `renew` follows."""

    def renew(self) -> None:
        """As `Renewed`: what was known here is not known at all ranks."""
        self._known = self._residual = None


def _trained(params: Parameters) -> list[torch.nn.Parameter]:
    """Those that are trained, of a model or of an optimizer's groups."""
    found: list[torch.nn.Parameter] = []
    for each in params:
        found += each["params"] if isinstance(each, Mapping) else [each]
    trained = [parameter for parameter in found if parameter.requires_grad]
    for parameter in trained:
        if parameter.dtype not in TYPES or parameter.device != trained[0].device:
            raise UsageProblem(
                "ChangeAverager takes float32, float16 and bfloat16 on one device, and a parameter of"
                f" {tuple(parameter.shape)} is {parameter.dtype} on {parameter.device}"
            )
    return trained
