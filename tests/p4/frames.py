# SPDX-License-Identifier: Apache-2.0
"""Frames of three hosts, member k with the MAC address that ends in k."""

from __future__ import annotations

from typing import Any

from nicps import wire
from nicps.auth import ControlKey
from nicps.protocol.phase import Member as Listed
from nicps.protocol.view import Successor

NETWORK = wire.network_id("nicps")
BROADCAST = b"\xff" * 6
HOSTS = (1, 2, 3)
#: Frames of which any member may send some at any time, to another member or to all.
STRIPES: dict[wire.FrameType, Any] = {
    wire.FrameType.CONTRIBUTION: wire.Contribution,
    wire.FrameType.SUM: wire.Sum,
    wire.FrameType.ASK: wire.Ask,
    wire.FrameType.LACKING: wire.Lacking,
}
SERVERS: dict[wire.FrameType, Any] = {
    wire.FrameType.PUSH: wire.Push,
    wire.FrameType.PULL: wire.Pull,
    wire.FrameType.HELD: wire.Held,
    wire.FrameType.TAKEN: wire.Taken,
}
CALLS: dict[wire.FrameType, Any] = {
    wire.FrameType.NUMBERS: wire.Numbers,
    wire.FrameType.MARKED: wire.Marked,
    wire.FrameType.WITHDRAWN: wire.Withdrawn,
    wire.FrameType.SETTLE: wire.Settle,
}
_BODY_ALONE = frozenset({wire.FrameType.TAKEN, *CALLS} - {wire.FrameType.NUMBERS})
NOTHING = dict.fromkeys(("view", "position", "owner", "round", "listed", "settled"), 0)


def mac(number: int) -> bytes:
    return bytes([2, 0, 0, 0, 0, number])


def ethernet(
    source: bytes, data: bytes, to: bytes = BROADCAST, kind: int = wire.ETHERTYPE
) -> bytes:
    return to + source + kind.to_bytes(2, "big") + data


def header(sender: int, view: int = 3, **more: Any) -> wire.Header:
    return wire.Header(network=NETWORK, view=view, round=7, sender=sender, sequence=1, **more)


def token(
    sender: int,
    hop: int,
    owner: int,
    view: int = 3,
    generation: int = 4,
    flags: int = 0,
    listed: int = 0,
) -> bytes:
    entries = [wire.Entry(0, 0, 0, 0, 0, 0, 0) for _ in HOSTS]
    body = wire.Token(generation, hop, owner, 0, len(HOSTS), 0, 0, 0, 0, 0, listed=listed)
    return ethernet(mac(sender), wire.pack(header(sender, view, flags=flags), body, entries, []))


def fragment(sender: int, view: int = 3, index: int = 0, flags: int = 0) -> bytes:
    body = wire.Fragment(index, 8, 360, 32, 0, 5)
    tail = bytes([sender]) * 1440
    return ethernet(mac(sender), wire.pack(header(sender, view, flags=flags), body, tail=tail))


def between_members(
    sender: int,
    to: int = 0,
    view: int = 3,
    kind: wire.FrameType = wire.FrameType.CONTRIBUTION,
) -> bytes:
    """A frame of stripes, of servers or of a direct call: for a member, or for all."""
    if kind in STRIPES:
        body = STRIPES[kind](0b111, 0, 8, 0, 32, 0, -20)
    elif kind in CALLS:
        body = CALLS[kind](1, 0, 1440, 0, 1, view)
    else:
        body = SERVERS[kind](5, 6, 0, 8, 1, 32, -20)
    tail = b"" if kind in _BODY_ALONE else bytes([sender]) * 1440
    data = wire.pack(header(sender, view), body, tail=tail)
    return ethernet(mac(sender), data, to=mac(to) if to else BROADCAST)


def want(sender: int) -> bytes:
    return ethernet(mac(sender), wire.pack(header(sender), wire.Want(1, 2)))


def install(
    view: int,
    live: tuple[int, ...] = HOSTS,
    base: int = 0,
    key: ControlKey | None = None,
    source: int = 1,
    nonce: int = 9,
    seed: int = 0,
) -> bytes:
    """The list of that view, as that member tells it to another, or to who has asked with that nonce."""
    members = tuple(Listed(k, mac(k), f"h{k}") for k in HOSTS)
    successor = Successor(members, frozenset(live), live[0], 0, 0, 0, 0, bytes([seed]) * 16)
    values, entries, channels = successor.items()
    body = wire.View(
        live=sum(1 << k - 1 for k in live),
        nonce=nonce,
        number=view,
        base=base,
        ballot=1,
        addressee=2,
        members=len(entries),
        values=1,
        step=wire.ViewStep.INSTALL,
        channels=len(channels),
    )
    data = wire.pack(header(0, 0), body, values, entries, channels)
    return ethernet(mac(source), key.sign(data, mac(source)) if key is not None else data)
