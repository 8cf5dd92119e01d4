# SPDX-License-Identifier: Apache-2.0
"""The LAN segment between virtual machines, without any."""

from __future__ import annotations

import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent / "vm-lab"))

from segment import Segment


@pytest.fixture
def segment(tmp_path: Path) -> Iterator[Segment]:
    with Segment(tmp_path / "segment") as made:
        yield made


def plug(segment: Segment, count: int = 3) -> list[socket.socket]:
    ports = [socket.socket(socket.AF_UNIX) for _ in range(count)]
    for port in ports:
        port.settimeout(10.0)
        port.connect(str(segment.path))
    has(segment, count)
    return ports


def has(segment: Segment, ports: int) -> None:
    deadline = time.monotonic() + 10
    while segment.ports != ports:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def framed(frame: bytes) -> bytes:
    return len(frame).to_bytes(4, "big") + frame


def test_all_others_get_it(segment: Segment) -> None:
    ports = plug(segment)
    ports[1].sendall(framed(b"one") + framed(b"another"))
    for port in (ports[0], ports[2]):
        got = b""
        while len(got) < 18:
            got += port.recv(100)
        assert got == framed(b"one") + framed(b"another")
    ports[1].settimeout(0.1)
    with pytest.raises(TimeoutError):
        ports[1].recv(100)
    assert segment.frames == 2
    for port in ports:
        port.close()


def test_a_full_port_makes_senders_wait(segment: Segment) -> None:
    """Nothing is lost, and nothing is mixed up when two send at once."""
    reader, *writers = plug(segment)
    count, size = 400, 1502

    def write(port: socket.socket, mark: int) -> None:
        for _ in range(count):
            port.sendall(framed(bytes([mark]) * size))

    def drain(port: socket.socket) -> None:
        with port.makefile("rb") as stream:
            for _ in range(count):
                assert stream.read(4 + size)

    threads = [
        threading.Thread(target=write, args=(port, mark)) for mark, port in enumerate(writers)
    ]
    threads += [threading.Thread(target=drain, args=(port,)) for port in writers]
    for thread in threads:
        thread.start()
    seen = [0, 0]
    with reader.makefile("rb") as stream:
        for _ in range(2 * count):
            assert int.from_bytes(stream.read(4), "big") == size
            frame = stream.read(size)
            assert frame == frame[:1] * size
            seen[frame[0]] += 1
    assert seen == [count, count]
    for thread in threads:
        thread.join(10.0)
        assert not thread.is_alive()
    for port in (reader, *writers):
        port.close()


def test_who_leaves_disturbs_nobody(segment: Segment) -> None:
    first, gone, last = plug(segment)
    gone.close()
    has(segment, 2)
    first.sendall(framed(b"still here"))
    assert last.recv(100) == framed(b"still here")
    segment.close()
    assert last.recv(100) == b""
    assert not segment.path.exists()
    first.close()
    last.close()


@pytest.mark.parametrize("left", [2, 4, 9], ids=["in the length", "behind it", "in the frame"])
def test_who_dies_within_a_frame(segment: Segment, left: int) -> None:
    """Nothing of that frame goes to the others: they would take the next one for the rest of it."""
    first, dying, last = plug(segment)
    dying.sendall(framed(b"whole") + framed(b"cut off")[:left])
    dying.close()
    has(segment, 2)
    first.sendall(framed(b"the next"))
    expected, got = framed(b"whole") + framed(b"the next"), b""
    while len(got) < len(expected):
        got += last.recv(100)
    assert got == expected and segment.frames == 2
    first.close()
    last.close()
