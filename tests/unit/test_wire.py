# SPDX-License-Identifier: Apache-2.0
"""The wire definition itself: layouts, pack and unpack for any values and any bytes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nicps import wire, wiregen
from nicps.errors import WireError
from nicps.wiretable import STRUCTS
from tests.vectors import encode

pytestmark = pytest.mark.unit

_RANGES = {"B": (0, 2**8 - 1), "b": (-(2**7), 2**7 - 1), "H": (0, 2**16 - 1)}
_RANGES |= {"I": (0, 2**32 - 1), "Q": (0, 2**64 - 1)}


def values(cls: type[Any], **fixed: Any) -> st.SearchStrategy[Any]:
    """Any value of a struct, with some fields given."""
    fields: dict[str, st.SearchStrategy[Any]] = {}
    layout = wire.Layout.of(cls)
    for name, w in zip(layout.names, layout.wires, strict=True):
        if name in fixed:
            fields[name] = st.just(fixed[name])
        elif w.code.endswith("s"):
            fields[name] = st.binary(min_size=w.size, max_size=w.size)
        else:
            low, high = _RANGES[w.code]
            fields[name] = st.integers(low, high)
    return st.builds(cls, **fields)


@st.composite
def frames(draw: st.DrawFn) -> wire.Frame:
    """Any frame that can be packed; `type` and `length` of the header are as yet 0."""
    body_class, groups = wire.FORMATS[draw(st.sampled_from(list(wire.FrameType)))]
    counts = {count: draw(st.integers(0, 12)) for _, count in groups}
    header = draw(values(wire.Header, version=wire.VERSION, type=0, length=0))
    items = tuple(
        tuple(draw(st.lists(values(cls), min_size=counts[count], max_size=counts[count])))
        for cls, count in groups
    )
    return wire.Frame(
        header, draw(values(body_class, **counts)), items, draw(st.binary(max_size=64))
    )


@given(frames())
def test_unpack_undoes_pack(frame: wire.Frame) -> None:
    data = wire.pack(frame.header, frame.body, *frame.items, tail=frame.tail)
    header = replace(frame.header, type=frame.type, length=len(data))
    assert wire.unpack(data) == replace(frame, header=header)
    assert wire.unpack_header(data) == header


def check_any(data: bytes) -> None:
    """Whatever bytes come: either our error in one line, or they can be packed again."""
    try:
        frame = wire.unpack(data)
    except WireError as error:
        message = str(error)
    else:
        message = "fine"
        again = wire.pack(frame.header, frame.body, *frame.items, tail=frame.tail)
        assert again == data[: frame.header.length]
    assert len(message.splitlines()) == 1


@given(st.binary(max_size=200))
def test_any_bytes(data: bytes) -> None:
    check_any(data)


@given(frames(), st.data())
def test_damaged_frames(frame: wire.Frame, data: st.DataObject) -> None:
    whole = bytearray(wire.pack(frame.header, frame.body, *frame.items, tail=frame.tail))
    for _ in range(data.draw(st.integers(1, 3))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    check_any(bytes(whole[: data.draw(st.integers(0, len(whole)))]))


@pytest.mark.parametrize("cls", STRUCTS, ids=lambda cls: cls.__name__)
def test_structs_are_aligned_and_without_holes(cls: type[Any]) -> None:
    layout = wire.Layout.of(cls)
    ends = [offset + w.size for offset, w in zip(layout.offsets, layout.wires, strict=True)]
    assert list(layout.offsets) == [0, *ends[:-1]]
    assert layout.struct.size == ends[-1]
    assert all(at % w.align == 0 for at, w in zip(layout.offsets, layout.wires, strict=True))
    assert layout.struct.size % max(w.align for w in layout.wires) == 0, "C would pad it"
    assert wire.HEADER_BYTES % max(w.align for w in layout.wires) == 0


def test_bodies_and_items_keep_their_alignment_behind_each_other() -> None:
    """Entries start behind the token, ranges behind any number of entries."""
    for body, groups in wire.FORMATS.values():
        at = [wire.HEADER_BYTES + wire.Layout.of(body).struct.size]
        for cls, _ in groups:
            layout = wire.Layout.of(cls)
            align = max(w.align for w in layout.wires)
            assert all(start % align == 0 for start in at)
            at = [start + n * layout.struct.size for start in at for n in range(4)]


def test_numbers_that_others_rely_on() -> None:
    assert wire.HEADER_BYTES == 32
    assert wire.FRAGMENT_HEADER_BYTES == 48
    assert wire.TOKEN_HEADER_BYTES == 72
    assert wire.FRAGMENT_HEADER_BYTES + wire.PAYLOAD_BYTES <= wire.LEAST_MTU
    assert wire.max_ranges(64) == 18
    assert wire.ETHERTYPE == encode.ETHERTYPE


def test_every_token_fits_the_least_mtu() -> None:
    """A token with many ranges is longer than a fragment: an MTU for fragments would not do."""
    longest = 0
    for members in range(1, wire.MAX_MEMBERS + 1):
        ranges = [wire.Range(0, 1, 1)] * wire.max_ranges(members)
        body = wire.Token(1, 1, 1, 0, members, 0, len(ranges), 0, 0, 0)
        token = wire.pack(wire.Header(), body, [wire.Entry()] * members, ranges)
        longest = max(longest, len(token))
    fragment = wire.FRAGMENT_HEADER_BYTES + wire.PAYLOAD_BYTES
    assert fragment < longest <= wire.LEAST_MTU == wire.MAX_FRAME_BYTES


@pytest.mark.parametrize(
    ("page", "words"),
    [
        ("README.md", "MTU of {} at least"),
        ("docs/own-network.md", "| MTU {} |"),
        ("docs/own-network.md", "ip link set eth1 mtu {}`"),
        ("docs/network.md", "has an MTU below {}"),
    ],
)
def test_the_documentation_names_the_least_mtu(page: str, words: str) -> None:
    text = " ".join((wiregen.ROOT / page).read_text("utf-8").split())
    assert words.format(wire.LEAST_MTU) in text


@pytest.mark.parametrize("width", [8, 16, 32])
def test_largest_shift_cannot_overflow(width: int) -> None:
    """64 members' largest lanes fit 64 bits, and one shift more would not."""
    shift = wire.MAX_SHIFT[width]
    assert wire.MAX_MEMBERS * (2 ** (width - 1) << shift) == 2**63
    assert -(2 ** (width - 1)) * 2**shift * wire.MAX_MEMBERS >= -(2**63)


@pytest.mark.parametrize(
    ("header", "body"),
    [
        (wire.Header(view=2**32), wire.Ack(0, 1)),
        (wire.Header(sender=-1), wire.Ack(0, 1)),
        (wire.Header(), wire.Want(2**32, 0)),
        (wire.Header(), wire.Token(1, 1, 1, 0, 0, 0, 0, 0, 128, 0)),
    ],
)
def test_pack_refuses_what_does_not_fit(header: wire.Header, body: wire.Body) -> None:
    with pytest.raises(WireError, match="does not fit the wire"):
        wire.pack(header, body)


def test_pack_refuses_a_frame_that_is_too_long() -> None:
    body = wire.Fail()
    room = wire.MAX_FRAME_BYTES - wire.HEADER_BYTES - wire.Layout.of(wire.Fail).struct.size
    assert len(wire.pack(wire.Header(), body, tail=bytes(room))) == wire.MAX_FRAME_BYTES
    with pytest.raises(WireError, match="longer than"):
        wire.pack(wire.Header(), body, tail=bytes(room + 1))


def test_network_ids_differ_and_stay() -> None:
    assert wire.network_id("nicps") != wire.network_id("nicps2")
    assert wire.network_id("nicps") == wire.network_id("nicps") < 2**32


def test_ethernet() -> None:
    assert wire.ethernet(b"\2\0\0\0\0\1", b"x").hex() == "ffffffffffff02000000000188b578"
    assert wire.mac_text(b"\2\0\0\0\0\1") == "02:00:00:00:00:01"
