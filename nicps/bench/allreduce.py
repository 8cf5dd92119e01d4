# SPDX-License-Identifier: Apache-2.0
"""`nicps bench allreduce`: our exchanges and Gloo's all-reduce side by side, in one run."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import orjson

from nicps.bench import engines, rounds
from nicps.bench.arguments import free_memory, host_count, names, need_memory, several, whole
from nicps.bench.barrier import median
from nicps.bench.engines import Engine, Size
from nicps.bench.profile import Profile
from nicps.errors import JobFailed
from nicps.extras import require_extra
from nicps.lab.agents import open_folder
from nicps.rates import format_rate, parse_line_rate, parse_size

LANES = ("i32", "i16", "i8")
EXCHANGES = ("broadcast", "stripes", "switch")
#: The part of the free memory that engines may take which run at the same time.
_MEMORY_SHARE = 0.8

DESCRIPTION = """\
All-reduce of random float32 tensors that differ per host, in labs of namespaces: seconds of the slowest host
from a common start to the float32 result, two rounds to warm up, then --rounds counted. Every engine has a lab of its
own. Those that fit into the memory together take turns round by round. The sum is checked in the same run. Processor
time is the machine's busy time (softirq included, that is where XDP works) less an idle baseline, shared over the
hosts; memory is the peak of the largest agent (nicps) or rank (gloo). --hosts, --rate and --params take lists: all
combinations are measured."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One engine's row.

    Attributes:
        bytes: payload of a round through the busiest port in one direction, by the formula of the exchange.
        rate_bps: of every port; None: unshaped.
        wire_limit_seconds, frame_limit_seconds: the time of these bytes at the port's rate, without headers and with
            those that the lab's ports count; None where it has none.
        cpu_seconds_per_host, cpu_seconds_machine: of a round, by the machine's busy time.
        cpu_seconds_agents, cpu_seconds_programs: of a round, of all hosts' processes; XDP's time in other processes'
            time, or in none, is not in them.
        cpu_seconds_switch: the same of the process of a switch that adds. It only handles frames of members; its XDP
            program's time is in the machine's, and `--profile` shows it.
        idle_processors: processors that the engine takes during the others' turns.
        stages: seconds of a round's parts by name (`nicps.bench.stages`); empty if hosts report none.
    """

    engine: str
    exchange: str
    lane: str
    hosts: int
    params: int
    rate_bps: int | None
    bytes: int
    seconds_median: float
    seconds_min: float
    wire_limit_seconds: float | None
    frame_limit_seconds: float | None
    cpu_seconds_per_host: float
    cpu_seconds_machine: float
    cpu_seconds_agents: float
    cpu_seconds_programs: float
    cpu_seconds_switch: float
    idle_processors: float
    peak_rss_bytes: int
    worst_error: float
    profile: Profile | None
    stages: dict[str, float]


def add_parser(subparsers: Any) -> None:
    """The arguments."""
    parser = subparsers.add_parser(
        "allreduce", help="all-reduce beside Gloo", description=DESCRIPTION
    )
    parser.add_argument("--hosts", type=several(host_count()), default=(4,))
    parser.add_argument(
        "--params",
        type=several(whole(1)),
        default=(11_700_000,),
        help="float32 values per tensor (11700000)",
    )
    parser.add_argument(
        "--rate", default="1gbit", help="of every port, or `unshaped` (%(default)s)"
    )
    parser.add_argument(
        "--queue", metavar="SIZE", default="4M", help="of every port of the switch (%(default)s)"
    )
    parser.add_argument(
        "--lane", type=names(LANES), default=LANES, help="lanes to measure (i32,i16,i8)"
    )
    parser.add_argument(
        "--exchange",
        type=names((*EXCHANGES, engines.CALL)),
        default=("auto",),
        help="exchanges to measure: broadcast,stripes,switch (that of a job that names none); the lab of `switch` has"
        " a Linux box that adds; `call` is no round of a job, but a call of nicps.collective on float32",
    )
    parser.add_argument("--against", choices=("gloo", "none"), default="gloo")
    parser.add_argument("--rounds", type=whole(1), default=20, help="counted (%(default)s)")
    parser.add_argument(
        "--key",
        action="store_true",
        help="in place of Gloo: for each a second network with a key",
    )
    parser.add_argument(
        "--profile",
        action="store_true",
        help="where the processors' time goes; measuring that takes some, too",
    )
    parser.add_argument("--json", action="store_true", help="a JSON object as the last line")
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Measure and print."""
    rates = [parse_line_rate(rate) for rate in args.rate.split(",")]
    queue = parse_size(args.queue)
    sizes = [
        Size(hosts, params, rate, queue)
        for hosts, rate, params in itertools.product(args.hosts, rates, args.params)
    ]
    gloo = args.against == "gloo" and not args.key
    wanted = [(size, _engines(args, size, gloo=gloo)) for size in sizes]
    for size, chosen in wanted:
        for engine in chosen:
            size.shape("bench", engine.switch)
        need_memory(max(engine.memory for engine in chosen), f"--params {size.params:,}")
    if gloo:
        require_extra("torch")
    rows: list[Measured] = []
    with open_folder("nicps-bench-") as folder:
        numbers = itertools.count(1)
        for size, chosen in wanted:
            if len(wanted) > 1:
                _print(
                    f"{size.hosts} hosts, {format_rate(size.rate_bps)}, {size.params:,} parameters"
                )
            for group in _groups(chosen):
                found = _measure(group, folder, numbers, args.rounds, profile=args.profile)
                _show(found)
                rows += found
    if args.json:
        summary = {"hosts": args.hosts, "params": args.params, "rate_bps": rates}
        one = {key: found[0] if len(found) == 1 else found for key, found in summary.items()}
        one["queue_bytes"] = queue
        print(orjson.dumps({**one, "results": [asdict(row) for row in rows]}).decode())
    return 0


def _engines(args: argparse.Namespace, size: Size, *, gloo: bool) -> list[Engine]:
    keys = (False, True) if args.key else (False,)
    chosen: list[Engine] = [
        engines.Nicps.of(exchange, lane, size, keyed=keyed)
        for lane, exchange, keyed in itertools.product(args.lane, args.exchange, keys)
        if exchange != engines.CALL
    ]
    if engines.CALL in args.exchange:
        chosen += [engines.Calls.of(size, keyed=keyed) for keyed in keys]
    if gloo:
        chosen += [engines.Gloo.of(dtype, size) for dtype in ("float32", "float16")]
    return chosen


def _groups(chosen: Sequence[Engine]) -> Iterator[list[Engine]]:
    """Groups of engines that run at the same time, in order: each as many as have room in the free memory."""
    rest = list(chosen)
    while rest:
        room, group = free_memory() * _MEMORY_SHARE, [rest.pop(0)]
        while rest and sum(e.all_memory for e in group) + rest[0].all_memory <= room:
            group.append(rest.pop(0))
        yield group


def _measure(
    group: Sequence[Engine],
    folder: Path,
    numbers: Iterator[int],
    counted: int,
    *,
    profile: bool,
) -> list[Measured]:
    with contextlib.ExitStack() as stack:
        running, folders = [], []
        for engine, number in zip(group, numbers, strict=False):
            folders.append(folder / str(number))
            started = engine.start(
                folders[-1], f"bench-{os.getpid()}-{number}", counted + rounds.WARM_UP
            )
            running.append(stack.enter_context(started))
        times = rounds.measure(running, counted, profile=profile)
        peaks = [each.end() for each in running]
        stages = [each.stages.medians(at) for each, at in zip(times, folders, strict=True)]
    return [_row(*found, counted) for found in zip(group, times, peaks, stages, strict=True)]


def _row(
    engine: Engine, times: rounds.Times, peak: int, stages: dict[str, float], counted: int
) -> Measured:
    worst = max(message["error"] for message in times.last)
    if not worst <= engine.worst_error:
        raise JobFailed(
            f"{engine.name}, {engine.exchange}, {engine.lane}: the sum is off by {worst:.3g}, at most"
            f" {engine.worst_error:.3g} can be explained"
        )
    if other := times.exchanges - {engine.exchange, ""}:
        raise JobFailed(
            f"{engine.name}, {engine.exchange}, {engine.lane}: rounds were summed by {', '.join(sorted(other))}"
        )
    size = engine.size
    limit = engine.bytes * 8 / size.rate_bps if size.rate_bps else None
    return Measured(
        engine=engine.name,
        exchange=engine.exchange,
        lane=engine.lane,
        hosts=size.hosts,
        params=size.params,
        rate_bps=size.rate_bps,
        bytes=round(engine.bytes),
        seconds_median=_rounded(median(times.seconds)),
        seconds_min=_rounded(min(times.seconds)),
        wire_limit_seconds=_rounded(limit) if limit else None,
        frame_limit_seconds=_rounded(limit * engine.frame_share) if limit else None,
        cpu_seconds_per_host=round(times.busy / counted / size.hosts, 4),
        cpu_seconds_machine=round(times.busy / counted, 4),
        cpu_seconds_agents=_rounded(times.agents / counted),
        cpu_seconds_programs=_rounded(times.programs / counted),
        cpu_seconds_switch=_rounded(times.switch / counted),
        idle_processors=_rounded(times.idle),
        peak_rss_bytes=max(peak, *(message.get("rss", 0) for message in times.last)),
        worst_error=worst,
        profile=times.profile,
        stages={name: _rounded(seconds) for name, seconds in stages.items()},
    )


def _show(rows: Sequence[Measured]) -> None:
    """A line for each engine; further ones with the same lanes show how much longer they took than the first."""
    first: dict[str, Measured] = {}
    for row in rows:
        beside = row.seconds_median / first.setdefault(row.lane, row).seconds_median - 1
        _print(
            f"{row.engine:<8} {row.exchange:<12} {row.lane:<8} median {_shown(row.seconds_median)} s  "
            f"min {_shown(row.seconds_min)} s  "
            f"{_beside_limit(row)}cpu {row.cpu_seconds_per_host:.3f} s/host  rss {row.peak_rss_bytes / 1e6:.0f} MB  "
            f"worst error {row.worst_error:.2g}"
            + (f"  {beside:+.1%}" if row is not first[row.lane] else "")
        )
        if row.profile is not None and row.stages:
            parts = "  ".join(f"{name} {seconds * 1e3:.4g}" for name, seconds in row.stages.items())
            _print(f"         stages, ms  {parts}")
        if row.profile is not None:
            _show_profile(row, row.profile)


def _beside_limit(row: Measured) -> str:
    """The limit, and how much longer the row took; empty where the line has none."""
    if (limit := row.wire_limit_seconds) is None:
        return ""
    return f"limit {_shown(limit)} s  ({row.seconds_median / limit - 1:+.1%})  "


def _show_profile(row: Measured, profile: Profile) -> None:
    modes = "  ".join(f"{mode} {seconds:.4f} s" for mode, seconds in profile.machine.items())
    _print(f"         machine  {modes}")
    _print(
        f"         processes  agents {row.cpu_seconds_agents:.4f} s  programs {row.cpu_seconds_programs:.4f} s  "
        f"waiting {row.idle_processors:.2%} of a processor"
    )
    for name, runs in profile.bpf_runs.items():
        if runs:
            seconds = profile.bpf_seconds[name]
            _print(
                f"         {name}  {runs:,.0f} runs  {seconds / runs * 1e9:.0f} ns each  {seconds:.4f} s"
            )


def _print(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _rounded(seconds: float) -> float:
    """To four digits, of less than a second to four significant ones: no time of a small tensor is 0."""
    return round(seconds, 4) if seconds >= 1 else float(f"{seconds:.4g}")


def _shown(seconds: float) -> str:
    return f"{seconds:.3f}" if seconds >= 0.01 else f"{seconds:.3g}"
