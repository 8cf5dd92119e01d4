# SPDX-License-Identifier: Apache-2.0
"""Programs that tests start on hosts beside their agents, and their output, line by line."""

from __future__ import annotations

import queue
import subprocess
import sys
import threading
from typing import Any

import orjson

from tests.netns.members import Network

LIMIT_S = 180.0


class Script:
    """One on a host."""

    def __init__(self, network: Network, host: str, module: str, settings: dict[str, Any]) -> None:
        self.host, self.lines = host, list[dict[str, Any]]()
        self._new: queue.Queue[dict[str, Any] | None] = queue.Queue()
        argv = [sys.executable, "-m", module, orjson.dumps(settings).decode()]
        self.process = network.run(
            host, argv, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._new.put(orjson.loads(line))
        self._new.put(None)

    def take(self) -> dict[str, Any] | None:
        """The next line; None at the end."""
        line = self._new.get(timeout=LIMIT_S)
        if line is not None:
            self.lines.append(line)
        return line

    def until(self, step: int) -> dict[str, Any]:
        """Wait until the program has done that step."""
        while (line := self.take()) is not None:
            assert "error" not in line, line
            if line.get("step", -1) >= step:
                return line
        raise AssertionError(f"{self.host} has ended: {self.lines[-3:]} {self.errors()}")

    def ended(self) -> dict[str, Any]:
        """Wait for its end: its last line."""
        while self.take() is not None:
            pass
        assert "Traceback" not in (errors := self.errors()), errors
        return self.lines[-1]

    def errors(self) -> str:
        """Its stderr, once it has ended."""
        self.process.wait(LIMIT_S)
        assert self.process.stderr is not None
        return self.process.stderr.read()

    def kill(self) -> None:
        """End it at once."""
        self.process.kill()
        self.process.wait()

    @property
    def steps(self) -> dict[int, dict[str, Any]]:
        """Its output for each step."""
        return {line["step"]: line for line in self.lines if "step" in line}


class Scripts:
    """One on each host, with the same settings."""

    def __init__(self, network: Network, module: str, **settings: Any) -> None:
        self.network, self.module, self.settings = network, module, settings
        self.all: list[Script] = []

    def start(self, *hosts: str, **more: Any) -> list[Script]:
        """Start it there."""
        settings = {**self.settings, **more}
        new = [Script(self.network, host, self.module, settings) for host in hosts]
        self.all += new
        return new

    def close(self) -> None:
        """End all that is left, and wait until the agents stand by."""
        for script in self.all:
            script.kill()
        self.network.ready()
        self.network.all_stand_by()

    def agree(self) -> dict[int, dict[str, Any]]:
        """All that did a step had the same result: their output for each."""
        by_step: dict[int, dict[str, Any]] = {}
        for script in self.all:
            for step, line in script.steps.items():
                first = by_step.setdefault(step, line)
                same = ("digest", "here")
                assert [line[k] for k in same] == [first[k] for k in same], (step, script.host)
        assert sorted(by_step) == list(range(len(by_step)))
        return by_step
