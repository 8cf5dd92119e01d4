# SPDX-License-Identifier: Apache-2.0
"""The programs on the lab's switch ports: their settings and their counts.

Every port carries an XDP program of two instructions that passes all frames: a frame that leaves a veth by XDP_TX in
native mode reaches the other end only if that end has a program too. The first fault puts `ebpf/lab_port.c` onto all
ports, beside it.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from nicps.dataplane import bpf, loader
from nicps.dataplane.loader import Loaded
from nicps.lab.delayline import FAULTS
from nicps.lab.settings import Faults

_NO_FAULTS = Faults()
_COUNT = struct.Struct("=7Q")

# r0 = XDP_PASS; exit
_PASS = struct.pack("=BBhiBBhi", 0xB7, 0, 0, bpf.XDP_PASS, 0x95, 0, 0, 0)


@dataclass(frozen=True)
class PortCount:
    """The counts of one direction of one port, since the first fault.

    `dropped` were lost at random, `severed` were to cross a cut, `reordered` were held back,
    `delayed` sent late. `passed` went on, copies and late ones among them.
    """

    passed: int = 0
    dropped: int = 0
    severed: int = 0
    duplicated: int = 0
    corrupted: int = 0
    reordered: int = 0
    delayed: int = 0


@dataclass(frozen=True)
class PortFaults:
    """The settings of a port: faults, its side of a cut, the interface to the delay line; and the number of frames
    of `lose_type` from its host that are lost next, `lose_left`.
    """

    faults: Faults = _NO_FAULTS
    side: int = 0
    line: int = 0
    lose_left: int = 0
    lose_type: int = 0


@contextmanager
def pass_program() -> Iterator[int]:
    """The XDP program; if it is attached when the context ends, it stays."""
    fd = bpf.program_load(bpf.PROGRAM_TYPES["xdp"], _PASS, bpf.F_XDP_HAS_FRAGS, "lab_pass")
    try:
        yield fd
    finally:
        os.close(fd)


@contextmanager
def fault_programs() -> Iterator[Loaded]:
    """Compile and load `lab_port.c`; the program stays with its maps if it is attached when the context ends."""
    loaded = loader.load(
        "lab_port.c",
        {
            "lab_from_host": "sched_cls",
            "lab_to_host": "sched_cls",
            "lab_release": "sched_cls",
        },
    )
    try:
        yield loaded
    finally:
        loaded.close()


@contextmanager
def opened(map_id: int) -> Iterator[int]:
    """A descriptor of the map during the context."""
    fd = bpf.map_by_id(map_id)
    try:
        yield fd
    finally:
        os.close(fd)


def write_middles(map_fd: int, indices: dict[int, int]) -> None:
    """Write to all ports that cables have a middle: the ports' own indices by host number."""
    for number, index in {0: 1, **indices}.items():  # index 0 says that there is one
        bpf.map_update(map_fd, struct.pack("=I", number), struct.pack("=I", index))


def read_counts(map_fd: int, ifindex: int) -> tuple[PortCount, PortCount]:
    """The counts of the port for frames from its host and to it."""
    with bpf.map_memory(map_fd) as memory:
        at = 2 * ifindex * _COUNT.size
        from_host = PortCount(*_COUNT.unpack_from(memory, at))
        return from_host, PortCount(*_COUNT.unpack_from(memory, at + _COUNT.size))


def read_faults(map_fd: int, ifindex: int) -> PortFaults:
    """The settings of the port."""
    with bpf.map_memory(map_fd) as memory:
        found = FAULTS.unpack_from(memory, 2 * ifindex * FAULTS.size)
    *thresholds, delay_ns, side, line, lose_left, lose_type = found
    # Nine digits: the given value, whatever its threshold was rounded to.
    loss, duplicate, corrupt, reorder = (round(share / 2**32, 9) for share in thresholds)
    faults = Faults(loss, duplicate, corrupt, reorder, delay_ns / 1e6)
    return PortFaults(faults, side, line, max(0, lose_left), lose_type)


def write_faults(map_fd: int, ifindex: int, told: PortFaults) -> None:
    """Write the settings to the port, for both directions."""
    faults = told.faults
    shares = (faults.loss, faults.duplicate, faults.corrupt, faults.reorder)
    thresholds = [round(share * 2**32) for share in shares]
    delay_ns = round(faults.delay_ms * 1e6)
    value = FAULTS.pack(*thresholds, delay_ns, told.side, told.line, told.lose_left, told.lose_type)
    for direction in range(2):
        bpf.map_update(map_fd, struct.pack("=I", 2 * ifindex + direction), value)
