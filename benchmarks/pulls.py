# SPDX-License-Identifier: Apache-2.0
"""Pulls of all parameters out of one server's kernel (`benchmarks.servers pulls`), in a lab of their own.

The first host of the lab serves, all others pull at the same time. An answer is as long as its question, so the line is
full in both directions.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import orjson

from benchmarks.pull_job import ENTRY
from nicps import wire
from nicps.bench.barrier import BarrierServer
from nicps.bench.profile import processor_seconds, profiler, seconds_since
from nicps.bench.profile import statistics as measured
from nicps.lab import Lab, LabSettings
from nicps.lab.agents import AgentProcess, joined, open_folder
from nicps.rates import format_rate
from nicps.session.commands import await_result, raise_failure

_READY_S = 120.0
_SILENCE_S = 2.0  # all hosts share a machine
_WARM_UP = 2
#: Pulls in which the kernel measures each run of its programs, which takes some time, too.
_PROFILED = 3
#: Bytes of a frame of parameters as the lab's ports count them.
FRAME_BYTES = wire.ETHERNET_BYTES + wire.PUSH_HEADER_BYTES + wire.PAYLOAD_BYTES


@dataclass(frozen=True, slots=True)
class Pulls:
    """One rate's row.

    Attributes:
        rate_bps: of the line; None: unshaped.
        seconds_median, seconds_min: until all workers had all parameters.
        gbit_per_s: of answers at the server's interface, headers included, by the median.
        of_line: that as a part of the line's rate; None where it is unshaped.
        server_user: user-space time of the server's agent and training program, as a part of a processor, while workers
            pulled; `server_processor`: all their time, with interrupts that came meanwhile.
        kernel_ns: time of the server's XDP program for a question and its answer.
        core_gbit_per_s: of answers, by that time: what a processor gives that does nothing else.
    """

    rate_bps: int | None
    workers: int
    params: int
    pulls: int
    seconds_median: float
    seconds_min: float
    gbit_per_s: float
    of_line: float | None
    server_user: float
    server_processor: float
    kernel_ns: float
    core_gbit_per_s: float


def measure(rate: int | None, workers: int, params: int, pulls: int) -> Pulls:
    """One row.

    Raises:
        JobFailed: the job has failed, or the server has not answered every question.
    """
    shape = LabSettings(f"pulls-{os.getpid()}", workers + 1, rate)
    with (
        open_folder("nicps-bench-") as folder,
        Lab(shape) as lab,
        joined(lab, lab.hosts, folder, "--silence", f"{_SILENCE_S:g}") as agents,
        contextlib.closing(BarrierServer(folder / "barrier.sock", workers)) as server,
    ):
        settings = {
            "system": "S",
            "sync_every": 1,
            "servers": "h1",
            "lane": "i32",
            "batch": workers,
            "quorum": 1.0,
            "params": params,
            "pulls": _WARM_UP + pulls + _PROFILED,
            "barrier": str(server.path),
        }
        with contextlib.closing(agents[0].submit(folder, settings, ENTRY)) as channel:
            server.accept(_READY_S, lambda: raise_failure(channel))
            row = _measure(server, agents[0], server_pids(lab, agents[0]), shape, params, pulls)
            server.gather()
            await_result(channel)
    return row


def server_pids(lab: Lab, agent: AgentProcess) -> list[int]:
    """The agent's and the training program's, of a host that serves."""
    return [process.pid for process in lab.processes()[agent.host]]


def _measure(
    server: BarrierServer,
    agent: AgentProcess,
    pids: Sequence[int],
    shape: LabSettings,
    params: int,
    pulls: int,
) -> Pulls:
    for _ in range(_WARM_UP):
        _pull(server)
    user, spent, began = user_seconds(pids), processor_seconds(pids), time.monotonic()
    took = [_pull(server) for _ in range(pulls)]
    lasted = time.monotonic() - began
    user, processor = user_seconds(pids) - user, seconds_since(spent)
    workers, fragments = shape.hosts - 1, -(-params // wire.lanes_per_fragment(32))
    answers = workers * fragments
    median = statistics.median(took)
    speed = answers * FRAME_BYTES * 8 / median
    kernel_ns = _kernel_seconds(server, agent) / (answers * _PROFILED) * 1e9
    return Pulls(
        rate_bps=shape.rate_bps,
        workers=workers,
        params=params,
        pulls=pulls,
        seconds_median=round(median, 5),
        seconds_min=round(min(took), 5),
        gbit_per_s=round(speed / 1e9, 4),
        of_line=None if shape.rate_bps is None else round(speed / shape.rate_bps, 4),
        server_user=round(user / lasted, 4),
        server_processor=round(processor / lasted, 4),
        kernel_ns=round(kernel_ns, 1),
        core_gbit_per_s=round(FRAME_BYTES * 8 / kernel_ns, 3),
    )


def _pull(server: BarrierServer) -> float:
    """Of all workers at once; seconds until the last one has all."""
    server.gather()
    began = server.start()
    return float(max(message["ended"] for message in server.gather())) - began


def _kernel_seconds(server: BarrierServer, agent: AgentProcess) -> float:
    """Of the agent's BPF programs, during the pulls that are left."""
    with measured(), profiler([agent.process.pid]) as found:
        found.begin()
        for _ in range(_PROFILED):
            _pull(server)
        found.end()
    return sum(found.profile(1).bpf_seconds.values())


def user_seconds(pids: Sequence[int]) -> float:
    """User-space time of these processes, interrupts left out: the kernel samples it a hundred times a second."""
    ticks = 0
    for pid in pids:
        with contextlib.suppress(FileNotFoundError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11])
    return ticks / os.sysconf("SC_CLK_TCK")


def table(rows: Sequence[Pulls]) -> str:
    """A table of the rows, for the terminal."""
    lines = [
        f"{'rate':<10}{'workers':>7}{'median':>10}{'least':>10}{'answers':>14}{'of the line':>13}"
        f"{'server user':>13}{'with kernel':>13}{'an answer':>11}{'a core gives':>15}"
    ]
    for row in rows:
        of_line = "" if row.of_line is None else f"{row.of_line:.1%}"
        lines.append(
            f"{format_rate(row.rate_bps):<10}{row.workers:>7}{row.seconds_median * 1e3:>7.1f} ms"
            f"{row.seconds_min * 1e3:>7.1f} ms"
            f"{row.gbit_per_s:>7.2f} Gbit/s{of_line:>13}{row.server_user:>13.2%}{row.server_processor:>13.2%}"
            f"{row.kernel_ns:>8.0f} ns{row.core_gbit_per_s:>8.2f} Gbit/s"
        )
    return "\n".join(lines)


def run(args: argparse.Namespace) -> int:
    """Measure and print."""
    rows = [measure(rate, args.workers, args.params, args.pulls) for rate in args.rate]
    print(table(rows))
    if args.json:
        print(orjson.dumps([asdict(row) for row in rows]).decode())
    return 0
