# SPDX-License-Identifier: Apache-2.0
"""The events that the agent waits for: descriptors, signals, and slow work that a thread has done."""

from __future__ import annotations

import contextlib
import os
import select
import signal
from collections.abc import Callable

from nicps.agent.background import Background
from nicps.shutdown import ending_signals

Events = list[tuple[int, int]]


class Loop:
    """Descriptors, each with its handler, and a thread. `failed(why)` takes an error of the thread."""

    def __init__(self, failed: Callable[[Exception], None]) -> None:
        self._failed = failed
        self._poll = select.epoll()
        self._handlers: dict[int, Callable[[], None]] = {}
        self._background = Background()
        self.watch(self._background.fileno(), self._done)

    def wait(self, timeout_s: float) -> Events:
        """Wait for events, or until the time has passed."""
        return self._poll.poll(timeout_s)

    def handle(self, events: Events) -> None:
        """Call the handlers, except that of a descriptor that was forgotten meanwhile."""
        for fd, _ in events:
            handler = self._handlers.get(fd)
            if handler is not None:
                handler()

    def watch(
        self, fd: int, handler: Callable[[], None], edge: bool = False, armed: bool = True
    ) -> None:
        """Call `handler` whenever `fd` is readable; with `edge`, once for every write, and nothing is read.

        Args:
            armed: watch from now on; otherwise once `arm` is called.
        """
        self._handlers[fd] = handler
        mask = select.EPOLLIN | (select.EPOLLET if edge else 0)
        self._poll.register(fd, mask if armed else 0)

    def arm(self, fd: int, armed: bool) -> None:
        """Watch a registered descriptor, or do not."""
        self._poll.modify(fd, select.EPOLLIN if armed else 0)

    def unwatch(self, fd: int) -> None:
        """Forget a descriptor."""
        if self._handlers.pop(fd, None) is not None:
            with contextlib.suppress(OSError):
                self._poll.unregister(fd)

    def on_signals(self, handler: Callable[[], None]) -> None:
        """Call `handler` after SIGTERM, and after SIGINT and SIGHUP unless the agent was started with them ignored."""
        read, write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(write)
        for number in ending_signals(signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, lambda *_: None)

        def take() -> None:
            os.read(read, 64)
            handler()

        self.watch(read, take)

    def background(self, work: Callable[[], None], then: Callable[[], None]) -> None:
        """Do slow work (files, hashes) in order in a thread, and call `then` here."""
        self._background.do(work, then)

    def drain(self) -> None:
        """Wait for the thread; no slow work begins from here on."""
        self._background.close()

    def close(self) -> None:
        """Close the selector, once all descriptors have been forgotten."""
        self._poll.close()

    def _done(self) -> None:
        for then, error in self._background.take_done():
            if error is not None:
                self._failed(error)
            else:
                self.guard(then)

    def guard(self, then: Callable[[], None]) -> None:
        """Run a step that depends on files of a job's code: whatever error it raises, the loop goes on."""
        try:
            then()
        except Exception as reason:
            self._failed(reason)
