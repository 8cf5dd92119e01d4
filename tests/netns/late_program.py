# SPDX-License-Identifier: Apache-2.0
"""A program of a group that admits others before every step: `python -m tests.netns.late_program SETTINGS`.

Its state is a counter and a vector, to which each step adds what all members give. It prints a JSON object a line:
`formed`, one for each step, `done`.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import time
from typing import Any

import numpy as np
import orjson

from nicps.collective import Group, GroupClosed
from nicps.errors import NicpsError

LENGTH = 2000


def say(**values: Any) -> None:
    """Print a line for the test."""
    print(orjson.dumps(values).decode(), flush=True)


def vector_of(rank: int, step: int) -> Any:
    """The contribution of that rank in that step."""
    return np.random.default_rng([rank, step]).integers(0, 1 << 20, LENGTH, np.int64)


class Program:
    """The state, and its next step."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings = settings
        self.step, self.end, self.comes = 0, 100_000, settings.get("comes", 1)
        self.total = np.zeros(LENGTH, np.int64)
        self.group = Group.form(
            settings.get("size", 3),
            rank=settings.get("rank"),
            forming_s=60,
            timeout_s=60,
            late=settings.get("late", True),
        )

    def run(self) -> None:
        """Until so many steps after the last arrival."""
        group = self.group
        say(formed=group.rank, size=group.size, late=group.late)
        while self.step < self.end:
            try:
                self._advance()
            except GroupClosed as error:
                if not self.settings.get("returns"):
                    raise
                say(closed=str(error))
                time.sleep(0.1)
        group.close()
        say(done=True, lost=group.lost, names=group.names, world=group.world)

    def _advance(self) -> None:
        group, began = self.group, time.monotonic()
        admission = group.admit().result()
        if admission.ranks:
            state = np.array([self.step, self.comes, *self.total], np.int64)
            state = group.broadcast(state, admission.sources[0]).result()
            self.step, self.comes, self.total = int(state[0]), int(state[1]), state[2:].copy()
            self.comes -= len(admission.ranks)
            if self.comes <= 0:
                self.end = self.step + 10
        if self.settings.get("dies") == [group.rank, self.step]:
            os.kill(os.getpid(), signal.SIGKILL)
        self.total += group.all_reduce(vector_of(group.rank, self.step)).result()
        digest = hashlib.sha256(self.total.tobytes()).hexdigest()[:16]
        here = [k for k in range(group.size) if k not in group.lost]
        seconds = round(time.monotonic() - began, 3)
        said = {"step": self.step, "rank": group.rank, "here": here, "digest": digest}
        say(**said, came=admission.ranks, seconds=seconds, at=time.time())
        self.step += 1
        time.sleep(0.02)


if __name__ == "__main__":
    try:
        Program(orjson.loads(sys.argv[1])).run()
    except NicpsError as error:
        say(error=str(error), kind=type(error).__name__)
        sys.exit(error.exit_code)
