# SPDX-License-Identifier: Apache-2.0
"""Tasks that have begun, and what follows when they are done: as long as the job that they are for is there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from nicps.job.actions import BeginTask, Task
from nicps.job.orders import Fail, Orders


@dataclass(frozen=True, slots=True)
class _Pending:
    """`owner`: the task is forgotten with it."""

    owner: object
    done: Callable[[float, Any], Orders]
    failed: Callable[[float, str], Orders]


class Tasks:
    """Gives each task its ticket, and takes its outcome in."""

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
        """A task begins; `done` takes its outcome, `failed` why there is none. By default the job cannot go on then."""
        self._last += 1
        self._pending[self._last] = _Pending(owner, done, failed)
        return BeginTask(self._last, task)

    def finish(self, now: float, ticket: int, outcome: Any) -> Orders:
        """It is done. Nothing follows for a job that is over."""
        pending = self._pending.pop(ticket, None)
        return pending.done(now, outcome) if pending is not None else []

    def fail(self, now: float, ticket: int, reason: str) -> Orders:
        """It has failed; the same."""
        pending = self._pending.pop(ticket, None)
        return pending.failed(now, reason) if pending is not None else []

    def forget(self, owner: object) -> None:
        """Nothing follows any more from the tasks of that owner."""
        self._pending = {k: p for k, p in self._pending.items() if p.owner is not owner}
