# SPDX-License-Identifier: Apache-2.0
"""What a switch in ring mode must do with a frame, written down a second time: from docs/switch.md, not from the P4."""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

OURS = 0x88B5
VERSION, TOKEN, FRAGMENT, VIEW, LAST_TYPE = 1, 6, 7, 3, 13
REPEAT = 1
INSTALL = 3
HEADER, FRAGMENT_HEADER, TOKEN_HEADER, VIEW_HEADER = 32, 16, 28, 40
ENTRY, RANGE = 20, 8


@dataclass
class RingSwitch:
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

    def take(self, port: int, frame: bytes) -> dict[int, bytes]:
        """A frame comes in; what goes out, by port."""
        destination, source = frame[:6], frame[6:12]
        if not source[0] & 1:
            self.learnt[source] = port
        reason, passes = self._verdict(port, frame)
        self.counters[reason] += 1
        if not passes:
            return {}
        if not destination[0] & 1 and destination in self.learnt:
            to = {self.learnt[destination]}
        else:
            to = {*self.ports}
            if self._is_list(frame):
                to.add(self.controller)
        return dict.fromkeys(to - {port}, frame)

    def _is_list(self, frame: bytes) -> bool:
        body = 14 + HEADER
        whole = len(frame) >= body + VIEW_HEADER
        return frame[12:14] == OURS.to_bytes(2, "big") and (
            whole and frame[15] == VIEW and frame[body + 32] == INSTALL
        )

    def _verdict(self, port: int, frame: bytes) -> tuple[str, bool]:
        """The reason that is counted, and whether the frame passes."""
        ours = frame[14:]
        if frame[12:14] != OURS.to_bytes(2, "big"):
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
        if kind not in (TOKEN, FRAGMENT):
            return "control", True
        if (sender, frame[6:12], port) not in self.members:
            return "stranger", False
        if kind == TOKEN:
            return self._token(view, flags, length, ours)
        if len(ours) < HEADER + FRAGMENT_HEADER:
            return "truncated", False
        if view != self.view:
            return "view", False
        return ("fragment", True) if sender == self.owner else ("holder", False)

    def _token(self, view: int, flags: int, length: int, ours: bytes) -> tuple[str, bool]:
        if len(ours) < HEADER + TOKEN_HEADER:
            return "truncated", False
        position, owner, _, members, _, ranges = struct.unpack_from(">QHBBHH", ours, HEADER)
        if length != HEADER + TOKEN_HEADER + ENTRY * members + RANGE * ranges:
            return "malformed", False
        if not 0 < owner <= members:
            return "malformed", False
        if view < self.view:
            return "view", False
        if view == self.view and position <= self.position:
            return ("token", True) if flags & REPEAT else ("stale", False)
        self.view, self.position, self.owner = view, position, owner
        return "token", True

    def registers(self) -> Mapping[str, int]:
        """As `nicps switch p4 registers` has them."""
        return {"view": self.view, "position": self.position, "owner": self.owner}
