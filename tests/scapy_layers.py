# SPDX-License-Identifier: Apache-2.0
"""Scapy layers for every frame, made from `nicps.wire`; tests only (scapy is GPL-2.0).

    Ether(src=...) / LAYERS[Header](view=3) / LAYERS[Token](members=1, entry_list=[...])

A layer's fields have the wire's names; repeated items are `<struct>_list`. `type` follows from the
layer above, `length` is filled in unless given, and what follows `length` is `Padding`.
"""

from __future__ import annotations

from typing import Any

from scapy.fields import (
    ByteField,
    Field,
    IntField,
    LongField,
    PacketListField,
    ShortField,
    SignedByteField,
    StrFixedLenField,
)
from scapy.layers.l2 import Ether
from scapy.packet import Packet, Raw, bind_layers

from nicps import wire
from nicps.wiretable import STRUCTS, snake

_FIELDS = {"B": ByteField, "b": SignedByteField, "H": ShortField, "I": IntField, "Q": LongField}
_LENGTH_AT = wire.Layout.of(wire.Header).offsets[wire.Layout.of(wire.Header).names.index("length")]


def _fields(cls: type[Any]) -> list[Field[Any, Any]]:
    layout = wire.Layout.of(cls)
    out = []
    for name, w in zip(layout.names, layout.wires, strict=True):
        if w.code.endswith("s"):
            out.append(StrFixedLenField(name, b"", w.size))
        else:
            out.append(_FIELDS[w.code](name, {"version": wire.VERSION}.get(name, 0)))
    return out


class _Header(Packet):
    """Fills in `length`, and takes no more than that."""

    def post_build(self, packet: bytes, payload: bytes) -> bytes:
        if self.length == 0:
            length = (len(packet) + len(payload)).to_bytes(2, "big")
            packet = packet[:_LENGTH_AT] + length + packet[_LENGTH_AT + 2 :]
        return packet + payload

    def extract_padding(self, rest: bytes) -> tuple[bytes, bytes]:
        size = max(self.length - wire.HEADER_BYTES, 0)
        return rest[:size], rest[size:]


class _Item(Packet):
    """One of a list: what follows is the next."""

    def extract_padding(self, rest: bytes) -> tuple[bytes, bytes]:
        return b"", rest


def _make() -> dict[type[Any], type[Packet]]:
    bodies = dict(wire.FORMATS.values())
    items = {cls for groups in bodies.values() for cls, _ in groups}
    layers: dict[type[Any], type[Packet]] = {}
    for cls in sorted(STRUCTS, key=lambda cls: cls not in items):  # items first: bodies name them
        base = _Header if cls is wire.Header else _Item if cls in items else Packet
        fields = _fields(cls)
        for item, count in bodies.get(cls, ()):
            fields.append(
                PacketListField(
                    f"{snake(item)}_list",
                    [],
                    layers[item],
                    count_from=lambda packet, count=count: getattr(packet, count),
                )
            )
        name = f"Nicps{cls.__name__}"
        layers[cls] = type(name, (base,), {"name": name, "fields_desc": fields})
    bind_layers(Ether, layers[wire.Header], type=wire.ETHERTYPE)
    for kind, (body, _) in wire.FORMATS.items():
        bind_layers(layers[wire.Header], layers[body], type=int(kind))
    return layers


#: Class of `nicps.wire` -> scapy layer.
LAYERS: dict[type[Any], type[Packet]] = _make()


def _values(value: Any) -> dict[str, Any]:
    return {name: getattr(value, name) for name in wire.Layout.of(type(value)).names}


def build(source: bytes, frame: wire.Frame) -> Packet:
    """The frame as scapy would send it."""
    header = _values(frame.header) | {"length": 0}
    lists = {
        f"{snake(cls)}_list": [LAYERS[cls](**_values(item)) for item in group]
        for (cls, _), group in zip(wire.FORMATS[frame.type][1], frame.items, strict=True)
    }
    packet = (
        Ether(dst=wire.mac_text(wire.BROADCAST), src=wire.mac_text(source), type=wire.ETHERTYPE)
        / LAYERS[wire.Header](**header)
        / LAYERS[type(frame.body)](**_values(frame.body), **lists)
    )
    return packet / Raw(frame.tail) if frame.tail else packet


def dissect(data: bytes) -> tuple[bytes, wire.Frame]:
    """Source MAC and frame, as scapy takes them apart."""
    packet = Ether(data)
    header_layer = packet[LAYERS[wire.Header]]

    def take(cls: type[Any], layer: Packet) -> Any:
        return cls(*(layer.getfieldval(name) for name in wire.Layout.of(cls).names))

    header = take(wire.Header, header_layer)
    body_class, groups = wire.FORMATS[wire.FrameType(header.type)]
    body_layer = header_layer[LAYERS[body_class]]
    items = tuple(
        tuple(take(cls, item) for item in body_layer.getfieldval(f"{snake(cls)}_list"))
        for cls, _ in groups
    )
    tail = body_layer[Raw].load if Raw in body_layer else b""
    source = bytes.fromhex(packet.src.replace(":", ""))
    return source, wire.Frame(header, take(body_class, body_layer), items, tail)
