# SPDX-License-Identifier: Apache-2.0
"""The script of `nicps run` at one host, as a process: how it ends, and what it leaves (`nicps.agent.scripts`)."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nicps import wire
from nicps.agent import process
from nicps.agent.control import Access, ControlSocket
from nicps.agent.loop import Loop
from nicps.agent.process import User
from nicps.agent.scripts import Scripts
from nicps.errors import JobFailed
from nicps.job.actions import CloseJob, OpenJob
from nicps.job.script import LaunchScript
from nicps.session.channel import Channel
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
WRITES = """
import os, pathlib
pathlib.Path("model.pt").write_text("it")
pathlib.Path("logs").mkdir()
for path in ("logs/1.txt", "logs/2.txt", "zzz", "out/kept.txt", ".cache", "__pycache__/it.pyc", "it.py"):
    pathlib.Path(path).parent.mkdir(exist_ok=True)
    pathlib.Path(path).write_text("it")
pathlib.Path("empty.lock").touch()
pathlib.Path("link").symlink_to("model.pt")
pathlib.Path(os.environ["NICPS_WEIGHTS"]).write_text("0f")
"""


class Waiting:
    """One `nicps run` that waits, and its connection to an agent's socket."""

    def __init__(self, loop: Loop) -> None:
        address = f"@nicps-test-{os.getpid()}-{time.monotonic_ns()}"
        self.control = ControlSocket(address, Access(os.getuid()), loop.watch, loop.unwatch)
        ours, theirs = socket.socketpair()
        self.control.adopt(ours, os.getuid())
        self.control.peers[-1].submission = 1
        self._channel = Channel(theirs)
        self.told: list[dict[str, Any]] = []

    def end(self) -> dict[str, Any] | None:
        """The result or the error, if it has come."""
        self.control.flush()
        if self._channel.wait(0.0):
            self._channel.pump()
        while (popped := self._channel.pop()) is not None:
            self.told.append(popped[0])
        return next((m for m in self.told if m["op"] in (Result.op, Error.op)), None)

    def close(self) -> None:
        self._channel.close()
        self.control.close()


class Host:
    """The rooms of an agent that starts a run by itself, and is alone in it."""

    def __init__(self, folder: Path) -> None:
        self.rooms = Rooms(folder)
        self.waiting = Waiting(self.rooms.loop)
        self.sent: list[bytes] = []
        rooms: Any = self.rooms
        self.scripts = Scripts(
            *(rooms.driver, rooms.loop, rooms.children, rooms.executor, self.waiting.control),
            *(rooms.settings, self.sent.append, lambda: False, lambda: False),  # type: ignore[arg-type]
        )

    def run(self, script: str, *arguments: str) -> Any:
        """Run it to its end: what `nicps run` is told of that."""
        self.launch(script, *arguments)
        self.rooms.until(self._ended, "the end of the run")
        return self.waiting.end()

    def launch(self, script: str, *arguments: str, rank: int = 0, hosts: int = 1) -> None:
        """Start it; of several hosts the last one has started the run."""
        self.rooms.executor.open_job(OpenJob("run-1"))
        job = self.rooms.executor.job
        assert job is not None
        source, files = self.rooms.folder / "source", job.folder
        source.mkdir(exist_ok=True)
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
        return self.waiting.end() is not None


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    found = Host(tmp_path)
    yield found
    found.rooms.executor.close_job(CloseJob())
    found.waiting.close()
    found.rooms.close()


def test_a_script_that_cannot_be_begun_says_why(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(user: User | None, network_access: bool) -> None:
        raise OSError(28, "cannot make a network namespace")

    monkeypatch.setattr(process, "_before_exec", refuse)
    end = host.run(PRINTS, "3")
    said = "".join(m["text"] for m in host.waiting.told if m.get("event") == Output.event)
    assert "cannot make a network namespace" in said
    assert end["result"]["exit_codes"] == {"h1": JobFailed.exit_code}


def test_a_script_runs_and_what_it_leaves_is_kept(host: Host) -> None:
    """It is there when the run's end is told."""
    end = host.run(PRINTS, "3")
    kept = host.rooms.settings.runs / "run-1" / "h1"
    assert (kept / "out" / "kept.txt").read_text() == "it"
    assert (kept / "output.log").read_text() == "printed\n"
    assert end["result"]["exit_codes"] == {"h1": 3}
    assert end["result"]["not_kept"] == end["result"]["removed"] == {}
    kinds = [m.get("event", m["op"]) for m in host.waiting.told]
    assert kinds == [Launched.event, Output.event, Result.op]
    assert host.waiting.told[0]["folder"] == end["result"]["folder"] == str(kept.parent)
    assert host.scripts.job is None
    host.rooms.executor.close_job(CloseJob())
    work = host.rooms.settings.work
    host.rooms.until(lambda: not [*work.iterdir()], "an empty folder of work")


def test_what_cannot_be_kept_is_told_and_stays(host: Host) -> None:
    """A file has the name of the folder of runs, as good as a full disk."""
    host.rooms.settings.runs.write_text("")
    end = host.run(PRINTS, "0")
    left = host.rooms.settings.work / "nicps-left-run-1-h1"
    (why,) = end["result"]["not_kept"].values()
    assert end["result"]["exit_codes"] == {"h1": 0}
    assert why.startswith("cannot keep what the script has left: ")
    assert why.endswith(f"; it is in {left}")
    host.rooms.until(left.exists, "the folder with what is left")
    assert (left / "work" / "out" / "kept.txt").read_text() == "it"
    assert (left / "output.log").read_text() == "printed\n"


def test_a_folder_of_a_script_may_have_any_name(host: Host) -> None:
    """Scripts have their models in `weights`, for one."""
    (host.rooms.folder / "source" / "weights").mkdir(parents=True)
    (host.rooms.folder / "source" / "weights" / "sent.pt").write_text("it")
    end = host.run(WRITES)
    assert end["result"]["exit_codes"] == {"h1": 0} and end["result"]["weights_identical"]


def test_files_of_a_script_may_have_the_names_of_ours(host: Host) -> None:
    source = host.rooms.folder / "source"
    source.mkdir()
    for name in ("job.tar", "prepared.json", "z.py"):
        (source / name).write_text("it" * 20_000)
    end = host.run(
        "for name in ('job.tar', 'prepared.json', 'z.py'): assert len(open(name).read()) == 40_000"
    )
    assert end["result"]["exit_codes"] == {"h1": 0}


def test_a_script_that_removes_its_folder_has_left_nothing(host: Host) -> None:
    end = host.run("import shutil; shutil.rmtree('out')")
    assert end["result"]["exit_codes"] == {"h1": 0} and end["result"]["not_kept"] == {}
    assert (host.rooms.settings.runs / "run-1" / "h1" / "output.log").read_text() == ""


def test_files_that_a_script_writes_outside_of_out_are_told(host: Host) -> None:
    """What was sent with the script is none of them unless it was changed; nor are caches and our own files."""
    (host.rooms.folder / "source").mkdir()
    (host.rooms.folder / "source" / "sent.txt").write_text("it")
    removed = host.run(WRITES)["result"]["removed"]
    assert removed == {"h1": {"files": 5, "first": ["it.py", "logs/1.txt", "logs/2.txt"]}}


def test_what_was_sent_in_out_is_not_what_the_script_has_left(host: Host) -> None:
    """An earlier run has left it in the script's folder; what the script changes of it is kept."""
    out = host.rooms.folder / "source" / "out"
    (out / "old").mkdir(parents=True)
    for name in ("model.pt", "log.csv", "old/1.pt"):
        (out / name).write_text("of an earlier run")
    host.run("open('out/log.csv', 'a').write('!'); open('out/old/2.pt', 'w').write('it')")
    kept = host.rooms.settings.runs / "run-1" / "h1" / "out"
    found = {p.relative_to(kept).as_posix(): p.read_text() for p in kept.rglob("*") if p.is_file()}
    assert found == {"log.csv": "of an earlier run!", "old/2.pt": "it"}


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
