# SPDX-License-Identifier: Apache-2.0
"""The lab's port program on single frames, without any lab."""

from __future__ import annotations

import struct
from collections.abc import Iterator

import pytest

from nicps.dataplane import bpf
from nicps.dataplane.loader import Loaded
from nicps.lab import Faults, PortCount, PortFaults, delayline, port

#: A test run happens on the loopback interface.
PORT = 1
OK, SHOT, REDIRECT = 0, 2, 7
FROM_HOST, TO_HOST = "lab_from_host", "lab_to_host"
COUNT = struct.Struct("=7Q")


@pytest.fixture(scope="module")
def loaded() -> Iterator[Loaded]:
    """The programs and their maps."""
    with port.fault_programs() as programs:
        yield programs


@pytest.fixture(autouse=True)
def empty(loaded: Loaded) -> None:
    """No faults, and nothing counted."""
    tell(loaded, Faults())
    for key in (2 * PORT, 2 * PORT + 1):
        bpf.map_update(loaded.maps["counts"], struct.pack("=I", key), bytes(COUNT.size))


def tell(loaded: Loaded, faults: Faults, side: int = 0) -> None:
    port.write_faults(loaded.maps["faults"], PORT, PortFaults(faults, side, line=PORT))


def counts(loaded: Loaded, program: str) -> PortCount:
    return port.read_counts(loaded.maps["counts"], PORT)[program == TO_HOST]


def frame_of(length: int) -> bytes:
    return b"\xff" * 6 + bytes(range(1, 7)) + b"\x88\xb6" + bytes(n % 251 for n in range(length))


def test_maps_are_laid_out_as_python_has_it(loaded: Loaded) -> None:
    faults, counted = (bpf.map_info(loaded.maps[name]) for name in ("faults", "counts"))
    assert (faults.value, faults.entries) == (delayline.FAULTS.size, 2 * delayline.PORTS)
    assert (counted.value, counted.entries) == (COUNT.size, 2 * delayline.PORTS)


def test_what_is_told_is_read_again(loaded: Loaded) -> None:
    told = PortFaults(Faults(0.02, 0.01, 1.0, 1e-6, 12.5), side=3, line=9)
    port.write_faults(loaded.maps["faults"], 77, told)
    assert port.read_faults(loaded.maps["faults"], 77) == told
    assert port.read_faults(loaded.maps["faults"], 78) == PortFaults()


@pytest.mark.parametrize("program", [FROM_HOST, TO_HOST])
def test_never_and_always(loaded: Loaded, program: str) -> None:
    fd, frame = loaded.programs[program], frame_of(50)
    run = bpf.prog_test_run(fd, frame, repeat=5000)
    assert (run.verdict, run.frame) == (OK, frame)
    assert counts(loaded, program) == PortCount(passed=5000)
    tell(loaded, Faults(loss=1.0))
    assert bpf.prog_test_run(fd, frame, repeat=5000).verdict == SHOT
    assert counts(loaded, program) == PortCount(passed=5000, dropped=5000)
    other = TO_HOST if program == FROM_HOST else FROM_HOST
    assert counts(loaded, other) == PortCount()


@pytest.mark.parametrize("program", [FROM_HOST, TO_HOST])
def test_corruption_makes_one_byte_another(loaded: Loaded, program: str) -> None:
    tell(loaded, Faults(corrupt=1.0))
    hit = set()
    for _ in range(1000):
        for length in (1, 2, 20):
            frame = frame_of(length)
            after = bpf.prog_test_run(loaded.programs[program], frame).frame
            assert len(after) == len(frame)
            (offset,) = [n for n in range(len(frame)) if frame[n] != after[n]]
            assert offset >= 14
            hit.add((length, offset))
    # Each of 20 bytes is missed a thousand times once in 10^21 runs.
    assert hit == {(length, 14 + n) for length in (1, 2, 20) for n in range(length)}
    assert counts(loaded, program) == PortCount(passed=3000, corrupted=3000)


def test_corruption_reaches_the_last_byte_of_the_longest_frame(loaded: Loaded) -> None:
    tell(loaded, Faults(corrupt=1.0))
    frame = frame_of(1500)
    offsets = []
    for _ in range(2000):
        after = bpf.prog_test_run(loaded.programs[TO_HOST], frame).frame
        offsets += [n for n in range(len(frame)) if frame[n] != after[n]]
    assert len(offsets) == 2000
    assert min(offsets) < 60 and max(offsets) > len(frame) - 45


def test_a_bare_header_has_nothing_to_corrupt(loaded: Loaded) -> None:
    tell(loaded, Faults(corrupt=1.0))
    run = bpf.prog_test_run(loaded.programs[FROM_HOST], frame_of(0))
    assert (run.verdict, run.frame) == (OK, frame_of(0))
    assert counts(loaded, FROM_HOST) == PortCount(passed=1)


def test_who_waits_is_counted_when_it_is_back(loaded: Loaded) -> None:
    tell(loaded, Faults(delay_ms=1.0))
    assert bpf.prog_test_run(loaded.programs[TO_HOST], frame_of(50)).verdict == REDIRECT
    assert counts(loaded, TO_HOST) == PortCount(delayed=1)
    tell(loaded, Faults(reorder=1.0))
    assert bpf.prog_test_run(loaded.programs[TO_HOST], frame_of(50)).verdict == REDIRECT
    assert counts(loaded, TO_HOST) == PortCount(delayed=1, reordered=1)


def test_a_frame_without_a_mark_is_not_released(loaded: Loaded) -> None:
    assert bpf.prog_test_run(loaded.programs["lab_release"], frame_of(50)).verdict == SHOT
