# SPDX-License-Identifier: Apache-2.0
"""The maps of the XDP program's room for parameter servers (docs/servers.md), and what is read out of them.

A host has a *part*, as a server, or a *store*, as a worker, or both. Fragments are push fragments in a part, and
fragments of 32-bit lanes in a store.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from nicps import wire
from nicps.barrier import barrier
from nicps.dataplane import bpf, inner
from nicps.dataplane.inner import Records, Wanted
from nicps.dataplane.parameters import F32, I64, as_told, largest
from nicps.errors import JobFailed
from nicps.layout import layout
from nicps.wire import MAX_MEMBERS

_CLAIMED_S = 3.0  # a program has a claim for a microsecond
_DISTINCT = 0xFFFFFFFF  # of a count, how many
_LOW = np.uint64(0xFFFFFFFF)
_BATCH = 64  # push fragments that are read at a time
_TOLD_LANES = wire.lanes_per_fragment(32)
_MADE, _STORED, _ACKNOWLEDGED = (0, 0), (1, 0), (1, 1)  # counts, by bank and place


@dataclass(frozen=True, slots=True)
class ServersPart:
    """Homes and parameters of `fragments` push fragments, in `blocks` blocks, that the program does not use yet."""

    fragments: int
    width: int
    blocks: int
    homes_fd: int
    parameters_fd: int

    def close(self) -> None:
        """They are not needed after all."""
        _close(self.homes_fd, self.parameters_fd)


@dataclass(frozen=True, slots=True)
class ServersStore:
    """Own lanes of `pushes` push fragments, and a store of `room` fragments, that the program does not use yet."""

    room: int
    pushes: int
    own_fd: int
    sums_fd: int
    taken_fd: int

    def close(self) -> None:
        """They are not needed after all."""
        _close(self.own_fd, self.sums_fd, self.taken_fd)


class Servers:
    """What a server holds, and what a worker has pulled.

    Args:
        fds: the maps' descriptors by name, those of the program of servers too; the caller keeps them open.
        config, ring, progress: views of these maps; `progress` by bank and sender.
        quiesce: returns once every program that saw the settings as they were has ended.
        swapping: as of `Stripes`.

    Attributes: `part` and `store`, what the program uses; None as long as there is none. `homes`, `struct nicps_home`;
    `own` and `sums`, `struct nicps_own` and `struct nicps_stored`, the latter read-only; `taken`, read-only, numbers.
    """

    def __init__(
        self,
        fds: Mapping[str, int],
        config: Records,
        ring: Records,
        progress: Records,
        quiesce: Callable[[], object],
        swapping: threading.Lock,
    ) -> None:
        self._fds, self._config, self._ring, self._progress = fds, config, ring, progress
        self._quiesce = quiesce
        shapes = layout().records
        self._swapping = swapping
        self.part: ServersPart | None = None
        self.store: ServersStore | None = None
        self.homes: Records = np.zeros(0, shapes["home"])
        self.own: Records = np.zeros(0, shapes["own"])
        self.sums: Records = np.zeros(0, shapes["stored"])
        self.taken: npt.NDArray[np.uint64] = np.zeros(0, np.uint64)
        self._blocks: I64 = np.zeros((0, wire.BLOCK_LANES), np.int64)
        self._pushers = self._view("pushers", shapes["pusher"])
        self._answered = self._view("answered", shapes["answered"])

    def _view(self, name: str, dtype: np.dtype[Any]) -> Any:
        entries = bpf.map_info(self._fds[name]).entries
        return np.frombuffer(bpf.map_memory(self._fds[name]), dtype, entries)

    # ---- what the maps are

    def reserve_part(
        self, fragments: int, width: int, fill: Callable[[I64], object], *, averages: bool
    ) -> ServersPart:
        """A new part for `use_part`: that takes long, and may be done in another thread.

        Args:
            fragments: push fragments of the part.
            width: bits of a lane of a step.
            fill: writes the parameters, multiples of 2**-`PARAMETER_BITS`: int64 (fragments * lanes,), zeros before.
            averages: there are synchronisations, which need as much memory again.

        Raises:
            EnvironmentProblem: there is not enough memory.
            JobFailed: `fill` refuses.
        """
        blocks = max(-(-fragments // wire.fragments_per_block(width)), 1)
        wanted = (
            Wanted("nicps_homes", "homes_shape", max(fragments, 1)),
            Wanted("nicps_params", "blocks_shape", blocks * (1 + averages)),
        )
        what = "parameters and their places"
        part = ServersPart(fragments, width, blocks, *inner.make(self._fds, wanted, what))
        try:
            memory = bpf.map_memory(part.parameters_fd)
            fill(np.frombuffer(memory, np.int64, fragments * wire.lanes_per_fragment(width)))
            memory.close()  # a map with a writable mapping cannot be frozen
            bpf.map_freeze(part.parameters_fd)
        except BaseException:
            part.close()
            raise
        return part

    def reserve_store(self, room: int, pushes: int) -> ServersStore:
        """A new store for `use_store`; as `reserve_part`.

        Args:
            room: fragments of parameters in the vector.
            pushes: push fragments of the vector.

        Raises:
            EnvironmentProblem: there is not enough memory.
        """
        wanted = (
            Wanted("nicps_own", "own_shape", pushes),
            Wanted("nicps_stored", "sums_shape", room, frozen=True),
            Wanted("nicps_taken", "taken_shape", pushes, frozen=True),
        )
        made = inner.make(self._fds, wanted, "own lanes and pulled parameters")
        return ServersStore(room, pushes, *made)

    def use_part(self, reserved: ServersPart) -> None:
        """From now on steps for the own part go there. Takes no frames while it works (20 to 60 ms)."""
        with self._swapping:
            inner.swap(self._config, self._swap_part(reserved))
        self.homes = inner.view(reserved.homes_fd, layout().records["home"], 1)[0]
        lanes = np.dtype((np.int64, wire.BLOCK_LANES))
        blocks = inner.view(reserved.parameters_fd, lanes, 1, writable=False)
        self._blocks = blocks.reshape(-1, wire.BLOCK_LANES)

    def _swap_part(self, reserved: ServersPart) -> Iterator[list[inner.Place]]:
        yield [(self._fds["homes"], reserved.homes_fd)]
        self._config["gather_blocks"] = reserved.blocks
        yield [(self._fds["parameters"], reserved.parameters_fd)]
        # Of the job before: in new homes nothing is due, and none is full.
        self._config["settled"] = self._ring["full"] = 0
        self._drop(self.part)
        self.part = reserved

    def use_store(self, reserved: ServersStore) -> None:
        """From now on parameters that come go there. Takes no frames while it works (20 to 60 ms)."""
        shapes = layout().records
        with self._swapping:
            inner.swap(self._config, self._swap_store(reserved))
        self.own = inner.view(reserved.own_fd, shapes["own"], 1)[0]
        self.sums = inner.view(reserved.sums_fd, shapes["stored"], 1, writable=False)[0]
        self.taken = inner.view(reserved.taken_fd, np.dtype(np.uint64), 1, writable=False)[0]

    def _swap_store(self, reserved: ServersStore) -> Iterator[list[inner.Place]]:
        yield [(self._fds["own"], reserved.own_fd)]
        for bank, place in (_STORED, _ACKNOWLEDGED):
            self._progress[bank, place] = np.zeros((), self._progress.dtype)
        self._config["room"] = reserved.room
        yield [(self._fds["taken"], reserved.taken_fd), (self._fds["sums"], reserved.sums_fd)]
        self._drop(self.store)
        self.store = reserved

    @property
    def in_use(self) -> bool:
        """The program takes frames of servers into a part or a store."""
        there = self.part is not None or self.store is not None
        return there and bool(self._config["room"][0] or self._config["gather_blocks"][0])

    def retire(self) -> None:
        """The job is over: the program takes no frames of servers into these maps, and `release` frees them."""
        self._config["room"] = self._config["gather_blocks"] = 0
        shapes = layout().records
        self.homes = np.zeros(0, shapes["home"])
        self.own, self.sums = np.zeros(0, shapes["own"]), np.zeros(0, shapes["stored"])
        self.taken = np.zeros(0, np.uint64)
        self._blocks = np.zeros((0, wire.BLOCK_LANES), np.int64)

    def release(self) -> None:
        """Give the memory of retired maps back to the kernel; as `Stripes.release`."""
        with self._swapping:
            if self._config["room"][0] or self._config["gather_blocks"][0]:
                return
            for name, there in (
                ("homes", self.part),
                ("parameters", self.part),
                ("own", self.store),
                ("sums", self.store),
                ("taken", self.store),
            ):
                if there is not None:
                    inner.take_out(self._fds[name])
            self.close()

    def close(self) -> None:
        """Close the maps; views that somebody holds stay readable."""
        self._drop(self.part)
        self._drop(self.store)
        self.part = self.store = None

    @staticmethod
    def _drop(held: ServersPart | ServersStore | None) -> None:
        if held is not None:
            held.close()

    # ---- phases and rounds

    def begin_phase(
        self,
        forget: Collection[int] | None = None,
        room: int | None = None,
        *,
        staleness: bool = True,
    ) -> None:
        """What a round of the phase before has come to that was dropped never counts.

        No round is open until the next one begins. Takes 10 to 30 ms: a frame that was checked before may still be
        added, and must find its step's number here.

        Args:
            forget: members whose agents have begun anew, and number their steps from 1 on again; None: all. Others may
                still have frames of the phase before under way, which are duplicates.
            room: fragments of parameters in the vector, where this host has no store.
            staleness: a push counts 1 / staleness (S3); otherwise all count alike.
        """
        self._config["round"] = 0
        self._config["staleness"] = staleness
        if room is not None:
            self._config["room"] = room
        self._quiesce()
        for number in range(1, MAX_MEMBERS + 1) if forget is None else forget:
            self.homes["last"][:, number - 1] = 0
        dropped = (self.homes["tag"] & _LOW) > self._config["settled"][0]
        self.homes["due"][dropped] = 0
        self._pushers[...] = np.zeros((), self._pushers.dtype)
        self._answered[...] = np.zeros((), self._answered.dtype)
        self._progress[...] = np.zeros((), self._progress.dtype)

    def open_round(self, round_: int, *, settled: bool) -> None:
        """That round is the open one; `settled`: the one before was committed with a list.

        Until the last of these stores, what is asked for of this round is answered with NOT_YET.
        """
        if settled:
            self.settle(round_ - 1)
        self.begin_round(round_)
        barrier()
        self._config["round"] = round_

    def settle(self, round_: int) -> None:
        """That round is committed with a list: what it comes to is added as homes are touched in later rounds."""
        self._config["settled"] = round_

    def begin_round(self, round_: int) -> None:
        """No push of that round is whole. It is open once `config` says so, after a barrier."""
        self._ring["version"] = np.uint64(round_ << 32)

    # ---- what a server has

    @property
    def version(self) -> tuple[int, int]:
        """A round, and how many pushes in it are whole here."""
        round_, pushes = divmod(int(self._ring["version"][0]), 1 << 32)
        return round_, pushes

    @property
    def full(self) -> int | None:
        """The first push fragment that takes no more steps, as a parameter in it is near the limits; None: none is."""
        return int(self._ring["full"][0]) - 1 if self._ring["full"][0] else None

    def parameters(self, first: int = 0, end: int | None = None) -> I64:
        """Of the own part, int64 (fragments, lanes), as it is once all that is committed is in it; a copy.

        Nobody may push or contribute meanwhile; pulls may come.

        Raises:
            JobFailed: a program keeps a claim.

        Args:
            first, end: push fragments of the part.
        """
        part = self.part
        if part is None:
            return np.zeros((0, 0), np.int64)
        end = part.fragments if end is None else min(end, part.fragments)
        flat = self._blocks.reshape(-1, wire.lanes_per_fragment(part.width))
        sums = part.blocks * wire.fragments_per_block(part.width)
        found = np.empty((end - first, flat.shape[1]), np.int64)
        left, deadline = np.arange(first, end), time.monotonic() + _CLAIMED_S
        while len(left):
            # A pull settles its home: what is due goes into the parameters, under a claim.
            before = self.homes[left]
            barrier()
            free = self.homes["claim"][left] == 0  # read after what it guards
            barrier()
            units = flat[left]
            settled = (before["tag"] & _LOW) <= self._config["settled"][0]
            due = (before["due"] != 0) & settled & (before["full"] == 0)
            units[due] += flat[sums + left[due]]
            barrier()
            after = self.homes[left]
            same = free & (before["due"] == after["due"]) & (after["claim"] == 0)
            found[left[same] - first] = units[same]
            left = left[~same]
            if len(left) and time.monotonic() > deadline:
                raise JobFailed(
                    f"push fragment {left[0]} of this server's part stays claimed: a program has stopped in it"
                )
        return found

    def read_part(self, out: F32) -> None:
        """Read the own part, rounded as in an answer to a pull. Another thread may do so; as `parameters`.

        Args:
            out: float32 (n,), what of the vector is in the part; written.
        """
        part = self.part
        if part is None:
            return
        lanes = wire.lanes_per_fragment(part.width)
        for first in range(0, part.fragments, _BATCH):
            units = self.parameters(first, first + _BATCH)
            place = out[first * lanes : (first + _BATCH) * lanes]
            as_told(units.reshape(-1, _TOLD_LANES), place)

    def find_full(self, first: int) -> tuple[int, float] | None:
        """The parameter that is near the limits: its place in the own part, and its value. None: there is none.

        Args:
            first: of the part, in push fragments of the vector.
        """
        full, part = self.full, self.part
        if full is None or part is None:
            return None
        place, value = largest(self.parameters(full - first, full - first + 1)[0])
        return (full - first) * wire.lanes_per_fragment(part.width) + place, value

    def made(self, round_: int, view: int) -> int:
        """Push fragments of the own part to which all listed members of that round have contributed."""
        return self._count(_MADE, view << 32 | round_)

    # ---- what a worker has

    def pulled(self, number: int) -> int:
        """Fragments of parameters that have come of that pull."""
        return self._count(_STORED, number)

    def acknowledged(self, number: int) -> int:
        """Push fragments of that step that servers have added."""
        return self._count(_ACKNOWLEDGED, number)

    def _count(self, place: tuple[int, int], number: int) -> int:
        progress = self._progress[place]
        if int(progress["tag"]) != number:
            return 0
        barrier()  # a count is set back before its tag is written
        return int(progress["count"]) & _DISTINCT

    def pulled_to(self, number: int, first: int, end: int) -> tuple[int, int]:
        """Of fragments `first` to `end` (exclusive): how far they have come of that pull; as `Stripes.reached`."""
        here = self.sums["tag"][first:end] == np.uint64(number)
        barrier()  # lanes, exponent and version are written before the tag
        return inner.find_reach(here, first)

    def acknowledged_to(self, number: int, first: int, end: int) -> tuple[int, int]:
        """The same of push fragments of that step, and of what servers have added."""
        return inner.find_reach(self.taken[first:end] >= np.uint64(number), first)

    def missing_parameters(
        self, number: int, first: int, end: int, limit: int
    ) -> list[tuple[int, int]]:
        """At most `limit` ranges (index, count) of `first` to `end` (exclusive) that have not come of that pull."""
        here = self.sums["tag"][first:end] == np.uint64(number)
        barrier()  # lanes, exponent and version are written before the tag
        return inner.find_gaps(here, first, limit)

    def missing_acknowledgements(
        self, number: int, first: int, end: int, limit: int
    ) -> list[tuple[int, int]]:
        """The same of push fragments of that step, and of what servers have said of it."""
        return inner.find_gaps(self.taken[first:end] >= np.uint64(number), first, limit)

    def least_version(self, first: int, end: int) -> tuple[int, int]:
        """Round and version of the oldest of these parameters: what a push to their server names."""
        least = int(self.sums["rest"][first:end].min())
        round_, version = divmod(least, 1 << 32)
        return round_, version

    def answered(self, server: int) -> tuple[int, int, int, int]:
        """What a server has said of this host's steps: a number and its staleness, a round and its highest version."""
        record = self._answered[server]
        number, staleness = divmod(int(record["staleness"]), 1 << 32)
        return number, staleness, *divmod(int(record["version"]), 1 << 32)


def _close(*fds: int) -> None:
    for fd in fds:
        if fd >= 0:
            os.close(fd)
