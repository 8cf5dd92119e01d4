# SPDX-License-Identifier: Apache-2.0
"""Data planes at the ends of a wire: the view that they are in, and the frames that they send."""

from __future__ import annotations

import select
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nicps import wire
from nicps.dataplane import DataPlane

NETWORK, VIEW = wire.network_id("test"), 1
HOUR_NS = 3_600_000_000_000


def until(condition: Callable[[], Any], what: str, timeout_s: float = 60.0) -> Any:
    """Poll until the condition holds; its value."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"in {timeout_s} s not: {what}"
        time.sleep(0.005)
    return value


def form(*hosts: DataPlane, blocks: int = 64) -> None:
    """Put the hosts into one view, with round 1 open."""
    for number, host in enumerate(hosts, 1):
        host.enter_view(VIEW, number, [other.mac for other in hosts], number % len(hosts) + 1)
        host.maps.allocate(blocks)
        config = host.maps.config
        config["round_low"], config["round_high"], config["round"] = 1, 2, 1
        config["enabled"] = 1


def fragments(count: int, lanes: NDArray[np.int64], total: int = 0) -> tuple[Any, Any]:
    """Headers (count, 48) and payload (count, 1440) of i32 lanes (count, 360), from member 1."""
    header = wire.Header(network=NETWORK, view=VIEW, round=1, sender=1)
    body = wire.Fragment(0, total or count, 360, 32, 4, 1)
    frame = wire.pack(header, body, tail=bytes(1440))
    headers = np.tile(np.frombuffer(frame[:48], np.uint8), (count, 1))
    headers[:, 32:36] = np.arange(count, dtype=">u4").view(np.uint8).reshape(count, 4)
    return headers, lanes.astype(">i4").view(np.uint8).reshape(count, 1440)


def send_all(host: DataPlane, headers: NDArray[np.uint8], payload: NDArray[np.uint8]) -> int:
    """Push everything through the ring, waiting as the agent does; how often it waited for room."""
    poll = select.poll()
    poll.register(host.tx.fileno(), select.POLLIN)
    at = waits = 0
    deadline = time.monotonic() + 30
    while at < len(headers) or host.tx.pending():
        assert time.monotonic() < deadline
        taken = host.tx.push(headers[at : at + 256], payload[at : at + 256])
        at += taken
        host.tx.flush()
        if not taken:
            waits += at < len(headers)
            poll.poll(20)
    return waits


def random_lanes(count: int) -> NDArray[np.int64]:
    return np.random.default_rng(3).integers(-(2**31), 2**31, (count, 360))


def token(sender: int, hop: int, owner: int) -> bytes:
    header = wire.Header(network=NETWORK, view=VIEW, round=1, sender=sender)
    body = wire.Token(1, hop, owner, 0, 3, 0, 0, 0, 0, 0)
    return wire.pack(header, body, [wire.Entry()] * 3)
