# SPDX-License-Identifier: Apache-2.0
"""The records of agents and training programs of this host that ended before the end of their job.

    runs/<id>/<host>/   earlier-1.timeline.jsonl    of an agent
                        earlier-1.1.metrics.jsonl   of its training programs, in their order
                        earlier-1.2.metrics.jsonl
                        earlier-2.1.metrics.jsonl   of a program that the last agent has started again
                        timeline.jsonl, metrics.jsonl

All files of one number have one clock. Until then they are in the job's working folder: a killed agent leaves the
folder behind, and the next agent takes the files from it.
"""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

import orjson

from nicps.agent.metrics import METRICS
from nicps.agent.records import TIMELINE, copy_file

EARLIER = "earlier-*.jsonl"
_MOST_FILES = 100  # that are kept: they are open all at once when they are handed out
_LINE_BYTES = 1 << 16


def set_aside(out: Path, base: Path) -> None:
    """Another training program is about to be started: move the records of the one before into our folder.

    The folder `out` is the training user's: no link is followed.
    """
    number = len(_programs(base)) + 1
    if number > _MOST_FILES:
        return
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):  # it has written nothing
        folder = os.open(out, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            os.rename(METRICS, base / f"program-{number}.{METRICS}", src_dir_fd=folder)
        finally:
            os.close(folder)


def keep_programs(base: Path, kept: Path) -> None:
    """At the end: copy the records of this agent's earlier training programs beside those of the last one."""
    _copy_programs(_programs(base), kept, _next(kept))


def keep_life(base: Path, kept: Path) -> None:
    """This host leaves the job, or has left it: copy all records of its agent and its training programs."""
    number = _next(kept)
    set_aside(base / "work" / "out", base)
    _copy_programs(_programs(base), kept, number)
    kept.mkdir(parents=True, exist_ok=True)
    copy_file(base / TIMELINE, kept / f"earlier-{number}.{TIMELINE}")


def rescue(base: Path, runs: Path) -> None:
    """The records of an agent that was killed. The first line that it wrote names the run and the host.

    Raises:
        OSError: the disk is full, or the run's folder cannot be written.
    """
    try:
        with (base / TIMELINE).open("rb") as file:
            first = orjson.loads(file.readline(_LINE_BYTES))
        names = first["job"], first["name"]
    except (OSError, orjson.JSONDecodeError, KeyError, TypeError):
        return  # no job had begun
    if all(isinstance(name, str) and Path(name).name == name for name in names):
        keep_life(base, runs.joinpath(*names))


def earlier_files(kept: Path) -> list[str]:
    """The names of the records of earlier lives, the oldest first; no more than can be handed out."""
    return sorted((path.name for path in kept.glob(EARLIER)), key=_order)[:_MOST_FILES]


def _programs(base: Path) -> list[Path]:
    return sorted(base.glob(f"program-*.{METRICS}"), key=lambda path: _order(path.name))


def _copy_programs(paths: list[Path], kept: Path, number: int) -> None:
    kept.mkdir(parents=True, exist_ok=True)
    for at, path in enumerate(paths, 1):
        status = path.lstat()
        if stat.S_ISREG(status.st_mode) and status.st_size:  # programs can leave other kinds
            copy_file(path, kept / f"earlier-{number}.{at}.{METRICS}")


def _next(kept: Path) -> int:
    """The number of the life that follows those whose agents have ended."""
    found = (_order(path.name) for path in kept.glob(f"earlier-*.{TIMELINE}"))
    return max((numbers[0] for numbers in found if numbers), default=0) + 1


def _order(name: str) -> tuple[int, ...]:
    """`earlier-2.1.metrics.jsonl`: 2, 1"""
    numbers = name.partition("-")[2].split(".")
    return tuple(int(part) for part in numbers if part.isdecimal())
