# SPDX-License-Identifier: Apache-2.0
"""What leaves a simulated host, in its order: frames of the node, and fragments once they are converted."""

from __future__ import annotations

import functools
from collections import deque
from typing import TYPE_CHECKING

from nicps import protocol, wire
from nicps.job import actions as act
from tests.simulator.lan import FRAGMENT_S

if TYPE_CHECKING:
    from tests.simulator.host import Host


class Outbox:
    """The agent's sender, and the wire behind it."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._line: deque[act.Transmit | protocol.Send] = deque()  # waits for the program
        self.free_at = 0.0

    @property
    def waits(self) -> bool:
        """Fragments have yet to be converted."""
        return bool(self._line)

    def send(self, action: protocol.Send) -> None:
        """A frame of the node; a token goes behind the fragments that were sent under it."""
        if isinstance(action.frame.body, wire.Token) and any(map(_delays_token, self._line)):
            self._line.append(action)
        else:
            self._put(action)

    def transmit(self, action: act.Transmit) -> None:
        """Fragments, once they are converted."""
        if self._line or not self._can_leave(action):
            self._line.append(action)
        else:
            self._put(action)

    def go_on(self) -> None:
        """More is converted: send what can be sent."""
        while self._line and self._can_leave(self._line[0]):
            self._put(self._line.popleft())

    def drop(self) -> None:
        """What has not gone out does not; tokens behind it do."""
        waiting, self._line = self._line, deque()
        for action in waiting:
            if isinstance(action, protocol.Send):
                self._put(action)
            else:
                self._host.later(0.0, functools.partial(self._dropped, action.fragments))

    def _put(self, action: act.Transmit | protocol.Send) -> None:
        host, lan, now = self._host, self._host.lan, self._host.lan.now
        self.free_at = max(now, self.free_at)
        if isinstance(action, protocol.Send):
            lan.checks.sent(host, action.frame)
            frame, token = action.frame.pack(), action.frame.body
            lan.broadcast(host, frame, host.key_of(frame), self.free_at)
            if isinstance(token, wire.Token):
                host.kernel.seen = max(host.kernel.seen, (token.generation, token.hop))
            return
        fragments = action.fragments
        if action.source is act.Source.STREAM:
            if not action.stream:  # withdrawn: the agent has nothing to read it from
                host.later(0.0, functools.partial(self._dropped, fragments))
                return
            lan.checks.can_read(host, host.disk.hand_out(action.stream, action.phase.first_round))
        lan.digest.add_contribution(host.index, self.free_at, fragments)
        if fragments.striped is not None:
            self._stripe(action, now)
            return
        send = lan.feed if fragments.flags & wire.Flag.ADD else lan.fragment
        key = host.keys.get(fragments.view)
        for first, count in fragments.ranges:
            for index in range(first, first + count):
                self.free_at += FRAGMENT_S
                fragment = (fragments.view, key, host.node.number, fragments.round, index)
                send(host, fragment, self.free_at)
        host.later(self.free_at - now, lambda: self._sent(fragments, now))

    def _stripe(self, action: act.Transmit, now: float) -> None:
        """Fragments of stripes leave."""
        host, fragments = self._host, action.fragments
        total, width = action.phase.fragments_in(fragments.round), action.phase.width
        if fragments.striped is not None:
            total = fragments.striped.fragments or total
        self.free_at = host.kernel.stripes.send(fragments, total, width, self.free_at)
        host.later(self.free_at - now, lambda: self._sent(fragments, now))

    def _sent(self, fragments: protocol.SendFragments, started: float) -> None:
        host = self._host
        start = started * host.rate + host.index * 1000.0
        host.do(host.machine.fragments_sent(host.clock(), fragments, start))

    def _dropped(self, fragments: protocol.SendFragments) -> None:
        host = self._host
        host.do(host.machine.fragments_sent(host.clock(), fragments))

    def _can_leave(self, action: act.Transmit | protocol.Send) -> bool:
        if isinstance(action, protocol.Send) or action.source is not act.Source.PROGRAM:
            return True
        if action.fragments.striped is not None:  # only what is converted
            return True
        memory = self._host.memory
        return memory is None or memory.converted(action.fragments.round)


def _delays_token(item: act.Transmit | protocol.Send) -> bool:
    """As the agent's sender has it."""
    return isinstance(item, protocol.Send) or item.fragments.exchange.token_waits
