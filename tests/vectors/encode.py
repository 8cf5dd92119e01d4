# SPDX-License-Identifier: Apache-2.0
"""Frames as bytes, written down a second time: nothing here comes from `nicps.wire`.

The vectors are there to show that the definition and what is made of it say the same, so they have
layouts of their own. Whoever changes `nicps/wire/` changes this table by hand. SipHash is a library's.
"""

from __future__ import annotations

import itertools
import re
import struct
from collections.abc import Mapping, Sequence
from typing import Any

from siphash24 import siphash24

LAYOUTS = {
    "header": "version:B type:B flags:H network:I view:I round:I sender:H length:H sequence:I "
    "tag:Q",
    "fragment": "index:I fragments:I lanes:H width:B shift:B samples:I",
    "token": "generation:I hop:I owner:H state:B members:B idle:H ranges:H sent:I unit:b "
    "unit_before:b stripe:H listed:Q settled:I reserved:I",
    "entry": "samples_before:I samples:I ready:I digest:I read:H marks:B unit:b",
    "range": "first:I count:H sender:H",
    "call": "nonce:Q view:I ballot:I",
    "answer": "nonce:Q fresh:Q view:I stage:B reserved:B group:H",
    "view": "live:Q nonce:Q number:I base:I ballot:I addressee:H members:B values:B step:B "
    "ended:B channels:B reserved2:B reserved3:I",
    "view_value": "live:Q seed:16s follows:I phase:I round:I lead:H unit:b saves:B",
    "view_member": "mac:6s name:14s",
    "vote": "nonce:Q ballot:I phase:I round:I decided:I mac:6s step:B complete:B accepted_ballot:I "
    "accepted_mac:6s members:B values:B channels:B standings:B reserved:H",
    **dict.fromkeys(("view_channel", "standing"), "channel:B complete:B round_high:H round_low:H"),
    "decision": "number:I generation:I phase:B reserved:B reserved2:H reserved3:I",
    "ack": "number:I prepared:B reserved:B reserved2:H",
    "want": "ready:I read:I digest:I unit:b window:B lacks:H",
    "lack": "count:I member:H reserved:H",
    "fail": "reserved:Q",
    "leave": "reserved:Q",
    "probe": "nonce:Q number:I step:B reserved:B reserved2:H",
    "switch": "boot:Q nonce:Q members:Q number:I fragments:I width:B step:B reserved:H reserved2:I",
    "grant": "seed:16s siphash:16s name:14s lead:H",
    "grant_member": "mac:6s number:H",
    "script": "run:Q at:Q step:B rank:B waits:H reserved:I",
    "echo": "nonce:Q first_ns:Q last_ns:Q count:I number:I busy:B reserved:B reserved2:H tagged:I",
}
STRIPES = ("contribution", "sum", "ask", "lacking")
LAYOUTS |= dict.fromkeys(
    STRIPES, "members:Q index:I fragments:I number:I width:B exponent:b unit:b behind:B"
)
SERVERS = ("push", "pull", "held", "taken")
LAYOUTS |= dict.fromkeys(
    SERVERS,
    "version:I number:I index:I fragments:I staleness:I width:B exponent:b reason:B reserved:B",
)
DIRECT = ("numbers", "marked", "withdrawn", "settle")
LAYOUTS |= dict.fromkeys(DIRECT, "call:I number:I size:H index:B fragments:B view:I")
TYPES = (
    *("", "call", "answer", "view", "decision", "ack", "token", "fragment", "want", "fail"),
    *("vote", "leave", "probe", "echo", *STRIPES, "switch", "script"),
    *SERVERS,
    *DIRECT,
)
REPEAT, BOUNCED, PARKED, REPAIR, TOKEN_WANTED, ADD, ANSWER = 1, 2, 4, 8, 16, 32, 64
CHANNEL = 7 << 13  # the bits of a channel's number
COMPLETE, OFFERED, GOES_ON = 128, 256, 1024
CHANNEL_5 = 0xA000
OPEN, CLOSING = 0, 1
ETHERTYPE, TAGGED = 0x88B5, 0x8100
LANES = {32: ("i", 360), 16: ("h", 720), 8: ("b", 1440)}

Fields = dict[str, Any]


def struct_bytes(name: str, fields: Mapping[str, Any]) -> bytes:
    """One struct, big-endian; fields that are not given are 0."""
    pairs = [pair.split(":") for pair in LAYOUTS[name].split()]
    unknown = set(fields) - {pair[0] for pair in pairs}
    assert not unknown, f"{name} has no {unknown}"
    values = (fields.get(field, b"" if code.endswith("s") else 0) for field, code in pairs)
    return struct.pack(">" + "".join(code for _, code in pairs), *values)


def with_defaults(name: str, fields: Mapping[str, Any]) -> Fields:
    """All fields of a struct, in their order."""
    pairs = [pair.split(":") for pair in LAYOUTS[name].split()]
    return {field: fields.get(field, "" if code.endswith("s") else 0) for field, code in pairs}


def frame(
    header: Mapping[str, Any], *structs: tuple[str, Mapping[str, Any]], tail: bytes = b""
) -> bytes:
    """A frame from its version byte on. `type` and `length` are filled in unless given."""
    body = b"".join(struct_bytes(name, fields) for name, fields in structs) + tail
    kind = TYPES.index(structs[0][0]) if structs and structs[0][0] in TYPES else 0
    fields = {"version": 1, "type": kind, "length": 32 + len(body), **header}
    return struct_bytes("header", fields) + body


def sign(data: bytes, key: bytes) -> bytes:
    """A frame (from its version byte on) with its tag: SipHash-2-4 up to `length`, zeros for the tag."""
    length = int.from_bytes(data[18:20], "big")
    message = data[:24] + bytes(8) + data[32:length]
    tag: bytes = siphash24(message, key=key).digest()  # little-endian, as the paper prints it
    return data[:24] + tag[::-1] + data[32:]


def ethernet(
    source: str, data: bytes, ethertype: int = ETHERTYPE, to: str = "ff:ff:ff:ff:ff:ff"
) -> bytes:
    """The frame as it is on the LAN: from a MAC in text form, broadcast unless it is `to` another one."""
    macs = bytes.fromhex((to + source).replace(":", ""))
    return macs + struct.pack(">H", ethertype) + data


def put_tag(frame: bytes, priority: int = 0, network: int = 0, tpid: int = TAGGED) -> bytes:
    """The frame with an 802.1Q tag; `network` is a virtual network's number."""
    return frame[:12] + struct.pack(">HH", tpid, priority << 13 | network) + frame[12:]


def untagged(frame: bytes) -> bytes:
    """The frame without its tag, if that is of no virtual network."""
    tpid, tci = struct.unpack_from(">HH", frame, 12) if len(frame) >= 18 else (0, 0)
    return frame[:12] + frame[16:] if tpid == TAGGED and not tci & 0xFFF else frame


def lanes(width: int, values: Mapping[int, int]) -> bytes:
    """A fragment's payload: lane -> value, all others 0; `width` 0 is raw: byte -> value."""
    if width == 0:
        return bytes(values.get(at, 0) for at in range(1440))
    code, count = LANES[width]
    assert all(at < count for at in values)
    return struct.pack(f">{count}{code}", *(values.get(at, 0) for at in range(count)))


def to_text(data: bytes, *cuts: int) -> str:
    """Hexadecimal, in words: cut at these places, and `00x24` for 24 (16 or more) zero bytes."""
    words = []
    for start, end in itertools.pairwise((0, *(cut for cut in cuts if cut < len(data)), len(data))):
        for run in re.findall(rb"\0{16,}|(?:(?!\0{16}).)+", data[start:end], re.DOTALL):
            words.append(run.hex() if any(run) or len(run) < 16 else f"00x{len(run)}")
    return " ".join(words)


def from_text(text: str) -> bytes:
    """The bytes that `to_text` wrote."""
    return b"".join(
        bytes(int(word[3:])) if word.startswith("00x") else bytes.fromhex(word)
        for word in text.split()
    )


def words(structs: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    """What a frame is, in one line."""
    return "; ".join(
        " ".join([name, *(f"{key}={value}" for key, value in fields.items())])
        for name, fields in structs
    )
