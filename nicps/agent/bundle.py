# SPDX-License-Identifier: Apache-2.0
"""Files as one stream of bytes for the hand-out (R5, R6), and the stream as files again.

The stream is an index (JSON, at the front) and the files' bytes behind each other. It travels in windows, one a round;
both ends hash it as they read or write it. A file is kept whole (`store: all`) or, record by record, by the member
whose
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from nicps.agent.records import naming
from nicps.errors import JobFailed
from nicps.job.plan import WINDOW_FRAGMENTS
from nicps.session.lanes import U8
from nicps.wire import PAYLOAD_BYTES

WINDOW_BYTES = WINDOW_FRAGMENTS * PAYLOAD_BYTES


@dataclass(frozen=True, slots=True)
class StreamFile:
    """One file of the stream, at `offset` in it."""

    path: str
    size: int
    offset: int
    record_bytes: int  # 0: every member keeps the whole file
    records: int

    def part_of(self, number: int, members: int) -> tuple[int, int]:
        """First and last-plus-one byte of the file that member `number` of `members` keeps (R6)."""
        if not self.record_bytes:
            return 0, self.size
        first = self.records * (number - 1) // members
        end = self.records * number // members
        return first * self.record_bytes, end * self.record_bytes


class OutStream:
    """The sender's end: files of a folder as a stream.

    Raises:
        JobFailed: a file is missing, or its size is not what its records say.
    """

    def __init__(self, folder: Path, files: Sequence[Mapping[str, Any]]) -> None:
        self._fds: list[int] = []
        self.files: list[StreamFile] = []
        offset = 0
        try:
            for entry in files:
                path = folder / entry["path"]
                if os.path.basename(entry["path"]) != entry["path"]:
                    raise JobFailed(
                        f"{entry['path']!r} is not a file's name: it cannot be handed out"
                    )
                fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
                self._fds.append(fd)
                status = os.fstat(fd)
                if not stat.S_ISREG(status.st_mode):
                    raise JobFailed(f"{path} is not a regular file: it cannot be handed out")
                size = status.st_size
                shard = entry.get("store") == "shard"
                record_bytes, records = (
                    (entry["record_bytes"], entry["records"]) if shard else (0, 0)
                )
                if shard and record_bytes * records != size:
                    raise JobFailed(
                        f"{path} has {size} bytes, not {records} records of {record_bytes}"
                    )
                self.files.append(StreamFile(entry["path"], size, offset, record_bytes, records))
                offset += size
        except OSError as error:
            self.close()
            raise JobFailed(f"cannot read {error.filename}: {error.strerror}") from None
        except JobFailed:
            self.close()
            raise
        self.index = orjson.dumps(
            [[f.path, f.size, f.offset, f.record_bytes, f.records] for f in self.files]
        )
        self.size = len(self.index) + offset

    def read(self, window: int, first: int, count: int) -> U8:
        """Payload of `count` fragments of a window from fragment `first` on: uint8 (count, 1440), zero padded."""
        rows = np.zeros((count, PAYLOAD_BYTES), np.uint8)
        self._fill(window * WINDOW_BYTES + first * PAYLOAD_BYTES, rows.reshape(-1))
        return rows

    def _fill(self, at: int, out: U8) -> None:
        index = len(self.index)
        done = 0
        if at < index:
            piece = self.index[at : at + len(out)]
            out[: len(piece)] = np.frombuffer(piece, np.uint8)
            done = len(piece)
        for fd, file in zip(self._fds, self.files, strict=True):
            start = index + file.offset
            while done < len(out) and start <= at + done < start + file.size:
                where = at + done - start
                want = min(len(out) - done, file.size - where)
                got = os.preadv(fd, [out[done : done + want].data], where)
                if got == 0:
                    raise JobFailed(f"{file.path} became shorter while it was handed out")
                done += got

    def close(self) -> None:
        """Close the files."""
        while self._fds:
            os.close(self._fds.pop())


class InStream:
    """The receiver's end: windows, in order, into the files of a folder.

    Args:
        keep: whether files are written at all; otherwise the stream is only hashed.
        owner: (uid, gid) of the files.
    """

    def __init__(
        self,
        folder: Path,
        size: int,
        index_bytes: int,
        number: int,
        members: int,
        owner: tuple[int, int],
        keep: bool = True,
    ) -> None:
        self.size = size
        self._folder = folder
        self._index_bytes = index_bytes
        self._number, self._members = number, members
        self._owner = owner
        self.keep = keep
        self._hash = hashlib.sha256()
        self._at = 0
        self._index = b""
        self._open: list[tuple[StreamFile, int, int, int]] = []  # file, fd, first, end

    def write(self, data: U8) -> None:
        """Take the next bytes of the stream.

        Raises:
            OSError: the disk is full, or the folder cannot be written.
            JobFailed: the index is not valid.
        """
        data = data[: self.size - self._at]
        self._hash.update(data.data)
        start, self._at = self._at, self._at + len(data)
        if start < self._index_bytes:
            self._index += data[: self._index_bytes - start].tobytes()
            if self._at >= self._index_bytes:
                self._create()
        for file, fd, first, end in self._open:
            base = self._index_bytes + file.offset
            low, high = max(start, base + first), min(self._at, base + end)
            if low < high:
                view = data[low - start : high - start].data
                where = low - base - first
                with naming(self._folder):
                    while view:
                        done = os.pwrite(fd, view, where)
                        view, where = view[done:], where + done

    def finish(self) -> str:
        """Close the files; the stream's SHA-256 in hex."""
        self.close()
        return self._hash.hexdigest()

    def close(self) -> None:
        """Close the files."""
        while self._open:  # loop and thread may close files at the same time
            os.close(self._open.pop()[1])

    def _create(self) -> None:
        try:
            files = [StreamFile(*entry) for entry in orjson.loads(self._index)]
        except (orjson.JSONDecodeError, TypeError) as error:
            raise JobFailed(f"the hand-out's index cannot be read: {error}") from None
        if not self.keep:
            return
        for file in files:
            if os.path.basename(file.path) != file.path or file.path in ("", ".", ".."):
                raise JobFailed(f"the hand-out names a file {file.path!r} outside its folder")
            first, end = file.part_of(self._number, self._members)
            path = self._folder / file.path
            path.unlink(missing_ok=True)  # another process may still be reading the former file
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o640)
            os.fchown(fd, *self._owner)
            self._open.append((file, fd, first, end))
