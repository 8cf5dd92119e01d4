# SPDX-License-Identifier: Apache-2.0
"""`nicps wire` and `nicps wire dump`: what people and programs see of formats and captures."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable
from pathlib import Path

import pytest

from nicps import wire, wiregen, wiretable
from nicps.cli import main
from tests.vectors import encode

pytestmark = pytest.mark.unit

H1, H2 = b"\2\0\0\0\0\1", b"\2\0\0\0\0\2"
HEADER = wire.Header(network=wire.network_id("nicps"), view=3, round=7, sender=2, sequence=9)
TOKEN = wire.Token(4, 100, 3, 1, 2, 0, 1, 12, -40, -41)
ENTRIES = (wire.Entry(marks=wire.Mark.CONTRIBUTED | wire.Mark.COMPLETE), wire.Entry(ready=17))
FRAMES = (
    wire.ethernet(H1, wire.pack(HEADER, wire.Call(255), tail=b"h1")),
    encode.ethernet(H2.hex(":"), b"", 0x0806) + bytes(46),  # ARP: not ours
    wire.ethernet(H2, wire.pack(HEADER, TOKEN, ENTRIES, (wire.Range(3, 2, 1),))),
    wire.ethernet(H2, wire.pack(HEADER, TOKEN, ENTRIES, (wire.Range(3, 2, 1),)))[:80],
    wire.ethernet(H2, wire.pack(HEADER, wire.Fragment(1, 2, 360, 32, 26, 32), tail=bytes(1440))),
    wire.ethernet(H1, wire.pack(HEADER, wire.Decision(1, 5, 2), tail=b'{"rounds":3}')) + bytes(3),
    wire.ethernet(H1, wire.pack(HEADER, wire.Fail(), tail=b"\x1b[2Jbad\xff")),
    wire.ethernet(H1, b"\x01"),
)


def pcap(frames: Iterable[bytes], order: str = "<", nano: bool = False, linktype: int = 1) -> bytes:
    magic = 0xA1B23C4D if nano else 0xA1B2C3D4
    out = struct.pack(order + "IHHiIII", magic, 2, 4, 0, 0, 65535, linktype)
    for at, frame in enumerate(frames):
        fraction = at * (250_000_000 if nano else 250_000)
        out += struct.pack(order + "IIII", 1000, fraction, len(frame), len(frame)) + frame
    return out


def pcapng(frames: Iterable[bytes], order: str = "<") -> bytes:
    def block(kind: int, body: bytes) -> bytes:
        body += bytes(-len(body) % 4)
        size = struct.pack(order + "I", 12 + len(body))
        return struct.pack(order + "I", kind) + size + body + size

    out = block(0x0A0D0D0A, struct.pack(order + "IHHq", 0x1A2B3C4D, 1, 0, -1))
    out += block(1, struct.pack(order + "HHI", 1, 0, 65535))
    for at, frame in enumerate(frames):
        time = 1_000_000_000 + at * 250_000
        size = len(frame)
        head = struct.pack(order + "IIIII", 0, time >> 32, time & 0xFFFFFFFF, size, size)
        out += block(6, head + frame)
    return out


@pytest.fixture
def capture(tmp_path: Path) -> Path:
    path = tmp_path / "c.pcap"
    path.write_bytes(pcap(FRAMES))
    return path


def test_dump_lines(capture: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["wire", "dump", str(capture)]) == 0
    out, err = capsys.readouterr()
    call, token, cut, fragment, decision, fail, short = out.splitlines()
    assert call.split() == [
        *("0.000000", "02:00:00:00:00:01", "CALL", "view", "3", "round", "7", "sender", "2"),
        *("nonce=00000000000000ff", "view=0", "ballot=0", '"h1"'),
    ]
    assert "0.500000  02:00:00:00:00:02  TOKEN" in token
    assert "generation=4 hop=100 owner=3 state=CLOSING members=2 idle=0 ranges=1 sent=12" in token
    assert "[1 marks=CONTRIBUTED|COMPLETE]  [2 ready=17]  [1 first=3 count=2 sender=1]" in token
    assert "MALFORMED  length 120 does not fit a frame of 66 bytes" in cut
    assert "index=1 fragments=2 lanes=360 width=32 shift=26 samples=32" in fragment
    assert 'phase=TRAIN  "{"rounds":3}"' in decision
    assert '"\\x1b[2Jbad�"' in fail
    assert "MALFORMED  1 bytes are too few for a header" in short
    assert err == "7 frames of ours, 2 of them malformed; 1 frames of others skipped\n"


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("form", ["pcap", "nano", "pcapng"])
def test_every_form_of_capture_reads_the_same(
    order: str, form: str, tmp_path: Path, capture: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other"
    data = pcapng(FRAMES, order) if form == "pcapng" else pcap(FRAMES, order, form == "nano")
    other.write_bytes(data)
    assert main(["wire", "dump", str(capture)]) == 0
    usual = capsys.readouterr()
    assert main(["wire", "dump", str(other)]) == 0
    assert capsys.readouterr() == usual


def test_dump_json(capture: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["wire", "dump", "--json", str(capture)]) == 0
    call, token, cut, fragment, *_ = map(json.loads, capsys.readouterr().out.splitlines())
    assert call["time"] == 1000.0
    assert call["source"] == "02:00:00:00:00:01"
    assert call["type"] == "CALL"
    assert call["call"] == {"nonce": 255, "view": 0, "ballot": 0}
    assert call["tail"] == "h1"
    assert (token["view"], token["round"], token["sender"]) == (3, 7, 2)
    assert token["token"]["hop"] == 100
    assert token["entry"][0]["marks"] == ["CONTRIBUTED", "COMPLETE"]
    assert token["range"] == [{"first": 3, "count": 2, "sender": 1}]
    assert "malformed" in cut
    assert fragment["fragment"]["samples"] == 32


def test_another_ethertype(capture: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["wire", "dump", str(capture), "--ethertype", "0x0806"]) == 0
    assert "1 frames of ours, 1 of them malformed; 7 frames" in capsys.readouterr().err


def test_flags_and_unknown_values(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    header = wire.Header(flags=wire.Flag.REPEAT | wire.Flag.REPAIR | 0x8000)
    token = wire.Token(0, 0, 0, 9, 1, 0, 0, 0, 0, 0)
    path = tmp_path / "c.pcap"
    path.write_bytes(pcap([wire.ethernet(H1, wire.pack(header, token, (wire.Entry(marks=129),)))]))
    assert main(["wire", "dump", str(path)]) == 0
    out = capsys.readouterr().out
    assert "REPEAT|REPAIR|0x8000" in out
    assert "state=9" in out
    assert "marks=CONTRIBUTED|0x80" in out


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (None, "cannot read {}: No such file or directory"),
        (b"", "{} is not a pcap or pcapng capture"),
        (b"\xa1\xb2", "{} is not a pcap or pcapng capture"),
        (b"root:x:0:0:root:/root:/bin/bash\n" * 9, "{} is not a pcap or pcapng capture"),
        (bytes(100), "{} is not a pcap or pcapng capture"),
        (pcap([], linktype=113), "{} is no Ethernet capture (link type 113)"),
        (pcap(FRAMES)[:-1], "{} is cut off in frame 8"),
        (pcap(FRAMES[:1])[:-30], "{} is cut off in frame 1"),
        (pcap(FRAMES[:1]) + b"12345", "{} is damaged after 1 frames"),
        (pcapng(FRAMES)[:-40], "{} is "),
        (pcapng(FRAMES[:1]) + bytes(8), "{} is damaged after 1 frames"),
    ],
)
def test_bad_files_are_one_line(
    data: bytes | None, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "c.pcap"
    if data is not None:
        path.write_bytes(data)
    assert main(["wire", "dump", str(path)]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("nicps: error: " + message.format(path))


def test_formats(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["wire"]) == 0
    out = capsys.readouterr().out
    for cls in wiretable.STRUCTS:
        assert f"\n{wiretable.snake(cls)}, {wiretable.size_of(cls)} bytes\n" in out
    assert "  hop              36      4  u32   raised by every hand-on\n" in out
    assert main(["wire", "--json"]) == 0
    formats = json.loads(capsys.readouterr().out)
    assert formats["structs"]["header"]["fields"][1] == {
        "name": "type",
        "offset": 1,
        "bytes": 1,
        "type": "u8",
        "meaning": "frame type",
    }
    assert formats["frames"]["TOKEN"]["type"] == 6
    assert formats["constants"]["MAX_SHIFT_8"]["value"] == 50
    assert formats["enums"]["FLAG"]["values"]["REPAIR"]["value"] == 8
    assert main(["wire", "--markdown"]) == 0
    assert capsys.readouterr().out == (wiregen.ROOT / "docs/wire.md").read_text("utf-8")


def test_the_channel_of_a_frame(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Only types that belong to a channel have one; elsewhere the bits mean nothing."""
    header = wire.Header(flags=wire.Flag.OFFERED | wire.channel_flags(5))
    path = tmp_path / "c.pcap"
    frames = wire.pack(header, wire.Want(1, 2), ()), wire.pack(header, wire.Ack(1, 0))
    path.write_bytes(pcap([wire.ethernet(H1, frame) for frame in frames]))
    assert main(["wire", "dump", str(path)]) == 0
    want, ack = capsys.readouterr().out.splitlines()[:2]
    assert "OFFERED|CHANNEL 5" in want
    assert "OFFERED|0xa000" in ack
