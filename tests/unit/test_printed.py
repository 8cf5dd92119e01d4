# SPDX-License-Identifier: Apache-2.0
"""The two files that a script prints to, as one stream (`nicps.agent.printed`)."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nicps.agent import printed
from nicps.agent.printed import Printed
from nicps.agent.relay import PIECE_BYTES, OutputReceiver, OutputSender
from nicps.wire import Script, ScriptStream

pytestmark = pytest.mark.unit
OUT, ERR = ScriptStream.STDOUT, ScriptStream.STDERR


def prints(output: Printed, stream: ScriptStream, text: bytes) -> None:
    with (output.stderr if stream else output.stdout).open("ab") as file:
        file.write(text)


def everything(output: Printed, piece: int = 1 << 20) -> list[tuple[ScriptStream, bytes]]:
    found, at = [], 0
    while data := output.read(at, piece):
        found.append((output.stream(at), data))
        at += len(data)
    assert at == output.size
    return found


def test_pieces_are_in_the_order_in_which_they_were_seen(tmp_path: Path) -> None:
    output = Printed(tmp_path)
    assert output.measure() == 0 and everything(output) == []
    for stream, text in ((OUT, b"one "), (OUT, b"two "), (ERR, b"bad "), (OUT, b"three ")):
        prints(output, stream, text)
        output.measure()
    assert everything(output) == [(OUT, b"one two "), (ERR, b"bad "), (OUT, b"three ")]
    assert output.read(6, 100) == b"o " and output.reach(6) == 8
    output.write_as_one(tmp_path / "all")
    assert (tmp_path / "all").read_bytes() == b"one two bad three "


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(texts=st.lists(st.tuples(st.sampled_from(ScriptStream), st.integers(0, 4000)), max_size=8))
def test_a_frame_has_one_stream_only(tmp_path: Path, texts: list[tuple[ScriptStream, int]]) -> None:
    folder = tmp_path / os.urandom(8).hex()
    folder.mkdir()
    output = Printed(folder)
    sender, receiver = OutputSender(0.0, output.reach), OutputReceiver(0.0)
    whole, got = {OUT: b"", ERR: b""}, {OUT: b"", ERR: b""}
    for number, (stream, size) in enumerate(texts):
        whole[stream] += bytes([97 + number]) * size
        prints(output, stream, bytes([97 + number]) * size)
        output.measure()
    now = 0.0
    while not sender.done:
        now += 1.0
        sender.note_output(output.measure(), ended=True)
        for piece in sender.due(now):
            tail = output.read(piece.at, piece.length)
            assert len(tail) == piece.length <= PIECE_BYTES
            new = receiver.take(now, Script(1, piece.at, piece.step, 0), tail or b"{}")
            got[output.stream(piece.at)] += (new or b"") if not receiver.ended else b""
            sender.acknowledge(now, receiver.seen)
        assert now < 100
    assert got == whole


def test_a_file_that_is_shortened(tmp_path: Path) -> None:
    """What was taken back does not come, nor does anything after it."""
    output = Printed(tmp_path)
    prints(output, OUT, b"0123456789")
    prints(output, ERR, b"bad")
    output.measure()
    os.truncate(output.stdout, 4)
    assert output.read(0, 100) == b"0123" and output.read(4, 100) == b""
    output.cut(4)
    prints(output, ERR, b"more")
    assert output.measure() == output.size == 4
    assert everything(output) == [(OUT, b"0123")]


def test_no_more_than_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(printed, "MOST_BYTES", 12)
    output = Printed(tmp_path)
    for _ in range(3):
        prints(output, OUT, b"12345")
        prints(output, ERR, b"abc")
        output.measure()
    assert everything(output) == [(OUT, b"12345"), (ERR, b"abc"), (OUT, b"1234")]
