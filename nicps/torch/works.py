# SPDX-License-Identifier: Apache-2.0
"""What a call of the backend gives back, and what a profiler sees of it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

import torch
from torch._C import _autograd, _distributed_c10d

from nicps.collective import CollectiveFailed
from nicps.collective.channels import check_wait
from nicps.torch.callbacks import callback, elsewhere

#: Its methods have the types of C++.
_Work: Any = _distributed_c10d.Work
_Tensors = Sequence[torch.Tensor]


class Work(_Work):  # type: ignore[misc]
    """A call that is under way. A work that torch makes of a future forgets what has failed: this one raises.

    Args:
        outcome: once it is done, its result, or raises what it has failed with; default: as torch words it.
        threads: those that cannot wait for it.

    Attributes: `limit`, the time-out of a `wait` that says none.
    """

    limit: timedelta | None = None

    def __init__(
        self,
        done: torch.futures.Future[Any],
        outcome: Callable[[], Any] | None = None,
        threads: Sequence[threading.Thread] = (),
    ) -> None:
        super().__init__()
        self._done, self._outcome, self.threads = done, outcome, threads
        self._shown: torch.futures.Future[Any] | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Until it is done; the group's own time-out counts too.

        Args:
            timeout: how long to wait at most. The call goes on afterwards. None and 0, which is C++'s: no limit.

        Raises:
            RuntimeError: it has failed, or is not done in time, with a CollectiveFailed of `nicps.collective`.
        """
        limit = timeout or self.limit
        self._await(limit.total_seconds() if limit is not None and limit > timedelta() else None)
        self.result()
        return True

    def _await(self, seconds: float | None = None) -> None:
        """Wait in Python, where Ctrl-C is heard."""
        if self._done.done():
            return
        check_wait(self.threads)
        done = threading.Event()
        self._done.then(lambda _: done.set())
        if not done.wait(seconds):
            raise CollectiveFailed(
                f"the call was not done within {seconds:g} s: not all ranks have made it, or its tensors are large. It"
                " goes on"
            )

    def get_future(self) -> torch.futures.Future[Any]:
        """Done with it, with callbacks that may make further calls."""
        if self._shown is None:
            self._shown = elsewhere(self._done, self._outcome)
        return self._shown

    def is_completed(self) -> bool:
        """Whether it has come to an end."""
        return self._done.done()

    def is_success(self) -> bool:
        """Whether it has come to a good one."""
        return self.is_completed() and self.exception() is None

    def exception(self) -> Exception | None:
        """What it has failed with."""
        try:
            self.result()
        except Exception as error:
            return error
        return None

    def result(self) -> Any:
        """The tensors.

        Raises:
            RuntimeError: as `wait`.
        """
        self._await()
        try:
            return self._done.wait()
        except RuntimeError:
            if self._outcome is None:
                raise
        return self._outcome()


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
    written: Future[list[Any]] = Future()

    def finish() -> list[Any]:
        try:
            write(future.result())
            written.set_result(result)
        except Exception as error:
            written.set_exception(error)
        finally:
            if event is not None:
                event.end()
        return outcome()

    def outcome() -> list[Any]:
        if (error := written.exception()) is not None:
            raise error.with_traceback(None)
        return result

    done = base.then(callback(finish))
    future.add_done_callback(lambda _: base.set_result(None))
    return Work(done, outcome, getattr(future, "threads", ()))


def all_of(works: Sequence[Work], result: list[Any], event: Event | None = None) -> Work:
    together = torch.futures.collect_all([work.get_future() for work in works])

    def finish() -> list[Any]:
        try:
            return outcome()
        finally:
            if event is not None:
                event.end()

    def outcome() -> list[Any]:
        for work in works:
            work.wait()
        return result

    threads = [each for work in works for each in work.threads]
    return Work(together.then(callback(finish)), outcome, threads)


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
