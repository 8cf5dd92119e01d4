# SPDX-License-Identifier: Apache-2.0
"""Networks of real agents, with real training programs, for tests.

    h1 --- p1 +--------+ p3 --- h3
              |  br0   |                 a host: eth1, `nicps join`, and while a job runs its training program
    h2 --- p2 +--------+ p4 --- h4

A network is made once and serves many tests; before each of them its agents must stand by, or are started anew.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np

from nicps.lab import Lab, LabSettings
from nicps.lab.agents import AgentProcess, Folders, start_agent
from nicps.lab.jobs import RunSettings, choose_user
from nicps.lab.processes import Running
from nicps.session.channel import Channel, ChannelClosed
from nicps.session.commands import await_result
from nicps.session.events import Event
from tests.netns import light_nicps
from tests.netns.box import Box
from tests.netns.labs import NICPS, ROOT, leftovers, until
from tests.netns.warm_programs import STEM
from tests.reaper import fresh_folder, fresh_name

DIGITS = ROOT / "trainer" / "jobs" / "digits"
MNIST = ROOT / "trainer" / "jobs" / "mnist"
LIGHT = ROOT / "tests" / "netns" / "light_trainer.py"
RECORDING = ROOT / "tests" / "netns" / "recording_trainer.py"
LIGHT_NICPS = [sys.executable, "-m", light_nicps.__name__]

#: Settings of jobs that name no others. `--exchange` of pytest puts another exchange here. With `switch` labs have a
#: Linux switch that adds, and all hosts believe it.
DEFAULTS: dict[str, Any] = {"exchange": "broadcast"}

#: A job that needs no files and trains in no time; `tiny_job` puts more text behind it.
TINY = """
import os
import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from trainer import Settings

settings = Settings(batch=64, rounds=3, quorum=1.0, test_every=1000)

def host():
    with open("/sys/class/net/eth1/address") as file:
        return "h%d" % int(file.read().strip()[-2:], 16)

def data(path):
    x = np.random.default_rng(5).standard_normal((256, 16), np.float32)
    y = x[:, :4].argmax(1).astype(np.uint8)
    return {"x": x[:192], "y": y[:192]}, {"x": x[192:], "y": y[192:]}

def model():
    return nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4))

def loss(model, batch):
    return cross_entropy(model(batch["x"]), batch["y"].long())

def success(model, batch):
    return model(batch["x"]).argmax(1) == batch["y"]

def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.1)
"""


def tiny_job(folder: Path, more: str = "", name: str = "tiny", hooks: str = "") -> Path:
    """A job's folder; `more` can define its functions anew. `hooks` is for `light_trainer`."""
    job = folder / name
    job.mkdir(exist_ok=True)
    (job / "job.py").write_text(TINY + more)
    (job / "hooks.py").write_text(hooks)
    return job


@functools.cache
def _user() -> str:
    """Who trains in labs: a process of that user looks whether it can."""
    return choose_user(RunSettings(DIGITS, LabSettings(fresh_name(), 1)))


@dataclass(frozen=True)
class Run:
    """A job that has ended well. `places` maps host names to the folders of their agents' runs."""

    result: Mapping[str, Any]
    events: Sequence[Event]
    places: Mapping[str, Path]

    @property
    def members(self) -> list[str]:
        """Host names by number, from 1 on."""
        return list(self.result["members"])

    def of(self, host: str) -> Path:
        """The files that the host itself has kept."""
        return self.places[host] / self.result["job_id"] / host

    def metrics(self, host: str) -> list[dict[str, Any]]:
        """A line a round, as node 1 has collected them."""
        folder = self.places[self.members[0]] / self.result["job_id"] / host
        return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]

    def training(self, host: str) -> list[dict[str, Any]]:
        """The lines of training rounds."""
        return [row for row in self.metrics(host) if row["phase"] == "train"]

    def facts(self, host: str) -> dict[str, Any]:
        """The host's agent.json."""
        facts = json.loads((self.of(host) / "agent.json").read_text())
        assert isinstance(facts, dict)
        return facts

    def gradients(self) -> dict[int, dict[int, dict[str, Any]]]:
        """The files that `save_gradients` kept of committed rounds, by round and member number."""
        rounds: dict[int, dict[int, dict[str, Any]]] = {}
        for number, host in enumerate(self.members, 1):
            for path in (self.of(host) / "gradients").glob("*.npz"):
                with np.load(path) as saved:
                    rounds.setdefault(int(path.stem), {})[number] = dict(saved)
        done = (
            round_ for round_, saved in rounds.items() if any("total" in s for s in saved.values())
        )
        return {round_: rounds[round_] for round_ in done}


@dataclass
class Ended:
    """A command that has ended."""

    code: int
    out: str
    err: str

    def error(self, code: int) -> str:
        """The text of the one error line; nothing else may be on stderr but progress."""
        lines = self.err.splitlines()
        errors = [line for line in lines if line.startswith("nicps: error: ")]
        assert self.code == code, (self.code, self.err)
        assert len(errors) == 1 and errors[0] == lines[-1], self.err
        assert "Traceback" not in self.err
        return errors[0].removeprefix("nicps: error: ")

    def only_error(self, code: int) -> str:
        """As `error`, if it is the only line of all."""
        text = self.error(code)
        assert len(self.err.splitlines()) == 1, self.err
        return text


@dataclass
class Network:
    """A lab with an agent on every host; all of them are given `arguments`.

    `program` is the training program: None is the trainer of PyTorch, LIGHT for a test about something else. Jobs for
    LIGHT are prepared without PyTorch too. A job that is submitted as `light` does without PyTorch on any network.
    `adds`: whether there is a Linux switch that adds, which all hosts believe; None: if `DEFAULTS` name it.
    """

    hosts: int
    loss: float = 0.0
    arguments: Sequence[str] = ()
    program: Path | None = None
    agents: dict[str, AgentProcess] = field(default_factory=dict)
    adds: bool | None = None
    box: Box | None = None

    def __post_init__(self) -> None:
        self.folder = fresh_folder()
        self.lab = Lab(self.lab_settings())
        if self.lab.settings.adds:
            self.box = Box(self.lab)
        self.user = _user()
        self._runs = 0

    @property
    def names(self) -> list[str]:
        """h1 to hN."""
        return [host.name for host in self.lab.hosts]

    def lab_settings(self) -> LabSettings:
        """Of the lab that is made."""
        adds = self.adds
        if adds is None:
            asked = DEFAULTS["exchange"] == "switch" and self.hosts > 1
            adds = asked and "--mode" not in self.arguments
        switch = "xdp" if adds else "bridge"
        return LabSettings(fresh_name(), self.hosts, loss=self.loss, switch=switch)

    def up(self) -> None:
        """Make the lab, and start the agents."""
        self.lab.up()
        if self.box is not None:
            self.box.start()
        self.ready()

    def __enter__(self) -> Self:
        """Nothing is up yet."""
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Take everything down; nothing of it may be left."""
        try:
            self.lab.close()
            assert leftovers(self.lab.name) == {}
        finally:
            shutil.rmtree(self.folder, ignore_errors=True)

    # ---- agents

    def place(self, host: str, what: str) -> Path:
        """A folder of that host: `work` or `runs`."""
        path = self.folder / host / what
        path.mkdir(parents=True, exist_ok=True)
        return path

    def join(self, host: str, *arguments: str, wrap: Sequence[str] = (), **options: Any) -> None:
        """Start `nicps join` there; it does not answer yet. `wrap` is a command that runs it."""
        self.agents[host] = start_agent(
            self.lab,
            host,
            Folders.below(self.folder / host),
            *self.more_arguments(host),
            *arguments,
            user=self.user,
            wrap=wrap,
            cwd=ROOT,
            **options,
        )

    def more_arguments(self, host: str) -> list[str]:
        """The agent's further arguments on that host."""
        more = [*self.arguments, *self.trusting(host)]
        if self.program is None:
            return more
        command = [sys.executable, "-P", self.program, *self.program_arguments(host)]
        return [*more, "--trainer", " ".join(map(str, command))]

    def trusting(self, host: str) -> list[str]:
        """The arguments that make the agent there believe the switch, if there is one that adds."""
        return self.box.trusting() if self.box is not None else []

    def program_arguments(self, host: str) -> list[Path]:
        """The arguments of the training program there."""
        return []

    def run(self, host: str, argv: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Start a command on a host."""
        return self.lab.run(host, argv, cwd=ROOT, stdin=subprocess.DEVNULL, **options)

    def answered(self, host: str, timeout_s: float = 60.0) -> AgentProcess:
        """Wait until the agent there answers."""
        agent = self.agents[host]

        def answers() -> bool:
            assert agent.process.poll() is None, self.log(host)
            return self.status(host) is not None

        until(answers, f"an answer from {host}", timeout_s)
        return agent

    def status(self, host: str) -> dict[str, Any] | None:
        """The output of `nicps status --json` there; None without an agent."""
        try:
            return self.agents[host].status()
        except (OSError, ChannelClosed, KeyError):
            return None

    def live(self, host: str) -> set[str]:
        """The hosts in the view, as that one knows it."""
        status = self.status(host) or {"members": []}
        return {member["name"] for member in status["members"] if member["state"] != "left"}

    def log(self, host: str) -> str:
        """All output of the agents there."""
        return (self.folder / host / "agent.log").read_text(errors="replace")

    def stands_by(self, host: str) -> bool:
        """Whether the agent there could take a job."""
        status = self.status(host)
        return status is not None and status["state"] == "standby" and status["job"] is None

    def all_stand_by(self, *hosts: str, timeout_s: float = 30.0) -> None:
        """Wait until these (or all) do."""
        names = hosts or self.names
        until(lambda: all(map(self.stands_by, names)), f"{names} stand by", timeout_s)

    def ready(self) -> None:
        """Make sure that an agent stands by on every host, whatever was before."""
        for host in self.names:
            agent = self.agents.get(host)
            if agent is not None and agent.process.poll() is None:
                with contextlib.suppress(AssertionError):
                    self.all_stand_by(host)
                    continue
            self.end(host, signal.SIGKILL)
            self.lab.host(host).set_link(True)
            self.join(host)
        for host in self.names:
            self.answered(host)

    def end(self, host: str, number: signal.Signals, timeout_s: float = 20.0) -> int | None:
        """Send the agent's process group a signal (as a terminal does), and wait; its exit code."""
        agent = self.agents.pop(host, None)
        if agent is None:
            return None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(agent.process.pid, number)
        return agent.process.wait(timeout_s)

    def processes(self, host: str) -> list[Running]:
        """The processes on the host, without the agent's stem (`tests/netns/warm_programs.py`)."""
        return [p for p in self.lab.processes()[host] if p.command != STEM]

    def leave(self, host: str) -> int | None:
        """End the agent as SIGTERM does; its exit code."""
        return self.end(host, signal.SIGTERM)

    def nothing_left(self, host: str, work: bool = True) -> None:
        """After an agent: no program on the interface, no process, no socket; no files either, if `work`."""
        assert self.lab.host(host).read_link().xdp_mode is None
        until(lambda: not self.lab.processes()[host], f"no process on {host}")
        ended = self.command(host, "status")
        assert "nicps join" in ended.only_error(4)
        if work:
            assert not (left := [*self.place(host, "work").iterdir()]), left

    def work_is_clear(self, host: str) -> None:
        """Wait until nothing of a job is left there; an agent that goes on removes files in the background."""
        place = self.place(host, "work")
        until(lambda: not list(place.iterdir()), f"nothing in {place}")

    # ---- jobs and commands

    @property
    def light(self) -> bool:
        """Whether all jobs do without PyTorch."""
        return self.program not in (None, RECORDING)

    def submit(
        self,
        host: str,
        job: Path,
        *,
        light: bool = False,
        data: str | None = None,
        **settings: Any,
    ) -> Channel:
        """Submit on that host; events and the result come through the channel.

        Without another `exchange` it is that of `DEFAULTS`: in broadcast every host adds for itself, and
        `tests.reference` knows these sums. Where a P4 switch adds no default holds.
        """
        entry = light_nicps.ENTRY if light or self.light else None
        if "--mode" not in self.arguments:
            settings = {**DEFAULTS, **settings}
        return self.agents[host].submit(job, settings=settings, entry=entry, data=data)

    def train(
        self, job: Path, *, host: str = "h1", timeout_s: float = 120.0, **settings: Any
    ) -> Run:
        """Submit and wait for the good end."""
        channel = self.submit(host, job, **settings)
        try:
            return self.finished(channel, timeout_s)
        finally:
            channel.close()

    def finished(self, channel: Channel, timeout_s: float = 120.0) -> Run:
        """Wait for the good end of a submitted job."""
        result, events = await_result(channel, timeout_s)
        return Run(result, events, {name: self.place(name, "runs") for name in self.names})

    def in_training(self, host: str = "h1", rounds: int = 2, timeout_s: float = 90.0) -> None:
        """Wait until a job's training is under way there."""
        begun: list[int] = []

        def trains() -> bool:
            status = self.status(host)
            assert status is not None, self.log(host)
            if status["phase"] != "train":
                return False
            begun.append(status["round"])
            return bool(status["round"] >= begun[0] + rounds)

        until(trains, f"{host} trains", timeout_s)

    def nicps(self, *arguments: str, light: bool = False) -> list[str]:
        """The command line of `nicps ...`; of one that submits a `light` job."""
        submits = arguments[0] in ("submit", "resume")
        return [*(LIGHT_NICPS if submits and (light or self.light) else NICPS), *arguments]

    def start(
        self, host: str, *arguments: str, light: bool = False, **options: Any
    ) -> subprocess.Popen[str]:
        """Start `nicps ...` on a host, with pipes."""
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        argv = self.nicps(*arguments, light=light)
        return self.run(host, argv, text=True, **{**pipes, **options})

    def command(
        self, host: str, *arguments: str, timeout_s: float = 120.0, **options: Any
    ) -> Ended:
        """Run `nicps ...` on a host, as a user does."""
        return self.finish(self.start(host, *arguments, **options), timeout_s)

    def finish(self, child: subprocess.Popen[str], timeout_s: float = 120.0) -> Ended:
        """Wait for a command; it is killed if it takes too long."""
        try:
            out, err = child.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            child.kill()
            child.communicate()
            raise
        return Ended(child.returncode, out or "", err or "")


class Keeping(Network):
    """The training programs keep files in the folder `kept`, which is their argument."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.kept = self.folder / "kept"
        self.kept.mkdir()
        self.kept.chmod(0o777)
        self.folder.chmod(0o755)

    def program_arguments(self, host: str) -> list[Path]:
        return [self.kept]
