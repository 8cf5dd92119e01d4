# SPDX-License-Identifier: Apache-2.0
"""The wire definition as data: structs, values and limits, and tables of them.

`nicps.wiregen` writes the C and P4 headers and `docs/wire.md` from this, `nicps wire` prints it.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Sequence
from enum import IntEnum
from typing import Any, NamedTuple

from nicps import wire


class Constant(NamedTuple):
    """A number that all three languages know; `bits` is its width in P4."""

    name: str
    value: int
    bits: int
    doc: str

    @property
    def text(self) -> str:
        """The value as people write it: EtherTypes in hexadecimal."""
        return f"{self.value:#06x}" if self.name == "ETHERTYPE" else str(self.value)


class Values(NamedTuple):
    """An enumeration of the wire: prefix of its names, and the field of the wire that holds it."""

    prefix: str
    enum: type[IntEnum]
    cls: type[Any]
    field: str

    @property
    def bits(self) -> int:
        """Width of the field on the wire."""
        return next(f.bytes for f in fields_of(self.cls) if f.name == self.field) * 8


class Field(NamedTuple):
    """One field of a struct: `offset` and `bytes` in the struct, type as `u32`, `i8` or `bytes`."""

    name: str
    offset: int
    bytes: int
    type: str
    doc: str
    wire: wire.Wire


#: Every struct of the wire, in the order in which a reader meets them.
STRUCTS: tuple[type[Any], ...] = (
    wire.Header,
    wire.Fragment,
    wire.Token,
    wire.Entry,
    wire.Range,
    wire.Call,
    wire.Answer,
    wire.View,
    wire.ViewValue,
    wire.ViewMember,
    wire.ViewChannel,
    wire.Standing,
    wire.Vote,
    wire.Decision,
    wire.Ack,
    wire.Want,
    wire.Lack,
    wire.Fail,
    wire.Leave,
    wire.Probe,
    wire.Echo,
    wire.Contribution,
    wire.Sum,
    wire.Ask,
    wire.Lacking,
    wire.Push,
    wire.Pull,
    wire.Held,
    wire.Taken,
    wire.Numbers,
    wire.Marked,
    wire.Withdrawn,
    wire.Settle,
    wire.Script,
    wire.Switch,
    wire.Grant,
    wire.GrantMember,
)

ENUMS: tuple[Values, ...] = (
    Values("TYPE", wire.FrameType, wire.Header, "type"),
    Values("FLAG", wire.Flag, wire.Header, "flags"),
    Values("STATE", wire.TokenState, wire.Token, "state"),
    Values("MARK", wire.Mark, wire.Entry, "marks"),
    Values("PHASE", wire.PhaseKind, wire.Decision, "phase"),
    Values("STEP", wire.ViewStep, wire.View, "step"),
    Values("STAGE", wire.Stage, wire.Answer, "stage"),
    Values("PROBE_STEP", wire.ProbeStep, wire.Probe, "step"),
    Values("REFUSAL", wire.Refusal, wire.Push, "reason"),
    Values("SWITCH_STEP", wire.SwitchStep, wire.Switch, "step"),
    Values("SCRIPT_STEP", wire.ScriptStep, wire.Script, "step"),
    Values("SCRIPT_STREAM", wire.ScriptStream, wire.Script, "stream"),
)


def constants() -> tuple[Constant, ...]:
    """The numbers that C and P4 share with `nicps.wire`."""
    return (
        Constant("VERSION", wire.VERSION, 8, "first byte of every frame of ours"),
        Constant("ETHERTYPE", wire.ETHERTYPE, 16, "IEEE 802 local experimental; settable"),
        Constant("MAX_MEMBERS", wire.MAX_MEMBERS, 16, "members of a network"),
        Constant("PAYLOAD_BYTES", wire.PAYLOAD_BYTES, 16, "payload of a fragment"),
        Constant("BLOCK_LANES", wire.BLOCK_LANES, 16, "accumulators in a block of the map"),
        Constant("MAX_FRAME_BYTES", wire.MAX_FRAME_BYTES, 16, "longest frame, from version on"),
        Constant("MAX_CHANNELS", wire.MAX_CHANNELS, 8, "channels of a phase"),
        Constant("CHANNEL_MASK", wire.CHANNEL_MASK, 16, "bits of `flags`: the channel's number"),
        Constant("CHANNEL_SHIFT", wire.CHANNEL_SHIFT, 8, "the lowest of these bits"),
        Constant("SHORT_BYTES", wire.SHORT_BYTES, 8, "payload of a short fragment there"),
        Constant("NAME_BYTES", wire.NAME_BYTES, 16, "host name in a member list"),
        Constant(
            "QUANTUM",
            wire.QUANTUM,
            16,
            "fragments by which a member may be ahead of its sums, where a switch adds",
        ),
        Constant(
            "SWITCH", int.from_bytes(wire.SWITCH, "big"), 48, "MAC address of a switch that adds"
        ),
        Constant("ETHERNET_BYTES", wire.ETHERNET_BYTES, 16, "Ethernet header, before version"),
        Constant("HEADER_BYTES", wire.HEADER_BYTES, 16, "header"),
        Constant("FRAGMENT_HEADER_BYTES", wire.FRAGMENT_HEADER_BYTES, 16, "header and fragment"),
        Constant(
            "CONTRIBUTION_HEADER_BYTES",
            wire.CONTRIBUTION_HEADER_BYTES,
            16,
            "header and contribution, or sum, ask, lacking",
        ),
        Constant(
            "PUSH_HEADER_BYTES", wire.PUSH_HEADER_BYTES, 16, "header and push, pull, held, taken"
        ),
        Constant("NOT_FINITE", wire.NOT_FINITE, 8, "exponent of lanes that are not finite"),
        Constant("TOKEN_HEADER_BYTES", wire.TOKEN_HEADER_BYTES, 16, "header and token"),
        Constant("ENTRY_BYTES", size_of(wire.Entry), 16, "a member's line in the token"),
        Constant("RANGE_BYTES", size_of(wire.Range), 16, "a missing range in the token"),
        *(
            Constant(f"MAX_SHIFT_{width}", shift, 8, f"largest shift, lanes of {width} bits")
            if width
            else Constant("MAX_SHIFT_0", shift, 8, "shift of raw bytes")
            for width, shift in sorted(wire.MAX_SHIFT.items())
        ),
    )


def fields_of(cls: type[Any]) -> Iterator[Field]:
    """The fields of one of the structs, in order."""
    layout = wire.Layout.of(cls)
    for name, w, offset in zip(layout.names, layout.wires, layout.offsets, strict=True):
        if w.code.endswith("s"):
            kind = "bytes"
        else:
            kind = f"{'i' if w.code == 'b' else 'u'}{w.size * 8}"
        yield Field(name, offset, w.size, kind, w.doc, w)


def size_of(cls: type[Any]) -> int:
    """Bytes of one of the structs."""
    return wire.Layout.of(cls).struct.size


def comments(cls: type[Any]) -> dict[str, str]:
    """The comments behind an enumeration's members in the source: member's name -> text."""
    found = re.finditer(r"^    ([A-Z_]+) = \d+(?:  # (.*))?$", inspect.getsource(cls), re.MULTILINE)
    return {match[1]: match[2] or "" for match in found}


def snake(cls: type[Any]) -> str:
    """`formed_member` for `FormedMember`: the name of a struct in C and P4."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower()


def summary(cls: type[Any]) -> str:
    """First paragraph of a class's docstring, in one line."""
    return " ".join((cls.__doc__ or "").split("\n\n")[0].split())


def shape(kind: wire.FrameType) -> str:
    """What a frame of that type is made of: `header, token, entry x members, range x ranges`."""
    body, groups = wire.FORMATS[kind]
    items = [f"{snake(cls)} x {count}" for cls, count in groups]
    return ", ".join(["header", snake(body), *items])


def start_of(cls: type[Any]) -> int:
    """Where a struct's offsets count from, in bytes from version on: bodies follow the header."""
    return wire.HEADER_BYTES if any(cls is body for body, _ in wire.FORMATS.values()) else 0


def describe() -> dict[str, Any]:
    """The whole definition as JSON-ready data. Offsets are in bytes from the struct's start."""
    return {
        "version": wire.VERSION,
        "ethertype": wire.ETHERTYPE,
        "byte_order": "big",
        "constants": {c.name: {"value": c.value, "meaning": c.doc} for c in constants()},
        "enums": {
            v.prefix: {
                "meaning": summary(v.enum),
                "field": f"{snake(v.cls)}.{v.field}",
                "values": {
                    str(m.name): {"value": m.value, "meaning": comments(v.enum)[str(m.name)]}
                    for m in v.enum
                },
            }
            for v in ENUMS
        },
        "frames": {
            kind.name: {
                "type": kind.value,
                "body": snake(body),
                "items": [{"struct": snake(cls), "count": count} for cls, count in groups],
            }
            for kind, (body, groups) in wire.FORMATS.items()
        },
        "structs": {
            snake(cls): {
                "bytes": size_of(cls),
                "meaning": summary(cls),
                "fields": [
                    {
                        "name": f.name,
                        "offset": f.offset,
                        "bytes": f.bytes,
                        "type": f.type,
                        "meaning": f.doc,
                    }
                    for f in fields_of(cls)
                ],
            }
            for cls in STRUCTS
        },
    }


Table = tuple[str, str, Sequence[str], list[tuple[str, ...]]]


def tables() -> Iterator[Table]:
    """Title, text, column heads and rows of every table, as `nicps wire` prints them."""
    yield (
        "Limits",
        "",
        ("name", "value", "meaning"),
        [(c.name, c.text, c.doc) for c in constants()],
    )
    yield (
        "Frames",
        "What follows the Ethernet header; a tail may come after it.",
        ("type", "name", "made of", "meaning"),
        [(str(k.value), k.name, shape(k), summary(body)) for k, (body, _) in wire.FORMATS.items()],
    )
    for values in ENUMS:
        docs = comments(values.enum)
        yield (
            f"Values of {snake(values.cls)}.{values.field}",
            summary(values.enum),
            ("name", "value", "meaning"),
            [(str(m.name), str(m.value), docs[str(m.name)]) for m in values.enum],
        )
    for cls in STRUCTS:
        start = start_of(cls)
        yield (
            f"{snake(cls)}, {size_of(cls)} bytes",
            summary(cls),
            ("name", "offset", "bytes", "type", "meaning"),
            [(f.name, str(start + f.offset), str(f.bytes), f.type, f.doc) for f in fields_of(cls)],
        )


INTRODUCTION = (
    "All numbers are big-endian. Offsets count from the version byte, right behind the Ethernet "
    "header; those of repeated items (entry, range, formed_member) from the item's own start."
)


def text() -> str:
    """The definition as aligned tables for a terminal."""
    lines = [INTRODUCTION]
    for title, note, heads, rows in tables():
        widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
        lines += ["", title.upper() if title in ("Limits", "Frames") else title]
        if note:
            lines.append(f"  {note}")
        for row in (heads, *rows):
            cells = (
                cell.rjust(width) if head in ("offset", "bytes", "value") else cell.ljust(width)
                for cell, width, head in zip(row, widths, heads, strict=True)
            )
            lines.append(("  " + "  ".join(cells)).rstrip())
    return "\n".join(lines) + "\n"


def markdown() -> str:
    """`docs/wire.md`: the same tables in Markdown."""
    lines = [
        "<!-- SPDX-License-Identifier: Apache-2.0 -->",
        "<!-- Generated from nicps/wire/ by `python -m nicps.wiregen`: change it there. -->",
        "# The wire",
        "",
        INTRODUCTION,
    ]
    for title, note, heads, rows in tables():
        lines += ["", f"## {title}", ""]
        if note:
            lines += [note, ""]
        lines += [f"| {' | '.join(heads)} |", f"|{' --- |' * len(heads)}"]
        lines += [
            f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in rows
        ]
    return "\n".join(lines) + "\n"
