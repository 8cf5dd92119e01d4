# SPDX-License-Identifier: Apache-2.0
"""R1 to R3: a starter calls, hosts answer, and the starter's list is the truth."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field

from nicps import wire
from nicps.protocol.actions import Action, Failed, Send
from nicps.protocol.phase import Member, Timings

_MOST_CALLS = 64  # that a host remembers to have answered


@dataclass(slots=True)
class Starting:
    """A formation that this host started, until its list is sent."""

    nonce: int
    hosts: list[tuple[bytes, str]]
    last_new: float
    next_call: float
    highest_view: int


@dataclass(slots=True)
class Formation:
    """Who is in the network. `header` makes a frame header from (flags, round, view)."""

    mac: bytes
    name: str
    timings: Timings
    header: Callable[[int, int], wire.Header]
    emit: Callable[[Action], None]
    starting: Starting | None = None
    answered: set[int] = field(default_factory=set)  # nonces of the calls that we answered

    def start(self, now: float, nonce: int, highest_view: int) -> None:
        """R1: call for members."""
        self.starting = Starting(nonce, [(self.mac, self.name)], now, now, highest_view)
        self.tick(now)

    def on_call(self, source: bytes, nonce: int, highest_view: int) -> None:
        """R2: answer. Two starters at once: the lower MAC wins, the other joins it (R3)."""
        if self.starting is not None:
            if self.mac < source:
                return
            self.starting = None
            self.emit(
                Failed(
                    f"{wire.mac_text(source)} started a job at the same moment; submit again later"
                )
            )
        if len(self.answered) >= _MOST_CALLS:
            self.answered.clear()
        self.answered.add(nonce)
        body = wire.Answer(nonce, highest_view)
        self.emit(Send(wire.pack(self.header(0, 0), body, tail=self.name.encode())))

    def on_answer(self, now: float, source: bytes, frame: wire.Frame) -> None:
        """R2: record who answers, in the order of the broadcasts."""
        answer, starting = frame.body, self.starting
        assert isinstance(answer, wire.Answer)
        if starting is None or answer.nonce != starting.nonce or answer.view >> 31:
            return
        starting.highest_view = max(starting.highest_view, answer.view)
        if len(starting.hosts) < wire.MAX_MEMBERS and all(
            source != mac for mac, _ in starting.hosts
        ):
            name = safe_name(frame.tail.decode(errors="replace"), source)
            if any(name == other for _, other in starting.hosts):
                name = safe_name("", source)
            starting.hosts.append((source, name))
            starting.last_new = now

    def tick(self, now: float) -> tuple[int, int, tuple[Member, ...]] | None:
        """Call again, or close the list: (nonce, view, members) once no new answer came for a while (R3)."""
        starting = self.starting
        if starting is None:
            return None
        if now >= starting.last_new + self.timings.quiet_s:
            self.starting = None
            members = tuple(Member(k, m, n) for k, (m, n) in enumerate(starting.hosts, 1))
            return starting.nonce, starting.highest_view + 1, members
        if now >= starting.next_call:
            starting.next_call = now + self.timings.call_s
            body = wire.Call(starting.nonce)
            self.emit(Send(wire.pack(self.header(0, 0), body, tail=self.name.encode())))
        return None

    def deadline(self) -> float | None:
        """When `tick` wants to be called next."""
        if self.starting is None:
            return None
        return min(self.starting.next_call, self.starting.last_new + self.timings.quiet_s)


def safe_name(name: str, mac: bytes) -> str:
    """A name that fits the list and can name a folder; where nothing is left of it, one made of the MAC."""
    kept = re.sub(r"[^A-Za-z0-9._-]", "-", name)[: wire.NAME_BYTES].lstrip(".-")
    return kept or "m" + mac.hex()


def pack_list(header: wire.Header, nonce: int, members: tuple[Member, ...]) -> bytes:
    """R3: the frame that says who is in."""
    entries = [
        wire.FormedMember(m.mac, m.name.encode()[: wire.NAME_BYTES].ljust(wire.NAME_BYTES, b"\0"))
        for m in members
    ]
    return wire.pack(header, wire.Formed(nonce, len(entries)), entries)


def unpack_list(frame: wire.Frame) -> tuple[Member, ...]:
    """The members of such a frame."""
    return tuple(
        Member(k, e.mac, safe_name(e.name.rstrip(b"\0").decode(errors="replace"), e.mac))
        for k, e in enumerate(frame.items[0], 1)
        if isinstance(e, wire.FormedMember)
    )
