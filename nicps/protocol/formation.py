# SPDX-License-Identifier: Apache-2.0
"""R1 to R3: a starter calls, hosts answer, and the starter's list is the truth."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from nicps import wire
from nicps.protocol.actions import Failed, Send
from nicps.protocol.phase import Member, Timings
from nicps.protocol.signals import Formed, Steps
from nicps.protocol.view import distinct_name, safe_name


@dataclass(frozen=True, slots=True)
class Group:
    """Programs that wait for one another (`nicps.collective`), and hosts with them that form a network.

    `key`: a hash of the group's name and size, 1 to 65535. `size`: so many hosts, each with a program that waits; 0:
    all hosts that answer.
    """

    key: int
    size: int


@dataclass(slots=True)
class Starting:
    """A formation that this host started, until its list is sent."""

    nonce: int
    hosts: list[tuple[bytes, str]]
    fresh: dict[bytes, int]  # MAC -> the nonce that it wants to see in the list
    last_new: float
    next_call: float
    highest_view: int
    group: Group | None = None
    yields_until: float | None = None  # another starter has called: it may be about to win


@dataclass(slots=True)
class Formation:
    """Who is in the network. Its frames belong to no view.

    Attributes: `waits`, the group that a program on this host waits for.
    """

    mac: bytes
    name: str
    timings: Timings
    starting: Starting | None = None
    waits: Group | None = None

    def start(self, now: float, nonce: int, highest_view: int, group: Group | None = None) -> Steps:
        """R1: call for members, perhaps those of a group."""
        own = [(self.mac, self.name)]
        self.starting = Starting(nonce, own, {}, now, now, highest_view, group)
        return self.tick(now)

    @property
    def found(self) -> tuple[str, ...]:
        """The hosts that have answered so far, this one included."""
        return tuple(name for _, name in self.starting.hosts) if self.starting else ()

    def on_call(self, now: float, source: bytes, group: int = 0) -> bool:
        """R2: whether to answer. Two starters at once: the lower MAC wins, the other joins it (R3).

        It has won once its list is here. Until then the other keeps still for a while, once: a call shows nothing, it
        may be an old frame that somebody sends again.
        """
        starting = self.starting
        if starting is None:
            return True
        if bool(group) != (starting.group is not None):
            if not group:  # a job goes before groups that wait
                starting.yields_until = math.inf
            return not group
        if self.mac < source:
            return False
        if starting.group is not None and starting.group.size:
            starting.yields_until = math.inf  # it needs so many hosts, and goes on calling
            return True
        if starting.yields_until is None:
            starting.yields_until = now + self.timings.yield_s
            starting.next_call = starting.last_new = starting.yields_until
        return now < starting.yields_until

    @property
    def yields(self) -> bool:
        """Another starter's list is welcome: it has called, or a program here waits for a group, whoever forms it."""
        starting = self.starting
        if starting is None:
            return False
        return starting.group is not None or starting.yields_until is not None

    def lose(self, source: bytes, name: str = "") -> Steps:
        """That host's list is here. `name`: as the list has it; empty where it is not in it."""
        starting, self.starting = self.starting, None
        if starting is None:
            return []
        reason = "started a job at the same moment; submit again later"
        if starting.group is not None:  # the program goes on waiting
            reason = "has formed the network at the same moment; the program here goes on waiting"
        other = name or dict(starting.hosts).get(source) or wire.mac_text(source)
        return [Failed(f"{other} {reason}")]

    def answer(self, nonce: int, fresh: int, highest_view: int, stage: wire.Stage) -> Send:
        """R2, R20: this host takes part."""
        body = wire.Answer(nonce, fresh, highest_view, stage)
        if stage is wire.Stage.NOTHING and nonce and self.waits is not None:
            body = replace(body, stage=wire.Stage.GROUP, group=self.waits.key)
        return Send(wire.Frame(wire.Header(), body, tail=self.name.encode()))

    def on_answer(self, now: float, source: bytes, frame: wire.Frame) -> None:
        """R2: record who answers, in the order of the broadcasts."""
        answer, starting = frame.body, self.starting
        assert isinstance(answer, wire.Answer)
        if starting is None or answer.nonce != starting.nonce or answer.view >> 31:
            return
        group = starting.group
        if group is not None and group.size:
            waits = answer.stage == wire.Stage.GROUP and answer.group == group.key
            if not waits or len(starting.hosts) == group.size:
                return
        starting.highest_view = max(starting.highest_view, answer.view)
        starting.fresh[source] = answer.fresh
        if len(starting.hosts) < wire.MAX_MEMBERS and all(
            source != mac for mac, _ in starting.hosts
        ):
            name = safe_name(frame.tail.decode(errors="replace"), source)
            taken = [other for _, other in starting.hosts]
            number = len(taken) + 1
            starting.hosts.append((source, distinct_name(name, number, source, taken)))
            starting.last_new = max(now, starting.last_new)

    def tick(self, now: float) -> Steps:
        """Call again, or close the list once no new answer came for a while (R3)."""
        starting = self.starting
        if starting is None:
            return []
        if self._closes(now, starting):
            self.starting = None
            members = tuple(Member(k, m, n) for k, (m, n) in enumerate(starting.hosts, 1))
            fresh = {m.number: starting.fresh.get(m.mac, 0) for m in members}
            return [Formed(starting.highest_view + 1, members, fresh)]
        if now >= starting.next_call:
            starting.next_call = now + self.timings.call_s
            key = starting.group.key if starting.group is not None else 0
            call = wire.Call(starting.nonce, 0, key)
            return [Send(wire.Frame(wire.Header(), call, tail=self.name.encode()))]
        return []

    def _closes(self, now: float, starting: Starting) -> bool:
        group = starting.group
        if group is not None and group.size:
            return len(starting.hosts) == group.size
        return now >= starting.last_new + self.timings.quiet_s

    def deadline(self) -> float:
        """When `tick` wants to be called next."""
        starting = self.starting
        if starting is None:
            return math.inf
        if starting.group is not None and starting.group.size:
            return -math.inf if len(starting.hosts) == starting.group.size else starting.next_call
        return min(starting.next_call, starting.last_new + self.timings.quiet_s)
