# SPDX-License-Identifier: Apache-2.0
"""Hosts that go and come in a DDP script with a State (docs/pytorch.md), with real agents."""

from __future__ import annotations

import queue
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import orjson
import pytest

from tests.netns.members import Network

torch = pytest.importorskip("torch")
PROGRAM = [sys.executable, "-m", "tests.netns.elastic_program"]
LIMIT_S = 90.0


class Script:
    """One on a host: what it says, line by line."""

    def __init__(self, network: Network, host: str, settings: dict[str, Any]) -> None:
        self.host, self.lines = host, list[dict[str, Any]]()
        self._new: queue.Queue[dict[str, Any] | None] = queue.Queue()
        argv = [*PROGRAM, orjson.dumps(settings).decode()]
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
        """Wait until it has done that step."""
        while (line := self.take()) is not None:
            assert "error" not in line, line
            if line.get("step", -1) >= step:
                return line
        raise AssertionError(f"{self.host} has ended: {self.lines[-3:]} {self.errors()}")

    def ended(self) -> dict[str, Any]:
        """Wait for its end: its last line."""
        while self.take() is not None:
            pass
        assert "Traceback" not in self.errors()
        return self.lines[-1]

    def errors(self) -> str:
        assert self.process.stderr is not None
        return self.process.stderr.read() if self.process.wait(LIMIT_S) is not None else ""

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    @property
    def steps(self) -> dict[int, dict[str, Any]]:
        return {line["step"]: line for line in self.lines if "step" in line}


class Scripts:
    """One on each host, with the same settings."""

    def __init__(self, network: Network, **settings: Any) -> None:
        self.network, self.settings = network, settings
        self.of: dict[str, Script] = {}

    def start(self, *hosts: str, **more: Any) -> list[Script]:
        for host in hosts:
            self.of[host] = Script(self.network, host, {**self.settings, **more})
        return [self.of[host] for host in hosts]

    def close(self) -> None:
        for script in self.of.values():
            script.kill()


@pytest.fixture
def scripts(three: Network) -> Iterator[Scripts]:
    made = Scripts(three, pace_s=0.05)
    yield made
    made.close()
    three.ready()
    three.all_stand_by()


def check(ended: list[Script]) -> None:
    """All that did a step hold the same weights after it, and they are those of one process alone."""
    from tests.netns.elastic_program import flat, loss_of, make

    by_step: dict[int, dict[str, Any]] = {}
    for script in ended:
        for step, line in script.steps.items():
            first = by_step.setdefault(step, line)
            assert (line["digest"], line["here"]) == (first["digest"], first["here"]), (
                step,
                script.host,
            )
    kind = "adam" if any(script.lines[0].get("adam") for script in ended) else "sgd"
    model, optimizer = make(kind, 0)
    for step in range(len(by_step)):
        optimizer.zero_grad()
        here = by_step[step]["here"]
        torch.stack([loss_of(model, step, rank) for rank in here]).mean().backward()
        optimizer.step()
    for script in ended:
        if "weights" in script.lines[-2]:
            found = torch.tensor(script.lines[-2]["weights"])
            torch.testing.assert_close(found, flat(model).detach(), rtol=1e-3, atol=1e-4)


def test_a_program_is_killed_and_comes_back(scripts: Scripts) -> None:
    """It has another model, and no momentum, until it has synced; then all are the same, bit for bit."""
    first = scripts.start("h1", "h2", "h3")
    killed = first[1]
    killed.until(5)
    killed.kill()
    for script in (first[0], first[2]):
        script.until(10)
    (back,) = scripts.start("h2")
    everybody = [first[0], first[2], back]
    assert all(script.ended() == {"done": True} for script in everybody)
    formed = back.lines[0]
    assert formed["late"] and formed["size"] == 3
    step = back.lines[1]["step"]
    assert back.lines[1]["came"] and back.lines[1]["rank"] == killed.lines[0]["formed"]
    assert back.lines[1]["here"] == [0, 1, 2] and step > 10
    check([*everybody, killed])
    assert [len(s.steps) for s in everybody] == [step + 8, step + 8, 8]
