# SPDX-License-Identifier: Apache-2.0
"""What a switch must do with a frame, written down a second time: from docs/switch.md, not from the P4."""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

OURS, TAGGED = 0x88B5, 0x8100
VERSION, TOKEN, FRAGMENT, VIEW = 1, 6, 7, 3
STRIPES, LAST_TYPE = (14, 15, 16, 17), 27
#: With servers, and of direct calls.
SERVERS = tuple(range(20, LAST_TYPE + 1))
REPEAT, ADD = 1, 32
INSTALL = 3
HEADER, FRAGMENT_HEADER, TOKEN_HEADER, VIEW_HEADER = 32, 16, 40, 40
ENTRY, RANGE = 20, 8
PAYLOAD = 1440
SLOTS = 512
SWITCH = bytes.fromhex("026e69637073")
WIDTHS = (32, 16, 8)


def _inside(frame: bytes) -> tuple[int, bytes]:
    """The EtherType and what follows it, behind a tag too, if that is of no virtual network."""
    ethertype, tci, behind = struct.unpack_from(">HHH", frame, 12)
    if ethertype == TAGGED and not tci & 0xFFF:
        return behind, frame[18:]
    return ethertype, frame[14:]


@dataclass
class Sum:
    """A fragment's sum in its slot, and who is in it."""

    tag: tuple[int, int, int]  # view, round, index
    seen: int
    payload: bytes


@dataclass
class ModelSwitch:
    """A switch that serves one network; members are (number, MAC address, port)."""

    network: int
    ports: tuple[int, ...]
    controller: int
    members: frozenset[tuple[int, bytes, int]]
    learnt: dict[bytes, int] = field(default_factory=dict)
    counters: Counter[str] = field(default_factory=Counter)
    view: int = 0
    position: int = 0
    owner: int = 0
    round: int = 0
    listed: int = 0
    settled: int = 0
    sums: dict[int, Sum] = field(default_factory=dict)
    reason: str = ""  # of the last frame

    def take(self, port: int, frame: bytes) -> dict[int, bytes]:
        """A frame comes in; what goes out, by port."""
        destination, source = frame[:6], frame[6:12]
        reason, passes = self._verdict(port, frame)
        self.counters[reason] += 1
        self.reason = reason
        if not passes:
            return {}
        if reason in ("summed", "answered"):
            out = self._sum_frame(frame)
            return dict.fromkeys(self.ports if reason == "summed" else (port,), out)
        if not source[0] & 1:
            self.learnt[source] = port
        if not destination[0] & 1 and destination in self.learnt:
            to = {self.learnt[destination]}
        else:
            to = {*self.ports}
            if self._is_list(frame):
                told = {self.controller: port.to_bytes(6, "big") + frame[6:]}
                return dict.fromkeys(to - {port}, frame) | told
        return dict.fromkeys(to - {port}, frame)

    def _is_list(self, frame: bytes) -> bool:
        ethertype, ours = _inside(frame)
        whole = len(ours) >= HEADER + VIEW_HEADER
        return ethertype == OURS and (whole and ours[1] == VIEW and ours[HEADER + 32] == INSTALL)

    def _verdict(self, port: int, frame: bytes) -> tuple[str, bool]:
        """The reason that is counted, and whether the frame passes."""
        ethertype, ours = _inside(frame)
        if ethertype != OURS:
            return "switched", True
        if len(ours) < HEADER:
            return "truncated", False
        version, kind, flags, network, view, _, sender, length = struct.unpack_from(
            ">BBHIIIHH", ours
        )
        if version != VERSION:
            return "version", False
        if not HEADER <= length <= len(ours):
            return "truncated", False
        if network != self.network:
            return "switched", True
        if not 0 < kind <= LAST_TYPE:
            return "type", False
        if kind not in (TOKEN, FRAGMENT, *STRIPES, *SERVERS):
            return "control", True
        known = (sender, frame[6:12], port) in self.members
        if not known or (sender == 0 and kind not in STRIPES):
            return "stranger", False
        if kind == TOKEN:
            return self._token(view, flags, length, ours)
        if kind == FRAGMENT and len(ours) < HEADER + FRAGMENT_HEADER:
            return "truncated", False
        if view != self.view:
            return "view", False
        if kind != FRAGMENT:
            return ("stripe" if kind in STRIPES else "server"), True
        if flags & ADD:
            return self._add(sender, length, ours)
        return ("fragment", True) if sender == self.owner else ("holder", False)

    def _add(self, sender: int, length: int, ours: bytes) -> tuple[str, bool]:
        whole = HEADER + FRAGMENT_HEADER + PAYLOAD
        index, fragments, _, width, shift, _ = struct.unpack_from(">IIHBBI", ours, HEADER)
        (round_,) = struct.unpack_from(">I", ours, 12)
        if len(ours) < whole or length != whole:
            return "truncated", False
        if width not in WIDTHS or index >= fragments:
            return "malformed", False
        if round_ != self.round or not self.listed:
            return "round", False
        if shift:
            return "shift", False
        found, seen = self.sums.get(index % SLOTS), self.seen(index)
        later = found and found.tag[:2] == (self.view, round_) and found.tag[2] > index
        if index < self.settled or later:
            return "window", False
        tag, bit = (self.view, round_, index), 1 << sender - 1
        if seen == self.listed:
            return "answered", True
        if not bit & self.listed:
            return "unlisted", False
        if bit & seen:
            return "duplicate", False
        payload = ours[whole - PAYLOAD : whole]
        if seen and found is not None:
            kind = f">i{width // 8}"
            payload = (
                (np.frombuffer(found.payload, kind) + np.frombuffer(payload, kind))
                .astype(kind)
                .tobytes()
            )
        self.sums[index % SLOTS] = Sum(tag, seen | bit, payload)
        return ("summed", True) if seen | bit == self.listed else ("added", False)

    def _sum_frame(self, frame: bytes) -> bytes:
        """The frame that completed or asked for a sum, with the sum in it: of sender 0, without a tag."""
        (index,) = struct.unpack_from(">I", _inside(frame)[1], HEADER)
        out, at = bytearray(frame), len(frame) - len(_inside(frame)[1])
        out[6:12] = SWITCH
        out[at + 16 : at + 18] = bytes(2)
        out[at + 24 : at + 32] = bytes(8)
        start = at + HEADER + FRAGMENT_HEADER
        out[start : start + PAYLOAD] = self.sums[index % SLOTS].payload
        return bytes(out)

    def _token(self, view: int, flags: int, length: int, ours: bytes) -> tuple[str, bool]:
        if len(ours) < HEADER + TOKEN_HEADER:
            return "truncated", False
        position, owner, _, members, _, ranges = struct.unpack_from(">QHBBHH", ours, HEADER)
        listed, settled = struct.unpack_from(">QI", ours, HEADER + 24)
        if length != HEADER + TOKEN_HEADER + ENTRY * members + RANGE * ranges:
            return "malformed", False
        if not 0 < owner <= members:
            return "malformed", False
        if view < self.view:
            return "view", False
        if view == self.view and position <= self.position:
            return ("token", True) if flags & REPEAT else ("stale", False)
        self.view, self.position, self.owner = view, position, owner
        self.round, self.listed, self.settled = (
            struct.unpack_from(">I", ours, 12)[0],
            listed,
            settled,
        )
        return "token", True

    def forget(self) -> None:
        """A new network begins: neither token nor sums."""
        self.view = self.position = self.owner = self.round = self.listed = self.settled = 0
        self.sums.clear()

    def seen(self, index: int) -> int:
        """Who is in that fragment's sum of the token's view and round, a bit each."""
        found = self.sums.get(index % SLOTS)
        return found.seen if found and found.tag == (self.view, self.round, index) else 0

    def registers(self) -> Mapping[str, int]:
        """As `nicps switch p4 registers` has them."""
        return {
            "view": self.view,
            "position": self.position,
            "owner": self.owner,
            "round": self.round,
            "listed": self.listed,
            "settled": self.settled,
        }
