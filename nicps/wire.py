# SPDX-License-Identifier: Apache-2.0
"""Every frame of nicps: the one definition of the wire.

The dataclasses below *are* the formats. Each field is annotated with its width on the wire; `Layout.of` derives
offsets, packing and tables from that, and `nicps.wiregen` derives the C and P4 headers. All numbers are big-endian,
every field is naturally aligned from the first byte after the Ethernet header, nothing is a bit-field.

A frame is Ethernet (broadcast destination, EtherType `ETHERTYPE`), `Header`, the body of its type, that body's
repeated items, and a tail (`Frame`). Only the standard library is used here.

Source: docs/protocol.md; rules R1 to R18 in docs/rules.md.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from enum import IntEnum, IntFlag
from typing import Annotated, Any, NamedTuple, TypeAlias, get_type_hints

from nicps.errors import WireError

VERSION = 1
ETHERTYPE = 0x88B5  # IEEE 802 local experimental
ETHERNET_BYTES = 14
BROADCAST = b"\xff" * 6

MAX_MEMBERS = 64  # one seen-bit for each in 64 bits, and 64-bit sums that cannot overflow
PAYLOAD_BYTES = 1440  # of a fragment: 360, 720 or 1440 lanes
BLOCK_LANES = 1440  # 64-bit accumulators in one block of the map
MAX_FRAME_BYTES = 1500  # the LAN's usual MTU
NAME_BYTES = 14

#: Largest shift by lane width: 64 members' `lane << shift` cannot overflow 64 bits. Width 0 is raw bytes.
MAX_SHIFT = {0: 0, 8: 50, 16: 42, 32: 26}


class Wire(NamedTuple):
    """How one field lies on the wire: `struct` code, bytes, C and P4 spelling and what it means."""

    code: str
    size: int
    c: str
    doc: str

    @property
    def align(self) -> int:
        """Alignment in bytes: that of the number, one for byte strings."""
        return 1 if self.code.endswith("s") else self.size


def _u8(doc: str) -> Wire:
    return Wire("B", 1, "__u8", doc)


def _i8(doc: str) -> Wire:
    return Wire("b", 1, "__s8", doc)


def _u16(doc: str) -> Wire:
    return Wire("H", 2, "__be16", doc)


def _u32(doc: str) -> Wire:
    return Wire("I", 4, "__be32", doc)


def _u64(doc: str) -> Wire:
    return Wire("Q", 8, "__be64", doc)


def _bytes(size: int, doc: str) -> Wire:
    return Wire(f"{size}s", size, "__u8", doc)


class FrameType(IntEnum):
    """The header's `type`."""

    CALL = 1  # R1: who takes part?
    ANSWER = 2  # R2: I do
    FORMED = 3  # R3: the member list
    DECISION = 4  # R5 to R7, R14: node 1 decides, all acknowledge
    ACK = 5
    TOKEN = 6  # R9, R10
    FRAGMENT = 7  # R10, R11
    WANT = 8  # a member has become ready while the token is parked
    FAIL = 9  # a member cannot go on


class Flag(IntFlag):
    """The header's `flags`."""

    REPEAT = 1  # R16: sent before
    BOUNCED = 2  # handed on by the kernel
    PARKED = 4  # the owner keeps the token: nothing to do
    REPAIR = 8  # a fragment sent again on request
    TOKEN_WANTED = 16  # WANT: hand me the token


class TokenState(IntEnum):
    """The token's `state`: gradients may still come, or the list is closed."""

    OPEN = 0
    CLOSING = 1


class Mark(IntFlag):
    """A member's `marks` in the token, about the open round."""

    CONTRIBUTED = 1
    COMPLETE = 2  # has every fragment of the list
    SKIPPED = 4  # had a gradient that does not fit the unit: asks for a larger one


class PhaseKind(IntEnum):
    """What a decision starts: a series of rounds, except FINISH and STOP."""

    HANDOUT = 1  # R5, R6: raw bytes of one member to all
    TRAIN = 2  # R8 to R13
    TEST = 3  # R15: one round of two lanes, succeeded and failed
    FINISH = 4  # R14: save the model; the acknowledgement tells what there is to collect
    STOP = 5  # back to standby, after the end or because the job failed


@dataclass(frozen=True, slots=True)
class Header:
    """Common to all frames of ours; follows the Ethernet header."""

    version: Annotated[int, _u8("format version, 1")] = VERSION
    type: Annotated[int, _u8("frame type")] = 0
    flags: Annotated[int, _u16("flag mask")] = 0
    network: Annotated[int, _u32("hash of the network's name")] = 0
    view: Annotated[int, _u32("number of the member list; 0 before any")] = 0
    round: Annotated[int, _u32("round that the frame belongs to")] = 0
    sender: Annotated[int, _u16("member number from 1; 0 if none yet")] = 0
    length: Annotated[int, _u16("bytes from version on, without padding")] = 0
    sequence: Annotated[int, _u32("sender's frame counter; a repeat has a new one")] = 0
    tag: Annotated[int, _u64("authentication tag; 0 on a trusted LAN")] = 0


@dataclass(frozen=True, slots=True)
class Fragment:
    """One frame's worth of a gradient (or of a hand-out); `PAYLOAD_BYTES` follow, zero padded."""

    index: Annotated[int, _u32("place in the contribution, from 0")]
    fragments: Annotated[int, _u32("fragments in the contribution")]
    lanes: Annotated[int, _u16("lanes in the payload, zeros included; bytes if raw")]
    width: Annotated[int, _u8("bits of a lane: 32, 16, 8; 0 is raw bytes")]
    shift: Annotated[int, _u8("left shift of every lane before it is added")]
    samples: Annotated[int, _u32("samples in the whole gradient")] = 0


@dataclass(frozen=True, slots=True)
class Token:
    """The right to broadcast (R9, R10), and the state of the open round."""

    generation: Annotated[int, _u32("raised by whoever creates a token")]
    hop: Annotated[int, _u32("raised by every hand-on")]
    owner: Annotated[int, _u16("number of the member that may take it")]
    state: Annotated[int, _u8("0 open, 1 closing")]
    members: Annotated[int, _u8("entries that follow")]
    idle: Annotated[int, _u16("hops since anything changed")]
    ranges: Annotated[int, _u16("missing ranges after the entries")]
    sent: Annotated[int, _u32("distinct fragments sent in the open round")]
    unit: Annotated[int, _i8("log2 of the accumulators' unit, open round")]
    unit_before: Annotated[int, _i8("the same, of the round committed last")]
    stripe: Annotated[int, _u16("0; room for several tokens")] = 0


@dataclass(frozen=True, slots=True)
class Entry:
    """One member's line in the token; the k-th is that of member k."""

    samples_before: Annotated[int, _u32("samples counted in the round committed last")] = 0
    samples: Annotated[int, _u32("samples counted in the open round")] = 0
    ready: Annotated[int, _u32("samples worked so far, not yet sent")] = 0
    read: Annotated[int, _u32("last round whose sum was read out")] = 0
    marks: Annotated[int, _u8("mark mask")] = 0
    unit: Annotated[int, _i8("log2 of the unit wanted for the next round")] = -128
    reserved: Annotated[int, _u16("0")] = 0


@dataclass(frozen=True, slots=True)
class Range:
    """Fragments that some member lacks; only their sender repairs."""

    first: Annotated[int, _u32("first missing fragment")]
    count: Annotated[int, _u16("how many in a row")]
    sender: Annotated[int, _u16("member that sent them")]


@dataclass(frozen=True, slots=True)
class Call:
    """R1: the starter asks who takes part. The tail is its name."""

    nonce: Annotated[int, _u64("names this formation")]


@dataclass(frozen=True, slots=True)
class Answer:
    """R2: a host takes part. The tail is its name."""

    nonce: Annotated[int, _u64("of the call")]
    view: Annotated[int, _u32("highest view this host has been in")]
    reserved: Annotated[int, _u32("0")] = 0


@dataclass(frozen=True, slots=True)
class Formed:
    """R3: the network is formed; the list is the truth. Acknowledged like a decision, as number 0."""

    nonce: Annotated[int, _u64("of the call")]
    members: Annotated[int, _u16("entries that follow")]
    reserved: Annotated[int, _u16("0")] = 0
    reserved2: Annotated[int, _u32("0")] = 0


@dataclass(frozen=True, slots=True)
class FormedMember:
    """One member of a list; the k-th is member k."""

    mac: Annotated[bytes, _bytes(6, "MAC address")]
    name: Annotated[bytes, _bytes(NAME_BYTES, "host name, UTF-8, zero padded")]


@dataclass(frozen=True, slots=True)
class Decision:
    """Node 1 opens the next phase. The tail is its settings as JSON. In force once all have acknowledged."""

    number: Annotated[int, _u32("1, 2, ... in a view")]
    generation: Annotated[int, _u32("of the token that the phase starts with")]
    phase: Annotated[int, _u8("1 hand-out, 2 train, 3 test, 4 finish, 5 stop")]
    reserved: Annotated[int, _u8("0")] = 0
    reserved2: Annotated[int, _u16("0")] = 0
    reserved3: Annotated[int, _u32("0")] = 0


@dataclass(frozen=True, slots=True)
class Ack:
    """A member has heard a decision (0: the list); once it is prepared, the tail may hold an answer as JSON."""

    number: Annotated[int, _u32("of the decision")]
    prepared: Annotated[int, _u8("1: prepared; 0: heard, still preparing")]
    reserved: Annotated[int, _u8("0")] = 0
    reserved2: Annotated[int, _u16("0")] = 0


@dataclass(frozen=True, slots=True)
class Want:
    """A member without the token tells what it has; with TOKEN_WANTED the holder of a parked one hands it over."""

    ready: Annotated[int, _u32("samples worked so far in the round")]
    read: Annotated[int, _u32("last round whose sum was read out")]


@dataclass(frozen=True, slots=True)
class Fail:
    """A member cannot go on with the job; the tail says why, in one line."""

    reserved: Annotated[int, _u64("0")] = 0


Body: TypeAlias = Call | Answer | Formed | Decision | Ack | Token | Fragment | Want | Fail
Item: TypeAlias = Entry | Range | FormedMember

#: Type -> body, then the repeated items with the body's field that counts them.
FORMATS: dict[FrameType, tuple[type[Body], tuple[tuple[type[Item], str], ...]]] = {
    FrameType.CALL: (Call, ()),
    FrameType.ANSWER: (Answer, ()),
    FrameType.FORMED: (Formed, ((FormedMember, "members"),)),
    FrameType.DECISION: (Decision, ()),
    FrameType.ACK: (Ack, ()),
    FrameType.TOKEN: (Token, ((Entry, "members"), (Range, "ranges"))),
    FrameType.FRAGMENT: (Fragment, ()),
    FrameType.WANT: (Want, ()),
    FrameType.FAIL: (Fail, ()),
}
_TYPE_OF: dict[type[Any], FrameType] = {body: kind for kind, (body, _) in FORMATS.items()}


class Layout(NamedTuple):
    """Where a dataclass's fields lie: names, `Wire`s, byte offsets, and the compiled `struct.Struct`."""

    names: tuple[str, ...]
    wires: tuple[Wire, ...]
    offsets: tuple[int, ...]
    struct: struct.Struct

    @staticmethod
    def of(cls: type[Any]) -> Layout:
        """Layout of one of this module's dataclasses."""
        return _LAYOUTS.get(cls) or _LAYOUTS.setdefault(cls, Layout._derive(cls))

    @staticmethod
    def _derive(cls: type[Any]) -> Layout:
        hints = get_type_hints(cls, include_extras=True)
        names = tuple(field.name for field in fields(cls))
        wires = tuple(hints[name].__metadata__[0] for name in names)
        offsets, at = [], 0
        for name, wire in zip(names, wires, strict=True):
            assert at % wire.align == 0, f"{cls.__name__}.{name} is not aligned at {at}"
            offsets.append(at)
            at += wire.size
        return Layout(
            names, wires, tuple(offsets), struct.Struct(">" + "".join(w.code for w in wires))
        )


_LAYOUTS: dict[type[Any], Layout] = {}


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


def pack_one(value: Any) -> bytes:
    """Bytes of one header, body or item.

    Raises:
        WireError: a value does not fit its field.
    """
    layout = Layout.of(type(value))
    try:
        return layout.struct.pack(*(getattr(value, name) for name in layout.names))
    except struct.error as error:
        raise WireError(f"{type(value).__name__} does not fit the wire: {error}: {value}") from None


def pack(header: Header, body: Body, *items: Sequence[Item], tail: bytes = b"") -> bytes:
    """A frame from its version byte on; `type` and `length` of the header are filled in here.

    Raises:
        WireError: a value does not fit its field, or the frame is longer than `MAX_FRAME_BYTES`.
    """
    parts = [pack_one(body), *(pack_one(item) for group in items for item in group), tail]
    length = Layout.of(Header).struct.size + sum(map(len, parts))
    if length > MAX_FRAME_BYTES:
        raise WireError(
            f"a {type(body).__name__} frame of {length} bytes is longer than {MAX_FRAME_BYTES}"
        )
    return pack_one(replace(header, type=_TYPE_OF[type(body)], length=length)) + b"".join(parts)


def unpack_header(frame: bytes) -> Header:
    """The header of a frame; checks version and length.

    Raises:
        WireError: too short, another version, or cut off.
    """
    layout = Layout.of(Header)
    if len(frame) < layout.struct.size:
        raise WireError(f"{len(frame)} bytes are too few for a header")
    header = Header(*layout.struct.unpack_from(frame))
    if header.version != VERSION:
        raise WireError(f"version {header.version} is not {VERSION}")
    if not layout.struct.size <= header.length <= len(frame):
        raise WireError(f"length {header.length} does not fit a frame of {len(frame)} bytes")
    return header


def unpack(frame: bytes) -> Frame:
    """Take a frame apart; Ethernet padding after `length` is ignored.

    Raises:
        WireError: it is not a frame of ours, of an unknown type, or cut off.
    """
    header = unpack_header(frame)
    try:
        body_class, groups = FORMATS[FrameType(header.type)]
    except ValueError:
        raise WireError(f"type {header.type} is unknown") from None
    end = header.length
    at = Layout.of(Header).struct.size

    def take(cls: type[Any]) -> Any:
        nonlocal at
        layout = Layout.of(cls)
        if at + layout.struct.size > end:
            raise WireError(
                f"{body_class.__name__} frame is cut off in {cls.__name__} at byte {at}"
            )
        value = cls(*layout.struct.unpack_from(frame, at))
        at += layout.struct.size
        return value

    body = take(body_class)
    items = tuple(tuple(take(cls) for _ in range(getattr(body, count))) for cls, count in groups)
    return Frame(header, body, items, bytes(frame[at:end]))


def ethernet(source: bytes, frame: bytes, ethertype: int = ETHERTYPE) -> bytes:
    """The frame behind its Ethernet header, broadcast from `source` (6 bytes)."""
    return BROADCAST + source + struct.pack(">H", ethertype) + frame


def network_id(name: str) -> int:
    """The header's `network` for a network's name."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest(), "big")


def mac_text(mac: bytes) -> str:
    """`02:00:00:00:00:01` for six bytes."""
    return mac.hex(":")


HEADER_BYTES = Layout.of(Header).struct.size
FRAGMENT_HEADER_BYTES = HEADER_BYTES + Layout.of(Fragment).struct.size
TOKEN_HEADER_BYTES = HEADER_BYTES + Layout.of(Token).struct.size


def max_ranges(members: int) -> int:
    """How many missing ranges fit a token of that many members."""
    room = MAX_FRAME_BYTES - TOKEN_HEADER_BYTES - members * Layout.of(Entry).struct.size
    return room // Layout.of(Range).struct.size
