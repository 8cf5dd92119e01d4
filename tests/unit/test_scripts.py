# SPDX-License-Identifier: Apache-2.0
"""The script of `nicps run` at one host, as a process: how it ends, and what it leaves (`nicps.agent.scripts`)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nicps.agent.scripts import Scripts
from nicps.job.script import LaunchScript
from nicps.session.events import Launched, Output
from nicps.session.messages import Error, Result
from tests.rooms import MAC, Rooms
from trainer.script import prepare

pytestmark = pytest.mark.unit

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
        rooms: Any = self.rooms
        self.scripts = Scripts(
            *(rooms.driver, rooms.loop, rooms.children, rooms.executor, self.control),
            *(rooms.settings, lambda frame: None, lambda: False, lambda: False),  # type: ignore[arg-type]
        )

    def launch(self, script: str, *arguments: str) -> Any:
        """Run it to its end: what `nicps run` is told of that."""
        folder = self.rooms.folder
        source, files = folder / "source", folder / "files"
        for made in (source, files, files / "out"):
            made.mkdir()
        (source / "it.py").write_text(script)
        settings = {
            "script": {"path": "it.py", "arguments": list(arguments)},
            "network_access": True,
        }
        prepare(source, files, settings)
        executor: Any = self.rooms.executor
        executor.job = SimpleNamespace(folder=files)
        hosts = (("h1", MAC),)
        self.scripts.launch(LaunchScript("run-1", "trainer.script", settings, hosts, 0, 0, 1))
        self.rooms.until(self._ended, "the end of the run")
        return self.control.end()

    def _ended(self) -> bool:
        self.scripts.tick()
        return self.control.end() is not None


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    found = Host(tmp_path)
    yield found
    found.rooms.close()


def test_a_script_runs_and_what_it_leaves_is_kept(host: Host) -> None:
    """It is there when the run's end is told."""
    end = host.launch(PRINTS, "3")
    kept = host.rooms.settings.runs / "run-1" / "h1"
    assert (kept / "out" / "kept.txt").read_text() == "it"
    assert (kept / "output.log").read_text() == "printed\n"
    assert end.result["exit_codes"] == {"h1": 3} and end.result["not_kept"] == {}
    assert [type(m) for m in host.control.told] == [Launched, Output, Result]
    assert host.scripts.job is None
    work = host.rooms.settings.work
    host.rooms.until(lambda: not [*work.iterdir()], "an empty folder of work")


def test_what_cannot_be_kept_is_told_and_stays(host: Host) -> None:
    """A file has the name of the folder of runs, as good as a full disk."""
    host.rooms.settings.runs.write_text("")
    end = host.launch(PRINTS, "0")
    left = host.rooms.settings.work / "nicps-left-run-1-h1"
    (why,) = end.result["not_kept"].values()
    assert end.result["exit_codes"] == {"h1": 0}
    assert why.startswith("cannot keep what the script has left: ")
    assert why.endswith(f"; it is in {left}")
    host.rooms.until(left.exists, "the folder with what is left")
    assert (left / "work" / "out" / "kept.txt").read_text() == "it"
    assert (left / "output.log").read_text() == "printed\n"
