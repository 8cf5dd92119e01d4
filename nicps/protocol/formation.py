# SPDX-License-Identifier: Apache-2.0
"""R1 to R3: a starter calls, hosts answer, and the starter's list is the truth."""

from __future__ import annotations

import math
from dataclasses import dataclass

from nicps import wire
from nicps.protocol.actions import Failed, Send
from nicps.protocol.phase import Member, Timings
from nicps.protocol.signals import Formed, Steps
from nicps.protocol.view import safe_name


@dataclass(slots=True)
class Starting:
    """A formation that this host started, until its list is sent."""

    nonce: int
    hosts: list[tuple[bytes, str]]
    fresh: dict[bytes, int]  # MAC -> the nonce that it wants to see in the list
    last_new: float
    next_call: float
    highest_view: int
    yields_until: float | None = None  # another starter has called: it may be about to win


@dataclass(slots=True)
class Formation:
    """Who is in the network. Its frames belong to no view."""

    mac: bytes
    name: str
    timings: Timings
    starting: Starting | None = None

    def start(self, now: float, nonce: int, highest_view: int) -> Steps:
        """R1: call for members."""
        self.starting = Starting(nonce, [(self.mac, self.name)], {}, now, now, highest_view)
        return self.tick(now)

    def on_call(self, now: float, source: bytes) -> bool:
        """R2: whether to answer. Two starters at once: the lower MAC wins, the other joins it (R3).

        It has won once its list is here. Until then the other keeps still for a while, once: a call shows nothing, it
        may be an old frame that somebody sends again.
        """
        starting = self.starting
        if starting is None:
            return True
        if self.mac < source:
            return False
        if starting.yields_until is None:
            starting.yields_until = now + self.timings.yield_s
            starting.next_call = starting.last_new = starting.yields_until
        return now < starting.yields_until

    @property
    def yields(self) -> bool:
        """Another starter has called, and its list is welcome."""
        return self.starting is not None and self.starting.yields_until is not None

    def lose(self, source: bytes) -> Steps:
        """That host's list is here."""
        if self.starting is None:
            return []
        self.starting = None
        reason = "started a job at the same moment; submit again later"
        return [Failed(f"{wire.mac_text(source)} {reason}")]

    def answer(self, nonce: int, fresh: int, highest_view: int, stage: wire.Stage) -> Send:
        """R2, R20: this host takes part."""
        body = wire.Answer(nonce, fresh, highest_view, stage)
        return Send(wire.Frame(wire.Header(), body, tail=self.name.encode()))

    def on_answer(self, now: float, source: bytes, frame: wire.Frame) -> None:
        """R2: record who answers, in the order of the broadcasts."""
        answer, starting = frame.body, self.starting
        assert isinstance(answer, wire.Answer)
        if starting is None or answer.nonce != starting.nonce or answer.view >> 31:
            return
        starting.highest_view = max(starting.highest_view, answer.view)
        starting.fresh[source] = answer.fresh
        if len(starting.hosts) < wire.MAX_MEMBERS and all(
            source != mac for mac, _ in starting.hosts
        ):
            name = safe_name(frame.tail.decode(errors="replace"), source)
            if any(name == other for _, other in starting.hosts):
                name = safe_name("", source)
            starting.hosts.append((source, name))
            starting.last_new = max(now, starting.last_new)

    def tick(self, now: float) -> Steps:
        """Call again, or close the list once no new answer came for a while (R3)."""
        starting = self.starting
        if starting is None:
            return []
        if now >= starting.last_new + self.timings.quiet_s:
            self.starting = None
            members = tuple(Member(k, m, n) for k, (m, n) in enumerate(starting.hosts, 1))
            fresh = {m.number: starting.fresh.get(m.mac, 0) for m in members}
            return [Formed(starting.highest_view + 1, members, fresh)]
        if now >= starting.next_call:
            starting.next_call = now + self.timings.call_s
            call = wire.Frame(wire.Header(), wire.Call(starting.nonce), tail=self.name.encode())
            return [Send(call)]
        return []

    def deadline(self) -> float:
        """When `tick` wants to be called next."""
        if self.starting is None:
            return math.inf
        return min(self.starting.next_call, self.starting.last_new + self.timings.quiet_s)
