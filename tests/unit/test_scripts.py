# SPDX-License-Identifier: Apache-2.0
"""The script of `nicps run` at one host, as a process: how it ends, and what it leaves (`nicps.agent.scripts`)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nicps import wire
from nicps.agent import process
from nicps.agent.process import User
from nicps.agent.scripts import Scripts
from nicps.errors import JobFailed
from nicps.job.actions import CloseJob, OpenJob
from nicps.job.script import LaunchScript
from nicps.session.events import Launched, Output
from nicps.session.messages import Error, Result
from tests.rooms import MAC, Rooms
from trainer.script import prepare

pytestmark = pytest.mark.unit

SLEEPS = """
import time
time.sleep(600)
"""
PRINTS = """
import sys
print("printed")
open("out/kept.txt", "w").write("it")
sys.exit(int(sys.argv[1]))
"""


class Control:
    """One `nicps run` that waits; what it is told."""

    def __init__(self) -> None:
        channel = SimpleNamespace(backlog=0)
        self.peers = [SimpleNamespace(submission=1, channel=channel)]
        self.told: list[Any] = []

    def post(self, peer: object, message: object) -> None:
        self.told.append(message)

    def end(self) -> Any:
        """The result or the error, if it has come."""
        return next((m for m in self.told if isinstance(m, Result | Error)), None)


class Host:
    """The rooms of an agent that starts a run by itself, and is alone in it."""

    def __init__(self, folder: Path) -> None:
        self.rooms, self.control = Rooms(folder), Control()
        self.sent: list[bytes] = []
        rooms: Any = self.rooms
        self.scripts = Scripts(
            *(rooms.driver, rooms.loop, rooms.children, rooms.executor, self.control),
            *(rooms.settings, self.sent.append, lambda: False, lambda: False),  # type: ignore[arg-type]
        )

    def run(self, script: str, *arguments: str) -> Any:
        """Run it to its end: what `nicps run` is told of that."""
        self.launch(script, *arguments)
        self.rooms.until(self._ended, "the end of the run")
        return self.control.end()

    def launch(self, script: str, *arguments: str, rank: int = 0, hosts: int = 1) -> None:
        """Start it; of several hosts the last one has started the run."""
        self.rooms.executor.open_job(OpenJob("run-1"))
        job = self.rooms.executor.job
        assert job is not None
        source, files = self.rooms.folder / "source", job.folder
        source.mkdir()
        (source / "it.py").write_text(script)
        settings = {
            "script": {"path": "it.py", "arguments": list(arguments)},
            "network_access": True,
        }
        prepare(source, files, settings)
        others = tuple((f"h{k}", bytes([k] * 6)) for k in range(2, hosts + 1))
        names, submission = (("h1", MAC), *others), int(hosts == 1)
        run = "run-1", "trainer.script", settings, names, rank, hosts - 1, submission
        self.scripts.launch(LaunchScript(*run))

    def _ended(self) -> bool:
        self.scripts.tick()
        return self.control.end() is not None


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    found = Host(tmp_path)
    yield found
    found.rooms.executor.close_job(CloseJob())
    found.rooms.close()


def test_a_script_that_cannot_be_begun_says_why(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(user: User | None, network_access: bool) -> None:
        raise OSError(28, "cannot make a network namespace")

    monkeypatch.setattr(process, "_before_exec", refuse)
    end = host.run(PRINTS, "3")
    said = "".join(m.text for m in host.control.told if isinstance(m, Output))
    assert "cannot make a network namespace" in said
    assert end.result["exit_codes"] == {"h1": JobFailed.exit_code}


def test_a_script_runs_and_what_it_leaves_is_kept(host: Host) -> None:
    """It is there when the run's end is told."""
    end = host.run(PRINTS, "3")
    kept = host.rooms.settings.runs / "run-1" / "h1"
    assert (kept / "out" / "kept.txt").read_text() == "it"
    assert (kept / "output.log").read_text() == "printed\n"
    assert end.result["exit_codes"] == {"h1": 3} and end.result["not_kept"] == {}
    assert [type(m) for m in host.control.told] == [Launched, Output, Result]
    assert host.scripts.job is None
    host.rooms.executor.close_job(CloseJob())
    work = host.rooms.settings.work
    host.rooms.until(lambda: not [*work.iterdir()], "an empty folder of work")


def test_what_cannot_be_kept_is_told_and_stays(host: Host) -> None:
    """A file has the name of the folder of runs, as good as a full disk."""
    host.rooms.settings.runs.write_text("")
    end = host.run(PRINTS, "0")
    left = host.rooms.settings.work / "nicps-left-run-1-h1"
    (why,) = end.result["not_kept"].values()
    assert end.result["exit_codes"] == {"h1": 0}
    assert why.startswith("cannot keep what the script has left: ")
    assert why.endswith(f"; it is in {left}")
    host.rooms.until(left.exists, "the folder with what is left")
    assert (left / "work" / "out" / "kept.txt").read_text() == "it"
    assert (left / "output.log").read_text() == "printed\n"


def test_a_host_that_cancels_tells_all_others(host: Host) -> None:
    """The one that has started the run may be lost: it is told as all are."""
    host.launch(SLEEPS, hosts=3)
    assert host.scripts.cancel("cancelled")
    host.scripts.tick()
    told = [wire.unpack(frame).body for frame in host.sent]
    kills = [body for body in told if isinstance(body, wire.Script)]
    kills = [body for body in kills if body.step == wire.ScriptStep.KILL]
    assert sorted(body.rank for body in kills) == [1, 2]
    host.scripts.close()
