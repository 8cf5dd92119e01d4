# SPDX-License-Identifier: Apache-2.0
"""Working folders of jobs, and names of runs."""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from nicps.agent.process import User
from nicps.errors import EnvironmentProblem, JobFailed

_NAME_BYTES = 100  # of a job's name
_ASK_S = 10.0
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def sweep(parent: Path, rescue: Callable[[Path], None] = lambda folder: None) -> None:
    """Remove the working folders of agents that were killed, after `rescue` has saved the files worth keeping from
    each.
    """
    for folder in parent.glob("nicps-*-*"):
        pid = folder.name.split("-")[1]
        with contextlib.suppress(FileNotFoundError):  # its agent has just removed it
            ours = folder.lstat().st_uid == os.geteuid() and not folder.is_symlink()
            if ours and pid.isdecimal() and not Path("/proc", pid).exists():
                rescue(folder)
                remove(folder)


def working_folder(parent: Path) -> Path:
    """A new folder that only root can change and every user can enter.

    Raises:
        EnvironmentProblem: the disk is full, or there is no such parent.
    """
    try:
        folder = Path(tempfile.mkdtemp(prefix=f"nicps-{os.getpid()}-", dir=parent))
    except OSError as error:
        raise EnvironmentProblem(
            f"jobs cannot work in {parent}: {error.strerror}; make room there, or name another folder with --work"
        ) from None
    folder.chmod(0o755)
    return folder


def check_work(parent: Path, user: User) -> None:
    """Check that jobs can work in the folder. The check leaves nothing behind.

    Raises:
        EnvironmentProblem: no folder can be made, or the training user cannot enter it.
    """
    folder = working_folder(parent)
    try:
        if os.geteuid() == 0 and user.uid != 0 and not _can_enter(folder, user):
            raise EnvironmentProblem(
                f"the user {user.name} cannot enter {parent}: chmod it or the folders above, or name another with"
                " --work"
            )
    finally:
        remove(folder)


def _can_enter(folder: Path, user: User) -> bool:
    try:
        asked = subprocess.run(
            ["/bin/sh", "-c", '[ -x "$1" ]', "sh", str(folder)],
            user=user.uid,
            group=user.gid,
            extra_groups=[],
            env={},
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            timeout=_ASK_S,
        )
    except subprocess.TimeoutExpired:
        raise EnvironmentProblem(
            f"{folder.parent} does not answer within {_ASK_S:.0f} s: name another folder with --work"
        ) from None
    except OSError as error:
        raise EnvironmentProblem(
            f"training programs cannot be run as the user {user.name}: {error.strerror}; the agent needs CAP_SETUID"
            " and CAP_SETGID"
        ) from None
    return asked.returncode == 0


def check_runs(runs: Path) -> None:
    """Check that results can be written to the folder, or that it can be made. The check leaves nothing behind.

    Raises:
        EnvironmentProblem: results cannot be written.
    """
    there = next(path for path in (runs, *runs.parents) if os.path.lexists(path))
    try:
        os.rmdir(tempfile.mkdtemp(prefix="nicps-", dir=there))
    except OSError as error:
        raise EnvironmentProblem(
            f"results cannot be left in {runs}: {there}: {error.strerror}; name another folder with --runs"
        ) from None


def remove(folder: Path) -> None:
    """Remove a working folder with all that training programs have made in it; what cannot be removed stays.

    A tree can be deeper than Python's recursion and the number of descriptors allow. So folders are moved to the top
    first.
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
    """Remove the files; return the names of the folders, which are moved to the top."""
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
    """Make a run's name of time and job. It names a folder on every host, and is in decisions, which must fit into
    frames.

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
