# SPDX-License-Identifier: Apache-2.0
"""Named network namespaces: made, found, entered by a thread, removed.

Only names of the form `nicps-<lab>-switch`, `-cables` and `-h<number>` are ever touched. Entering a namespace is a
property of a thread. So every piece of work inside one runs in a thread of its own, which ends with the work, and the
caller's thread never leaves its namespace.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from nicps.lab import enter

_NAME = re.compile(r"nicps-(?P<lab>.+)-(?P<role>switch|cables|h[1-9][0-9]*)")

T = TypeVar("T")


def switch_name(lab: str) -> str:
    """The namespace of the lab's switch."""
    return f"nicps-{lab}-switch"


def cables_name(lab: str) -> str:
    """The namespace in the middle of the cables, if the switch adds (`LabSettings.switch`)."""
    return f"nicps-{lab}-cables"


def host_name(lab: str, host: str) -> str:
    """The namespace of the lab's host, e.g. `h1`."""
    return f"nicps-{lab}-{host}"


def find() -> dict[str, list[str]]:
    """The namespaces that carry our prefix, by lab."""
    found: dict[str, list[str]] = {}
    try:
        names = sorted(os.listdir(enter.NETNS_DIR))
    except FileNotFoundError:
        return found
    for name in names:
        if match := _NAME.fullmatch(name):
            found.setdefault(match["lab"], []).append(name)
    return found


def identity(path: str | Path) -> tuple[int, int] | None:
    """The identity of a namespace: device and inode; None if there is none."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return (status.st_dev, status.st_ino) if stat.S_ISREG(status.st_mode) else None


class _Work(threading.Thread, Generic[T]):
    def __init__(self, work: Callable[[], T]) -> None:
        super().__init__(name="nicps-lab", daemon=False)
        self._work = work
        self._result: list[T] = []
        self._error: BaseException | None = None
        self._done = threading.Event()

    def run(self) -> None:
        try:
            self._result.append(self._work())
        except BaseException as error:
            self._error = error
        finally:
            self._done.set()

    def result(self) -> T:
        """The work's result. Ctrl-C waits until the work is done: it is short, and is never interrupted.

        An event, not `join`: a `join` that is interrupted may take the thread for ended (CPython 3.11).
        """
        interrupted: BaseException | None = None
        while not self._done.is_set():
            try:
                self._done.wait()
            except BaseException as error:
                interrupted = error
        if interrupted is not None:
            raise interrupted
        self.join()
        if self._error is not None:
            raise self._error
        return self._result[0]


def in_thread(work: Callable[[], T]) -> T:
    """Run `work` in a thread of its own, which may change its namespace."""
    thread = _Work(work)
    thread.start()
    return thread.result()


def switch_to(netns: str) -> None:
    """Put the calling thread (one made by `in_thread`) into `netns`."""
    fd = os.open(enter.path_of(netns), os.O_RDONLY | os.O_CLOEXEC)
    try:
        enter.setns(fd)
    finally:
        os.close(fd)


def inside(netns: str, work: Callable[[], T]) -> T:
    """Run `work` inside `netns` and return its result."""

    def entered() -> T:
        switch_to(netns)
        return work()

    return in_thread(entered)


def create(names: Sequence[str]) -> None:
    """Make the namespaces, empty, without IPv6 on the interfaces to come (it would send)."""

    def work() -> None:
        _share_directory()
        for name in names:
            path = enter.path_of(name)
            os.close(os.open(path, os.O_RDONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0))
            enter.unshare(enter.CLONE_NEWNET)
            _quiet_ipv6()
            enter.mount("/proc/thread-self/ns/net", path, flags=enter.MS_BIND)

    in_thread(work)


def remove(names: Sequence[str]) -> None:
    """Remove the names; a namespace ends when no process is left in it."""
    for name in names:
        if not _NAME.fullmatch(name):
            raise ValueError(f"{name} is not a namespace of ours")
        path = enter.path_of(name)
        try:
            enter.unmount(path)
        except OSError as error:
            # EINVAL: nothing is mounted there; an `up` that was killed half-way has left it.
            if error.errno not in (errno.EINVAL, errno.ENOENT):
                raise
        Path(path).unlink(missing_ok=True)


def _share_directory() -> None:
    """Do as `ip netns`: names appear, and vanish, in every mount namespace alike."""
    os.makedirs(enter.NETNS_DIR, mode=0o755, exist_ok=True)
    try:
        enter.mount("none", enter.NETNS_DIR, flags=enter.MS_SHARED | enter.MS_REC)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        enter.mount(enter.NETNS_DIR, enter.NETNS_DIR, flags=enter.MS_BIND | enter.MS_REC)
        enter.mount("none", enter.NETNS_DIR, flags=enter.MS_SHARED | enter.MS_REC)


def _quiet_ipv6() -> None:
    # /proc/sys/net shows the namespace of the thread that opens it.
    setting = Path("/proc/sys/net/ipv6/conf/default/disable_ipv6")
    if setting.exists():
        setting.write_text("1")
