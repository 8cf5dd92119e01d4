# SPDX-License-Identifier: Apache-2.0
"""XDP programs in which a processor stalls at a place that a test names (`stall.h`)."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
import pytest

from nicps.dataplane import bpf
from tests.xdp.kernel import Kernel, kernel

SOURCE = Path(__file__).with_name("stall.c")
SERVERS_SOURCE = Path(__file__).with_name("servers_stall.c")
SWITCH_SOURCE = Path(__file__).with_name("switch_stall.c")
WORDS = ("place", "reached", "go", "late")
#: A fragment's round is checked, and its slot is not claimed; the slot is claimed; the fragment is added, and not
#: counted; a token is bounced, and its copy is not written; a remainder is copied, and its place has no new tag; a
#: push's staleness is fixed, and nothing is added; a push is whole, and has not raised the version.
CHECKED, CLAIMED, ADDED, BOUNCED, COPIED, FIXED, WHOLE = 1, 2, 3, 4, 5, 6, 7
LIMIT_S = 60.0

T = TypeVar("T")


def words_of(fds: Mapping[str, int]) -> Any:
    """The memory by which a test stalls the program (`struct stall`)."""
    record = np.dtype([(name, np.uint64) for name in WORDS])
    return np.frombuffer(bpf.map_memory(fds["stalls"]), record, 1)[0]


@dataclass
class Met(Generic[T]):
    """The outcome of a frame whose processor stalled, and of the actions meanwhile; counters that have risen."""

    run: bpf.Run
    meanwhile: T
    counters: dict[str, int]


class Meeting:
    """A program, and a second processor that stalls in it.

    Args:
        run: gives the program a frame; `counters` are counts of frames by outcome.
    """

    def __init__(
        self,
        fds: Mapping[str, int],
        run: Callable[[bytes], bpf.Run],
        counters: Callable[[], Mapping[str, int]],
        pool: ThreadPoolExecutor,
    ) -> None:
        self._run, self._counters, self._pool = run, counters, pool
        self._words = words_of(fds)

    def stall(self, place: int, frame: bytes) -> Future[bpf.Run]:
        """Run a frame on another processor; returns when that stalls, or is done as it does not come to the place.

        It stalls for 20 to 30 ms at most.
        """
        for name in WORDS:
            self._words[name] = 0
        self._words["place"] = place
        other = self._pool.submit(self._run, frame)
        deadline = time.monotonic() + LIMIT_S
        while not self._words["reached"] and not other.done():
            time.sleep(
                0
            )  # the other thread needs the interpreter, which this one would keep for 5 ms
            assert time.monotonic() < deadline
        return other

    @property
    def reached(self) -> bool:
        """Whether a processor stalls, or has stalled."""
        return bool(self._words["reached"])

    def go(self) -> None:
        """Let the processor that stalls go on."""
        self._words["go"], self._words["place"] = 1, 0

    def meet(
        self, place: int, frame: bytes, prepare: Callable[[], None], meanwhile: Callable[[], T]
    ) -> Met[T]:
        """Run a frame on another processor, until that stalls; then `meanwhile`; then let it go on.

        If it did not wait until then, since this thread did not get its turn, everything begins anew.
        """
        deadline = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline:
            prepare()
            before = self._counters()
            other = self.stall(place, frame)
            assert self._words["reached"], "the frame does not come to this place"
            result = meanwhile()
            self.go()
            run = other.result(LIMIT_S)
            if not self._words["late"]:
                after = self._counters()
                risen = {name: after[name] - n for name, n in before.items() if after[name] != n}
                return Met(run, result, risen)
        pytest.fail("the other processor never waited long enough")


class Stalling(Meeting):
    """The program of `tests.xdp.kernel`."""

    def __init__(self, program: Kernel, pool: ThreadPoolExecutor) -> None:
        super().__init__(program.fds, program.run, program.maps.counters, pool)
        self.kernel, self.maps = program, program.maps

    def reset(self, blocks: int = 2) -> None:
        """No processor stalls; empty maps."""
        for name in WORDS:
            self._words[name] = 0
        self.kernel.reset(blocks)


@contextmanager
def stalling() -> Iterator[Stalling]:
    """The program, loaded; skips the test on one processor."""
    need_two_processors()
    with kernel(str(SOURCE)) as loaded, ThreadPoolExecutor(1) as pool:
        yield Stalling(loaded, pool)


def need_two_processors() -> None:
    """Skip the test on one."""
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("needs two processors")
