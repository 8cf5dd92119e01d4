# SPDX-License-Identifier: Apache-2.0
"""What a group's store holds, and the streams that carry it (`nicps.store`)."""

from __future__ import annotations

import pytest

from nicps.errors import WireError
from nicps.session.store_form import MOST_VALUE, Answer, Ask, unpack
from nicps.store import Values
from nicps.store.streams import PIECE_BYTES, WINDOW, Incoming, Outgoing
from nicps.store.values import MOST_BYTES
from tests.store_calls import ask


def test_calls_come_to_what_tcpstore_has() -> None:
    """Each row was tried with PyTorch 2.13's TCPStore."""
    values = Values()

    def do(asked: Ask) -> Answer:
        found = values.carry_out(asked)
        assert found is not None
        return found

    assert values.carry_out(ask("get", "k")) is None
    assert do(ask("set", "b", values=(b"\xff\0",))).error == ""
    assert unpack(do(ask("get", "b")).values[0]) == b"\xff\0"
    assert do(ask("add", "n", amount=5)).amount == 5
    assert do(ask("add", "n", amount=-2)).amount == 3
    assert unpack(do(ask("get", "n")).values[0]) == b"3"
    for key, old, new, found in (
        ("m", b"", b"x", b"x"),
        ("mm", b"e", b"x", b"e"),
        ("m", b"x", b"y", b"y"),
        ("m", b"q", b"z", b"y"),
    ):
        assert unpack(do(ask("swap", key, values=(old, new))).values[0]) == found
    assert do(ask("check", "m", "mm")).amount == 0
    assert do(ask("check")).amount == 1
    assert do(ask("delete", "m")).amount == 1
    assert do(ask("delete", "m")).amount == 0
    do(ask("append", "ap", values=(b"1",)))
    do(ask("append", "ap", values=(b"2",)))
    assert unpack(do(ask("get", "ap")).values[0]) == b"12"
    do(ask("set", "x", "y", values=(b"1", b"2")))
    assert [unpack(v) for v in do(ask("get", "y", "x")).values] == [b"2", b"1"]
    assert do(ask("add", "big", amount=(1 << 63) - 1)).amount == (1 << 63) - 1
    assert "has more than 64 bits" in do(ask("add", "big", amount=1)).error
    assert "holds b'12x', which is no whole number" in (
        do(ask("append", "ap", values=(b"x",))) and do(ask("add", "ap", amount=1)).error
    )
    assert sorted(do(ask("list")).values) == ["ap", "b", "big", "n", "x", "y"]
    assert do(ask("count")).amount == len(values) == 6


def test_a_store_that_is_full_takes_what_makes_it_smaller() -> None:
    values, whole = Values(), b"v" * (MOST_VALUE - 100)
    number = 0
    while not (told := values.carry_out(ask("set", f"k{number}", values=(whole,)))).error:  # type: ignore[union-attr]
        number += 1
    assert number == MOST_BYTES // MOST_VALUE and "the store is full" in told.error  # type: ignore[union-attr]
    assert values.carry_out(ask("set", "k0", values=(b"",))).error == ""  # type: ignore[union-attr]
    assert values.carry_out(ask("delete", "k1")).amount == 1  # type: ignore[union-attr]
    assert values.carry_out(ask("set", "new", values=(whole,))).error == ""  # type: ignore[union-attr]
    grown = values.carry_out(ask("append", "new", values=(b"x" * 200,)))
    assert grown is not None and f"at most {MOST_VALUE:,}" in grown.error


# ---- streams


def test_a_window_is_the_most_that_is_under_way() -> None:
    out = Outgoing(0.0, [2, 3])
    out.put(b"x" * (20 * PIECE_BYTES))
    pieces = out.due(0.0)
    assert len(pieces) == WINDOW and not out.due(0.05)
    out.acknowledge(0.05, 2, 3 * PIECE_BYTES)
    assert not out.due(0.05)  # 3 has nothing
    out.acknowledge(0.05, 3, PIECE_BYTES)
    assert [at for at, _ in out.due(0.05)] == [WINDOW * PIECE_BYTES]
    assert [at for at, _ in out.due(0.2)] == [k * PIECE_BYTES for k in range(1, WINDOW + 1)]
    assert not out.acknowledge(0.2, 2, out.end + 1) and not out.acknowledge(0.2, 7, 5)


def test_lines_come_in_order_however_they_are_cut() -> None:
    stream, lines = b"first\nsecond\n", Incoming()
    for at, end in ((0, 3), (7, 13), (2, 9), (0, 13), (4, 13)):
        lines.take(at, stream[at:end])
    assert lines.at == 13
    assert lines.next_line() == b"first" and lines.read_to == 6
    assert lines.next_line() == b"second" and lines.next_line() is None
    lines.take(13, b"x" * ((1 << 21) + 1))
    with pytest.raises(WireError, match="has no end"):
        lines.next_line()
