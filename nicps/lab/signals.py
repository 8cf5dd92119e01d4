# SPDX-License-Identifier: Apache-2.0
"""Faults of a lab's hosts: their agents and training programs stopped, going on, killed."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from typing import Literal

from nicps.lab import processes
from nicps.lab.errors import LabProblem, NothingRuns
from nicps.lab.processes import Running

Part = Literal["agent", "trainer", "both"]

TIMEOUT_S = 10.0
_POLL_S = 0.005


def choose(host: str, running: Sequence[Running], part: Part) -> list[Running]:
    """The processes on a host: the agent (`nicps join`), those that agents have started, or both. At a switch that
    adds: its process.

    Raises:
        NothingRuns: there is no such process.
    """
    if host == "switch":
        if switches := [p for p in running if processes.program(p.command) == "switch"]:
            return switches
        raise NothingRuns("no switch runs: start it with `nicps lab start switch`")
    agents = [process for process in running if processes.program(process.command) == "agent"]
    pids = {process.pid for process in agents}
    started: list[Running] = []
    while more := [p for p in running if p.parent in pids and p not in [*agents, *started]]:
        started += more
        pids |= {process.pid for process in more}
    chosen = {"agent": agents, "trainer": started, "both": [*agents, *started]}[part]
    if not agents:
        raise NothingRuns(f"no agent runs on {host}: start one with `nicps join`")
    if not chosen:
        raise NothingRuns(f"no training program runs on {host}")
    return chosen


def pause(chosen: Sequence[Running]) -> None:
    """SIGSTOP; returns when all have stopped, or ended."""
    processes.send(chosen, signal.SIGSTOP)
    _await(chosen, lambda p: processes.stopped(p) or not processes.alive(p), "stop")


def resume(chosen: Sequence[Running]) -> None:
    """SIGCONT; returns when all go on."""
    processes.send(chosen, signal.SIGCONT)
    _await(chosen, lambda p: not processes.stopped(p), "go on")


def kill(chosen: Sequence[Running]) -> None:
    """SIGKILL; returns when all have ended."""
    processes.send(chosen, signal.SIGKILL)
    _await(chosen, lambda p: not processes.alive(p), "end")


def _await(chosen: Sequence[Running], done: Callable[[Running], bool], what: str) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while left := [process for process in chosen if not done(process)]:
        if time.monotonic() > deadline:
            raise LabProblem(
                f"process {left[0].pid} ({left[0].command}) does not {what} within "
                f"{TIMEOUT_S:.0f} s of the signal"
            )
        time.sleep(_POLL_S)
