# SPDX-License-Identifier: Apache-2.0
"""The time of a step of DDP above computing, which `benchmarks.low_rank` and `benchmarks.which` measure.

Two hosts have a core and a thread each, and their agents the same core. "Above" is the time of a step less that of
computing without DDP, at the slower rank; "processor" is the same of the rank's processor time, without its agent's.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import orjson

from benchmarks.rendezvous import gloo_variables
from nicps.errors import EnvironmentProblem, JobFailed
from nicps.lab import Lab, LabSettings
from nicps.lab.agents import environment, joined, open_folder

HOSTS = 2
LAYERS = 4
#: Kinds of ways: those that need an agent, and those on Gloo.
OURS = ("plain", "lane", "rank", "local")
GLOO = ("gloo", "powersgd")
BURST_BYTES = 16 * 1024  # the lab's own would let the factors through at any rate
_LIMIT_S = 300.0


def parameters(width: int) -> int:
    """Of a model of layers that wide."""
    return LAYERS * width * (width + 1)


@dataclass(frozen=True)
class Way:
    """One way to exchange gradients.

    Attributes:
        kind: one of OURS and GLOO. value: its lane, rank, or steps between two averages.
        variables: more of the environment.
    """

    kind: str
    value: str = ""
    variables: Mapping[str, str] = field(default_factory=dict)


class Bench:
    """A lab at one rate with agents; ranks are started in it for each run."""

    def __init__(self, lab: Lab, width: int) -> None:
        self.lab, self.width = lab, width
        self._ports = count(29500)
        rate = lab.settings.rate_bps
        #: Seconds of all parameters in float32 on the line.
        self.line_s = 32 * parameters(width) / rate if rate else 0.0

    def measure(self, way: Way, steps: int, warm_up: int) -> dict[str, float]:
        """One start of both ranks; medians in seconds.

        Raises:
            JobFailed: a rank failed, or what should be the same at both differs.
        """
        command = [sys.executable, "-m", "benchmarks.above_rank", "--way", way.kind]
        command += ["--value", way.value, "--width", str(self.width)]
        command += ["--steps", str(steps), "--warm-up", str(warm_up)]
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        gloo = gloo_variables(self.lab, next(self._ports))
        ranks = []
        for host, core, rendezvous in zip(self.lab.hosts, _cores(), gloo, strict=False):
            env = {**environment(), "OMP_NUM_THREADS": "1", **way.variables}
            env |= rendezvous if way.kind in GLOO else {}
            process = self.lab.run(host, command, env=env, stdin=subprocess.DEVNULL, **pipes)
            os.sched_setaffinity(process.pid, {core})
            ranks.append(process)
        limit_s = _LIMIT_S + 3 * self.line_s * (steps + warm_up)
        found = []
        try:
            for process in ranks:
                out, err = process.communicate(timeout=limit_s)
                if process.returncode:
                    raise JobFailed(f"{way}: exit code {process.returncode}: {err[-500:]}")
                found.append(orjson.loads(out.splitlines()[-1]))
        finally:
            for process in ranks:
                process.kill()
        if len({each["same"] for each in found}) != 1:
            raise JobFailed(f"{way}: the ranks' results differ")
        computing = max(each["computing"][0] for each in found)
        step = max(each["step"][0] for each in found)
        used = max(each["step"][1] - each["computing"][1] for each in found)
        return {"computing": computing, "step": step, "above": step - computing, "processor": used}


@contextmanager
def opened(name: str, rate_bps: int, width: int, burst_bytes: int = BURST_BYTES) -> Iterator[Bench]:
    """A lab of that rate, with an agent on each host.

    Args:
        burst_bytes: what the line takes at once after a pause.

    Raises:
        EnvironmentProblem: there is one core.
    """
    if len(_cores()) < HOSTS:
        raise EnvironmentProblem(f"each of {HOSTS} hosts needs a core: there is one")
    settings = LabSettings(name, HOSTS, rate_bps, burst_bytes=burst_bytes)
    with (
        open_folder("nicps-bench-") as folder,
        Lab(settings) as lab,
        joined(lab, lab.hosts, folder, "--silence", "2") as agents,
    ):
        for agent, core in zip(agents, _cores(), strict=False):
            for thread in os.listdir(f"/proc/{agent.process.pid}/task"):
                os.sched_setaffinity(int(thread), {core})
        yield Bench(lab, width)


def _cores() -> list[int]:
    return sorted(os.sched_getaffinity(0))
