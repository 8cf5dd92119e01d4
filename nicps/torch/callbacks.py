# SPDX-License-Identifier: Apache-2.0
"""Futures whose callbacks may make calls, and wait for them.

PyTorch's hooks do so (PowerSGD). In the thread that carries out a group's calls they would wait for themselves.
"""

from __future__ import annotations

import os
import threading
import time
import traceback
from collections.abc import Callable, Generator, Iterable
from functools import partial
from itertools import chain
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

import torch

from nicps.collective import endings

T = TypeVar("T")
_MOST_THREADS = 64
_END_LIMIT_S = 5.0  # for them to end, once the process has left its groups


class _Threads:
    """Made as they are needed: each can wait for a call whose own callback needs another one.

    They are daemons. At its end the interpreter waits for all others before anything else, and a call that the other
    ranks do not make would hold it up. Groups are left first, which ends the calls, and then there is a wait for these.
    """

    def __init__(self) -> None:
        self.renew()
        os.register_at_fork(after_in_child=self.renew)
        endings.afterwards.append(self._join)

    def renew(self) -> None:
        """A process that was forked has none: the pool would count those of the other one."""
        self._lock = threading.Lock()
        self._queue = SimpleQueue[Callable[[], object] | None]()
        self._idle = threading.Semaphore(0)  # each is a thread that takes one more out of the queue
        self._made: list[threading.Thread] = []

    def submit(self, function: Callable[..., object], *args: object) -> None:
        """Call it in one of them.

        Raises:
            RuntimeError: there can be no further thread.
        """
        work = partial(function, *args)
        with self._lock:
            if self._idle.acquire(blocking=False) or len(self._made) >= _MOST_THREADS:
                self._queue.put(work)
                return
            name = f"nicps-callbacks-{len(self._made)}"
            thread = threading.Thread(target=self._work, args=(work,), name=name, daemon=True)
            thread.start()
            self._made.append(thread)

    def _work(self, work: Callable[[], object] | None) -> None:
        queue, idle = self._queue, self._idle
        while work is not None:
            try:
                work()
            except BaseException:  # the thread goes on, as it counts as one that takes work
                traceback.print_exc()
            work = None  # what it holds may be large
            try:
                work = queue.get_nowait()
            except Empty:
                idle.release()
                work = queue.get()

    def _join(self) -> None:
        until = time.monotonic() + _END_LIMIT_S
        with self._lock:
            threads, queue = self._made, self._queue
            self.renew()
        for _ in threads:
            queue.put(None)
        for each in threads:
            each.join(max(0.0, until - time.monotonic()))


_threads = _Threads()


#: A generator at its end: what is thrown into it comes out again.
_spent: Generator[Any] = (each for each in "")
next(_spent, None)


def callback(function: Callable[[], T]) -> Callable[[object], T]:
    """The function, to be called once, as the callback of a torch future.

    torch makes a text of what a callback raises, with a line for each frame of Python under it. An exception that comes
    out of built-in functions only has none: the text is one line.
    """

    def outcome(_: None) -> Iterable[T]:
        try:
            return [function()]
        except Exception as error:
            return map(_spent.throw, [error.with_traceback(None)])

    return partial(next, chain.from_iterable(map(outcome, [None])))


def elsewhere(
    done: torch.futures.Future[T], outcome: Callable[[], T] | None = None
) -> torch.futures.Future[T]:
    """Done, or failed, as that future; what is called then is called in a thread of its own.

    Args:
        outcome: its result, or raises what it has failed with; default: its own `wait`.
    """
    base: torch.futures.Future[None] = torch.futures.Future()
    found = base.then(callback(outcome or done.wait))

    def hand_over(_: object) -> None:
        try:
            _threads.submit(base.set_result, None)
        except RuntimeError:  # there can be no thread, perhaps as the interpreter is at its end
            base.set_result(None)

    done.then(hand_over)
    return found
