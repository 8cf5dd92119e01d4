# SPDX-License-Identifier: Apache-2.0
"""Rounds of several engines in turn: each round of one after the other, while the others wait."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from nicps.bench.barrier import busy_ticks
from nicps.bench.engines import Running
from nicps.bench.profile import (
    Profile,
    Profiler,
    processor_seconds,
    profiler,
    seconds_since,
    statistics,
)
from nicps.bench.stages import Stages
from nicps.errors import JobFailed

WARM_UP = 2
_READY_S = 120.0
_SETTLE_S = 1.0  # until the token parks
_IDLE_S = 1.0
_REST_S = 0.1  # after a round: the token still goes round for a while


@dataclass
class Times:
    """The figures of one engine.

    Attributes:
        seconds: per counted round.
        busy: seconds of the machine's processors in all of them, less those of an idle machine.
        agents, programs, switch: seconds of processors of these processes in all of them.
        idle: processors that its processes take while the engines wait.
        last: the workers' last messages.
        stages: of the counted rounds.
        exchanges: those by which the counted rounds were summed, as the hosts report; empty if they report none.
        profile: of a round, if that was asked for.
    """

    seconds: list[float] = field(default_factory=list)
    busy: float = 0.0
    agents: float = 0.0
    programs: float = 0.0
    switch: float = 0.0
    idle: float = 0.0
    last: list[dict[str, Any]] = field(default_factory=list)
    profile: Profile | None = None
    stages: Stages = field(default_factory=Stages)
    exchanges: set[str] = field(default_factory=set)


class _Turn:
    """One engine's turns."""

    def __init__(
        self, running: Running, agents: list[int], programs: list[int], profiler: Profiler | None
    ) -> None:
        self.running, self.times = running, Times()
        self.agents, self.programs, self.profiler = agents, programs, profiler

    def round(self, number: int, baseline: float) -> None:
        """A round, which counts after those that warm up."""
        server, times, counts = self.running.server, self.times, number >= WARM_UP
        groups = self.agents, self.programs, self.running.switch
        before = [processor_seconds(pids) for pids in groups]
        if counts and self.profiler:
            self.profiler.begin()
        start = server.start()
        time.sleep(max(0.0, start - time.monotonic()))
        ticks = busy_ticks()
        told = server.gather()
        ended = max(message["ended"] for message in told)
        ticks = busy_ticks() - ticks
        if counts and self.profiler:
            self.profiler.end()
        took = [seconds_since(each) for each in before]
        times.last = server.gather()
        if len({message["digest"] for message in times.last}) != 1:
            raise JobFailed(f"round {number + 1}: the hosts' sums differ")
        if counts:
            times.seconds.append(ended - start)
            times.stages.add(start, told)
            times.exchanges |= {message.get("exchange", "") for message in told}
            hertz = os.sysconf("SC_CLK_TCK")
            times.busy += max(0.0, ticks / hertz - baseline * (ended - start))
            times.agents += took[0]
            times.programs += took[1]
            times.switch += took[2]


def measure(engines: Sequence[Running], rounds: int, *, profile: bool) -> list[Times]:
    """So many counted rounds of each, in turn.

    Raises:
        JobFailed: the hosts' sums differ, or an engine's processes failed.
        NetworkProblem: not all of an engine's processes have connected.
    """
    for running in engines:
        running.server.accept(_READY_S, running.check)
        running.server.gather()
    with contextlib.ExitStack() as stack:
        if profile:
            stack.enter_context(statistics())
        turns = []
        for running in engines:
            agents, programs = running.pids()
            ours = [*agents, *running.switch]
            made = stack.enter_context(profiler(ours)) if profile else None
            turns.append(_Turn(running, agents, programs, made))
        baseline = _measure_idle(turns)
        for number in range(rounds + WARM_UP):
            for turn in turns:
                turn.round(number, baseline)
                time.sleep(_REST_S)
    for turn in turns:
        turn.times.profile = turn.profiler.profile(rounds) if turn.profiler else None
    return [turn.times for turn in turns]


def _measure_idle(turns: Sequence[_Turn]) -> float:
    """Busy processors (0 to the number of them) while all engines wait; and each engine's own."""
    time.sleep(_SETTLE_S)
    ticks, start = busy_ticks(), time.monotonic()
    spent = [processor_seconds(turn.agents + turn.programs) for turn in turns]
    time.sleep(_IDLE_S)
    took = time.monotonic() - start
    for turn, before in zip(turns, spent, strict=True):
        turn.times.idle = seconds_since(before) / took
    return (busy_ticks() - ticks) / os.sysconf("SC_CLK_TCK") / took
