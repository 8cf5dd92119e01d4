# SPDX-License-Identifier: Apache-2.0
"""Agents on hosts of a lab: started, awaited, asked and ended. `nicps lab run`, benchmarks and tests share this."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nicps
from nicps.errors import NetworkProblem
from nicps.lab import namespaces
from nicps.lab.errors import AgentFailed
from nicps.lab.lab import Host, Lab
from nicps.lab.links import HOST_INTERFACE
from nicps.session.channel import DEFAULT_SOCKET, Channel
from nicps.session.commands import ask, submit
from nicps.session.fields import values
from nicps.session.messages import AskStatus, Status, Submit

READY_S = 120.0
SCRATCH = "/var/tmp"
_END_S = 30.0
_POLL_S = 0.02


def environment() -> dict[str, str]:
    """The environment of this process; in a checkout with the path of its packages, so that it works in any folder."""
    environment = dict(os.environ)
    root = Path(nicps.__file__).resolve().parent.parent
    if root.name not in ("site-packages", "dist-packages"):
        before = environment.get("PYTHONPATH")
        environment["PYTHONPATH"] = os.pathsep.join([str(root), *([before] if before else [])])
    return environment


def nicps_command(*arguments: str) -> list[str]:
    """`nicps ARGUMENTS` by this interpreter, without modules of the current folder."""
    return [sys.executable, "-P", "-m", "nicps", *arguments]


@dataclass(frozen=True, slots=True)
class Folders:
    """An agent's folders: for its log, its jobs' results, and its jobs' work."""

    log: Path
    runs: Path
    work: Path

    @classmethod
    def below(cls, folder: Path) -> Folders:
        """All of them in `folder`, which is made."""
        folders = cls(folder / "agent.log", folder / "runs", folder / "work")
        for made in (folders.runs, folders.work):
            made.mkdir(parents=True, exist_ok=True)
        return folders


def join_command(interface: str, name: str, user: str, folders: Folders | None = None) -> list[str]:
    """`nicps join` with the options of every agent; without `folders` it keeps its files where an installation does."""
    command = nicps_command("join", "--iface", interface, "--name", name, "--user", user)
    if folders is not None:
        command += ["--runs", str(folders.runs), "--work", str(folders.work)]
    return command


@dataclass(frozen=True, slots=True)
class AgentProcess:
    """`nicps join` on one host. `netns`: name or path of the host's network namespace."""

    host: str
    netns: str
    process: subprocess.Popen[Any]
    folders: Folders

    @property
    def log(self) -> Path:
        """The file with all output of the agent."""
        return self.folders.log

    def connect(self) -> Channel:
        """A connection to its socket.

        Raises:
            OSError: the agent does not listen.
        """
        return namespaces.inside(self.netns, lambda: Channel.connect(DEFAULT_SOCKET))

    def answers(self) -> bool:
        """Whether it listens."""
        with contextlib.suppress(OSError):
            self.connect().close()
            return True
        return False

    def status(self) -> dict[str, Any]:
        """The output of `nicps status --json` there."""
        with contextlib.closing(self.connect()) as channel:
            return values(ask(channel, AskStatus(), Status, 10.0))

    def submit(
        self,
        job: Path,
        settings: Mapping[str, Any] | None = None,
        entry: str | None = None,
        data: str | None = None,
    ) -> Channel:
        """Submit a job; events and the result come through the channel (`nicps.session.commands.follow`)."""
        channel = self.connect()
        submit(channel, Submit(str(job), settings=settings, entry=entry, data=data))
        return channel

    def last_words(self) -> str:
        """Its error line, else the last line of its log."""
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        errors = [line for line in lines if "error:" in line]
        last = [*lines, *errors][-1:] or ["it said nothing"]
        return last[0].removeprefix("nicps: error: ")


def start_agent(
    lab: Lab,
    host: str | Host,
    folders: Folders,
    *arguments: str,
    user: str = "root",
    wrap: Sequence[str] = (),
    **options: Any,
) -> AgentProcess:
    """Start `nicps join` on a host; it does not answer yet.

    Args:
        arguments: further ones of `nicps join`.
        user: the user that trains.
        wrap: a command that runs it.
        options: of `Lab.run`.
    """
    where = host if isinstance(host, Host) else lab.host(host)
    command = [*wrap, *join_command(HOST_INTERFACE, where.name, user, folders), *arguments]
    with folders.log.open("ab") as file:
        streams = {"stdin": subprocess.DEVNULL, "stdout": file, "stderr": subprocess.STDOUT}
        process = lab.run(where, command, **{**streams, "env": environment(), **options})
    return AgentProcess(where.name, where.netns, process, folders)


def await_agents(agents: Sequence[AgentProcess], timeout_s: float | None = None) -> None:
    """Wait until all of them answer.

    Args:
        timeout_s: for all together; None: `READY_S`.

    Raises:
        AgentFailed: one has ended, with its own error.
        NetworkProblem: some do not answer in time; with the last lines of the first.
    """
    limit_s = READY_S if timeout_s is None else timeout_s
    deadline = time.monotonic() + limit_s
    waiting = list(agents)
    while waiting:
        for agent in agents:
            code = agent.process.poll()
            if code is not None:
                raise AgentFailed(f"the agent on {agent.host} ended: {agent.last_words()}", code)
        waiting = [agent for agent in waiting if not agent.answers()]
        if waiting and time.monotonic() > deadline:
            names = ", ".join(agent.host for agent in waiting)
            raise NetworkProblem(
                f"no answer after {limit_s:.0f} s from the agent on {names}: "
                f"{waiting[0].last_words()}"
            )
        time.sleep(_POLL_S if waiting else 0.0)


@contextlib.contextmanager
def joined(
    lab: Lab, hosts: Sequence[str | Host], folder: Path, *arguments: str
) -> Iterator[list[AgentProcess]]:
    """Agents that answer on these hosts, each with a folder of its own in `folder`; they are ended at the end.

    Processes that the caller puts into the list are ended, too.
    """
    agents: list[AgentProcess] = []
    try:
        for host in hosts:
            name = host.name if isinstance(host, Host) else host
            agents.append(start_agent(lab, host, Folders.below(folder / name), *arguments))
        await_agents(agents)
        yield agents
    finally:
        for agent in agents:
            agent.process.terminate()
        for agent in agents:
            agent.process.wait(_END_S)


@contextlib.contextmanager
def open_folder(prefix: str) -> Iterator[Path]:
    """A new folder that every user may enter, as agents' training users must; removed at the end."""
    with tempfile.TemporaryDirectory(prefix=prefix, dir=SCRATCH) as name:
        folder = Path(name)
        folder.chmod(0o755)
        yield folder
