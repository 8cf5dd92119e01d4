# SPDX-License-Identifier: Apache-2.0
"""Reads our frames out of a capture.

dpkt reads pcap (either byte order, micro- or nanoseconds) and pcapng. A frame with our EtherType
that `nicps.wire` refuses is reported as malformed with the reason; frames of others are only
counted. Nothing here needs privileges.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, fields
from enum import IntEnum
from pathlib import Path
from typing import Any, BinaryIO

from nicps import wire
from nicps.errors import UsageProblem, WireError
from nicps.wiretable import snake

LINKTYPE_ETHERNET = 1

#: Fields that hold masks or values with names, by struct and field.
_NAMED: dict[tuple[type[Any], str], Any] = {
    (wire.Token, "state"): wire.TokenState,
    (wire.Entry, "marks"): wire.Mark,
    (wire.Decision, "phase"): wire.PhaseKind,
    (wire.Probe, "step"): wire.ProbeStep,
    (wire.Taken, "reason"): wire.Refusal,
}


@dataclass(frozen=True)
class Seen:
    """One frame of ours in a capture: `frame`, or the `fault` that makes it malformed.

    `time_s` is the capture's time stamp in seconds since 1970, `source` the sender's MAC address.
    """

    time_s: float
    source: bytes
    frame: wire.Frame | None
    fault: str = ""


@dataclass
class Counts:
    """What `read` met: frames of ours, those of them that are malformed, and frames of others."""

    ours: int = 0
    malformed: int = 0
    foreign: int = 0


@dataclass
class _Watched:
    """A file that notices when a reader asked for more than there was: dpkt does not say so."""

    file: BinaryIO
    partial: bool = False
    empty: int = 0

    def read(self, size: int) -> bytes:
        if size < 0:
            raise ValueError("a block has a length that cannot be")
        data = self.file.read(size)
        if 0 < len(data) < size:
            self.partial = True
        elif size and not data:
            self.empty += 1
        return data

    def seek(self, position: int) -> int:
        self.partial, self.empty = False, 0
        return self.file.seek(position)

    @property
    def cut(self) -> bool:
        """The file ends within a record: only the look for a next record may find nothing."""
        return self.partial or self.empty > 1


def read(path: Path, counts: Counts, ethertype: int = wire.ETHERTYPE) -> Iterator[Seen]:
    """Frames of ours in the capture, in its order; `counts` grows as they are read.

    Raises:
        UsageProblem: the file is missing or is no Ethernet capture; or, after its frames, that it
            is cut off.
    """
    import dpkt  # takes a while to import, and only this command needs it

    try:
        file = path.open("rb")
    except OSError as error:
        raise UsageProblem(f"cannot read {path}: {error.strerror}") from error
    with file:
        watched = _Watched(file)
        frames = 0
        try:
            reader = dpkt.pcap.UniversalReader(watched)
            if reader.datalink() != LINKTYPE_ETHERNET:
                kind = reader.datalink()
                raise UsageProblem(
                    f"{path} is no Ethernet capture (link type {kind}): capture on one interface"
                )
            for time_s, data in reader:
                frames += 1
                seen = _take_apart(float(time_s), bytes(data), counts, ethertype)
                if seen is not None:
                    yield seen
        except (ValueError, struct.error, dpkt.Error, OverflowError) as error:
            if not frames:
                raise UsageProblem(f"{path} is not a pcap or pcapng capture") from error
            raise UsageProblem(f"{path} is damaged after {frames} frames") from error
        if watched.cut:
            raise UsageProblem(f"{path} is cut off in frame {frames}")


def _take_apart(time_s: float, data: bytes, counts: Counts, ethertype: int) -> Seen | None:
    if len(data) < wire.ETHERNET_BYTES or data[12:14] != ethertype.to_bytes(2, "big"):
        counts.foreign += 1
        return None
    counts.ours += 1
    try:
        return Seen(time_s, data[6:12], wire.unpack(data[wire.ETHERNET_BYTES :]))
    except WireError as error:
        counts.malformed += 1
        return Seen(time_s, data[6:12], None, str(error))


def _names(bits: type[IntEnum], mask: int) -> list[str]:
    """Names of the set bits; what has none as a number."""
    known = [bit for bit in bits if bit & mask]
    rest = mask & ~sum(known)
    return [bit.name for bit in known] + ([hex(rest)] if rest else [])


def _value(cls: type[Any], name: str, value: Any) -> str:
    if (kind := _NAMED.get((cls, name))) is wire.Mark:
        return "|".join(_names(wire.Mark, value)) or "0"
    if kind is not None:
        return str(kind(value).name) if value in list(kind) else str(value)
    if isinstance(value, bytes):
        return wire.mac_text(value) if name == "mac" else _text(value)
    return f"{value:016x}" if name == "nonce" else str(value)


def _text(data: bytes) -> str:
    """UTF-8 without trailing zeros; control characters cannot reach the terminal."""
    text = data.rstrip(b"\0").decode("utf-8", "replace")
    return "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in text)


def _flags(frame: wire.Frame) -> list[str]:
    """The header's flags by name; behind them the channel, unless it is 0, where the frame's type has one."""
    flags = frame.header.flags
    if frame.type not in wire.CHANNELLED or not wire.channel_of(flags):
        return _names(wire.Flag, flags)
    named = _names(wire.Flag, flags & ~wire.CHANNEL_MASK)
    return [*named, f"CHANNEL {wire.channel_of(flags)}"]


def _fields(value: Any, brief: bool = False) -> str:
    """`name=value ...`; with `brief`, only what differs from the default."""
    shown = [
        f"{f.name}={_value(type(value), f.name, getattr(value, f.name))}"
        for f in fields(value)
        if not f.name.startswith("reserved")
        and not (brief and f.default is not MISSING and getattr(value, f.name) == f.default)
    ]
    return " ".join(shown) or "-"


def line(seen: Seen, start_s: float) -> str:
    """One line for people; the time is in seconds from `start_s`."""
    head = f"{seen.time_s - start_s:12.6f}  {wire.mac_text(seen.source)}"
    if seen.frame is None:
        return f"{head}  MALFORMED  {seen.fault}"
    frame, header = seen.frame, seen.frame.header
    parts = [
        f"{head}  {frame.type.name:<9}",
        f"view {header.view}  round {header.round}  sender {header.sender}",
    ]
    if header.flags:
        parts.append("|".join(_flags(frame)))
    parts.append(_fields(frame.body))
    for group in frame.items:
        parts += [f"[{number} {_fields(item, True)}]" for number, item in enumerate(group, 1)]
    if frame.tail and frame.type is not wire.FrameType.FRAGMENT:
        parts.append(f'"{_text(frame.tail)}"')
    return "  ".join(parts)


def record(seen: Seen) -> dict[str, Any]:
    """The same as JSON-ready data, every field under its name; a fragment's payload is left out."""
    out: dict[str, Any] = {"time": seen.time_s, "source": wire.mac_text(seen.source)}
    if seen.frame is None:
        return out | {"malformed": seen.fault}
    frame = seen.frame
    header = {f.name: getattr(frame.header, f.name) for f in fields(frame.header)}
    out |= header | {"type": frame.type.name, "flags": _flags(frame)}
    out[snake(type(frame.body))] = _plain(frame.body)
    for (cls, _), group in zip(wire.FORMATS[frame.type][1], frame.items, strict=True):
        out[snake(cls)] = [_plain(item) for item in group]
    if frame.type is not wire.FrameType.FRAGMENT:
        out["tail"] = _text(frame.tail)
    return out


def _plain(value: Any) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for f in fields(value):
        item = getattr(value, f.name)
        if _NAMED.get((type(value), f.name)) is wire.Mark:
            out[f.name] = _names(wire.Mark, item)
        elif (type(value), f.name) in _NAMED or isinstance(item, bytes):
            out[f.name] = _value(type(value), f.name, item)
        else:
            out[f.name] = item
    return out
