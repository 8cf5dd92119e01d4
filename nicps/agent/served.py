# SPDX-License-Identifier: Apache-2.0
"""The part of the parameters that this host serves (docs/servers.md): how it is filled, and read without a frame.

Filling and reading take long for a large part: a thread may do so, while the agent goes on.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Callable

import numpy as np

from nicps.dataplane.parameters import F32, I64, from_weights
from nicps.dataplane.servers import Servers, ServersPart
from nicps.job.serving import Room
from nicps.session.served_form import NearLimit


class WeightsFile:
    """Float32 in a memory file of whole pages, between this agent and its training program.

    Attributes: `fd`; `values`, float32 (n,), which the program can write, too.
    """

    def __init__(self, lanes: int) -> None:
        size = -(-4 * lanes // mmap.PAGESIZE) * mmap.PAGESIZE
        self.fd = os.memfd_create("nicps-weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, size)
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(
            self.fd, fcntl.F_ADD_SEALS, seals
        )  # a process that shrank it would kill the other end
        self.values: F32 = np.zeros(0, np.float32)
        if lanes:
            self.values = np.frombuffer(mmap.mmap(self.fd, size), np.float32, lanes)

    def close(self) -> None:
        """Close the descriptor; the mapping goes with the last view of it."""
        os.close(self.fd)


class ServedPart:
    """One host's part in a phase.

    Args:
        servers: this host's maps.
        room: what of the vector is here.
        width: bits of a lane of a step.
        vector: parameters in the vector.
    """

    def __init__(self, servers: Servers, room: Room, width: int, vector: int) -> None:
        self._servers, self._room, self._width = servers, room, width
        self.lanes = room.lanes(width, vector)

    @property
    def is_first(self) -> bool:
        """It is the first server's."""
        return self._room.rank == 0

    def fill(self, file: WeightsFile) -> ServersPart:
        """New maps with the weights that the training program has written into the file.

        Raises:
            TooLarge: a weight cannot be a parameter.
            EnvironmentProblem: there is not enough memory.
        """
        return self._reserve(lambda units: from_weights(file.values, self.lanes.start, units))

    def _reserve(self, fill: Callable[[I64], None]) -> ServersPart:
        room = self._room
        return self._servers.reserve_part(room.homes, self._width, fill, averages=room.averages)

    def read(self) -> WeightsFile:
        """A file with the part, rounded as in an answer to a pull. No worker may push meanwhile."""
        file = WeightsFile(len(self.lanes))
        self._servers.read_part(file.values)
        return file

    def find_full(self) -> NearLimit | None:
        """What the training program is told, where a parameter has come near the limits."""
        found = self._servers.find_full(self._room.first)
        return NearLimit(self.lanes.start + found[0], found[1]) if found is not None else None
