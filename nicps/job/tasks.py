# SPDX-License-Identifier: Apache-2.0
"""Tasks that have begun, and what follows when they are done, while the job that they are for exists."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from nicps.job.actions import BeginTask
from nicps.job.orders import Fail, Orders
from nicps.job.slow_work import Task


@dataclass(frozen=True, slots=True)
class _Pending:
    """`owner`: the task is forgotten with it."""

    owner: object
    done: Callable[[float, Any], Orders]
    failed: Callable[[float, str], Orders]


class Tasks:
    """Gives each task its ticket, and takes its outcome."""

    def __init__(self) -> None:
        self._last = 0
        self._pending: dict[int, _Pending] = {}

    def begin(
        self,
        owner: object,
        task: Task,
        done: Callable[[float, Any], Orders],
        failed: Callable[[float, str], Orders] = lambda now, reason: [Fail(reason)],
    ) -> BeginTask:
        """A task begins; `done` takes its outcome, `failed` its error. By default the job cannot go on after an
        error.
        """
        self._last += 1
        self._pending[self._last] = _Pending(owner, done, failed)
        return BeginTask(self._last, task)

    def finish(self, now: float, ticket: int, outcome: Any) -> Orders:
        """The task is done. If its job is over, nothing follows."""
        pending = self._pending.pop(ticket, None)
        return pending.done(now, outcome) if pending is not None else []

    def fail(self, now: float, ticket: int, reason: str) -> Orders:
        """The task has failed. If its job is over, nothing follows."""
        pending = self._pending.pop(ticket, None)
        return pending.failed(now, reason) if pending is not None else []

    def forget(self, owner: object) -> None:
        """Forget the tasks of that owner: nothing follows from them any more."""
        self._pending = {k: p for k, p in self._pending.items() if p.owner is not owner}
