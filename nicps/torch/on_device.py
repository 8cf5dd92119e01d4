# SPDX-License-Identifier: Apache-2.0
"""Means in narrow lanes of tensors, converted on their own device: only lanes go to the host, and only sums come back.

Lanes, means and residuals have the bits that `nicps.session.absolute` makes. Each operation is one of IEEE 754's,
rounded by itself. To divide by a number of the host, torch multiplies by its inverse on a GPU: so the number of members
is one of the device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from nicps.collective import Group
from nicps.session.absolute import I8, Lanes
from nicps.session.lanes import LEAST_EXPONENT, LaneFormat
from nicps.session.sized import Bank, Outcome, Rest
from nicps.torch.join import too_early
from nicps.torch.staging import beside, reached
from nicps.wire import NOT_FINITE

_NATIVE = {8: torch.int8, 16: torch.int16, 32: torch.int32}
_MAGNITUDE, _MANTISSA = 0x7FFFFFFF, 0x7FFFFF  # of a float32's bits


def average(group: Group, vector: torch.Tensor, residual: torch.Tensor, lane: str) -> Future[Any]:
    """`Group.average` of tensors, converted where they are.

    Args:
        vector: float32 (n,), without gaps; on a GPU also float16 or bfloat16. The mean takes its place once the future
            is done.
        residual: float32 (n,), on the same device.

    Raises:
        CollectiveFailed: this process has come late, and is not in the group.
    """
    if group.late:
        raise too_early()
    if vector.is_cuda:
        form = partial(OnDevice, after=reached(vector.device))
        return group.average_as(form, vector, residual, lane=lane)
    return group.average(vector.numpy(), residual.numpy(), lane=lane)


class OnDevice:
    """One round of such a vector, as `nicps.collective.feedback.Compressed` of NumPy's.

    Args:
        vector: float32, float16 or bfloat16 (n,), without gaps. The mean takes its place.
        residual: float32 (n,), finite, on the same device, written with the sum.
        width: of the lanes, in bits.
        after: what must be done before the numbers are there.
    """

    feedback = True

    def __init__(
        self,
        vector: torch.Tensor,
        residual: torch.Tensor,
        width: int,
        *,
        after: torch.cuda.Event | None = None,
    ) -> None:
        self.width, self.numbers = width, len(vector)
        self._vector, self._residual, self._after = vector, residual, after
        self._format = LaneFormat(len(vector), width)
        self._own: tuple[torch.Tensor, torch.Tensor] | None = None  # lanes and exponents, there
        # The same in the host's memory, as they are sent; later those of the sum.
        self._host: tuple[torch.Tensor, ...] = ()

    # ---- a member's own

    def bound(self) -> int:
        """As `Vector`: it is the largest x itself."""
        x = self._converted().exponents
        return int(x.max(where=x != NOT_FINITE, initial=LEAST_EXPONENT))

    def write(self, first: int, count: int, lanes: Lanes, exponents: I8) -> None:
        """As `Vector`: what the first call, or `bound`, has converted as a whole."""
        own, rows = self._converted(), slice(first, first + count)
        lanes[rows], exponents[rows] = own.lanes[rows], own.exponents[rows]

    def _converted(self) -> Bank:
        if self._own is None:
            with beside(self._vector.device, self._after):
                value = self._residual.new_zeros(self._format.fragments, self._format.per_fragment)
                flat = value.view(-1)[: self.numbers]
                flat.copy_(self._vector)
                flat.add_(self._residual)
                self._own = lanes, x = quantise(value, self._format)
                sent = self._swapped(lanes.view(torch.uint8)), x.to(torch.int8)
                self._host = tuple(self._on_host(each.shape, each.dtype) for each in sent)
                for here, there in zip(self._host, sent, strict=True):
                    here.copy_(there, non_blocking=True)
        return self._bank

    @property
    def _bank(self) -> Bank:
        """What is in the host's memory."""
        lanes, exponents = (each.numpy() for each in self._host)
        return Bank(lanes.view(self._format.wire), exponents)

    # ---- sums

    def settle(self, outcome: Outcome) -> None:
        """As `Vector`."""
        sums, rows = self._bank, slice(outcome.count)
        sums.lanes[:], sums.exponents[:] = outcome.lanes[rows], outcome.exponents[rows]
        with beside(self._vector.device):
            lanes, exponents = (self._to_device(each) for each in self._host)
            x = exponents.to(torch.int32)
            if outcome.counted:
                self._keep(x == NOT_FINITE)
            mean = read(self._swapped(lanes).view(_NATIVE[self.width]), x)
            mean.div_(mean.new_full((), outcome.members))  # a number of the device: see above
            self._vector.copy_(mean.view(-1)[: self.numbers])
            if outcome.rest is not None and outcome.rest.used.any():
                self._add(outcome.rest, outcome.unit)

    def _keep(self, lost: torch.Tensor) -> None:
        """Make what rounding has left over the residual, but for fragments that are lost, (fragments,)."""
        assert self._own is not None, "nothing was converted"
        lanes, exponents = self._own
        sent = lanes.to(torch.float32).mul_(_power(exponents)[:, None])
        left = self._vector.to(torch.float32) + self._residual
        left.sub_(sent.view(-1)[: self.numbers])
        per_number = lost[:, None].expand_as(lanes).reshape(-1)[: self.numbers]
        self._residual.copy_(torch.where(per_number, self._residual, left))

    def _add(self, rest: Rest, unit: int) -> None:
        """What rounding the sums of this member's stripe has left over: float32, half as long as it is in units."""
        per = self._format.per_fragment
        left = self._on_host(rest.lanes.shape, torch.float32)
        more: npt.NDArray[Any] = left.numpy()
        np.multiply(rest.lanes, math.ldexp(1.0, unit), out=more, casting="unsafe")
        more[~rest.used] = 0.0
        kept = self._residual[rest.first * per :][: more.size]
        kept.add_(self._to_device(left).view(-1)[: len(kept)])

    # ---- between host and device

    def _swapped(self, lanes: torch.Tensor) -> torch.Tensor:
        """Bytes of lanes in the other order, uint8 (fragments, bytes): they are big-endian as they are sent."""
        return lanes.view(len(lanes), -1, self.width // 8).flip(2).flatten(1)

    def _on_host(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Memory from which a GPU can copy by itself."""
        pinned = self._vector.device.type == "cuda"
        return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=pinned)

    def _to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self._vector.device, non_blocking=True)


def quantise(value: torch.Tensor, format: LaneFormat) -> tuple[torch.Tensor, torch.Tensor]:
    """Lanes, and exponents as int32 (fragments,), of float32 (fragments, per_fragment)."""
    # Magnitudes compared as integers: NaN is above infinity.
    top = (value.view(torch.int32) & _MAGNITUDE).amax(dim=1)
    most = np.float32(math.ldexp(format.largest_lane, 1 - format.width))
    over = (top & _MANTISSA) > (int(most.view(np.int32)) & _MANTISSA)
    x = ((top >> 23) - 125 - format.width + over).clamp_(min=LEAST_EXPONENT)
    largest = top.view(torch.float32)
    finite = torch.isfinite(torch.round(largest * _power(-x)) * _power(x))
    scaled = value * _power(-x)[:, None]
    scaled = torch.where(finite[:, None], scaled.round_(), 0.0)
    return scaled.to(_NATIVE[format.width]), torch.where(finite, x, NOT_FINITE)


def read(lanes: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
    """float32 of lanes in this device's order, and of exponents, int32 (fragments,)."""
    scale = torch.where(exponents == NOT_FINITE, math.nan, _power(exponents))
    return lanes.to(torch.float32).mul_(scale[:, None])


def _power(exponents: torch.Tensor) -> torch.Tensor:
    """2**x, float32, of int32 from -126 to 127: made of bits, as `pow` and `ldexp` need not be exact."""
    return ((exponents + 127) << 23).view(torch.float32)
