# SPDX-License-Identifier: Apache-2.0
"""What the XDP program does, in Python: written from docs/protocol.md, not from the C.

`XdpModel.run` takes a frame as it comes from the LAN and says verdict, frame out and the counters
that rise. Sequences (`tests/vectors/sequences`) run against this and against the program itself;
random ones compare the two. It has no clock: how many control frames a second go up is not in it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from siphash24 import siphash24

from nicps import wire
from nicps.wire import Flag, FrameType

PASS, DROP, TX = "pass", "drop", "tx"
BANKS = 2
SLOTS_PER_BLOCK = 8
#: How far a sender's numbers may fall behind the highest.
REPLAY_WINDOW = 1024
LAST_SEQUENCE = LAST_HOP = 2**32 - 1
#: Of stripes, which are a room of their own (tests/stripes_model.py).
STRIPES = frozenset({FrameType.CONTRIBUTION, FrameType.SUM, FrameType.ASK, FrameType.LACKING})
#: Of parameter servers, likewise (tests/servers_model.py).
SERVERS = frozenset({FrameType.PUSH, FrameType.PULL, FrameType.HELD, FrameType.TAKEN})
DIRECT = frozenset({FrameType.NUMBERS, FrameType.MARKED, FrameType.WITHDRAWN, FrameType.SETTLE})
CONTROL = frozenset(FrameType) - STRIPES - SERVERS - DIRECT
CONTROL -= {FrameType.TOKEN, FrameType.FRAGMENT, FrameType.PROBE}
BLOCK_BYTES = wire.BLOCK_LANES * 8
#: Fragments that share a block, by lane width; 0 is raw bytes.
PER_BLOCK = {0: 8, 8: 1, 16: 2, 32: 4}


@dataclass
class Config:
    """`struct nicps_config`; `alive` stands for the heartbeat, `next` is who is handed the token.

    `position` is that of the newest token that the agent has sent.
    """

    enabled: int = 1
    network: int = 0
    view: int = 0
    round_low: int = 0
    round_high: int = 0
    number: int = 1
    members: int = 0
    live: int = 0
    next: int = 0
    bounce: int = 0
    round: int = 0
    sent_seen: int = 0
    own_sent: int = 0
    fragments: int = 0
    blocks: int = 0
    keyed: int = 0
    sums: int = 0
    sums_next: int = 0
    alive: bool = True
    position: int = 0


@dataclass
class Outcome:
    """What came of one frame; `heard`: it was noted as a member's sign of life."""

    verdict: str
    counters: tuple[str, ...] = ()
    out: bytes | None = None
    heard: bool = False


@dataclass
class Slot:
    """One fragment's place in a bank: whose it is, and which members are in it."""

    tag: int = 0
    seen: int = 0


@dataclass
class Window:
    """Numbers of a sender's frames: the highest believed of fragments, of tokens, and of repeated tokens."""

    highest: int = 0
    token: int = 0
    repeat: int = 0


def tag_of(ours: bytes, length: int, key: bytes) -> int:
    """SipHash-2-4 of a frame's `length` bytes, with zeros for the tag."""
    message = ours[:24] + bytes(8) + ours[32:length]
    return int.from_bytes(siphash24(message, key=key).digest(), "little")


@dataclass
class XdpModel:
    """The program with its maps; `members` has zeros for who is not in the view."""

    config: Config
    members: Sequence[bytes]
    key: bytes = b""
    sequence: int = 0  # the last number that this host gave to a frame
    counters: Counter[str] = field(default_factory=Counter)
    seen: int = 0  # generation << 32 | hop
    bounced: int = 0
    bounces: int = 0
    bounced_frame: bytes = b""
    train: int = 0  # the nonce of the train that is counted
    counted: int = 0

    def __post_init__(self) -> None:
        blocks = self.config.blocks
        self.progress: dict[tuple[int, int], tuple[int, int]] = {}  # bank, sender -> tag, count
        self.windows: dict[int, Window] = {}
        self.slots: dict[tuple[int, int], Slot] = {}  # bank, fragment
        self.accumulators = np.zeros((BANKS, blocks, wire.BLOCK_LANES), np.int64)

    def configure(self, changes: Mapping[str, Any]) -> None:
        """The agent writes into the configuration."""
        for name, value in changes.items():
            assert hasattr(self.config, name)
            setattr(self.config, name, value)

    def run(self, frame: bytes) -> Outcome:
        """One frame from its Ethernet header on."""
        outcome = self._run(frame)
        self.counters.update(outcome.counters)
        return outcome

    def _run(self, frame: bytes) -> Outcome:
        if len(frame) < wire.ETHERNET_BYTES or frame[12:14] != wire.ETHERTYPE.to_bytes(2, "big"):
            return Outcome(PASS)
        ours, config = frame[wire.ETHERNET_BYTES :], self.config
        if len(ours) < wire.HEADER_BYTES:
            return Outcome(DROP, ("truncated",))
        header = wire.Header(*wire.Layout.of(wire.Header).struct.unpack_from(ours))
        if header.version != wire.VERSION:
            return Outcome(DROP, ("version",))
        if not wire.HEADER_BYTES <= header.length <= len(ours):
            return Outcome(DROP, ("truncated",))
        if header.network != config.network:
            return Outcome(DROP, ("network",))
        if header.type in CONTROL:
            return Outcome(PASS, ("control",))
        if header.type == FrameType.PROBE:
            return self._probe(ours, header)
        if header.type in STRIPES | SERVERS | DIRECT:  # the room is not loaded
            return Outcome(DROP, ("mode",))
        if header.type not in (FrameType.TOKEN, FrameType.FRAGMENT):
            return Outcome(DROP, ("type",))
        if not config.enabled:
            return Outcome(DROP, ("disabled",))
        if header.view != config.view:
            return Outcome(DROP, ("view",))
        if header.sender == config.number:
            return Outcome(DROP, ("echo",))
        added = header.type == FrameType.FRAGMENT and bool(header.flags & Flag.ADD)
        is_sum = added and header.sender == 0
        if is_sum:
            known = frame[6:12] == wire.SWITCH
        else:
            known = self._is_in(header.sender) and self.members[header.sender - 1] == frame[6:12]
        if not known:
            return Outcome(DROP, ("stranger",))
        if header.type == FrameType.TOKEN:
            return self._token(frame, ours, header)
        expected = config.sums_next if header.round > config.round else config.sums
        if is_sum != bool(expected):
            return Outcome(DROP, ("mode",))
        return self._fragment(ours, header)

    def _probe(self, ours: bytes, header: wire.Header) -> Outcome:
        layout = wire.Layout.of(wire.Probe).struct
        if header.length < wire.HEADER_BYTES + layout.size:
            return Outcome(DROP, ("truncated",))
        probe = wire.Probe(*layout.unpack_from(ours, wire.HEADER_BYTES))
        if probe.step != wire.ProbeStep.TRAIN:
            return Outcome(PASS, ("control",))
        self.counted += probe.nonce == self.train
        return Outcome(DROP, ("probed",))

    def _is_in(self, number: int) -> bool:
        known = 1 <= number <= min(self.config.members, len(self.members))
        return known and any(self.members[number - 1])

    def _doubt(self, ours: bytes, header: wire.Header) -> str | None:
        """Why a frame is not believed; None raises its sender's window."""
        if not self.config.keyed:
            return None
        window = self.windows.get(header.sender, Window())
        token = header.type == FrameType.TOKEN
        highest = window.token if token else window.highest
        if header.sequence + REPLAY_WINDOW <= highest:
            return "replayed"
        if header.tag != tag_of(ours, header.length, self.key):
            return "forged"
        self.windows[header.sender] = window
        if not token:
            window.highest = max(highest, header.sequence)
            return None
        window.token = max(highest, header.sequence)
        if header.flags & Flag.REPEAT:
            if header.sequence <= window.repeat:
                return "replayed"
            window.repeat = header.sequence
        return None

    def _token(self, frame: bytes, ours: bytes, header: wire.Header) -> Outcome:
        config = self.config
        if not wire.TOKEN_HEADER_BYTES <= header.length <= wire.MAX_FRAME_BYTES:
            return Outcome(DROP, ("truncated",))
        token = wire.Token(*wire.Layout.of(wire.Token).struct.unpack_from(ours, wire.HEADER_BYTES))
        items = 20 * token.members + 8 * token.ranges
        if (
            token.members != config.members
            or not self._is_in(token.owner)
            or header.length != wire.TOKEN_HEADER_BYTES + items
        ):
            return Outcome(DROP, ("malformed",))
        if doubt := self._doubt(ours, header):
            return Outcome(DROP, (doubt,))
        key = token.generation << 32 | token.hop
        if key <= max(self.seen, config.position):
            if header.flags & Flag.REPEAT:
                return Outcome(PASS, ("raised",))
            return Outcome(DROP, ("stale",))
        self.seen = key
        return replace(self._accept(frame, header, token), heard=True)

    def _accept(self, frame: bytes, header: wire.Header, token: wire.Token) -> Outcome:
        config = self.config
        if token.owner == config.number:
            if self._may_bounce(header, token):
                return self._bounce(frame, header, token)
            return Outcome(PASS, ("raised",))
        if (
            header.flags & (Flag.REPEAT | Flag.PARKED)
            or header.round != config.round
            or token.sent != config.sent_seen
            or token.state != wire.TokenState.OPEN
        ):
            return Outcome(PASS, ("raised",))
        return Outcome(DROP, ("heard",))

    def _may_bounce(self, header: wire.Header, token: wire.Token) -> bool:
        config = self.config
        taken = sum(
            count
            for (bank, _), (tag, count) in self.progress.items()
            if bank == header.round & 1 and tag == config.view << 32 | header.round
        )
        return bool(
            config.bounce
            and config.alive
            and not (config.keyed and self.sequence >= LAST_SEQUENCE)
            and not header.flags & ~int(Flag.REPEAT | Flag.BOUNCED)
            and token.state == wire.TokenState.OPEN
            and token.ranges == 0
            and token.hop < LAST_HOP
            and token.idle + 1 < config.live
            and header.round == config.round
            and taken + config.own_sent == token.sent
        )

    def _bounce(self, frame: bytes, header: wire.Header, token: wire.Token) -> Outcome:
        number = self.config.number
        out = bytearray(frame)
        out[6:12] = self.members[number - 1]
        at = wire.ETHERNET_BYTES
        out[at + 2 : at + 4] = int(Flag.BOUNCED).to_bytes(2, "big")
        out[at + 16 : at + 18] = number.to_bytes(2, "big")
        hop = token.hop + 1
        out[at + 36 : at + 40] = hop.to_bytes(4, "big")
        out[at + 40 : at + 42] = self.config.next.to_bytes(2, "big")
        out[at + 44 : at + 46] = (token.idle + 1).to_bytes(2, "big")
        if self.config.keyed:
            self.sequence += 1
            out[at + 20 : at + 24] = self.sequence.to_bytes(4, "big")
            tag = tag_of(bytes(out[at:]), header.length, self.key)
            out[at + 24 : at + 32] = tag.to_bytes(8, "big")
        self.seen = self.bounced = token.generation << 32 | hop
        self.bounces += 1
        self.bounced_frame = bytes(out)
        return Outcome(TX, ("bounced",), bytes(out))

    def _fragment(self, ours: bytes, header: wire.Header) -> Outcome:
        config = self.config
        if header.length != wire.FRAGMENT_HEADER_BYTES + wire.PAYLOAD_BYTES:
            return Outcome(DROP, ("truncated",))
        if not config.round_low <= header.round <= config.round_high:
            return Outcome(DROP, ("round",))
        layout = wire.Layout.of(wire.Fragment).struct
        fragment = wire.Fragment(*layout.unpack_from(ours, wire.HEADER_BYTES))
        width = fragment.width
        is_sum = header.sender == 0
        if width not in PER_BLOCK or fragment.index >= fragment.fragments or (is_sum and not width):
            return Outcome(DROP, ("malformed",))
        if fragment.shift > (0 if is_sum else wire.MAX_SHIFT[width]):
            return Outcome(DROP, ("shift",))
        if fragment.index >= config.blocks * PER_BLOCK[width]:
            return Outcome(DROP, ("range",))
        before = self.windows.get(header.sender, Window()).highest
        if not is_sum and (doubt := self._doubt(ours, header)):
            return Outcome(DROP, (doubt,))
        fresh_number = is_sum or not config.keyed or header.sequence > before
        bank, tag = header.round & 1, header.view << 32 | header.round
        bit = 2**64 - 1 if is_sum else 1 << header.sender - 1
        slot = self.slots.setdefault((bank, fragment.index), Slot())
        fresh = slot.tag != tag
        if not fresh and slot.seen & bit:
            return Outcome(DROP, ("duplicate",), heard=fresh_number)
        counted = self.progress.get((bank, header.sender), (0, 0))[0]
        if slot.tag > tag or counted > tag:
            return Outcome(DROP, ("round",))
        if counted != tag:
            self.progress[bank, header.sender] = tag, 0
        start = wire.FRAGMENT_HEADER_BYTES
        self._add(bank, fragment, ours[start : start + wire.PAYLOAD_BYTES], fresh)
        slot.tag, slot.seen = tag, bit if fresh else slot.seen | bit
        if self._count(bank, header.sender, tag) == fragment.fragments:
            return Outcome(PASS, ("added",), heard=True)
        return Outcome(DROP, ("added",), heard=True)

    def _add(self, bank: int, fragment: wire.Fragment, payload: bytes, fresh: bool) -> None:
        block, part = divmod(fragment.index, PER_BLOCK[fragment.width])
        target = self.accumulators[bank, block]
        if fragment.width == 0:
            start = part * wire.PAYLOAD_BYTES
            target.view(np.uint8)[start : start + wire.PAYLOAD_BYTES] = np.frombuffer(payload, "u1")
            return
        lanes = np.frombuffer(payload, f">i{fragment.width // 8}").astype(np.int64)
        place = target[part * len(lanes) : (part + 1) * len(lanes)]
        shifted = lanes << fragment.shift
        if fresh:
            place[:] = shifted
        else:
            place += shifted

    def _count(self, bank: int, sender: int, tag: int) -> int:
        _, count = self.progress[bank, sender]
        self.progress[bank, sender] = tag, count + 1
        return count + 1
