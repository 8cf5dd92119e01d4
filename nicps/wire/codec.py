# SPDX-License-Identifier: Apache-2.0
"""Frames as bytes, and back; what is in front of them; how long they are."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import starmap
from typing import Any

from nicps.errors import WireError
from nicps.wire.fields import Layout, pack_all, pack_one
from nicps.wire.frames import (
    FORMATS,
    Body,
    Contribution,
    Entry,
    Fragment,
    Grant,
    GrantMember,
    Header,
    Item,
    Push,
    Range,
    Token,
)
from nicps.wire.values import BROADCAST, ETHERTYPE, MAX_FRAME_BYTES, MAX_MEMBERS, VERSION, FrameType

_TYPE_OF: dict[type[Any], FrameType] = {body: kind for kind, (body, _) in FORMATS.items()}

_HEADER = Layout.of(Header).struct
HEADER_BYTES = _HEADER.size
FRAGMENT_HEADER_BYTES = HEADER_BYTES + Layout.of(Fragment).struct.size
CONTRIBUTION_HEADER_BYTES = HEADER_BYTES + Layout.of(Contribution).struct.size
PUSH_HEADER_BYTES = HEADER_BYTES + Layout.of(Push).struct.size
TOKEN_HEADER_BYTES = HEADER_BYTES + Layout.of(Token).struct.size


@dataclass(frozen=True, slots=True)
class Frame:
    """One frame of ours, taken apart.

    `items` holds one tuple for each kind of repeated item of the type (`FORMATS`). `tail` is what follows: a
    fragment's payload, a decision's JSON, a name or a reason as UTF-8.
    """

    header: Header
    body: Body
    items: tuple[tuple[Item, ...], ...] = ()
    tail: bytes = b""

    @property
    def type(self) -> FrameType:
        """The frame's type, as an enum."""
        return _TYPE_OF[type(self.body)]

    def pack(self) -> bytes:
        """As it lies on the wire (`pack`)."""
        return pack(self.header, self.body, *self.items, tail=self.tail)


def pack(header: Header, body: Body, *items: Sequence[Item], tail: bytes = b"") -> bytes:
    """A frame from its version byte on; `type` and `length` of the header are filled in here.

    Raises:
        WireError: a value does not fit its field, or the frame is longer than `MAX_FRAME_BYTES`.
    """
    rest = pack_one(body) + b"".join(map(pack_all, items)) + tail
    length = HEADER_BYTES + len(rest)
    if length > MAX_FRAME_BYTES:
        raise WireError(
            f"a {type(body).__name__} frame of {length} bytes is longer than {MAX_FRAME_BYTES}"
        )
    h, kind = header, _TYPE_OF[type(body)]
    whose = (h.network, h.view, h.round, h.sender)
    return pack_one(Header(h.version, kind, h.flags, *whose, length, h.sequence, h.tag)) + rest


def unpack_header(frame: bytes) -> Header:
    """The header of a frame; checks version and length.

    Raises:
        WireError: too short, another version, or cut off.
    """
    if len(frame) < HEADER_BYTES:
        raise WireError(f"{len(frame)} bytes are too few for a header")
    header = Header(*_HEADER.unpack_from(frame))
    if header.version != VERSION:
        raise WireError(f"version {header.version} is not {VERSION}")
    if not HEADER_BYTES <= header.length <= len(frame):
        raise WireError(f"length {header.length} does not fit a frame of {len(frame)} bytes")
    return header


def unpack(frame: bytes) -> Frame:
    """Take a frame apart; Ethernet padding after `length` is ignored.

    Raises:
        WireError: it is not a frame of ours, of an unknown type, cut off, or longer than `MAX_FRAME_BYTES`.
    """
    header = unpack_header(frame)
    if header.length > MAX_FRAME_BYTES:
        raise WireError(f"length {header.length} is more than {MAX_FRAME_BYTES}")
    known = FORMATS.get(header.type)  # type: ignore[call-overload]
    if known is None:
        raise WireError(f"type {header.type} is unknown")
    body_class, groups = known
    at, end = HEADER_BYTES, header.length

    form = Layout.of(body_class).struct
    if at + form.size > end:
        raise _cut_off(body_class, body_class, at)
    body = body_class(*form.unpack_from(frame, at))
    at += form.size
    items = []
    for cls, count in groups:
        form, first = Layout.of(cls).struct, at
        at += getattr(body, count) * form.size
        if at > end:
            raise _cut_off(body_class, cls, first + (end - first) // form.size * form.size)
        items.append(tuple(starmap(cls, form.iter_unpack(frame[first:at]))))
    return Frame(header, body, tuple(items), bytes(frame[at:end]))


def _cut_off(body: type[Any], cls: type[Any], at: int) -> WireError:
    return WireError(f"{body.__name__} frame is cut off in {cls.__name__} at byte {at}")


def pack_grant(grant: Grant, members: Sequence[GrantMember]) -> bytes:
    """The tail of a GRANT, before it is sealed.

    Raises:
        WireError: a value does not fit its field.
    """
    return pack_one(grant) + pack_all(members)


def unpack_grant(tail: bytes) -> tuple[Grant, tuple[GrantMember, ...]]:
    """What a grant says, and the live members.

    Raises:
        WireError: it has no member, or its length is not that of a number of members.
    """
    head, each = Layout.of(Grant).struct, Layout.of(GrantMember).struct
    count, rest = divmod(len(tail) - head.size, each.size)
    if count < 1 or count > MAX_MEMBERS or rest:
        raise WireError(f"a grant of {len(tail)} bytes has no whole number of members")
    members = tuple(starmap(GrantMember, each.iter_unpack(tail[head.size :])))
    return Grant(*head.unpack_from(tail)), members


def ethernet(source: bytes, frame: bytes, destination: bytes = BROADCAST) -> bytes:
    """The frame behind its Ethernet header, from `source` to all, or to a multicast group (6 bytes each)."""
    return destination + source + struct.pack(">H", ETHERTYPE) + frame


def network_id(name: str) -> int:
    """The header's `network` for a network's name."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest(), "big")


def mac_text(mac: bytes) -> str:
    """`02:00:00:00:00:01` for six bytes."""
    return mac.hex(":")


def max_ranges(members: int) -> int:
    """How many missing ranges fit a token of that many members."""
    room = MAX_FRAME_BYTES - TOKEN_HEADER_BYTES - members * Layout.of(Entry).struct.size
    return room // Layout.of(Range).struct.size
