# SPDX-License-Identifier: Apache-2.0
"""The files that a job leaves on a host: the agent's time line and facts, and those of the training program.

The training program owns its folder, and the agent is root. So the agent follows no link in it, waits for nothing, and
reads only files and folders.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import orjson

from nicps.errors import JobFailed

TIMELINE = "timeline.jsonl"
#: These files of every host are collected by node 1 at the end.
COLLECTED = ("metrics.jsonl", TIMELINE, "agent.json", "final.json")
#: The size of the log of a program that has failed.
MOST_LOG_BYTES = 1 << 18
DEEPEST = 32  # levels of folders that are copied, each of which needs a descriptor
_FLUSH_ROWS = 256
_FLUSH_S = 1.0  # a host that is killed loses no more than this of its time line
_OPEN = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class Records:
    """The agent's notes on a job, in a folder of its own: times with the token, commits, and events.

    Args:
        job, name: the run's name and this host's, for the agent that finds the folder after this one has been killed.
    """

    def __init__(self, folder: Path, job: str, name: str, now: float) -> None:
        self._path = folder / TIMELINE
        self._file = self._path.open("ab")
        self._rows: list[dict[str, Any]] = []
        self._flushed = now
        self.event("begin", now, 0, job=job, name=name)

    def note(self, kind: str, started: float, ended: float, round_: int, **more: Any) -> None:
        """For the time line: "hold", "send", "repair", "sums", "commit" or "rounds", in seconds of CLOCK_MONOTONIC."""
        self._rows.append({"t0": started, "t1": ended, "kind": kind, "round": round_, **more})
        if len(self._rows) >= _FLUSH_ROWS or ended > self._flushed + _FLUSH_S:
            self._flushed = ended
            self.flush()

    def event(self, kind: str, now: float, round_: int, **more: Any) -> None:
        """Note an event that the report shows (docs/jobs.md lists the kinds). It is written at once."""
        self.note(kind, now, now, round_, **more)
        self.flush()

    def flush(self) -> None:
        """Write the notes to the file.

        Raises:
            OSError: the disk is full; it names the file.
        """
        lines = b"".join(orjson.dumps(row) + b"\n" for row in self._rows)
        self._rows.clear()
        with naming(self._path):
            self._file.write(lines)
            self._file.flush()

    def keep(self, out: Path, logs: Path, facts: Mapping[str, Any], kept: Path) -> list[str]:
        """Copy all files into the run's folder; return the names of those that node 1 collects.

        Args:
            out: the folder of the training program's files.
            logs: the folder of its logs, which is ours.

        Raises:
            OSError: the disk is full, or the folder cannot be written.
        """
        self.flush()
        with naming(kept):
            kept.mkdir(parents=True, exist_ok=True)
            copy_tree(out, kept)
            # A program makes its log as large as it likes: it is copied in pieces.
            for path in (self._path, *logs.glob("*.log")):
                copy_file(path, kept / path.name)
            _put(orjson.dumps(dict(facts)), kept / "agent.json")
        return [name for name in COLLECTED if (kept / name).exists()]

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class TimeLine:
    """The time line of the job that is here; `records` is None without one."""

    def __init__(self) -> None:
        self.records: Records | None = None

    def note(self, kind: str, started: float, ended: float, round_: int, **more: Any) -> None:
        """`Records.note`"""
        if self.records is not None:
            self.records.note(kind, started, ended, round_, **more)


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Errors of what is written there name it: a write alone knows no name, and a host has several disks."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


def read_file(path: Path, most: int) -> bytes:
    """Read a file that may be the training user's.

    Raises:
        OSError: it is missing, is no regular file, or holds more than `most` bytes.
    """
    fd = open_file(path)
    try:
        with open(fd, "rb", closefd=False) as file:
            data = file.read(most + 1)
    finally:
        os.close(fd)
    if len(data) > most:
        raise OSError(errno.EFBIG, f"More than {most} bytes", str(path))
    return data


def read_object(path: Path, most: int) -> dict[str, Any]:
    """Read the JSON object in such a file.

    Raises:
        OSError, orjson.JSONDecodeError: as `read_file`; the file is not valid JSON.
        JobFailed: the JSON is not an object.
    """
    value = orjson.loads(read_file(path, most))
    if not isinstance(value, dict):
        raise JobFailed(f"{path.name} is no JSON object")
    return value


def copy_file(source: Path, target: Path) -> None:
    """Copy a regular file; readers never see a part of it.

    Raises:
        OSError: it is missing, or is no regular file; the disk is full, or the folder cannot be written.
    """
    fd = open_file(source)
    try:
        _copy_file(fd, target)
    finally:
        os.close(fd)


def keep_tail(source: Path, target: Path) -> None:
    """Copy the end of a log, at most `MOST_LOG_BYTES` of it, in whole lines.

    Raises:
        OSError: as `copy_file`.
    """
    fd = open_file(source)
    with open(fd, "rb") as file:
        size = os.fstat(fd).st_size
        file.seek(max(0, size - MOST_LOG_BYTES))
        if size > MOST_LOG_BYTES:
            file.readline()
        data = file.read(MOST_LOG_BYTES)
    target.parent.mkdir(parents=True, exist_ok=True)
    _put(data, target)


def copy_tree(source: Path, target: Path, since_ns: int = 0) -> None:
    """Copy regular files and folders. Links and files of other kinds are left out, and so are folders too deep in
    the tree.

    Args:
        since_ns: files that were last changed (ctime) at that time or before are left out, too.
    """
    fd = os.open(source, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        _copy_folder(fd, target, since_ns)
    finally:
        os.close(fd)


def keep_files(source: Path, target: Path, names: Mapping[str, str]) -> None:
    """Copy files to the disk, each whole or not at all: names in `source`, and their names in `target`.

    They are there after a power cut, too.

    Raises:
        OSError: one is missing, or is no regular file; the disk is full, or the folder cannot be written.
    """
    old = next(path for path in (target, *target.parents) if path.exists())
    target.mkdir(parents=True, exist_ok=True)
    folder = os.open(source, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        for name, kept in names.items():
            fd = open_file(name, folder)
            try:
                _copy_file(fd, target / kept, sync=True)
            finally:
                os.close(fd)
    finally:
        os.close(folder)
    for path in (
        target,
        *target.parents,
    ):  # the new names; those of new folders are in the ones above
        _sync_folder(path)
        if path == old:
            break


def open_file(name: str | Path, folder: int | None = None) -> int:
    """Open a regular file; any other kind is refused, without waiting for it."""
    wrong = OSError(errno.EINVAL, "Not a regular file", str(name))
    try:
        fd = os.open(name, _OPEN, dir_fd=folder)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):  # a link, a socket
            raise wrong from None
        raise
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise wrong
    return fd


def _copy_folder(folder: int, target: Path, since_ns: int, depth: int = 1) -> None:
    target.mkdir(parents=True, exist_ok=True)
    for name in os.listdir(folder):
        try:
            fd = os.open(name, _OPEN, dir_fd=folder)
        except OSError:
            continue  # a link, or gone
        try:
            about = os.fstat(fd)
            if stat.S_ISDIR(about.st_mode) and depth < DEEPEST:
                _copy_folder(fd, target / name, since_ns, depth + 1)
            elif stat.S_ISREG(about.st_mode) and about.st_ctime_ns > since_ns:
                _copy_file(fd, target / name)
        finally:
            os.close(fd)


def _copy_file(fd: int, target: Path, *, sync: bool = False) -> None:
    """Copy an open file under another name first; with `sync`, to the disk."""
    partial = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        with open(fd, "rb", closefd=False) as file, partial.open("wb") as copy:
            shutil.copyfileobj(file, copy, 1 << 20)
            if sync:
                copy.flush()
                os.fsync(copy.fileno())
        os.replace(partial, target)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def _sync_folder(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _put(data: bytes, target: Path) -> None:
    """Write a file so that readers never see a part of it."""
    partial = target.with_name(f".{target.name}.{os.getpid()}")
    partial.write_bytes(data)
    os.replace(partial, target)
