# SPDX-License-Identifier: Apache-2.0
"""What a call of the backend gives back, and what a profiler sees of it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

import torch
from torch._C import _autograd, _distributed_c10d

#: Its methods have the types of C++.
_Work: Any = _distributed_c10d.Work
_Tensors = Sequence[torch.Tensor]


class Work(_Work):  # type: ignore[misc]
    """A call that is under way. A work that torch makes of a future forgets what has failed: this one raises."""

    def __init__(self, done: torch.futures.Future[Any]) -> None:
        super().__init__()
        self._done = done
        _recent.append(self)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Until it is done; the group's own time-out counts.

        Raises:
            RuntimeError: it has failed.
        """
        self._done.wait()
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        """Done with it."""
        return self._done

    def is_completed(self) -> bool:
        """Whether it has come to an end."""
        return self._done.done()

    def is_success(self) -> bool:
        """Whether it has come to a good one."""
        return self.is_completed() and self.exception() is None

    def exception(self) -> Exception | None:
        """What it has failed with."""
        try:
            self._done.wait()
        except RuntimeError as error:
            return error
        return None

    def result(self) -> Any:
        """The tensors."""
        return self._done.wait()


#: C++ asks a work for its future after Python has let go of it.
_recent: deque[Work] = deque(maxlen=64)


def work_of(
    event: Event | None,
    future: Future[Any],
    write: Callable[[Any], None],
    result: list[Any],
) -> Work:
    """Done once the result is written; what has failed raises out of `wait()`.

    An exception that is set in a torch future from Python ends the interpreter: it is raised in a callback.
    """
    base: torch.futures.Future[None] = torch.futures.Future()

    def finish(_: torch.futures.Future[None]) -> list[Any]:
        try:
            write(future.result())
        finally:
            if event is not None:
                event.end()
        return result

    done = base.then(finish)
    future.add_done_callback(lambda _: base.set_result(None))
    return Work(done)


def all_of(works: Sequence[Work], result: list[Any], event: Event | None = None) -> Work:
    together = torch.futures.collect_all([work.get_future() for work in works])

    def finish(done: torch.futures.Future[list[torch.futures.Future[Any]]]) -> list[Any]:
        try:
            for each in done.value():
                each.wait()
        finally:
            if event is not None:
                event.end()
        return result

    return Work(together.then(finish))


# ---- what a profiler sees


def event_of(name: str, tensors: _Tensors) -> Event | None:
    """The beginning of a call, if there is a profiler."""
    return Event(name, tensors) if _autograd._profiler_enabled() else None


class Event:
    """A call as a profiler sees it, `nicps:NAME`, from another thread than the one that has ended it."""

    def __init__(self, name: str, tensors: _Tensors) -> None:
        self._thread = threading.get_ident()
        self._handle = _autograd._record_function_with_args_enter(f"nicps:{name}", *tensors)

    def end(self) -> None:
        """Its result is there. The profiler takes what began and ended in one thread for no call of this kind."""
        if threading.get_ident() == self._thread:
            thread = threading.Thread(target=self._end)
            thread.start()
            thread.join()
        else:
            self._end()

    def _end(self) -> None:
        _autograd._record_function_with_args_exit(self._handle)
