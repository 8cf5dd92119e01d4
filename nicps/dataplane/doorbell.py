# SPDX-License-Identifier: Apache-2.0
"""The ring buffer by which the XDP program wakes the agent in rounds of stripes (BPF_MAP_TYPE_RINGBUF)."""

from __future__ import annotations

import mmap
from dataclasses import dataclass

import numpy as np

from nicps.barrier import barrier
from nicps.dataplane import bpf
from nicps.layout import layout

_HEAD_BYTES = 8  # before each record: its length, and what it is part of
_BUSY, _DISCARDED = 1 << 31, 1 << 30


@dataclass(frozen=True, slots=True)
class Bell:
    """What the program tells (`struct nicps_bell`): a list, if `count` is 0; or how many sums there are.

    Attributes: `tag`, view << 32 | round. `members`, the list, bit number - 1. `fragments`, of the round.
    `unit`, of the round, where `count` is 0.
    """

    tag: int
    members: int
    count: int
    fragments: int
    unit: int


class Doorbell:
    """The reader of the ring, of which there may be one only.

    The first page holds how far it has read, the second how far the program has written; then come the records, in
    memory that is mapped twice, so that none is in two pieces.

    Args:
        fd: the map's; the caller keeps it open as long as this lives.
    """

    def __init__(self, fd: int) -> None:
        page, self._fd = mmap.PAGESIZE, fd
        self._size = bpf.map_info(fd).entries
        consumer = mmap.mmap(fd, page, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        rest = mmap.mmap(fd, page + 2 * self._size, mmap.MAP_SHARED, mmap.PROT_READ, offset=page)
        self._read = np.frombuffer(consumer, np.uint64, 1)
        self._written = np.frombuffer(rest, np.uint64, 1)
        self._records = np.frombuffer(rest, np.uint8, offset=page)
        bell = layout().records["bell"]
        self._record = np.dtype([("length", "=u4"), ("page", "=u4"), ("bell", bell)])
        assert self._record.itemsize == _HEAD_BYTES + bell.itemsize

    def fileno(self) -> int:
        """Readable while there is something to take."""
        return self._fd

    def take(self) -> list[Bell]:
        """What was told since the last time, oldest first."""
        begin, end = int(self._read[0]), int(self._written[0])
        barrier()  # a record's length is written before the position, the record before its length
        each = self._record.itemsize
        at = begin % self._size
        records = np.frombuffer(self._records[at : at + end - begin], self._record)
        written = np.flatnonzero(records["length"] & (_BUSY | _DISCARDED))
        records = records[: written[0]] if len(written) else records
        barrier()
        bells = records["bell"]
        names = ("tag", "members", "count", "fragments")
        columns = [bells[name].tolist() for name in names]
        units = bells["unit"].view(np.int8).tolist()
        barrier()  # they have been read: the program may write over them
        self._read[0] = begin + len(records) * each
        return [Bell(*values) for values in zip(*columns, units, strict=True)]
