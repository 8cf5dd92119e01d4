# SPDX-License-Identifier: Apache-2.0
"""What a job with parameter servers has at this host, in the kernel and in memory files shared with its program.

A server's program gives the weights of the own part in a file, and gets that part back in another one; all else goes
through the maps (docs/servers.md).
"""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from nicps import wire
from nicps.dataplane import DataPlane
from nicps.dataplane.servers import I64, Servers, ServersPart, ServersStore
from nicps.errors import BpfLoadError, JobFailed
from nicps.job import actions as act
from nicps.layout import layout
from nicps.session.fields import Message
from nicps.session.served_form import Pulled, Serves

F32 = npt.NDArray[np.float32]

_PER = wire.lanes_per_fragment(32)
_BATCH = 4096  # fragments of 360 parameters: what is converted at a time
_RANGE_BITS = 22  # log2 of what no parameter may reach
_FLOAT = 4  # bytes


def units_of(weights: F32, bits: int) -> I64:
    """Parameters as multiples of 2**-bits.

    Args:
        weights: float32 (n,).

    Raises:
        JobFailed: one is not finite, or too large.
    """
    units = np.empty(len(weights), np.int64)
    for first in range(0, len(weights), _BATCH * _PER):
        here = slice(first, first + _BATCH * _PER)
        with np.errstate(invalid="ignore"):
            fits = np.abs(weights[here]) < 2.0**_RANGE_BITS
        if not fits.all():
            at = first + int(fits.argmin())
            raise JobFailed(
                f"parameter {at} of this server's part is {weights[at]}: servers hold numbers below 2**{_RANGE_BITS}"
            )
        np.rint(np.ldexp(weights[here].astype(np.float64), bits), out=units[here], casting="unsafe")
    return units


def weights_of(units: I64, bits: int) -> F32:
    """As workers read them: 360 parameters at a time are rounded to 31 bits and their sign.

    Args:
        units: multiples of 2**-bits, int64 (fragments, lanes), a multiple of 360 lanes.
    """
    rows = units.reshape(-1, _PER)
    found = np.empty(rows.shape, np.float32)
    for first in range(0, len(rows), _BATCH):
        here = rows[first : first + _BATCH]
        magnitude = np.bitwise_or.reduce(here ^ (here >> 63), axis=1)
        length = np.frexp(magnitude.astype(np.float64))[1].astype(np.int64)
        # Rounded up to the next power of two on its way to a double, a number may seem one bit longer.
        length -= (magnitude >> np.maximum(length - 1, 0)) == 0
        shift = np.maximum(length - 31, 0)[:, None]
        lane = (here + ((1 << shift) >> 1)) >> shift
        lane -= lane > 2**31 - 1
        scale = np.ldexp(np.float32(1), (shift - bits).astype(np.int32))
        np.multiply(
            lane.astype(np.int32).astype(np.float32), scale, out=found[first : first + len(here)]
        )
    return found.reshape(-1)


@dataclass(frozen=True, slots=True)
class ReservedPart:
    """An own part that the program does not use yet."""

    made: ServersPart

    def use(self, servers: Servers) -> None:
        """The program works with it from now on."""
        servers.use_part(self.made)

    def close(self) -> None:
        """It is not needed."""
        self.made.close()


@dataclass(frozen=True, slots=True)
class ReservedStore:
    """Own lanes and a store that the program does not use yet."""

    made: ServersStore

    def use(self, servers: Servers) -> None:
        """As `ReservedPart`."""
        servers.use_store(self.made)

    def close(self) -> None:
        """As `ReservedPart`."""
        self.made.close()


class ServedRoom:
    """Of the job that is here. What takes long is done in a thread; `use`, `drop` and `begin` at once."""

    def __init__(self, dataplane: DataPlane) -> None:
        self._dataplane = dataplane
        self._bits = layout().limits["PARAMETER_BITS"]
        self._reserved: dict[int, ReservedPart | ReservedStore] = {}
        self._given = -1  # a file that the program writes its weights to
        self._part = -1  # a file with the own part

    @property
    def _servers(self) -> Servers:
        servers = self._dataplane.maps.servers
        assert servers is not None, "the program of servers is loaded first"
        return servers

    # ---- in a thread

    def reserve(self, ticket: int, task: act.ReserveServed) -> int | act.StripesRefused:
        """Load the program, and make a store."""
        try:
            self._dataplane.open_servers()
        except BpfLoadError as error:
            return act.StripesRefused(str(error))
        if task.room:
            self._reserved[ticket] = ReservedStore(
                self._servers.reserve_store(task.room, task.pushes)
            )
        return ticket

    def fill(self, ticket: int, task: act.FillPart) -> int:
        """Make the own part of what the program has given.

        Raises:
            JobFailed: a weight is not finite, or too large.
        """
        weights = np.zeros(0, np.float32)
        if task.lanes:
            file = mmap.mmap(self._given, 0, prot=mmap.PROT_READ)
            weights = np.frombuffer(file, np.float32, task.lanes)
        units = units_of(weights, self._bits)
        made = self._servers.reserve_part(
            task.fragments, task.width, units, averages=task.averages, first=task.first
        )
        self._reserved[ticket] = ReservedPart(made)
        return ticket

    def read(self, task: act.ReadPart) -> None:
        """Write the own part into a file."""
        weights = weights_of(self._servers.parameters(), self._bits)[: task.lanes]
        file = _create("nicps-part", task.lanes)
        try:
            os.pwrite(file, weights.tobytes(), 0)
        except BaseException:
            os.close(file)
            raise
        former, self._part = self._part, file
        _close(former)

    # ---- at once

    def use(self, action: act.UseServed) -> None:
        """What was reserved comes into use."""
        self._reserved.pop(action.served).use(self._servers)

    def drop(self, action: act.DropServed) -> None:
        """It is not needed."""
        self._reserved.pop(action.served).close()

    def begin(self, action: act.BeginServing) -> None:
        """A phase begins."""
        self._servers.begin_phase(action.forget, action.room)

    def settle(self, action: act.Settled) -> None:
        """A round is committed with a list."""
        self._servers.settle(action.round)

    def descriptors(self, message: Message) -> tuple[int, ...]:
        """Of what a message tells of, in the order that it promises."""
        if isinstance(message, Pulled):
            return (self._part,) if message.lanes else ()
        if not isinstance(message, Serves):
            return ()
        fds = list[int]()
        store = self._servers.store
        if message.room and store is not None:
            fds += [store.own_fd, store.sums_fd]
        if message.lanes:
            _close(self._given)
            self._given = _create("nicps-weights", message.lanes)
            fds.append(self._given)
        return tuple(fds)

    # ---- the end

    def retire(self) -> None:
        """The job is over."""
        reserved, self._reserved = self._reserved, {}
        for made in reserved.values():
            made.close()
        _close(self._given)
        _close(self._part)
        self._given = self._part = -1
        if self._dataplane.maps.servers is not None:
            self._servers.retire()

    def release(self) -> None:
        """Give the kernel's memory back, once the programs are gone."""
        if self._dataplane.maps.servers is not None:
            self._servers.release()


def _create(name: str, lanes: int) -> int:
    """A memory file for so many float32 values, in whole pages."""
    file = os.memfd_create(name, os.MFD_CLOEXEC)
    os.truncate(file, -(-lanes * _FLOAT // mmap.PAGESIZE) * mmap.PAGESIZE)
    return file


def _close(fd: int) -> None:
    if fd >= 0:
        os.close(fd)
