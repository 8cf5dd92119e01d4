# SPDX-License-Identifier: Apache-2.0
"""One member's part in the ring of a phase with parameter servers (docs/servers.md)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace

from nicps import wire
from nicps.protocol.actions import Send
from nicps.protocol.carried import Carried, Offer
from nicps.protocol.exchange import ServersExchanger
from nicps.protocol.exchange.steps import Source
from nicps.protocol.kernel import Receiver
from nicps.protocol.phase import AdaptiveTimeout, Phase, Timings
from nicps.protocol.ring import Ring
from nicps.protocol.served import Served
from nicps.protocol.signals import Steps
from nicps.protocol.view import View


class ServedRing(Ring):
    """The ring, with what workers do between two rounds, and GO.

    Args:
        numbers: of a worker's steps and pulls.
    """

    def __init__(
        self,
        phase: Phase,
        view: View,
        number: int,
        receiver: Receiver,
        timings: Timings,
        timeout: AdaptiveTimeout,
        carried: Carried | None = None,
        now: float = 0.0,
        numbers: Iterator[int] | None = None,
    ) -> None:
        carried = carried or Carried.at_the_start(phase)
        super().__init__(phase, view, number, receiver, timings, timeout, carried, now)
        assert isinstance(self._exchange, ServersExchanger)
        self._servers = self._exchange
        whose = self._control, self._servers, view, number
        self._served = Served(*whose, timings, numbers or itertools.count(1), carried)

    def carry(self) -> Carried:
        """What goes along into the next view."""
        served = self._served
        return replace(super().carry(), goes_on=served.go.known, pending=served.pending)

    @property
    def between_steps(self) -> bool:
        """Workers have not begun to push: what the lead decides now leaves nothing of a round at the servers."""
        return not self._served.is_under_way

    # ---- reports of the agent and the node

    def create(self, now: float) -> Steps:
        """R9: the lead makes the token."""
        return super().create(now) + self._served.settle(now)

    def step(self, now: float, offer: Offer) -> Steps:
        """A step is ready. It is pushed, or offered to the synchronisation that is due."""
        self._served.step(offer)
        return self._settle(now) + self._act_or_want(now)

    def pull(self, now: float, sources: tuple[Source, ...]) -> Steps:
        """The training program needs all parameters."""
        self._served.pull(sources)
        return self._served.settle(now)

    def refused(self, now: float, member: int, number: int) -> None:
        """That member has answered that it cannot do something yet."""
        self._servers.hear_refusal(now, member, number)

    def read(self, now: float, round_: int, digest: int, channel: int = 0) -> Steps:
        """The parameters after that round have been read."""
        steps = super().read(now, round_, digest)
        return steps + self._served.read(now) + self._settle(now)

    # ---- frames, and time

    def on_want(self, now: float, frame: wire.Frame) -> Steps:
        """A member tells what it has read, gives GO, or says what it says in other rings."""
        steps = super().on_want(now, frame)
        if frame.header.sender == self.number:
            return steps
        steps += self._served.hear(now, frame) + self._settle(now)
        # A member that has asked for the token asks again in time: or each question would draw one of each member.
        return steps + (self._act_or_want(now) if self._want.at == math.inf else [])

    def deadline(self) -> float:
        """When `tick` wants to be called next."""
        return min(super().deadline(), self._served.deadline())

    def tick(self, now: float) -> Steps:
        """As in other rings; and retransmit what has been read, where GO has not been heard."""
        return super().tick(now) + self._served.tick(now)

    def _is_beacon(self, frame: wire.Frame) -> bool:
        """No WANT is one: workers repeat what they have read, and no holder waits until its fragments are sent."""
        return False

    def _settle(self, now: float) -> Steps:
        return self._served.settle(now) + super()._settle(now)

    def _hold(self, now: float) -> Steps:
        token = self._control.token
        if token is not None:
            self._served.go.enter(token, self.number)
        return super()._hold(now)

    def _want_frame(self, flags: int, lacks: tuple[wire.Lack, ...] = ()) -> Send:
        goes_on = self._served.go.may_begin(self.round)
        return super()._want_frame(flags | wire.Flag.GOES_ON * goes_on, lacks)
