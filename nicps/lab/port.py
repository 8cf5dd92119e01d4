# SPDX-License-Identifier: Apache-2.0
"""The programs on the lab's switch ports, and their counters.

Every port carries an XDP program: a frame that leaves a veth by XDP_TX in native mode reaches the
other end only if that end has a program too. Without loss two instructions do, loaded without a
compiler; with loss it is `ebpf/lab_port.c`.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from nicps.dataplane import bpf, loader

_COUNT = struct.Struct("=QQ")

# r0 = XDP_PASS; exit
_PASS = struct.pack("=BBhiBBhi", 0xB7, 0, 0, bpf.XDP_PASS, 0x95, 0, 0, 0)


@dataclass(frozen=True)
class PortPrograms:
    """Descriptors of what goes onto each port; `to_host` and `counters_map` only where frames get
    lost."""

    from_host: int
    to_host: int | None = None
    counters_map: int | None = None


@dataclass(frozen=True)
class LossCount:
    """Frames that one direction of one port passed on and dropped."""

    passed: int = 0
    dropped: int = 0


@contextmanager
def programs(loss: float) -> Iterator[PortPrograms]:
    """Load the programs; what is attached when the context ends stays in the kernel."""
    if loss == 0.0:
        fd = bpf.program_load_xdp(_PASS, bpf.F_XDP_HAS_FRAGS, "lab_pass")
        try:
            yield PortPrograms(fd)
        finally:
            os.close(fd)
        return
    loaded = loader.load("lab_port.c", {"lab_from_host": "xdp", "lab_to_host": "sched_cls"})
    try:
        threshold = struct.pack("=Q", round(loss * 2**32))
        bpf.map_update(loaded.maps["config"], struct.pack("=I", 0), threshold)
        yield PortPrograms(
            loaded.programs["lab_from_host"],
            loaded.programs["lab_to_host"],
            bpf.map_info(loaded.maps["counts"]).id,
        )
    finally:
        loaded.close()


def read_counts(counters_map: int, ifindex: int) -> tuple[LossCount, LossCount]:
    """What the port lost from its host and to it, since the lab was made."""
    fd = bpf.map_by_id(counters_map)
    try:
        with bpf.map_memory(fd) as memory:
            at = 2 * ifindex * _COUNT.size
            from_host = LossCount(*_COUNT.unpack_from(memory, at))
            return from_host, LossCount(*_COUNT.unpack_from(memory, at + _COUNT.size))
    finally:
        os.close(fd)
