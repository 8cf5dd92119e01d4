# SPDX-License-Identifier: Apache-2.0
"""B3: a worker computes its next step while the parameters arrive, first with those of its own set.

The order of computing is that of the set which the worker pulls from the servers, whatever arrives when, and whether it
has a partner or not. So the bits of its gradient are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from nicps import client
from trainer.order import Arrivals, Fragments, Traced, attach
from trainer.packing import FRAGMENT

if TYPE_CHECKING:
    from trainer.share import Share
    from trainer.training import Training


class _CalledAway(BaseException):
    """The parameters do not come, as another phase begins. It is no error, and passes through the job's code."""


class _Done(NamedTuple):
    """A share that has been computed: its round and step, its samples, the sum of their losses, and the buffers."""

    round: int
    step: int
    samples: int
    loss_sum: float
    buffers: list[tuple[nn.Module, str, Tensor, Tensor]]


class Ahead:
    """One member's steps, each computed before it is asked for.

    Args:
        orders: names of the nodes of the traced model, for each set; none where the model computes as it is written.
        servers: the session's, once there are some.
    """

    def __init__(
        self,
        training: Training,
        share: Share,
        orders: Sequence[Sequence[str]],
        servers: Callable[[], client.Served],
    ) -> None:
        model = training.model
        self._model, self._share, self._servers = model, share, servers
        self._arrivals = Arrivals(-(-model.lanes // FRAGMENT), self._arrive)
        self._arrivals.end()
        self._orders, self._set = orders, 1
        self._traced = Traced(training.job.model) if orders else None
        whose = model.model, model.layout, self._arrivals.require
        self._forward = attach(*whose, self._traced, orders[0] if orders else ())
        self._done: _Done | None = None

    def enter(self) -> None:
        """A phase begins, in which this worker has a set of its own."""
        own = self._servers().about.own_set or 1
        if self._forward is not None and self._traced is not None and own != self._set:
            self._forward.follow(self._traced.in_order(self._orders[own - 1]))
        self._set, self._done = own, None

    def compute(self, round_: int, step: int) -> None:
        """Compute this member's share of the step while all parameters arrive.

        Raises:
            JobError: the job's functions fail.
        """
        self._done = None
        self._arrivals.begin()
        try:
            samples, loss_sum = self._share.compute(round_, step)
            self._arrivals.require_all()  # a module that was skipped has buffers, too
        except _CalledAway:
            return
        finally:
            self._arrivals.end()
        if samples == self._share.place.share:
            self._done = _Done(round_, step, samples, loss_sum, self._buffers())

    def take(self, round_: int, step: int) -> tuple[int, float] | None:
        """The samples of that share and the sum of their losses, if it is computed; the model is as it was then."""
        done, self._done = self._done, None
        if done is None or (done.round, done.step) != (round_, step):
            return None
        with torch.no_grad():
            for module, key, held, values in done.buffers:
                held.copy_(values)
                module._buffers[key] = held
        return done.samples, done.loss_sum

    def _arrive(self, pieces: Fragments) -> None:
        servers = self._servers()
        for piece in pieces:
            if not servers.arrive(piece.start, piece.stop):
                raise _CalledAway
            servers.read(self._model.weights, piece.start, piece.stop)

    def _buffers(self) -> list[tuple[nn.Module, str, Tensor, Tensor]]:
        """The buffers as the forward pass has left them, with copies. Until `take` the model has the commit's."""
        return [
            (module, key, held, held.detach().clone())
            for module in self._model.model.modules()
            for key, held in module._buffers.items()
            if held is not None
        ]
