# SPDX-License-Identifier: Apache-2.0
"""A member's part in a phase with parameter servers, beside the list and the marks of its rounds (docs/servers.md).

A training program begins a step or a pull; a step is pushed, or it is offered to the synchronisation that is due.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from nicps import wire
from nicps.protocol.actions import ReadByAll, Send, ServerLost
from nicps.protocol.carried import Carried, Offer, Pending
from nicps.protocol.control import Control
from nicps.protocol.exchange import ServersExchanger
from nicps.protocol.exchange.servers import Begun
from nicps.protocol.exchange.steps import Source
from nicps.protocol.goes_on import GoesOn
from nicps.protocol.phase import Timings
from nicps.protocol.signals import Steps
from nicps.protocol.timers import MarkTimer
from nicps.protocol.view import View


class Served:
    """What this member knows of GO, and what its training program waits for.

    Args:
        numbers: of steps and pulls. They rise as long as the agent runs: a contribution that is sent in another view
            has another one.

    Attributes: `go`, what is known of GO.
    """

    def __init__(
        self,
        control: Control,
        exchange: ServersExchanger,
        view: View,
        number: int,
        timings: Timings,
        numbers: Iterator[int],
        carried: Carried,
    ) -> None:
        phase = control.phase
        assert phase.serving is not None
        self._control, self._exchange, self._numbers = control, exchange, numbers
        self._view, self._number, self._leads = view, number, view.lead == number
        self._workers = phase.sharing(view.live)
        self._synchronises, self._pushes = phase.serving.every > 0, phase.serving.every != 1
        self.go = GoesOn(phase, view, carried.goes_on)
        self._step, self._begun = carried.pending.step, carried.pending.begun
        self._wants = MarkTimer(timings)
        self._told = 0  # the round that all workers have read, as the lead was told
        self._tells_lost = self._leads and exchange.lacks_server
        exchange.goes_on = self.go.known
        if carried.offer is not None:
            exchange.conversion = next(numbers)

    @property
    def pending(self) -> Pending:
        """What goes along into the next view."""
        return Pending(self._step, self._begun or self._exchange.begun)

    # ---- what the training program asks for

    def step(self, offer: Offer) -> None:
        """Its next step is converted."""
        control, works = self._control, self._number in self._workers
        settled = control.has_offered or control.line().settled
        if works and offer.round == control.round and not settled:
            self._step = offer

    def pull(self, sources: tuple[Source, ...]) -> None:
        """It needs all parameters: from these, or else from the servers. What it has offered must be added first."""
        if not self._control.has_offered:
            self._step, self._begun = None, Begun(wire.FrameType.PULL, next(self._numbers), sources)

    @property
    def is_under_way(self) -> bool:
        """Workers may have pushed in the open round: it is not left in the middle, unless a server lacks."""
        pushes = self._pushes and not self._exchange.lacks_server
        return pushes and self.go.may_begin(self._control.round)

    def settle(self, now: float) -> Steps:
        """Begin what can be begun now; the lead gives GO, once it can."""
        control, go = self._control, self.go
        token, round_ = control.token, control.round
        if token is None:
            return []
        go.hear_token(token)
        go.hear_read(self._number, control.last_read)
        steps: Steps = []
        if self._tells_lost and go.is_read(round_ - 2):  # the token says less before each has told
            self._tells_lost = False
            steps.append(ServerLost(go.reads))
        if self._leads and go.is_read(round_ - 1):
            if self._told < round_ - 1:
                self._told = round_ - 1
                steps.append(ReadByAll(round_ - 1))
            if not (control.held_back or go.may_begin(round_)):
                go.hear(round_)
                steps += self._send_want(now, wire.Flag.GOES_ON)
        if self._leads and self.is_under_way:
            control.go_on(saves=False)  # R14: a lead before this one has decided so
        self._exchange.goes_on = go.known
        if self._waits and self._wants.due() == math.inf:
            steps += self._send_want(now)
        return steps + self._begin(now)

    def _begin(self, now: float) -> Steps:
        control, exchange, frozen = self._control, self._exchange, self._control.frozen
        begun, step = self._begun, self._step
        if exchange.lacks_server:
            return []
        if begun is not None and begun.type is wire.FrameType.PULL:
            self._begun = None
            return [*exchange.pull(now, begun)]
        if frozen:
            return []
        if begun is not None:
            self._begun = None
            return [*exchange.push(now, begun)]
        if step is None or exchange.begun is not None or not self.go.may_begin(control.round):
            return []
        self._step = None
        if step.round != control.round:
            return []
        number = next(self._numbers)
        if step.skip or self._is_due:  # the ring says so
            control.offer(replace(step, unit=step.unit or 0, conversion=number))
            return []
        return [*exchange.push(now, Begun(wire.FrameType.PUSH, number))]

    @property
    def _is_due(self) -> bool:
        """The next step is one for the synchronisation: so say this member's own steps, or somebody has offered."""
        control = self._control
        assert control.token is not None
        lines = control.token.lines
        others = control.offers.members(control.round)
        begun = others or any(lines[k - 1].settled for k in self._workers)
        return self._synchronises and (bool(begun) or self._exchange.is_due)

    # ---- what this member says, and hears

    def read(self, now: float) -> Steps:
        """The training program has read what was pulled: the others wait for that."""
        self._wants.reset_interval()
        return self._send_want(now) if self._waits else []

    def hear(self, now: float, frame: wire.Frame) -> Steps:
        """What a member's WANT says of a round that it has read, and of GO."""
        want, flags, sender = frame.body, frame.header.flags, frame.header.sender
        control, go, round_ = self._control, self.go, frame.header.round
        assert isinstance(want, wire.Want)
        if flags & (wire.Flag.OFFERED | wire.Flag.GOES_ON):
            go.hear(round_)
        go.hear_read(sender, want.read)
        if control.token is None or round_ != control.round:
            return []
        steps: Steps = [*control.hear_read(sender, want)]
        # It says no more than that while it waits for GO.
        asks = self._leads and not flags and round_ <= go.known
        if asks and sender in self._workers and self._wants.may_answer(now):
            steps += self._send_want(now, wire.Flag.GOES_ON)
        return steps

    def deadline(self) -> float:
        """When this member repeats what it has read, as it has not heard GO."""
        return self._wants.due() if self._waits else math.inf

    def tick(self, now: float) -> Steps:
        """Time has passed."""
        if now < self.deadline():
            return []
        self._wants.back_off(now)
        return self._send_want(now)

    @property
    def _waits(self) -> bool:
        """A worker has read the round before the open one, and others must hear of it: the lead has not given GO."""
        control = self._control
        reads = self._number in self._workers and control.last_read >= control.round - 1
        waits = reads and not (self._leads or control.frozen or control.token is None)
        return waits and not self.go.may_begin(control.round)

    def _send_want(self, now: float, flags: int = 0) -> Steps:
        self._wants.said(now)
        control, want = self._control, self._control.want(0)
        header = self._view.header(self._number, control.round, flags)
        told = Send(wire.Frame(header, want, ((),)))
        sends: Steps = [told] if len(self._view.live) > 1 else []
        return [*sends, *control.hear_read(self._number, want)]
