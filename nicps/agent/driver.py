# SPDX-License-Identifier: Apache-2.0
"""Between the life of a job, which asks for actions, and the rooms of the agent, which carry them out."""

from __future__ import annotations

import contextlib
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nicps.errors import NicpsError, explain
from nicps.job import Life
from nicps.job.actions import Action


class JobNotOpen(Exception):
    """An action is for a job whose files could not be made here. The reason was reported when that failed."""


class Driver:
    """Carries actions out in order; the actions that follow from them come after them.

    Attributes: `life`, for the rooms' events; `now`, the time of this step of the loop.
    """

    def __init__(self, life: Life) -> None:
        self.life = life
        self.now = time.monotonic()
        self._rooms: dict[type, Callable[[Any], None]] = {}
        self._actions: deque[Action] = deque()
        self._busy = False

    def assign(self, rooms: Mapping[type, Callable[[Any], None]]) -> None:
        """The table of the methods that carry out each kind of action."""
        self._rooms.update(rooms)

    def carry_out(self, actions: Sequence[Action]) -> None:
        """Queue these actions behind those that are waiting."""
        if not actions:
            return
        self._actions.extend(actions)
        if self._busy:
            return
        self._busy = True
        try:
            while self._actions:
                action = self._actions.popleft()
                try:
                    self._rooms[type(action)](action)
                except JobNotOpen:
                    continue
                except (OSError, NicpsError) as error:
                    reason = explain("go on with the job here", error)
                    self._actions.extend(self.life.action_failed(self.now, reason))
        finally:
            self._busy = False


def log(text: str) -> None:
    """One line for the operator. If it cannot be written (a full disk, a closed terminal) the agent goes on."""
    with contextlib.suppress(OSError, ValueError):
        print(f"nicps: {text}", file=sys.stderr, flush=True)
