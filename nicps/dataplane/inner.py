# SPDX-License-Identifier: Apache-2.0
"""Maps that are as large as a job's vectors: they are made at run time, and put into the program's maps of maps."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from nicps.dataplane import bpf
from nicps.errors import EnvironmentProblem

Records = npt.NDArray[np.void]


@dataclass(frozen=True, slots=True)
class Wanted:
    """A map to make: like the map `shape`, with that many entries. Frozen: only programs write to it."""

    name: str
    shape: str
    entries: int
    frozen: bool = False


def make(fds: Mapping[str, int], wanted: tuple[Wanted, ...], what: str) -> list[int]:
    """Their descriptors, in this order; the caller owns them. The kernel clears their memory, which takes long.

    Args:
        fds: the loaded maps' descriptors by name.
        what: they hold, for the error's message.

    Raises:
        EnvironmentProblem: there is not enough memory.
    """
    made: list[int] = []
    try:
        for each in wanted:
            made.append(bpf.map_like(fds[each.shape], each.entries, each.name))
            if each.frozen:
                bpf.map_freeze(made[-1])
    except OSError as error:
        for fd in made:
            os.close(fd)
        size = sum(bpf.map_info(fds[each.shape]).value * each.entries for each in wanted)
        raise EnvironmentProblem(
            f"cannot allocate {size / 1e6:.0f} MB of {what}: {os.strerror(error.errno or 0)}"
        ) from None
    return made


def put(outer_fd: int, inner_fd: int) -> None:
    """From now on the program finds that one there. Returns when none is at work that saw the former (10 to 30 ms)."""
    bpf.map_update(outer_fd, bytes(4), inner_fd.to_bytes(4, sys.byteorder))


def view(fd: int, dtype: np.dtype[Any], banks: int, writable: bool = True) -> npt.NDArray[Any]:
    """The records of a map, (banks, records of a bank); they stay when the descriptor is closed."""
    entries = bpf.map_info(fd).entries
    return np.frombuffer(bpf.map_memory(fd, writable), dtype, entries).reshape(banks, -1)


@contextmanager
def disabled(config: Any) -> Iterator[None]:
    """The program takes no frames in here, and none with settings or maps that only partly are the new ones.

    That needs two calls of `put` in here: after the first no program is at work, and one that finds `enabled` set
    again finds what was written before the second.
    """
    enabled = int(config["enabled"][0])
    config["enabled"] = 0
    try:
        yield
    finally:
        config["enabled"] = enabled


def find_gaps(here: npt.NDArray[np.bool_], first: int, limit: int) -> list[tuple[int, int]]:
    """At most `limit` ranges (number, count) that are not there; the first of the array has number `first`."""
    edges = np.flatnonzero(np.diff(np.concatenate(([True], here, [True]))))
    firsts, ends = edges[0::2][:limit], edges[1::2][:limit]
    return list(zip((firsts + first).tolist(), (ends - firsts).tolist(), strict=True))
