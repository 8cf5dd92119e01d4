# SPDX-License-Identifier: Apache-2.0
"""Slow work of the agent, in one thread and in order: files and hashes must not delay the token."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from collections.abc import Callable, Iterator
from typing import TypeAlias

_Work: TypeAlias = tuple[Callable[[], None], Callable[[], None]]
_END_LIMIT_S = 5.0


class Background:
    """A thread that does one thing after the other. `fileno` is readable when a piece of work is done."""

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[tuple[Callable[[], None], Exception | None]] = (
            queue.SimpleQueue()
        )
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def fileno(self) -> int:
        """The descriptor, for selectors."""
        return self._bell

    def do(self, work: Callable[[], None], then: Callable[[], None]) -> None:
        """Do `work` in the thread; `take_done` returns `then` afterwards."""
        self._work.put((work, then))

    def take_done(self) -> Iterator[tuple[Callable[[], None], Exception | None]]:
        """The work that is done: its `then`, and its error."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._bell)
        while not self._done.empty():
            yield self._done.get()

    def close(self) -> None:
        """Let the thread end; wait for its current work, at most 5 s."""
        self._work.put(None)
        self._thread.join(_END_LIMIT_S)
        if not self._thread.is_alive():
            os.close(self._bell)

    def _run(self) -> None:
        while (item := self._work.get()) is not None:
            work, then = item
            error: Exception | None = None
            try:
                work()
            except Exception as raised:  # the loop reports any error
                error = raised
            self._done.put((then, error))
            os.eventfd_write(self._bell, 1)
