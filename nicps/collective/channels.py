# SPDX-License-Identifier: Apache-2.0
"""The threads of a group, one for each channel: each carries the calls on its channel out in their order."""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeAlias

from nicps.errors import NicpsError, UsageProblem
from nicps.session.shared_form import ChannelPlan
from nicps.wire import MAX_CHANNELS

#: Urgencies are below this.
URGENCIES = 8
_Item: TypeAlias = tuple[Callable[[], Any] | None, Future[Any]]


def plan_of(
    urgencies: Sequence[int], rooms: Sequence[int] | None, per_fragment: int, limit: int
) -> tuple[ChannelPlan, ...]:
    """A group's channels.

    Args:
        urgencies: of each.
        rooms: numbers of 32 bits in a round of each, at most; default: equal parts of the limit.
        per_fragment: such numbers in a fragment.
        limit: fragments of all rooms together.

    Raises:
        UsageProblem: there cannot be such channels.
    """
    count = len(urgencies)
    if not 1 <= count <= MAX_CHANNELS:
        raise UsageProblem(f"a group has 1 to {MAX_CHANNELS} channels, not {count}")
    for urgency in urgencies:
        if type(urgency) is not int or not 0 <= urgency < URGENCIES:
            raise UsageProblem(f"an urgency is a number from 0 to {URGENCIES - 1}, not {urgency!r}")
    if rooms is None:
        return tuple(ChannelPlan(urgency, (limit // count,)) for urgency in urgencies)
    if len(rooms) != count:
        raise UsageProblem(
            f"{count} urgencies and {len(rooms)} rooms: each channel has one of both"
        )
    for room in rooms:
        if type(room) is not int or room < 1:
            raise UsageProblem(f"a channel's room is a number above 0, not {room!r}")
    fragments = [-(-room // per_fragment) for room in rooms]
    if sum(fragments) > limit:
        raise UsageProblem(
            f"the channels' rooms are {sum(rooms):,} numbers together, and a group has room for"
            f" {limit * per_fragment:,}: longer vectors take several rounds"
        )
    return tuple(map(ChannelPlan, urgencies, [(each,) for each in fragments]))


class Promised(Future[Any]):
    """What a call comes to.

    Args:
        threads: those without which it comes to nothing. None of them can wait for it.
    """

    def __init__(self, threads: Sequence[threading.Thread] = ()) -> None:
        super().__init__()
        self.threads = threads

    def result(self, timeout: float | None = None) -> Any:
        """As `Future`. Raises UsageProblem where it would wait for itself."""
        if not self.done():
            check_wait(self.threads)
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """As `Future`. Raises UsageProblem where it would wait for itself."""
        if not self.done():
            check_wait(self.threads)
        return super().exception(timeout)


def check_wait(threads: Sequence[threading.Thread]) -> None:
    """Raise UsageProblem in a callback of a future, if it is called in one of these threads."""
    if threading.current_thread() in threads:
        raise UsageProblem(
            "this callback of a future is called in the thread that carries out the group's calls, and would wait for"
            " itself: let it make the call without waiting, and give that one's future another callback"
        )


class _Together:
    """A call on all channels: the threads of all wait for it, and it waits for what was called before on them."""

    def __init__(self, others: int) -> None:
        self._missing = others
        self._arrived = threading.Condition()
        self.done = threading.Event()

    def arrive(self) -> None:
        """Another channel's thread has come so far, and waits."""
        with self._arrived:
            self._missing -= 1
            self._arrived.notify_all()
        self.done.wait()

    def carry_out(self, work: Callable[[], Any]) -> Any:
        """In the thread of channel 0."""
        with self._arrived:
            self._arrived.wait_for(lambda: not self._missing)
        try:
            return work()
        finally:
            self.done.set()


class Workers:
    """A channel's thread begins with the first call on it.

    Args:
        failed: told of an error that is none of ours, in the thread in which it has occurred.
    """

    def __init__(self, failed: Callable[[BaseException], None]) -> None:
        self._failed = failed
        self._lock = threading.Lock()
        self._queues: list[SimpleQueue[_Item]] = []
        self.threads: list[threading.Thread] = []
        self._last: _Together | None = None
        self._add()

    def put(self, channel: int, work: Callable[[], Any]) -> Future[Any]:
        """After all that was put on that channel."""
        with self._lock:
            while channel >= len(self._queues):
                self._add()
            future = Promised(self.threads[channel : channel + 1])
            self._queues[channel].put((work, future))
        return future

    def put_together(self, work: Callable[[], Any]) -> Future[Any]:
        """After all that was put on any channel, and before all that is put later; in the thread of channel 0."""
        with self._lock:
            future = Promised(tuple(self.threads))
            self._last = together = _Together(len(self._queues) - 1)
            for queue in self._queues[1:]:
                queue.put((together.arrive, Future()))
            self._queues[0].put((lambda: together.carry_out(work), future))
        return future

    def end(self) -> None:
        """End the threads after all that was put."""
        with self._lock:
            for queue in self._queues:
                queue.put((None, Future()))

    def join(self, timeout_s: float | None = None) -> None:
        """Wait for the end of all; the one that calls this, in a callback of a future, ends behind it."""
        until = None if timeout_s is None else time.monotonic() + timeout_s
        for thread in self.threads:
            if thread is not threading.current_thread():
                thread.join(None if until is None else max(0.0, until - time.monotonic()))

    def _add(self) -> None:
        queue = SimpleQueue[_Item]()
        if self._last is not None:
            queue.put((self._last.done.wait, Future()))
        name = f"nicps-collective-{len(self._queues)}"
        thread = threading.Thread(target=self._work, args=(queue,), name=name, daemon=True)
        thread.start()
        self._queues.append(queue)
        self.threads.append(thread)

    def _work(self, queue: SimpleQueue[_Item]) -> None:
        while True:
            work, future = queue.get()
            if work is None:
                return
            if not future.set_running_or_notify_cancel():
                # The others wait for it.
                future = Future()
            settle: Callable[[], None]
            try:
                settle = partial(future.set_result, work())
            except BaseException as error:
                # SystemExit, too: without this thread every call would wait for ever.
                if isinstance(error, NicpsError):
                    # Its text says all: a script shows its own frames only.
                    error.with_traceback(None).__suppress_context__ = True
                else:
                    self._failed(error)
                settle = partial(future.set_exception, error)
            try:
                settle()
            except BaseException:  # of a callback: the future itself stops at others only
                traceback.print_exc()
            del work, future, settle  # a vector, and what came of it, may be large
