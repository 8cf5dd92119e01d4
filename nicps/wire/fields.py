# SPDX-License-Identifier: Apache-2.0
"""How one field lies on the wire, and how the fields of a dataclass follow each other."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import fields
from operator import attrgetter
from typing import Any, NamedTuple, get_type_hints

from nicps.errors import WireError


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


def u8(doc: str) -> Wire:
    """An unsigned number of one byte."""
    return Wire("B", 1, "__u8", doc)


def i8(doc: str) -> Wire:
    """A signed number of one byte."""
    return Wire("b", 1, "__s8", doc)


def u16(doc: str) -> Wire:
    """An unsigned number of two bytes."""
    return Wire("H", 2, "__be16", doc)


def u32(doc: str) -> Wire:
    """An unsigned number of four bytes."""
    return Wire("I", 4, "__be32", doc)


def u64(doc: str) -> Wire:
    """An unsigned number of eight bytes."""
    return Wire("Q", 8, "__be64", doc)


def byte_string(size: int, doc: str) -> Wire:
    """So many bytes, as they are."""
    return Wire(f"{size}s", size, "__u8", doc)


class Layout(NamedTuple):
    """Where a dataclass's fields lie: names, `Wire`s, byte offsets, the compiled `struct.Struct`, and their values."""

    names: tuple[str, ...]
    wires: tuple[Wire, ...]
    offsets: tuple[int, ...]
    struct: struct.Struct
    values: Callable[[Any], tuple[Any, ...]]

    @staticmethod
    def of(cls: type[Any]) -> Layout:
        """Layout of one of the dataclasses of `nicps.wire.frames`."""
        return _LAYOUTS[cls]

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
        form = struct.Struct(">" + "".join(w.code for w in wires))
        one = attrgetter(names[0])
        values = attrgetter(*names) if len(names) > 1 else lambda value: (one(value),)
        return Layout(names, wires, tuple(offsets), form, values)


class _Layouts(dict[type[Any], Layout]):
    """Each is derived when it is needed first."""

    def __missing__(self, cls: type[Any]) -> Layout:
        layout = self[cls] = Layout._derive(cls)
        return layout


_LAYOUTS = _Layouts()


def pack_one(value: Any) -> bytes:
    """Bytes of one header, body or item.

    Raises:
        WireError: a value does not fit its field.
    """
    layout = _LAYOUTS[type(value)]
    try:
        return layout.struct.pack(*layout.values(value))
    except struct.error as error:
        raise WireError(f"{type(value).__name__} does not fit the wire: {error}: {value}") from None


def pack_all(values: Sequence[Any]) -> bytes:
    """Bytes of values that are all of one class, one after the other.

    Raises:
        WireError: one of them does not fit its field.
    """
    if not values:
        return b""
    layout = _LAYOUTS[type(values[0])]
    pack, of = layout.struct.pack, layout.values
    try:
        return b"".join([pack(*of(value)) for value in values])
    except struct.error:
        return b"".join(map(pack_one, values))
