# SPDX-License-Identifier: Apache-2.0
"""Frames of parameter servers as a test makes them, and what a step adds: written from docs/servers.md, not from the C.

What the XDP program does with them is in `tests.servers_model`, random sequences in `tests.servers_scene`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nicps import wire
from nicps.wire import FrameType
from tests.stripes import NATIVE, addressed, rounded

I64 = NDArray[np.int64]
UNIT = -40
WEIGHT = 1 << 30
FULL = 1 << 62
SHORT = wire.PUSH_HEADER_BYTES
LONG = wire.PUSH_HEADER_BYTES + wire.PAYLOAD_BYTES
KINDS = (FrameType.PUSH, FrameType.PULL, FrameType.CONTRIBUTION, FrameType.HELD, FrameType.TAKEN)


def pieces(width: int) -> int:
    """Parameter fragments in a push fragment."""
    return 32 // width


def weight_of(parts: int) -> int:
    """Of one of so many, out of 2**30, rounded."""
    return (WEIGHT + parts // 2) // parts


def down_of(width: int, exponent: int) -> int:
    """By how much a product is shifted."""
    return 30 + UNIT - (exponent - (32 - width))


def addend(payload: bytes, width: int, exponent: int, weight: int) -> I64:
    """What lanes of a step add to the parameters, in units."""
    lanes = np.frombuffer(payload, NATIVE[width]).astype(np.int64) << (32 - width)
    down = min(down_of(width, exponent), 63)
    half = (1 << down) >> 1
    return (lanes * weight + half) >> down


def is_full(parameters: I64) -> bool:
    """One of them has come near the limits."""
    return bool(((parameters >= FULL) | (parameters < -FULL)).any())


def shown(parameters: I64) -> tuple[bytes, int]:
    """Lanes of 32 bits, and their exponent."""
    lanes, exponent, _ = rounded(parameters, 32, UNIT, False)
    return lanes.astype(">i4").tobytes(), exponent


@dataclass
class Home:
    """A push fragment's place at its server."""

    parameters: I64
    sums: I64
    tag: int = 0
    seen: int = 0
    members: int = 0
    due: bool = False
    full: bool = False
    last: dict[int, int] = field(default_factory=dict)


@dataclass
class Pusher:
    """What a worker's push at this server has fixed."""

    number: int = 0
    weight: int = 0
    staleness: int = 0


@dataclass
class Stored:
    """Parameters that have come; `rest`: round << 32 | version."""

    tag: int = 0
    rest: int = 0
    exponent: int = 0
    lanes: bytes = bytes(wire.PAYLOAD_BYTES)


def signed(
    sender: int, header: wire.Header, body: Any, payload: bytes, to: bytes, key: bytes
) -> bytes:
    """A frame of servers, with its tag where there is a key."""
    frame = wire.pack(header, body, tail=payload)
    return addressed(frame, sender, to, key)
