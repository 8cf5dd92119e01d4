# SPDX-License-Identifier: Apache-2.0
"""Ring buffers by which an XDP program wakes a process (BPF_MAP_TYPE_RINGBUF); the agent's, of rounds of stripes."""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from nicps.barrier import barrier
from nicps.dataplane import bpf
from nicps.layout import layout

_HEAD_BYTES = 8  # before each record: its length, and its place in the ring
_BUSY, _DISCARDED = 1 << 31, 1 << 30


@dataclass(frozen=True, slots=True)
class Bell:
    """A message of the program (`struct nicps_bell`): a list if `count` is 0, otherwise how many sums are here.

    Attributes: `tag`, view << 32 | round; of servers, the number of the step or the pull. `members`, the list, bit
    number - 1. `fragments`, of the round. `channel`, of the round.
    `unit`, of the round, where `count` is 0; of servers, where `fragments` is 0, too, the member that refuses.
    """

    tag: int
    members: int
    count: int
    fragments: int
    unit: int
    channel: int = 0


class Ring:
    """The reader of a ring whose records are all alike. A ring has one reader at most.

    The first page holds the reader's position, the second the program's. The records follow. Their memory is mapped
    twice in a row, so that every record is contiguous.

    Args:
        fd: the map's; the caller keeps it open as long as this lives.
        record: the type of the program's records.
    """

    def __init__(self, fd: int, record: np.dtype[Any]) -> None:
        page, self._fd = mmap.PAGESIZE, fd
        self._size = bpf.map_info(fd).entries
        consumer = mmap.mmap(fd, page, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        rest = mmap.mmap(fd, page + 2 * self._size, mmap.MAP_SHARED, mmap.PROT_READ, offset=page)
        self._read = np.frombuffer(consumer, np.uint64, 1)
        self._written = np.frombuffer(rest, np.uint64, 1)
        self._records = np.frombuffer(rest, np.uint8, offset=page)
        self._record = np.dtype([("length", "=u4"), ("page", "=u4"), ("record", record)])
        assert self._record.itemsize == _HEAD_BYTES + record.itemsize

    def fileno(self) -> int:
        """A descriptor that is readable while `read` would return something."""
        return self._fd

    def read(self) -> npt.NDArray[Any]:
        """A copy of the records since the last call, oldest first."""
        begin, end = int(self._read[0]), int(self._written[0])
        barrier()  # a record's length is written before the position, the record before its length
        at = begin % self._size
        records = np.frombuffer(self._records[at : at + end - begin], self._record)
        written = np.flatnonzero(records["length"] & (_BUSY | _DISCARDED))
        records = records[: written[0]] if len(written) else records
        barrier()
        copied = records["record"].copy()
        barrier()  # they have been read: the program may overwrite them
        self._read[0] = begin + len(records) * self._record.itemsize
        return copied


class Doorbell(Ring):
    """The reader of the agent's ring."""

    def __init__(self, fd: int) -> None:
        super().__init__(fd, layout().records["bell"])

    def take(self) -> list[Bell]:
        """The bells since the last call, oldest first."""
        bells = self.read()
        names = ("tag", "members", "count", "fragments")
        columns = [bells[name].tolist() for name in names]
        columns += [bells["unit"].view(np.int8).tolist(), bells["channel"].tolist()]
        return [Bell(*values) for values in zip(*columns, strict=True)]
