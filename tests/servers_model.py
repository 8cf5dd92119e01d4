# SPDX-License-Identifier: Apache-2.0
"""What the XDP program does with parameter servers, in Python: written from docs/servers.md, not from the C."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from nicps import wire
from nicps.dataplane.doorbell import Bell
from nicps.wire import Flag, FrameType, Refusal
from tests.model import DROP, TX, Outcome
from tests.servers import (
    LONG,
    SHORT,
    Home,
    Pusher,
    Stored,
    addend,
    down_of,
    is_full,
    pieces,
    shown,
    signed,
    weight_of,
)
from tests.stripes import LANES, MACS, Window, bit_of, doubt, mac_of


@dataclass
class ServersModel:
    """One member's program.

    `servers` in order of rank; `room`, parameter fragments of the vector; `rounds`, the open one and the last that is
    known; `averages`: there is room for synchronisations.
    """

    number: int
    live: frozenset[int]
    servers: tuple[int, ...]
    width: int
    room: int
    view: int
    rounds: tuple[int, int]
    settled: int = 0
    by_staleness: bool = True
    passes: frozenset[int] = frozenset()
    averages: bool = True
    key: bytes = b""
    clock: int = 0
    homes: dict[int, Home] = field(default_factory=dict)  # by place in the part
    pushers: dict[int, Pusher] = field(default_factory=dict)
    store: dict[int, Stored] = field(default_factory=dict)  # empty: there is no store
    taken: dict[int, int] = field(default_factory=dict)
    counts: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)
    answered: dict[int, tuple[int, int]] = field(default_factory=dict)  # by server, both words
    windows: dict[int, dict[int, Window]] = field(default_factory=dict)  # by channel and sender
    pulls: dict[tuple[int, int, bool], Window] = field(default_factory=dict)
    version: tuple[int, int] = (0, 0)  # round, pushes
    full: int = 0
    announced: list[int] = field(default_factory=lambda: [0, 0])
    answers: int = 0
    bells: list[Bell] = field(default_factory=list)
    settles: int = 0  # homes to which an average was added

    @property
    def fragments(self) -> int:
        """Push fragments of the vector."""
        return -(-self.room // pieces(self.width))

    def part(self, number: int) -> range:
        """The push fragments that a member serves."""
        if number not in self.servers:
            return range(0)
        n, rank = len(self.servers), self.servers.index(number)
        return range(self.fragments * rank // n, self.fragments * (rank + 1) // n)

    @property
    def believed(self) -> dict[tuple[int, int], tuple[int, int]]:
        """By channel and sender the highest numbers: of its own frames, and of its answers."""
        return {
            (channel, sender): (window.highest, window.answers)
            for channel, windows in self.windows.items()
            for sender, window in windows.items()
            if window.highest or window.answers
        }

    def whole(self, round_: int) -> int:
        """Pushes of that round that are whole here."""
        return self.version[1] if self.version[0] == round_ else 0

    def run(self, frame: bytes) -> Outcome:
        """One frame from its Ethernet header on, of this network, whole, and of a type of servers or stripes."""
        ours = frame[wire.ETHERNET_BYTES :]
        header = wire.Header(*wire.Layout.of(wire.Header).struct.unpack_from(ours))
        if header.view != self.view:
            return Outcome(DROP, ("view",))
        if header.sender == self.number:
            return Outcome(DROP, ("echo",))
        if header.sender not in self.live or frame[6:12] != mac_of(header.sender):
            return Outcome(DROP, ("stranger",))
        if header.length != (SHORT if header.type == FrameType.TAKEN else LONG):
            return Outcome(DROP, ("truncated",))
        if not self.rounds[0] <= header.round <= self.rounds[1]:
            return Outcome(DROP, ("round",))
        if not self.servers:
            return Outcome(DROP, ("mode",))
        if frame[:6] != MACS[self.number - 1]:
            return Outcome(DROP, ("astray",))
        windows = self.windows.setdefault(wire.channel_of(header.flags), {})
        if reason := doubt(windows, self.key, ours, header):
            return Outcome(DROP, (reason,))
        kind = header.type
        cls = wire.Contribution if kind == FrameType.CONTRIBUTION else wire.Push
        body: Any = cls(*wire.Layout.of(cls).struct.unpack_from(ours, wire.HEADER_BYTES))
        payload = ours[wire.PUSH_HEADER_BYTES : header.length]
        if header.round > self.rounds[0]:
            asks = (FrameType.PUSH, FrameType.PULL, FrameType.CONTRIBUTION)
            return (
                self._refuse(header, body, 0, Refusal.NOT_YET) if kind in asks else _drop("round")
            )
        match kind:
            case FrameType.PUSH:
                return self._push(header, body, payload)
            case FrameType.PULL:
                return self._pull(header, body)
            case FrameType.HELD:
                return self._held(header, body, payload)
            case FrameType.TAKEN:
                return self._taken(header, body)
            case FrameType.CONTRIBUTION:
                return self._contribute(header, body, payload)
            case _:
                return _drop("type")

    # ---- at a server

    def _home(self, index: int) -> Home | None:
        part = self.part(self.number)
        return self.homes.get(index - part.start) if index in part else None

    def _settle(self, home: Home, index: int) -> None:
        """What a committed synchronisation has come to is added by who comes first."""
        committed = home.tag & 0xFFFFFFFF <= self.settled
        if home.due and committed and not home.full and self.averages:
            home.due = False
            self.settles += 1
            home.parameters = home.parameters + home.sums
            self._note_full(home, index)

    def _note_full(self, home: Home, index: int) -> None:
        if not is_full(home.parameters):
            return
        home.full = True
        if not self.full:
            self.full = index + 1
            self.bells.append(Bell(0, 0, 0, len(self.part(self.number)), 0))

    def _push(self, header: wire.Header, body: wire.Push, payload: bytes) -> Outcome:
        width, worker, number = self.width, header.sender, body.number
        if body.width != width or body.fragments != self.fragments or not number:
            return _drop("malformed")
        if down_of(width, body.exponent) < 0:
            return _drop("shift")
        home = self._home(body.index)
        if home is None:
            return _drop("range")
        version = self.whole(header.round)
        if body.version > version:
            return _drop("malformed")
        self._settle(home, body.index)
        pusher = self.pushers.setdefault(worker, Pusher())
        if home.last.get(worker, 0) >= number:
            staleness = pusher.staleness if pusher.number == number else 0
            version = body.version + max(0, staleness - 1)
            return self._take(header, body, version, staleness, "duplicate")
        if home.seen and home.tag == header.view << 32 | header.round:
            return self._refuse(header, body, version, Refusal.SYNCHRONISING)
        if home.full:
            return self._refuse(header, body, version, Refusal.FULL)
        if pusher.number < number:
            staleness = version + 1 - body.version
            pusher.number, pusher.staleness = number, staleness
            pusher.weight = weight_of(staleness if self.by_staleness else 1)
        elif pusher.number > number:
            return _drop("round")
        if not self._enter(0, worker, number):
            return _drop("round")
        home.parameters = home.parameters + addend(payload, width, body.exponent, pusher.weight)
        home.last[worker] = number
        held = shown(home.parameters) if width == 32 else None
        self._note_full(home, body.index)
        whole = self._count(0, worker) == len(self.part(self.number))
        if whole and self.version[0] == header.round:
            self.version = header.round, self.version[1] + 1
        if held is None:
            return replace(
                self._take(header, body, version, pusher.staleness, "pushed"), heard=True
            )
        return self._hold(header, body, version, pusher.staleness, *held, "pushed", heard=True)

    def _contribute(self, header: wire.Header, body: wire.Contribution, payload: bytes) -> Outcome:
        width, bit = self.width, bit_of(header.sender)
        live = sum(map(bit_of, self.live))
        wrong = body.width != width or body.fragments != self.fragments or not body.number
        if wrong or not body.members & bit or body.members & ~live:
            return _drop("malformed")
        if down_of(width, body.exponent) < 0:
            return _drop("shift")
        home = self._home(body.index)
        if home is None or not self.averages:
            return _drop("range")
        version, tag = self.whole(header.round), header.view << 32 | header.round
        self._settle(home, body.index)
        seen = home.seen if home.tag == tag else 0
        last = seen | bit == body.members
        if home.tag > tag:
            return _drop("round")
        if seen and home.members != body.members:
            return _drop("malformed")
        if seen & bit:
            return self._take(header, body, version, 0, "duplicate")
        if home.full:
            return self._refuse(header, body, version, Refusal.FULL)
        if last and not self._enter(0, 0, tag):
            return _drop("round")
        if tag > self.announced[tag & 1]:
            self.announced[tag & 1] = tag
            self.bells.append(Bell(tag, body.members, 0, body.fragments, body.unit))
        count = bin(body.members).count("1")
        adds = addend(payload, width, body.exponent, weight_of(count))
        home.sums = home.sums + adds if seen else adds
        home.tag, home.members, home.seen, home.due = tag, body.members, seen | bit, last
        if last:
            size = len(self.part(self.number))
            self._tell(tag, self._count(0, 0), size)
        done = self._take(header, body, version, 0, "summed" if last else "gathered")
        return replace(done, heard=True)

    def _pull(self, header: wire.Header, body: wire.Push) -> Outcome:
        if body.width != 32 or body.fragments != self.room or not body.number:
            return _drop("malformed")
        if body.index >= self.room:
            return _drop("range")
        way = wire.channel_of(header.flags), header.sender, bool(header.flags & Flag.ANSWER)
        if self.key and not self.pulls.setdefault(way, Window()).answers_to(header.sequence):
            return _drop("replayed")
        index, piece = divmod(body.index, pieces(self.width))
        if index not in self.part(self.number):
            return self._pass_on(header, body)
        home = self._home(index)
        if home is None:
            return _drop("range")
        version = self.whole(header.round)
        self._settle(home, index)
        if home.seen and home.tag == header.view << 32 | header.round:
            return self._refuse(header, body, version, Refusal.SYNCHRONISING)
        part = home.parameters[piece * LANES[32] : (piece + 1) * LANES[32]]
        return self._hold(header, body, version, 0, *shown(part), "pulled", heard=True)

    def _pass_on(self, header: wire.Header, body: wire.Push) -> Outcome:
        """A partner asks."""
        stored = self.store.get(body.index)
        if stored is None:
            return _drop("range")
        if not stored.tag or stored.rest >> 32 != header.round:
            return self._refuse(header, body, 0, Refusal.ABSENT)
        version = stored.rest & 0xFFFFFFFF
        return self._hold(header, body, version, 0, stored.lanes, stored.exponent, "passed_on")

    # ---- at a worker

    def _held(self, header: wire.Header, body: wire.Push, payload: bytes) -> Outcome:
        if body.width != 32 or body.fragments != self.room or not body.number:
            return _drop("malformed")
        index = body.index // pieces(self.width)
        if index not in self.part(header.sender) and header.sender not in self.passes:
            return _drop("stranger")
        stored = self.store.get(body.index)
        if stored is None or body.index >= self.room:
            return _drop("range")
        if stored.tag >= body.number:
            return _drop("duplicate")
        if not self._enter(1, 0, body.number):
            return _drop("round")
        rest = header.round << 32 | body.version + bool(body.staleness) & 0xFFFFFFFF
        self.store[body.index] = Stored(body.number, rest, body.exponent, payload)
        self._tell(body.number, self._count(1, 0), self.room)
        also = body.staleness and not self._acknowledge(header, body, index)
        return Outcome(DROP, ("stored", "acknowledged") if also else ("stored",), heard=True)

    def _taken(self, header: wire.Header, body: wire.Push) -> Outcome:
        if not body.number:
            return _drop("malformed")
        if body.reason:
            if header.sender not in (*self.servers, *self.passes):
                return _drop("stranger")
            if self._is_past(body):
                return _drop("duplicate")
            return Outcome(DROP, ("refused",), heard=True)
        if body.fragments != self.fragments:
            return _drop("malformed")
        if body.index not in self.part(header.sender):
            return _drop("stranger")
        reason = self._acknowledge(header, body, body.index)
        return Outcome(DROP, (reason or "acknowledged",), heard=True)

    def _is_past(self, refusal: wire.Push) -> bool:
        """What it is about has come, or is added, by now."""
        number, index = refusal.number, refusal.index
        stored = self.store.get(index) if refusal.fragments == self.room else None
        taken = self.taken.get(index, 0) if refusal.fragments == self.fragments else 0
        return (stored is not None and stored.tag >= number) or taken >= number

    def _acknowledge(self, header: wire.Header, body: wire.Push, index: int) -> str:
        """Why it does not count; empty if it does."""
        if index not in self.taken:
            return "range"
        before = self.answered.get(header.sender, (0, 0))
        words = body.number << 32 | body.staleness, header.round << 32 | body.version
        self.answered[header.sender] = max(before[0], words[0]), max(before[1], words[1])
        if self.taken[index] >= body.number:
            return "duplicate"
        if not self._enter(1, 1, body.number):
            return "round"
        self.taken[index] = body.number
        self._tell(body.number, self._count(1, 1), self.fragments)
        return ""

    # ---- counts, bells and answers

    def _enter(self, bank: int, sender: int, tag: int) -> bool:
        before = self.counts.get((bank, sender), (0, 0))
        if before[0] < tag:
            self.counts[bank, sender] = tag, 0
        return before[0] <= tag

    def _count(self, bank: int, sender: int) -> int:
        tag, count = self.counts[bank, sender]
        self.counts[bank, sender] = tag, count + 1
        return count + 1

    def _tell(self, tag: int, count: int, fragments: int) -> None:
        left = fragments - count
        step = min(self.clock, max(4, self.clock // 16)) if left < self.clock else self.clock
        if not left or (step and count % step == 0):
            self.bells.append(Bell(tag, 0, count, fragments, 0))

    def _refuse(self, header: wire.Header, body: Any, version: int, reason: Refusal) -> Outcome:
        counter = "full" if reason == Refusal.FULL else "refused"
        return self._take(header, body, version, 0, counter, reason)

    def _take(
        self,
        header: wire.Header,
        body: Any,
        version: int,
        staleness: int,
        counter: str,
        reason: int = Refusal.NONE,
    ) -> Outcome:
        of = body.number, body.index, body.fragments
        answer = wire.Taken(version, *of, staleness, body.width, body.exponent, reason)
        return Outcome(TX, (counter,), self._send(header, answer, b""))

    def _hold(
        self,
        header: wire.Header,
        body: wire.Push,
        version: int,
        staleness: int,
        lanes: bytes,
        exponent: int,
        counter: str,
        *,
        heard: bool = False,
    ) -> Outcome:
        of = body.number, body.index, body.fragments
        answer = wire.Held(version, *of, staleness, 32, exponent)
        return Outcome(TX, (counter,), self._send(header, answer, lanes), heard=heard)

    def _send(self, header: wire.Header, body: wire.Push, payload: bytes) -> bytes:
        sequence = 0
        if self.key:
            self.answers += 1
            sequence = self.answers
        flags = Flag.ANSWER | header.flags & wire.CHANNEL_MASK
        own = replace(header, flags=flags, sender=self.number, sequence=sequence, tag=0)
        return signed(self.number, own, body, payload, MACS[header.sender - 1], self.key)


def _drop(reason: str) -> Outcome:
    return Outcome(DROP, (reason,))
