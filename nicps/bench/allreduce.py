# SPDX-License-Identifier: Apache-2.0
"""`nicps bench allreduce`: our all-reduce and Gloo's in the same lab, in one run."""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import orjson

from nicps.auth import write_key
from nicps.bench.arguments import host_count, names, need_memory, whole
from nicps.bench.barrier import BarrierServer, busy_ticks, median, peak_rss_bytes
from nicps.errors import JobFailed
from nicps.extras import require_extra
from nicps.lab import Lab, LabSettings, parse_rate
from nicps.lab.agents import AgentProcess, joined, open_folder
from nicps.session.channel import Channel, ChannelClosed
from nicps.session.commands import await_result, raise_failure

LANES = ("i32", "i16", "i8")
_WARM_UP = 2
#: For a parameter, of one host: two banks of sums, three float32 in the training program, two lanes of 8 bits.
_HELD_BYTES = 2 * 8 + 3 * 4 + 2
_IDLE_S = 1.0
_LAST_WORDS_S = 2.0
_SILENCE_S = 2.0

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
    parser.add_argument("--hosts", type=host_count(), default=4)
    parser.add_argument(
        "--params", type=whole(1), default=11_700_000, help="float32 values per tensor"
    )
    parser.add_argument("--rate", default="1gbit", help="of every port (%(default)s)")
    parser.add_argument(
        "--lane", type=names(LANES), default=LANES, help="lanes to measure (i32,i16,i8)"
    )
    parser.add_argument("--against", choices=("gloo", "none"), default="gloo")
    parser.add_argument("--rounds", type=whole(1), default=10, help="counted (%(default)s)")
    parser.add_argument(
        "--key",
        action="store_true",
        help="in place of Gloo: a second network with a key, the two in turn round by round",
    )
    parser.add_argument("--json", action="store_true", help="a JSON object as the last line")
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Measure and print."""
    rate = parse_rate(args.rate)
    networks = args.hosts * (1 + args.key)
    need_memory(networks * args.params * _HELD_BYTES, f"--params {args.params:,}")
    if args.against == "gloo" and not args.key:
        require_extra("torch")
    rows: list[Measured] = []
    with open_folder("nicps-bench-") as folder, contextlib.ExitStack() as stack:
        labs = [
            stack.enter_context(Lab(LabSettings(f"bench-{os.getpid()}-{n}", args.hosts, rate)))
            for n in range(1 + args.key)
        ]
        keys: list[Path | None] = [None]
        if args.key:
            keys.append(folder / "network.key")
            write_key(folder / "network.key")
        bench = _Bench(folder, args.hosts, args.params, args.rounds, rate)
        for lane in args.lane:
            rows += bench.nicps(lane, list(zip(labs, keys, strict=True)))
            _show(*rows[-len(labs) :])
        if args.against == "gloo" and not args.key:
            for dtype in ("float32", "float16"):
                rows.append(bench.gloo(labs[0], dtype))
                _show(rows[-1])
    if args.json:
        summary = {"hosts": args.hosts, "params": args.params, "rate_bps": rate}
        print(orjson.dumps({**summary, "results": [asdict(row) for row in rows]}).decode())
    return 0


def _show(*rows: Measured) -> None:
    """A line for each; what comes after the first says how much longer it took."""
    for row in rows:
        beside = row.seconds_median / rows[0].seconds_median - 1
        print(
            f"{row.engine:<8} {row.lane:<8} median {_shown(row.seconds_median)} s  min {_shown(row.seconds_min)} s  "
            f"limit {_shown(row.wire_limit_seconds)} s  ({row.seconds_median / row.wire_limit_seconds - 1:+.1%})  "
            f"cpu {row.cpu_seconds_per_host:.3f} s/host  rss {row.peak_rss_bytes / 1e6:.0f} MB  "
            f"worst error {row.worst_error:.2g}"
            + (f"  {beside:+.1%}" if row is not rows[0] else ""),
            file=sys.stderr,
            flush=True,
        )


@dataclass
class _Times:
    """Of one engine: seconds per counted round, busy processor seconds in all, the workers' last messages."""

    seconds: list[float] = field(default_factory=list)
    busy: float = 0.0
    last: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class _Ours:
    """A network of ours with the benchmark's job under way."""

    agents: list[AgentProcess]
    server: BarrierServer
    channel: Channel

    def check(self) -> None:
        """Raises JobFailed if the job has failed."""
        raise_failure(self.channel)

    def end(self) -> int:
        """Wait for the job's end; bytes of memory of the largest agent.

        Raises:
            JobFailed: the sums differ.
        """
        rss = max(peak_rss_bytes(agent.process.pid) for agent in self.agents)
        result, _ = await_result(self.channel)
        if not result["weights_identical"]:
            raise JobFailed("the hosts' sums differ")
        return rss


def _rounded(seconds: float) -> float:
    """To four digits, of less than a second to four significant ones: no time of a small tensor is 0."""
    return round(seconds, 4) if seconds >= 1 else float(f"{seconds:.4g}")


def _shown(seconds: float) -> str:
    return f"{seconds:.3f}" if seconds >= 0.01 else f"{seconds:.3g}"


class _Bench:
    def __init__(self, folder: Path, hosts: int, params: int, rounds: int, rate: int) -> None:
        self.folder, self.hosts = folder, hosts
        self.params, self.rounds, self.rate = params, rounds, rate

    def nicps(self, lane: str, places: list[tuple[Lab, Path | None]]) -> list[Measured]:
        """Our engine in each of the labs, with a key where there is one; they take turns round by round."""
        bits = int(lane[1:])
        with contextlib.ExitStack() as stack:
            all_ = [stack.enter_context(self._ours(lab, lane, key)) for lab, key in places]
            times = self._measure([ours.server for ours in all_], [ours.check for ours in all_])
            rss = [ours.end() for ours in all_]
        limit = self.hosts * self.params * bits / self.rate
        rows = []
        for (_, key), measured, bytes_ in zip(places, times, rss, strict=True):
            # a lane's step is at most 2**-(bits-2) of the largest value (about 6 here), residual included
            self._check(measured.last, self.hosts * 6.0 * 2.0 ** (2 - bits) + 1e-5)
            engine = "nicps" if key is None else "with key"
            rows.append(self._row(engine, lane, measured, limit, bytes_))
        return rows

    @contextlib.contextmanager
    def _ours(self, lab: Lab, lane: str, key: Path | None) -> Iterator[_Ours]:
        name = f"{lane}-{'key' if key else 'plain'}"
        # All hosts share a machine, which stands still while it makes room for large vectors: nobody has died.
        arguments = ["--silence", f"{_SILENCE_S:g}", *(["--key", str(key)] if key else [])]
        with contextlib.ExitStack() as stack:
            agents = stack.enter_context(joined(lab, lab.hosts, self.folder / name, *arguments))
            server = BarrierServer(self.folder / f"{name}.sock", self.hosts)
            stack.callback(server.close)
            settings = {
                "params": self.params,
                "rounds": self.rounds + _WARM_UP,
                "barrier": str(server.path),
                "lane": lane,
                "batch": self.hosts,
                "quorum": 1.0,
            }
            channel = agents[0].submit(
                self.folder,
                entry="nicps.bench.reduce_job",
                settings=settings,
            )
            stack.callback(channel.close)
            yield _Ours(agents, server, channel)

    def gloo(self, lab: Lab, dtype: str) -> Measured:
        """torch.distributed, one rank a host."""
        server = BarrierServer(self.folder / f"{dtype}.sock", self.hosts)
        ranks: list[subprocess.Popen[Any]] = []
        try:
            for rank, host in enumerate(lab.hosts):
                command = [sys.executable, "-m", "nicps.bench.gloo_rank", "--rank", str(rank)]
                command += ["--hosts", str(self.hosts), "--master", lab.hosts[0].ip]
                command += ["--params", str(self.params), "--dtype", dtype]
                command += ["--rounds", str(self.rounds + _WARM_UP), "--barrier", str(server.path)]
                ranks.append(lab.run(host, command, stdin=subprocess.DEVNULL))
            (times,) = self._measure([server], [lambda: None])
        finally:
            server.close()
            for process in ranks:
                process.terminate()
            for process in ranks:
                process.wait(30.0)
        bits = 32 if dtype == "float32" else 16
        self._check(times.last, 1e-4 if bits == 32 else 0.05)
        limit = 2 * self.params * bits * (self.hosts - 1) / self.hosts / self.rate
        rss = max(message["rss"] for message in times.last)
        return self._row("gloo", dtype, times, limit, rss)

    def _measure(
        self, servers: Sequence[BarrierServer], checks: Sequence[Callable[[], None]]
    ) -> list[_Times]:
        """Every round on each server in turn."""
        for server, check in zip(servers, checks, strict=True):
            server.accept(120.0, check)
            server.gather()
        baseline = self._idle()
        all_ = [_Times() for _ in servers]
        try:
            for number in range(self.rounds + _WARM_UP):
                for server, times in zip(servers, all_, strict=True):
                    self._round(number, server, times, baseline)
        except ChannelClosed:
            time.sleep(_LAST_WORDS_S)  # the agents tell why
            for check in checks:
                check()
            raise
        return all_

    def _round(self, number: int, server: BarrierServer, times: _Times, baseline: float) -> None:
        hertz = os.sysconf("SC_CLK_TCK")
        start = server.start()
        time.sleep(max(0.0, start - time.monotonic()))
        ticks = busy_ticks()
        ended = max(message["ended"] for message in server.gather())
        ticks = busy_ticks() - ticks
        times.last = server.gather()
        if len({message["digest"] for message in times.last}) != 1:
            raise JobFailed(f"round {number + 1}: the hosts' sums differ")
        if number >= _WARM_UP:
            times.seconds.append(ended - start)
            times.busy += max(0.0, ticks / hertz - baseline * (ended - start))

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

    def _row(self, engine: str, lane: str, times: _Times, limit: float, rss: int) -> Measured:
        worst = max(message["error"] for message in times.last)
        return Measured(
            engine,
            lane,
            _rounded(median(times.seconds)),
            _rounded(min(times.seconds)),
            _rounded(limit),
            round(times.busy / self.rounds / self.hosts, 4),
            rss,
            worst,
        )
