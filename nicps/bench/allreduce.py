# SPDX-License-Identifier: Apache-2.0
"""`nicps bench allreduce`: our all-reduce and Gloo's in the same lab, in one run."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import orjson

from nicps.bench.agents import await_agents, result_of, start_agent, submit
from nicps.bench.barrier import BarrierServer, busy_ticks, median, peak_rss_bytes
from nicps.errors import JobFailed, UsageProblem
from nicps.lab import Lab, LabSettings, parse_rate

_WARM_UP = 2
_IDLE_S = 1.0

DESCRIPTION = """\
All-reduce of random float32 tensors that differ per host, in a lab of namespaces: seconds of the slowest host
from a common start to the float32 result, two rounds to warm up, then --rounds counted. The sum is checked in the
same run. Processor time is the machine's busy time (softirq included, that is where XDP works) less an idle
baseline, shared over the hosts; memory is the peak of the largest agent (nicps) or rank (gloo)."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One engine's row."""

    engine: str
    lane: str
    seconds_median: float
    seconds_min: float
    wire_limit_seconds: float
    cpu_seconds_per_host: float
    peak_rss_bytes: int
    worst_error: float


def add_parser(subparsers: Any) -> None:
    """The arguments."""
    parser = subparsers.add_parser(
        "allreduce", help="all-reduce beside Gloo", description=DESCRIPTION
    )
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--params", type=int, default=11_700_000, help="float32 values per tensor")
    parser.add_argument("--rate", default="1gbit", help="of every port (%(default)s)")
    parser.add_argument("--lane", default="i32,i16,i8", help="lanes to measure (%(default)s)")
    parser.add_argument("--against", choices=("gloo", "none"), default="gloo")
    parser.add_argument("--rounds", type=int, default=10, help="counted (%(default)s)")
    parser.add_argument("--json", action="store_true", help="a JSON object as the last line")
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Measure and print."""
    lanes = [lane for lane in args.lane.split(",") if lane]
    if any(lane not in ("i32", "i16", "i8") for lane in lanes):
        raise UsageProblem(f"lanes are i32, i16 and i8, not {args.lane}")
    rate = parse_rate(args.rate)
    rows: list[Measured] = []
    with tempfile.TemporaryDirectory(prefix="nicps-bench-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        with Lab(LabSettings(name=f"bench-{os.getpid()}", hosts=args.hosts, rate_bps=rate)) as lab:
            bench = _Bench(lab, folder, args.params, args.rounds, rate)
            for lane in lanes:
                rows.append(bench.nicps(lane))
                _show(rows[-1])
            if args.against == "gloo":
                for dtype in ("float32", "float16"):
                    rows.append(bench.gloo(dtype))
                    _show(rows[-1])
    if args.json:
        summary = {"hosts": args.hosts, "params": args.params, "rate_bps": rate}
        print(orjson.dumps({**summary, "results": [asdict(row) for row in rows]}).decode())
    return 0


def _show(row: Measured) -> None:
    print(
        f"{row.engine:<6} {row.lane:<8} median {row.seconds_median:.3f} s  min {row.seconds_min:.3f} s  "
        f"limit {row.wire_limit_seconds:.3f} s  ({row.seconds_median / row.wire_limit_seconds - 1:+.1%})  "
        f"cpu {row.cpu_seconds_per_host:.3f} s/host  rss {row.peak_rss_bytes / 1e6:.0f} MB  "
        f"worst error {row.worst_error:.2g}",
        file=sys.stderr,
        flush=True,
    )


class _Bench:
    def __init__(self, lab: Lab, folder: Path, params: int, rounds: int, rate: int) -> None:
        self.lab, self.folder = lab, folder
        self.params, self.rounds, self.rate = params, rounds, rate
        self.hosts = len(lab.hosts)

    def nicps(self, lane: str) -> Measured:
        """Our engine: agents join, a job of this benchmark's own is submitted on h1."""
        bits = int(lane[1:])
        agents = [
            start_agent(self.lab, host.name, self.folder / lane, "--user", "root")
            for host in self.lab.hosts
        ]
        await_agents(agents)
        server = BarrierServer(self.folder / f"{lane}.sock", self.hosts)
        try:
            settings = {
                "params": self.params,
                "rounds": self.rounds + _WARM_UP,
                "barrier": str(server.path),
                "lane": lane,
                "batch": self.hosts,
                "quorum": 1.0,
            }
            channel = submit(
                agents[0],
                job=str(self.folder),
                entry="nicps.bench.reduce_job",
                settings=settings,
            )
            seconds, cpu, last = self._measure(server)
            rss = max(peak_rss_bytes(agent.process.pid) for agent in agents)
            result, _ = result_of(channel)
            channel.close()
        finally:
            server.close()
            for agent in agents:
                agent.process.terminate()
            for agent in agents:
                agent.process.wait(30.0)
        if not result["weights_identical"]:
            raise JobFailed("the hosts' sums differ")
        # a lane's step is at most 2**-(bits-2) of the largest value (about 6 here), residual included
        self._check(last, self.hosts * 6.0 * 2.0 ** (2 - bits) + 1e-5)
        limit = self.hosts * self.params * bits / self.rate
        return self._row("nicps", lane, seconds, cpu, limit, rss, last)

    def gloo(self, dtype: str) -> Measured:
        """torch.distributed, one rank a host."""
        server = BarrierServer(self.folder / f"{dtype}.sock", self.hosts)
        ranks: list[subprocess.Popen[Any]] = []
        try:
            for rank, host in enumerate(self.lab.hosts):
                command = [sys.executable, "-m", "nicps.bench.gloo_rank", "--rank", str(rank)]
                command += ["--hosts", str(self.hosts), "--master", self.lab.hosts[0].ip]
                command += ["--params", str(self.params), "--dtype", dtype]
                command += ["--rounds", str(self.rounds + _WARM_UP), "--barrier", str(server.path)]
                ranks.append(self.lab.run(host, command, stdin=subprocess.DEVNULL))
            seconds, cpu, last = self._measure(server)
        finally:
            server.close()
            for process in ranks:
                process.terminate()
            for process in ranks:
                process.wait(30.0)
        bits = 32 if dtype == "float32" else 16
        self._check(last, 1e-4 if bits == 32 else 0.05)
        limit = 2 * self.params * bits * (self.hosts - 1) / self.hosts / self.rate
        rss = max(message["rss"] for message in last)
        return self._row("gloo", dtype, seconds, cpu, limit, rss, last)

    def _measure(self, server: BarrierServer) -> tuple[list[float], float, list[dict[str, Any]]]:
        """Seconds per counted round, busy processor seconds per counted round, and the last messages."""
        server.accept(120.0)
        messages = server.gather()
        baseline = self._idle()
        hertz = os.sysconf("SC_CLK_TCK")
        seconds: list[float] = []
        busy = 0.0
        for number in range(self.rounds + _WARM_UP):
            start = server.start()
            time.sleep(max(0.0, start - time.monotonic()))
            ticks = busy_ticks()
            ended = max(message["ended"] for message in server.gather())
            ticks = busy_ticks() - ticks
            messages = server.gather()
            if len({message["digest"] for message in messages}) != 1:
                raise JobFailed(f"round {number + 1}: the hosts' sums differ")
            if number >= _WARM_UP:
                seconds.append(ended - start)
                busy += max(0.0, ticks / hertz - baseline * (ended - start))
        return seconds, busy / self.rounds, messages

    def _idle(self) -> float:
        """Busy processors (0 to the number of them) while nothing of ours runs."""
        before, start = busy_ticks(), time.monotonic()
        time.sleep(_IDLE_S)
        hertz = os.sysconf("SC_CLK_TCK")
        return (busy_ticks() - before) / hertz / (time.monotonic() - start)

    def _check(self, last: list[dict[str, Any]], most: float) -> None:
        worst = max(message["error"] for message in last)
        if not worst <= most:
            raise JobFailed(f"the sum is off by {worst:.3g}, at most {most:.3g} can be explained")

    def _row(
        self,
        engine: str,
        lane: str,
        seconds: list[float],
        cpu: float,
        limit: float,
        rss: int,
        last: list[dict[str, Any]],
    ) -> Measured:
        worst = max(message["error"] for message in last)
        return Measured(
            engine,
            lane,
            round(median(seconds), 4),
            round(min(seconds), 4),
            round(limit, 4),
            round(cpu / self.hosts, 4),
            rss,
            worst,
        )
