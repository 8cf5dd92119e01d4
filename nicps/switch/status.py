# SPDX-License-Identifier: Apache-2.0
"""The state of a Linux switch that adds, read from outside its process: its program on the ports, and its maps."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from nicps.dataplane import bpf, loader, xdp
from nicps.errors import NetworkProblem
from nicps.layout import layout
from nicps.protocol.view import numbers


@dataclass(frozen=True, slots=True)
class SwitchStatus:
    """The state of one process.

    Attributes:
        ports: modes of the program by interface.
        view: the one for which it adds; 0: none.
        members: numbers of the live ones.
        keyed: the frames that it takes and sends are signed.
        fragments, width: the room; 0: none yet.
        counters: frames by outcome.
    """

    ports: dict[str, str]
    view: int
    members: list[int]
    keyed: bool
    fragments: int
    width: int
    counters: dict[str, int]


def read_status() -> list[SwitchStatus]:
    """All switches in this network namespace.

    Raises:
        NotRoot: without the privileges to read maps.
        NetworkProblem: there is none.
    """
    loader.need_root()
    ports: dict[int, dict[str, str]] = {}
    for index, name in socket.if_nameindex():
        there = xdp.attached(index)
        if there is not None and there.name == xdp.SWITCH_PROGRAM:
            ports.setdefault(there.id, {})[name] = there.mode
    if not ports:
        raise NetworkProblem("no switch that adds runs here: start one with `nicps switch xdp run`")
    return [_read(ident, names) for ident, names in ports.items()]


def _read(ident: int, ports: dict[str, str]) -> SwitchStatus:
    with _opened(bpf.open_program, ident) as program:
        ids = bpf.program_maps(program)
    config: Any = None
    counts: dict[str, int] = {}
    for each in ids:
        with _opened(bpf.map_by_id, each) as fd:
            info = bpf.map_info(fd)
            if info.name == "config":
                record = layout().records["switch_config"]
                config = np.frombuffer(bpf.map_memory(fd), record, 1)[0].copy()
            elif info.name == "counters":
                values = np.frombuffer(bpf.map_memory(fd), np.uint64, info.entries).tolist()
                counts = dict(zip(layout().counters, values, strict=True))
    live = bool(config["enabled"])
    return SwitchStatus(
        ports,
        int(config["view"]) if live else 0,
        sorted(numbers(int(config["live_members"]))) if live else [],
        bool(config["keyed"]) and live,
        int(config["room"]),
        int(config["width"]),
        counts,
    )


@contextlib.contextmanager
def _opened(open_: Callable[[int], int], ident: int) -> Iterator[int]:
    try:
        fd = open_(ident)
    except OSError:
        raise NetworkProblem("the switch has just ended") from None
    try:
        yield fd
    finally:
        os.close(fd)
