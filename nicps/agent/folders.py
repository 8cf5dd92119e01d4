# SPDX-License-Identifier: Apache-2.0
"""Working folders of jobs, and names of runs."""

from __future__ import annotations

import contextlib
import itertools
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from nicps.errors import JobFailed

_NAME_BYTES = 100  # of a job's name
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def sweep(parent: Path) -> None:
    """Remove the working folders of agents that were killed."""
    for folder in parent.glob("nicps-*-*"):
        pid = folder.name.split("-")[1]
        ours = folder.lstat().st_uid == os.geteuid() and not folder.is_symlink()
        if ours and pid.isdecimal() and not Path("/proc", pid).exists():
            remove(folder)


def working_folder(parent: Path) -> Path:
    """A new folder that only root can change and everybody can enter.

    Raises:
        OSError: the disk is full, or there is no such parent.
    """
    folder = Path(tempfile.mkdtemp(prefix=f"nicps-{os.getpid()}-", dir=parent))
    folder.chmod(0o755)
    return folder


def remove(folder: Path) -> None:
    """Remove a working folder, with whatever training programs have made in it; what cannot be removed stays.

    A tree can be deeper than Python recurses, and than there are descriptors: so folders are moved to the top first.
    """
    with contextlib.suppress(OSError):
        top = os.open(folder, _FOLDER)
        try:
            names = os.urandom(4).hex()
            fresh = (f"{names}-{number}" for number in itertools.count())
            waiting = _empty(top, top, fresh)
            while waiting:
                name = waiting.pop()
                with contextlib.suppress(OSError):
                    inner = os.open(name, _FOLDER, dir_fd=top)
                    try:
                        waiting += _empty(inner, top, fresh)
                    finally:
                        os.close(inner)
                    os.rmdir(name, dir_fd=top)
        finally:
            os.close(top)
        folder.rmdir()


def _empty(folder: int, top: int, fresh: Iterator[str]) -> list[str]:
    """Remove the files; the names of the folders, at the top."""
    moved = []
    for name in os.listdir(folder):
        with contextlib.suppress(OSError):
            try:
                os.unlink(name, dir_fd=folder)
            except IsADirectoryError:
                aside = next(fresh)
                os.rename(name, aside, src_dir_fd=folder, dst_dir_fd=top)
                moved.append(aside)
    return moved


def new_job_id(name: object) -> str:
    """A run's name: time and job. It is a folder's on every host, and part of decisions, which must fit into frames.

    Raises:
        JobFailed: the job's name is not printable text, or too long.
    """
    if not isinstance(name, str) or not name.isprintable():
        raise JobFailed(f"the job's name is to be printable text, not {name!r:.100}")
    size = len(name.encode())
    if size > _NAME_BYTES:
        raise JobFailed(
            f"the job's name has {size} bytes, {_NAME_BYTES} at most: give its folder a shorter one"
        )
    safe = "".join(c if c.isalnum() or c in "-_" else "-" for c in name)
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{safe}-{os.urandom(2).hex()}"
