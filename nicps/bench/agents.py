# SPDX-License-Identifier: Apache-2.0
"""A lab with agents on its hosts, for benchmarks and for tests that look inside."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nicps.cli.agentlink import checked
from nicps.errors import NetworkProblem
from nicps.lab import Lab, LabSettings
from nicps.lab.namespaces import inside
from nicps.session.channel import Channel, ChannelClosed

_END_S = 30.0


@dataclass(frozen=True, slots=True)
class AgentProcess:
    """`nicps join` on one host of a lab; `log` is in a folder of the host's own."""

    host: str
    netns: str
    process: subprocess.Popen[Any]
    log: Path

    def connect(self) -> Channel:
        """A connection to its socket."""

        def dial() -> Channel:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                connection.connect("\0nicps")
            except OSError:
                connection.close()
                raise
            return Channel(connection)

        return inside(self.netns, dial)

    def status(self) -> dict[str, Any]:
        """What `nicps status --json` prints there."""
        channel = self.connect()
        try:
            channel.send({"op": "status"})
            return checked(channel.recv(10.0)[0])
        finally:
            channel.close()


def start_agent(lab: Lab, host: str, folder: Path, *arguments: str) -> AgentProcess:
    """Start `nicps join` on a host; it does not answer yet.

    In `folder` it has one of its own, with its log, and with `runs` and `work` for its jobs' files.
    """
    own = folder / host
    work = own / "work"
    work.mkdir(parents=True, exist_ok=True)
    log = own / "agent.log"
    command = [sys.executable, "-m", "nicps", "join", "--iface", "eth1", "--name", host]
    command += ["--runs", str(own / "runs"), "--work", str(work), "--user", "root", *arguments]
    with log.open("ab") as file:
        process = lab.run(
            host, command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT
        )
    return AgentProcess(host, lab.host(host).netns, process, log)


def await_agents(agents: Sequence[AgentProcess], timeout_s: float = 60.0) -> None:
    """Wait until all of them answer.

    Raises:
        NetworkProblem: one ended, or does not answer; with its last words.
    """
    deadline = time.monotonic() + timeout_s
    for agent in agents:
        while True:
            ended = agent.process.poll() is not None
            if ended or time.monotonic() > deadline:
                lines = agent.log.read_text(errors="replace").strip().splitlines()
                raise NetworkProblem(
                    f"the agent on {agent.host} {'ended' if ended else 'does not answer'}: "
                    f"{lines[-1] if lines else 'it said nothing'}"
                )
            with contextlib.suppress(OSError):
                agent.connect().close()
                break
            time.sleep(0.02)


@contextlib.contextmanager
def joined(
    lab: Lab, hosts: Sequence[str], folder: Path, *arguments: str
) -> Iterator[list[AgentProcess]]:
    """Agents that answer on these hosts; ended at the end."""
    agents: list[AgentProcess] = []
    try:
        agents += [start_agent(lab, host, folder, *arguments) for host in hosts]
        await_agents(agents)
        yield agents
    finally:
        for agent in agents:
            agent.process.terminate()
        for agent in agents:
            agent.process.wait(_END_S)


@contextlib.contextmanager
def network(settings: LabSettings, folder: Path, *arguments: str) -> Iterator[list[AgentProcess]]:
    """A lab with an agent that answers on every host; all gone at the end."""
    with Lab(settings) as lab:
        agents = [start_agent(lab, host.name, folder, *arguments) for host in lab.hosts]
        await_agents(agents)
        yield agents


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """A folder for a benchmark's agents, that every user may enter; gone at the end."""
    with tempfile.TemporaryDirectory(prefix="nicps-bench-", dir="/var/tmp") as name:
        folder = Path(name)
        folder.chmod(0o755)
        yield folder


def submit(agent: AgentProcess, **message: Any) -> Channel:
    """Submit on that host; events and the result come through the channel."""
    channel = agent.connect()
    channel.send({"op": "submit", **message})
    return channel


def result_of(
    channel: Channel, timeout_s: float = 300.0
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The job's result and the events before it.

    Raises:
        JobFailed: it failed.
    """
    events: list[dict[str, Any]] = []
    while True:
        message = checked(channel.recv(timeout_s)[0])
        if message["op"] == "result":
            return message["result"], events
        events.append(message)


def check_under_way(channel: Channel) -> None:
    """Look at what has come from a submitted job, without waiting.

    Raises:
        JobFailed: the job has failed.
    """
    with contextlib.suppress(ChannelClosed):
        while channel.wait(0.0):
            checked(channel.recv()[0])
