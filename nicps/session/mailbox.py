# SPDX-License-Identifier: Apache-2.0
"""The messages of one connection, for several threads: one of them reads at a time, for all."""

from __future__ import annotations

import contextlib
import math
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TypeVar

from nicps.session import shared_form
from nicps.session.channel import is_ready
from nicps.session.messages import Error

R = TypeVar("R")
Received = tuple[shared_form.FromAgent, list[int]]

#: What ends a wait for a round, if it comes first.
ENDS = shared_form.Phase, shared_form.Abort, Error


class Mailbox:
    """Commits of channels by the rounds that they name; all else in order, for the thread that computes.

    Args:
        descriptor: readable when something comes; `is_there`: whether a message can be had at once; `receive`: it.
        note: told of a view at once where steps have a plan, as sums of later commits need what comes with it.

    What comes behind a phase that has not begun is of that phase: a view or a commit waits there until it begins.

    Attributes: `rest`, for the thread that computes; that thread alone takes messages out of it.
    """

    def __init__(
        self,
        descriptor: int,
        is_there: Callable[[], bool],
        receive: Callable[[], Received],
        note: Callable[[shared_form.FromAgent, list[int]], None],
    ) -> None:
        self.rest: deque[Received] = deque()
        self._receive, self._is_there, self._note = receive, is_there, note
        self._changed = threading.Condition()
        self._commits: dict[tuple[int, int], shared_form.Committed] = {}
        self._descriptor, self._planned = descriptor, False
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._reads = False  # a thread is receiving
        self._failure: BaseException | None = None  # of the connection: every thread's

    def take(self, deadline: float = math.inf) -> Received:
        """The next message for the thread that computes, waited for.

        Args:
            deadline: on the monotonic clock.

        Raises:
            TimeoutError: nothing has come until then.
        """
        return self._wait_for(lambda: self.rest.popleft() if self.rest else None, deadline)

    def take_commit(
        self,
        channel: int,
        round_: int,
        deadline: float = math.inf,
        *,
        unless: Callable[[], bool] = lambda: False,
    ) -> shared_form.Committed | None:
        """That round's commit, waited for; None if the phase ends before.

        Args:
            unless: None also once that is so, of which `wake` tells.

        Raises:
            TimeoutError: as `take`.
        """

        def find() -> tuple[shared_form.Committed | None] | None:
            found = self._commits.pop((channel, round_), None)
            return (found,) if found is not None or self.ends or unless() else None

        return self._wait_for(find, deadline)[0]

    @property
    def ends(self) -> bool:
        """The thread that computes will find a message after which no round of this phase is waited for."""
        return self._has(*ENDS)

    @property
    def holds_commits(self) -> bool:
        """Rounds of channels are committed that no thread has waited for yet."""
        return bool(self._commits)

    def begin(self, *, planned: bool) -> None:
        """Another phase has begun: commits of the one before are not waited for any more.

        What has come behind it, up to the next phase, is noted, or is the channels' now.

        Args:
            planned: its commits are the channels'; otherwise the thread that computes waits for them.
        """
        with self._changed:
            self._commits.clear()
            self._planned = planned
            behind = [*self.rest]
            self.rest.clear()
            for received in behind:
                self._sort(*received)

    def attend(self, done: Callable[[], bool]) -> None:
        """The thread that computes waits until other threads, which `wake` this one, have `done` something.

        Once the phase ends they have soon done what they can.
        """

        def find() -> tuple[Received, ...] | None:
            if done():
                return ()
            return (self.rest.popleft(),) if self.rest and not self.ends else None

        while received := self._wait_for(find):
            self._note(*received[0])

    def note_first(self, *kinds: type) -> None:
        """Note the messages of these kinds that come first. Meanwhile no thread takes what is behind them."""
        with self._changed:
            while self.rest and isinstance(self.rest[0][0], kinds):
                self._note(*self.rest.popleft())

    def wake(self) -> None:
        """Let all threads look again at what they wait for, the one that reads, too."""
        with self._changed:
            if self._bell >= 0:
                os.eventfd_write(self._bell, 1)
            self._changed.notify_all()

    def close(self) -> None:
        """No thread waits any more; some may still `wake`."""
        with self._changed:
            os.close(self._bell)
            self._bell = -1

    def poll(self) -> None:
        """Receive what is there."""
        with self._changed:
            while not self._reads and self._failure is None and self._is_there():
                self._sort(*self._receive())

    def _wait_for(self, find: Callable[[], R | None], deadline: float = math.inf) -> R:
        with self._changed:
            while True:
                if (found := find()) is not None:
                    return found
                if self._failure is not None:
                    raise self._failure
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    raise TimeoutError("no message has come in time")
                if self._reads:
                    self._changed.wait(None if left_s == math.inf else left_s)
                else:
                    self._read(None if left_s == math.inf else left_s)

    def _read(self, timeout_s: float | None) -> None:
        """Receive one message, or be woken, without the lock; another thread may find what it waits for meanwhile."""
        self._reads, received = True, None
        self._changed.release()
        try:
            if not self._is_there():
                is_ready(select.POLLIN, timeout_s, self._descriptor, self._bell)
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._bell)
            if self._is_there():
                received = self._receive()
        except BaseException as failure:
            self._failure = failure
        finally:
            self._changed.acquire()
            self._reads = False
            self._changed.notify_all()
        if received is not None:
            self._sort(*received)

    def _sort(self, message: shared_form.FromAgent, fds: list[int]) -> None:
        at_once = self._planned and not self.ends
        if at_once and isinstance(message, shared_form.Committed):
            self._commits[message.channel, message.round] = message
        elif at_once and isinstance(message, shared_form.View) and not self._has(shared_form.View):
            self._note(message, fds)
        else:
            self.rest.append((message, fds))

    def _has(self, *kinds: type) -> bool:
        """Whether a message of these kinds waits for the thread that computes."""
        return any(isinstance(message, kinds) for message, _ in tuple(self.rest))
