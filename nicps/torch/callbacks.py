# SPDX-License-Identifier: Apache-2.0
"""Futures whose callbacks may make calls, and wait for them.

PyTorch's hooks do so (PowerSGD). In the thread that carries out a group's calls they would wait for themselves.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain
from typing import Any, TypeVar

import torch

T = TypeVar("T")


class _Threads:
    """Made as they are needed: each can wait for a call whose own callback needs another one."""

    def __init__(self) -> None:
        self.renew()
        os.register_at_fork(after_in_child=self.renew)

    def renew(self) -> None:
        """A process that was forked has none: the pool would count those of the other one."""
        self.submit = ThreadPoolExecutor(64, "nicps-callbacks").submit


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
