# SPDX-License-Identifier: Apache-2.0
"""Frames of stripes as a test makes them, and the arithmetic of their sums; from docs/stripes.md, not from the C.

What the XDP program does with them is in `tests.stripes_model`, random sequences in `tests.stripes_scene`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from nicps import wire
from nicps.wire import Flag, FrameType
from tests.model import REPLAY_WINDOW, tag_of

NETWORK = 0x0A0B0C0D
GROUP = bytes.fromhex("036e69637073")
MACS = [bytes((2, 0, 0, 0, 0, number)) for number in range(1, 65)]
NATIVE = {8: ">i1", 16: ">i2", 32: ">i4"}
LANES = {width: wire.lanes_per_fragment(width) for width in NATIVE}
PER_BLOCK = {width: wire.fragments_per_block(width) for width in NATIVE}
KINDS = (FrameType.CONTRIBUTION, FrameType.SUM, FrameType.ASK, FrameType.LACKING)
I64 = NDArray[np.int64]


def mac_of(number: int) -> bytes:
    """A member's address; number 0 is a switch that adds."""
    return MACS[number - 1] if number else wire.SWITCH


def bit_of(number: int) -> int:
    """A member's in a list; a switch has none."""
    return 1 << number - 1 if number else 0


@dataclass
class Window:
    """A member's highest numbers by the two ways out, and which of its questions have been answered."""

    highest: int = 0
    answers: int = 0
    newest: int = 0
    asked: set[int] = field(default_factory=lambda: {0})  # numbers begin at 1

    def answers_to(self, number: int) -> bool:
        """Whether this question is answered; then it is not any more."""
        if number <= self.newest and (number in self.asked or number < self.newest - 32):
            return False
        self.newest = max(self.newest, number)
        self.asked.add(number)
        return True


def doubt(windows: dict[int, Window], key: bytes, ours: bytes, header: wire.Header) -> str | None:
    """Why a frame is not believed, from the version byte on; its number counts if it is."""
    if not key:
        return None
    window = windows.setdefault(header.sender, Window())
    way = "answers" if header.flags & Flag.ANSWER else "highest"
    highest = getattr(window, way)
    if header.sequence + REPLAY_WINDOW <= highest:
        return "replayed"
    if header.tag != tag_of(ours, header.length, key):
        return "forged"
    setattr(window, way, max(highest, header.sequence))
    return None


def bound(fragments: int, rank: int, aggregators: int) -> int:
    """Where the stripe of rank + 1 begins."""
    return fragments * rank // aggregators


def shifted(lanes: I64, by: int) -> I64:
    """Lanes in units."""
    return lanes << by if by >= 0 else lanes >> min(-by, 63)


def rounded(total: I64, width: int, unit: int, not_finite: bool) -> tuple[I64, int, I64]:
    """Lanes, their exponent and what is left over."""
    bits = int(np.bitwise_or.reduce(total ^ (total >> 63))).bit_length()
    shift = max(0, bits - (width - 1))
    half = 1 << (shift - 1) if shift else 0
    lanes = np.minimum((total + half) >> shift, (1 << (width - 1)) - 1)
    if not_finite or unit + shift > 128 - width:
        return lanes, wire.NOT_FINITE, np.zeros_like(total)
    return lanes, unit + shift, total - (lanes << shift)


def signed(
    sender: int,
    kind: FrameType,
    header: wire.Header,
    body: wire.Contribution,
    payload: bytes,
    to: bytes,
    key: bytes,
) -> bytes:
    """A frame of stripes, with its tag where there is a key."""
    values = [getattr(body, name) for name in wire.Layout.of(wire.Contribution).names]
    frame = wire.pack(header, wire.FORMATS[kind][0](*values), tail=payload)
    return addressed(frame, sender, to, key)


def addressed(frame: bytes, sender: int, to: bytes, key: bytes) -> bytes:
    """A member's frame on the cable, with its tag where there is a key."""
    if key:
        tag = tag_of(frame, len(frame), key)
        frame = frame[:24] + tag.to_bytes(8, "big") + frame[32:]
    return wire.ethernet(mac_of(sender), frame, to)
