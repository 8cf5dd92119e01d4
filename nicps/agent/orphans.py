# SPDX-License-Identifier: Apache-2.0
"""Processes of a job's code that have detached themselves: a session of their own, a parent that has ended.

Linux gives an orphan to the nearest ancestor that asks for it (PR_SET_CHILD_SUBREAPER). The agent asks for it. So
processes that its programs leave behind become its children, in whatever session they are, and it ends them.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import time
from collections.abc import Collection
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36
_TIMES = 64  # scans in a row: a process that is killed may have forked just before
_AT_ONCE_S = 0.005  # for all these scans, since a token may be waiting
_REST_S = 0.25  # between two scans, while none finds a process
_HURRY_S = 1.0  # after the last process was found
_libc = ctypes.CDLL(None, use_errno=True)


class OrphanReaper:
    """Ends children of this process that it has not started itself: its programs' descendants, once orphaned.

    Only for a process that is an agent and nothing else. It leaves alone the children that the process had before, and
    processes that are not the training user's or could gain privileges: they are not a job's.
    """

    def __init__(self, uid: int) -> None:
        self._uid = uid
        self._spared = set(_children())
        self._ended: set[int] = set()
        self._next = 0.0
        self._hurry = 0.0
        self.ending = False  # there are processes to be ended
        _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

    def close(self) -> None:
        """Stop being the reaper of orphans."""
        _libc.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)

    def hurry(self, now: float) -> bool:
        """Whether a process was found just now, so that more may follow."""
        return now < self._hurry

    def is_due(self, now: float) -> bool:
        """Whether the time of the next `tick` has come."""
        return now >= self._next or now < self._hurry

    def tick(self, now: float, known: Collection[int]) -> None:
        """Scan again: for processes that are being ended, and for orphans that have ended by themselves.

        Args:
            known: processes that this process has started.
        """
        self._next = now + _REST_S
        self._end_orphans(now, known)

    def end(self, now: float, known: Collection[int]) -> None:
        """A program has ended: end the orphans that are there, as many as can be in 5 ms. `tick` goes on with the rest.

        `ending` is true until all are gone.
        """
        self.ending = True
        self._end_orphans(now, known)

    def _end_orphans(self, now: float, known: Collection[int]) -> None:
        until = time.monotonic() + _AT_ONCE_S
        for _ in range(_TIMES):
            found = [pid for pid in _children() if pid not in known and pid not in self._spared]
            self._ended.intersection_update(found)
            more = False
            for pid in found:
                if self.ending and pid not in self._ended and self._is_a_jobs(pid):
                    os.kill(pid, signal.SIGKILL)  # a child's number is its own until we reap it
                    self._ended.add(pid)
                    self._hurry = now + _HURRY_S
                    more = True
                if _reaped(pid):
                    self._ended.discard(pid)
                    more = True  # the children of that process are ours now
                if time.monotonic() > until:
                    return
            if not more:
                self.ending = bool(self._ended)
                return

    def _is_a_jobs(self, pid: int) -> bool:
        try:
            status = Path(f"/proc/{pid}/status").read_text(errors="replace")
        except OSError:
            return False
        uid = re.search(r"^Uid:\t(\d+)", status, re.MULTILINE)
        locked = re.search(r"^NoNewPrivs:\t1$", status, re.MULTILINE)
        return uid is not None and int(uid[1]) == self._uid and locked is not None


def _reaped(pid: int) -> bool:
    with contextlib.suppress(ChildProcessError):
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    return False


def _children() -> list[int]:
    """The children of all threads of this process, also those that have ended and were not reaped."""
    found: list[int] = []
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):
            found += map(int, Path("/proc/self/task", thread, "children").read_text().split())
    return found
