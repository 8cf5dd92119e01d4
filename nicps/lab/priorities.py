# SPDX-License-Identifier: Apache-2.0
"""Ports of the lab's switch that heed 802.1p priorities, as a managed switch does: one queue for each of them.

A port has an HTB with eight classes at the cable's rate, the highest priority first. The bridge has taken the tag out
of the frame, so a program of a few instructions at the port's queue reads it beside the frame. The port puts it back
into the frame, where a host's XDP program finds it. Frames without a tag have priority 0.
"""

from __future__ import annotations

import os
import struct
from typing import Any

from nicps.dataplane import bpf, tags
from nicps.lab.filters import add_filter

_MAJOR = 1 << 16
_ROOT, _FIRST = 0x1, 0x10  # minor numbers; that of priority 0
_QUANTUM = 3_028  # bytes that a class sends in its turn: two full frames
_FLOOR = 100  # a class has this part of the rate for itself

_TCI_AT, _PRESENT_AT, _CLASS_AT = 24, 20, 72  # in struct __sk_buff
_LOAD, _STORE, _MOVE, _ADD, _SHIFT, _JUMP_IF_ZERO, _EXIT = 0x61, 0x63, 0xB7, 0x07, 0x77, 0x15, 0x95


def _instruction(
    code: int, to: int = 0, source: int = 0, offset: int = 0, number: int = 0
) -> bytes:
    return struct.pack("=BBhi", code, source << 4 | to, offset, number)


#: The class of a frame, by its tag.
_CLASSIFY = b"".join(
    (
        _instruction(_LOAD, 2, 1, _PRESENT_AT),
        _instruction(_MOVE, 3),
        _instruction(_JUMP_IF_ZERO, 2, offset=2),
        _instruction(_LOAD, 3, 1, _TCI_AT),
        _instruction(_SHIFT, 3, number=13),
        _instruction(_ADD, 3, number=_FIRST),
        _instruction(_STORE, 1, 3, _CLASS_AT),
        _instruction(_MOVE, 0),
        _instruction(_EXIT),
    )
)


def add_queues(ipr: Any, index: int, rate_bps: int) -> None:
    """Give a port its queues, at that rate for all together."""
    rate = rate_bps // 8  # pyroute2 takes a plain number as bytes per second
    ipr.tc("add", "htb", index, handle=_MAJOR, default=_FIRST)
    root = _MAJOR | _ROOT
    ipr.tc("add-class", "htb", index, handle=root, parent=_MAJOR, rate=rate, ceil=rate)
    for priority in range(tags.PRIORITIES):
        ipr.tc(
            "add-class",
            "htb",
            index,
            handle=_MAJOR | _FIRST + priority,
            parent=root,
            rate=max(1_000, rate // _FLOOR),
            ceil=rate,
            prio=_rank(priority),
            quantum=_QUANTUM,
        )
    program = bpf.program_load(bpf.PROGRAM_TYPES["sched_cls"], _CLASSIFY, 0, "lab_priority")
    try:
        add_filter(ipr, index, _MAJOR, "lab_priority", program, _MAJOR)
    finally:
        os.close(program)


def _rank(priority: int) -> int:
    """Of HTB, 0 is served first. Priority 1 is below 0 (IEEE 802.1Q)."""
    return 7 if priority == 1 else 6 if priority == 0 else 7 - priority


def sent(ipr: Any, index: int) -> dict[int, int]:
    """Frames that a port has sent, by priority."""
    found = {}
    for each in ipr.get_classes(index=index):
        minor = each["handle"] & 0xFFFF
        if minor >= _FIRST:
            basic = each.get_attr("TCA_STATS2").get_attr("TCA_STATS_BASIC")
            found[minor - _FIRST] = int(basic["packets"])
    return found
