# SPDX-License-Identifier: Apache-2.0
"""A worker computes its next step while the parameters arrive, with partners first with those of its own set (B3).

With partners the order of computing is that of the set which the worker pulls from the servers, whatever arrives when,
and whether it has a partner or not. Without, it is the model's own. So the bits of a gradient are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from nicps import client
from trainer.order import Arrivals, Forward, Fragments, Traced, attach
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

    Attributes: `computed_s`, how long the last step has taken, without what it has waited for parameters.
    """

    def __init__(
        self,
        training: Training,
        share: Share,
        orders: Sequence[Sequence[str]],
        clock: Callable[[], float],
        servers: Callable[[], client.Served],
    ) -> None:
        self._model, self._build = training.model, training.job.model
        self._share, self._orders, self._servers = share, orders, servers
        self._clock, self.computed_s = clock, 0.0
        self._arrivals = Arrivals(-(-self._model.lanes // FRAGMENT), self._arrive)
        self._arrivals.end()
        self._waits = (
            0  # the set that comes first in the order of computing; 0: the model does not wait yet
        )
        self._traced: Traced | None = None
        self._forward: Forward | None = None
        self._done: _Done | None = None

    def enter(self) -> None:
        """A phase begins: what was computed before is of another one."""
        self._done = None

    def _order(self) -> None:
        """Let the model wait for its parameters, and compute in the order of the own set.

        It does so once the first pull is under way: the partner waits for what comes, and a host that only serves needs
        no order.

        Raises:
            JobError: the model's forward pass is another one than on the host that has prepared the job.
        """
        before, self._waits = self._waits, self._servers().about.own_set or 1
        order = self._orders[self._waits - 1] if self._orders else ()
        if not before:
            self._traced = Traced(self._build) if order else None
            whose = self._model.model, self._model.layout, self._arrivals.require
            self._forward = attach(*whose, self._traced, order)
        elif self._forward is not None and self._traced is not None and before != self._waits:
            self._forward.follow(self._traced.in_order(order))

    def compute(self, round_: int, step: int) -> None:
        """Compute this member's share of the step while all parameters arrive.

        Raises:
            JobError: the job's functions fail, or its model is another one here.
        """
        self._done = None
        self._order()
        self._arrivals.begin()
        self.computed_s = -self._clock()
        try:
            samples, loss_sum = self._share.compute(round_, step)
            self._arrivals.require_all()  # a module that was skipped has buffers, too
        except _CalledAway:
            return
        finally:
            self._arrivals.end()
            self.computed_s += self._clock()
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
        servers, since = self._servers(), self._clock()
        for piece in pieces:
            if not servers.arrive(piece.start, piece.stop):
                raise _CalledAway
            servers.read(self._model.weights, piece.start, piece.stop)
        self.computed_s -= self._clock() - since

    def _buffers(self) -> list[tuple[nn.Module, str, Tensor, Tensor]]:
        """The buffers as the forward pass has left them, with copies. Until `take` the model has the commit's."""
        return [
            (module, key, held, held.detach().clone())
            for module in self._model.model.modules()
            for key, held in module._buffers.items()
            if held is not None
        ]
