# SPDX-License-Identifier: Apache-2.0
"""Maps whose size depends on a job's vectors: made at run time, and put into the program's maps of maps."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from nicps.dataplane import bpf
from nicps.errors import EnvironmentProblem

Records = npt.NDArray[np.void]
Place: TypeAlias = tuple[
    int, int
]  # descriptors of a map of maps, and of the map that comes into it


@dataclass(frozen=True, slots=True)
class Wanted:
    """A map to make: like the map `shape`, with that many entries. Frozen: only programs write to it."""

    name: str
    shape: str
    entries: int
    frozen: bool = False


def make(fds: Mapping[str, int], wanted: tuple[Wanted, ...], what: str) -> list[int]:
    """Make the maps; return their descriptors, in this order. The caller owns them. The kernel clears their memory,
    which takes long.

    Args:
        fds: the loaded maps' descriptors by name.
        what: their content, for the error's message.

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
    """Replace the inner map. Returns once no run of the program uses the former one (10 to 30 ms)."""
    bpf.map_update(outer_fd, bytes(4), inner_fd.to_bytes(4, sys.byteorder))


def put_all(places: Iterable[Place]) -> None:
    """Replace several inner maps. Returns as `put` does, and takes no longer: the kernel waits once for all of them."""
    with ThreadPoolExecutor() as pool:
        list(pool.map(put, *zip(*places, strict=True)))


def swap(config: Any, *steps: Iterator[Sequence[Place]]) -> None:
    """Replace inner maps while the program takes no frames (20 to 60 ms, however many they are).

    Args:
        steps: each yields twice which maps go where. What it does between the two, no run of the program can disturb;
            a run that comes later sees that, and what it did before.
    """
    with _disabled(config):
        for _ in range(2):
            put_all([place for step in steps for place in next(step)])
        for step in steps:
            next(step, None)


def take_out(outer_fd: int) -> None:
    """Take the inner map away from the program. Returns as `put` does; a map that no process holds is freed then."""
    bpf.map_delete(outer_fd, bytes(4))


def view(fd: int, dtype: np.dtype[Any], banks: int, writable: bool = True) -> npt.NDArray[Any]:
    """The records of a map, (banks, records of a bank); they stay when the descriptor is closed."""
    entries = bpf.map_info(fd).entries
    return np.frombuffer(bpf.map_memory(fd, writable), dtype, entries).reshape(banks, -1)


@contextmanager
def _disabled(config: Any) -> Iterator[None]:
    """The program takes no frames inside this context, and never a frame with a mixture of old and new settings or
    maps, if `put` is called twice in it.

    After the first call no run of the program is active. A run that finds `enabled` set again sees all that was written
    before the second call.
    """
    enabled = int(config["enabled"][0])
    config["enabled"] = 0
    try:
        yield
    finally:
        config["enabled"] = enabled


def find_reach(here: npt.NDArray[np.bool_], first: int) -> tuple[int, int]:
    """How far the elements have come; the first has the number `first`.

    Returns the number of the first that is not there (one past the last if all are), and one past the last that is
    (`first` if none is).
    """
    found, lacking = np.flatnonzero(here), np.flatnonzero(~here)
    return (
        first + (int(lacking[0]) if len(lacking) else len(here)),
        first + int(found[-1]) + 1 if len(found) else first,
    )


def find_gaps(here: npt.NDArray[np.bool_], first: int, limit: int) -> list[tuple[int, int]]:
    """At most `limit` ranges (number, count) of elements that are not there; the first of the array has number
    `first`.
    """
    edges = np.flatnonzero(np.diff(np.concatenate(([True], here, [True]))))
    firsts, ends = edges[0::2][:limit], edges[1::2][:limit]
    return list(zip((firsts + first).tolist(), (ends - firsts).tolist(), strict=True))
