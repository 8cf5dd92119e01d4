# SPDX-License-Identifier: Apache-2.0
"""A list in force is sent to every member (R3, R18), to a host that is no longer in it (R19), and to a switch (R4)."""

from __future__ import annotations

import math

from nicps import wire
from nicps.protocol.actions import Send
from nicps.protocol.phase import Timings
from nicps.protocol.signals import Steps
from nicps.protocol.view import Successor, View, mask

_ANSWERS, _ANSWER_S = 8, 0.1  # so many in a row to who asks, then one each 0.1 s


class Installation:
    """A list in force, sent to each member until it has answered (R3, R18).

    Each frame names the fresh nonce of the host that it is for, so that nobody can put yesterday's list in force again.

    Args:
        installed: members that have it; this class adds nobody, its owner does.
        nonces: by number, of the hosts that it is sent to; a host that is not in the view learns so (R19).
    """

    def __init__(
        self,
        view: View,
        base: int,
        successor: Successor,
        installed: set[int],
        nonces: dict[int, int],
        timings: Timings,
    ) -> None:
        self.view = view
        self.installed = installed
        self._base = base
        self._successor = successor
        self.nonces = {k: nonce for k, nonce in nonces.items() if k not in installed}
        self._timings = timings
        self._evictions = 3  # times that a host that is not in the view learns so
        self._next_send = 0.0
        self._interval = timings.decision_s
        self._answered = 0.0  # when the answers given so far are paid off
        self.heard: dict[int, float] = {}
        self.ending = wire.Ending.NONE  # of the view's job

    @property
    def unit(self) -> int:
        """log2 of the unit of the round that is open as the view begins."""
        return self._successor.unit

    @property
    def missing(self) -> frozenset[int]:
        """Who is in, and has not answered."""
        return self.view.live - self.installed

    def tick(self, now: float) -> Steps:
        """Send it to the members that have not answered."""
        if not self.heard:
            self.heard = dict.fromkeys(self.view.live, now)
        if now < self._next_send or not self.wants:
            return []
        steps: Steps = []
        self._next_send = now + self._interval
        self._interval = min(self._interval * 1.5, self._timings.decision_s * 5)
        for number, nonce in self.nonces.items():
            if number in self.missing or (number not in self.view.live and self._evictions):
                steps.append(self.send_to(number, nonce))
        self._evictions = max(0, self._evictions - 1)
        return steps

    @property
    def wants(self) -> bool:
        """Some host does not have it yet."""
        evicted = self._evictions and any(number not in self.view.live for number in self.nonces)
        return bool(self.missing) or bool(evicted)

    def deadline(self) -> float:
        """When `tick` wants to be called next."""
        return self._next_send if self.wants else math.inf

    def silent(self, now: float, timeout_s: float) -> int:
        """A member that does not answer; 0 if there is none."""
        late = (k for k in sorted(self.missing) if now > self.heard.get(k, now) + timeout_s)
        return next(late, 0)

    def answer(self, now: float, nonce: int) -> Steps:
        """A switch's controller asks what is in force. Anybody can send its question again, so answers are few."""
        if self._answered > now + (_ANSWERS - 1) * _ANSWER_S:
            return []
        self._answered = max(self._answered, now) + _ANSWER_S
        return [self.send_to(0, nonce)]

    def send_to(self, number: int, nonce: int) -> Send:
        """One frame, for one host; number 0 is who has asked."""
        values, members, channels = self._successor.items()
        body = wire.View(
            live=mask(self.view.live),
            nonce=nonce,
            number=self.view.number,
            base=self._base,
            ballot=self.view.ballot,
            addressee=number,
            members=len(members),
            values=len(values),
            step=wire.ViewStep.INSTALL,
            ended=self.ending,
            channels=len(channels),
        )
        return Send(wire.Frame(wire.Header(), body, (values, members, channels)))
