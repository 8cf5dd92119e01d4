# SPDX-License-Identifier: Apache-2.0
"""A job that is under way, watched from outside: the lines that its training programs write, as they write them."""

from __future__ import annotations

import importlib.util
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import orjson

from nicps.errors import EnvironmentProblem, NetworkProblem
from nicps.lab.agents import AgentProcess

_POLL_S = 0.01
T = TypeVar("T")


def example(name: str) -> Path:
    """The folder of one of the trainer's example jobs.

    Raises:
        EnvironmentProblem: there is no trainer beside nicps.
    """
    found = importlib.util.find_spec("trainer")
    if found is None or found.origin is None:
        raise EnvironmentProblem("this benchmark trains: run it where the package trainer is")
    return Path(found.origin).parent / "jobs" / name


def until(read: Callable[[], T | None], what: str, timeout_s: float, poll_s: float = _POLL_S) -> T:
    """The first value that is not None.

    Raises:
        NetworkProblem: there was none in time.
    """
    deadline = time.monotonic() + timeout_s
    while (value := read()) is None:
        if time.monotonic() > deadline:
            raise NetworkProblem(f"not within {timeout_s:g} s: {what}")
        time.sleep(poll_s)
    return value


class Metrics:
    """The metrics.jsonl of the training program that one host's agent has started last."""

    def __init__(self, agent: AgentProcess) -> None:
        self.host = agent.host
        self._work = agent.folders.work
        self._path: Path | None = None
        self._at = 0
        self._rows: deque[dict[str, Any]] = deque()

    def fresh(self) -> Iterator[dict[str, Any]]:
        """Rows that have been written and not been returned yet."""
        self._read()
        while self._rows:
            yield self._rows.popleft()

    def _read(self) -> None:
        found = sorted(self._work.glob("*/work/out/metrics.jsonl"), key=_age)
        if not found:
            return
        if found[-1] != self._path:
            self._path, self._at = found[-1], 0
        try:
            with self._path.open("rb") as file:
                file.seek(self._at)
                data = file.read()
        except FileNotFoundError:  # the job has ended
            return
        whole = data[: data.rfind(b"\n") + 1]
        self._at += len(whole)
        self._rows.extend(orjson.loads(line) for line in whole.splitlines())

    def until(
        self, fits: Callable[[dict[str, Any]], bool], what: str, timeout_s: float
    ) -> dict[str, Any]:
        """The first new row that fits.

        Raises:
            NetworkProblem: there was none in time.
        """

        def read() -> dict[str, Any] | None:
            return next(filter(fits, self.fresh()), None)

        return until(read, f"{what} ({self.host})", timeout_s)


def _age(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0
