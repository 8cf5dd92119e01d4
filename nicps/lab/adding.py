# SPDX-License-Identifier: Apache-2.0
"""The process of a lab's switch that adds: `nicps switch xdp run` in the switch's namespace, started and awaited."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nicps.auth import write_key
from nicps.errors import NetworkProblem, UsageProblem
from nicps.lab import links, processes, state
from nicps.lab.agents import environment, nicps_command
from nicps.lab.errors import AgentFailed, LabNotFound
from nicps.lab.faults import SWITCH
from nicps.lab.lab import Lab

READY_S = 120.0
_END_S = 30.0
_POLL_S = 0.02


@dataclass(frozen=True, slots=True)
class Keys:
    """Files: the network's key, which hosts have, and the switch's, which hosts and switch have."""

    network: Path
    switch: Path

    @classmethod
    def make(cls, folder: Path) -> Keys:
        """Make new ones, in a folder that exists."""
        keys = cls(folder / "network.key", folder / "switch.key")
        for path in (keys.network, keys.switch):
            write_key(path)
        return keys


def trusting(keys: Keys | None) -> list[str]:
    """The options that make `nicps join` believe the switch."""
    if keys is None:
        return ["--trust-switch"]
    return ["--key", str(keys.network), "--switch-key", str(keys.switch)]


def key_arguments(keys: Keys | None) -> list[str]:
    """The options of `nicps switch xdp run` for these keys."""
    return [] if keys is None else ["--key", str(keys.switch)]


def require_adding(lab: Lab) -> None:
    """Raise LabNotFound unless the lab's switch adds."""
    if not lab.settings.adds:
        raise LabNotFound(
            f"lab {lab.name} has no switch that adds: make one with `nicps lab up --switch xdp`"
        )


def command(lab: Lab, *arguments: str) -> list[str]:
    """`nicps switch xdp run` on all ports of the lab's switch."""
    ports = ",".join(links.switch_port_name(host.number) for host in lab.hosts)
    run = ["switch", "xdp", "run", "--ports", ports, "--bridge", links.BRIDGE]
    return nicps_command(*run, *arguments)


def start(lab: Lab, *arguments: str, log: Path | None = None) -> subprocess.Popen[Any]:
    """Start the switch, and wait until it is on its ports; it ends with the lab, if not before.

    Args:
        arguments: further ones of `nicps switch xdp run`; `start_again` gives the same.
        log: the file of its output (that of the lab).

    Raises:
        LabNotFound: the lab's switch does not add.
        UsageProblem: it runs already.
        AgentFailed: it has ended, with its own error.
        NetworkProblem: it is not ready in time.
    """
    require_adding(lab)
    if running(lab):
        raise UsageProblem(f"the switch of lab {lab.name} runs already")
    _remember(lab, arguments)
    log = log or state.switch_log(lab.name)
    with log.open("ab") as out:
        out.seek(0, 2)
        begin = out.tell()
        streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": out}
        process = lab.run(SWITCH, command(lab, *arguments), **streams, env=environment())
    _await_ready(lab, process, log, begin)
    return process


def start_again(lab: Lab) -> subprocess.Popen[Any]:
    """Start it with its former arguments."""
    require_adding(lab)
    found = state.read(lab.name)
    return start(lab, *(found.switch if found is not None else ()))


@contextlib.contextmanager
def serving(lab: Lab, *arguments: str, log: Path | None = None) -> Iterator[subprocess.Popen[Any]]:
    """Run a switch during the context."""
    process = start(lab, *arguments, log=log)
    try:
        yield process
    finally:
        process.terminate()
        process.wait(_END_S)


def running(lab: Lab) -> list[processes.Running]:
    """The switch's process."""
    there = lab.processes().get(SWITCH, [])
    return [process for process in there if processes.program(process.command) == "switch"]


def _remember(lab: Lab, arguments: Sequence[str]) -> None:
    with state.lock():
        found = state.read(lab.name)
        if found is not None:
            state.write(replace(found, switch=tuple(arguments)))


def _await_ready(lab: Lab, process: subprocess.Popen[Any], log: Path, begin: int) -> None:
    deadline = time.monotonic() + READY_S
    while any(link.xdp_mode is None for link in lab.switch_ports().values()):
        if (code := process.poll()) is not None:
            raise AgentFailed(f"the switch ended: {_last_words(log, begin)}", code)
        if time.monotonic() > deadline:
            raise NetworkProblem(
                f"no switch on its ports after {READY_S:.0f} s: {_last_words(log, begin)}"
            )
        time.sleep(_POLL_S)


def _last_words(log: Path, begin: int) -> str:
    text = log.read_bytes()[begin:].decode(errors="replace")
    lines = [line.strip() for line in text.splitlines() if line.strip()] or ["it said nothing"]
    return lines[-1].removeprefix("nicps: error: ")
