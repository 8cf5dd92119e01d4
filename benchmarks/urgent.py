# SPDX-License-Identifier: Apache-2.0
"""An urgent all-reduce of 4 KB, 20 a second, beside one of 46 MB that never pauses, in labs of namespaces, as root.

    .venv/bin/python -m benchmarks.urgent --rate 250mbit --ports both

A group with two channels (docs/collective.md, "Channels"). In one kind of lab ports heed priorities, and agents tag and
order their frames; in the other neither is so. Each turn measures the urgent call alone, the bulk one alone, and both.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import orjson

from benchmarks.command import finish
from nicps.bench.arguments import as_type, duration, host_count, whole
from nicps.collective import Group
from nicps.errors import JobFailed
from nicps.lab import Lab, LabSettings
from nicps.lab.agents import environment, joined, open_folder
from nicps.rates import format_rate, parse_rate

URGENT = 1024  # float32, 4 KB
_EVERY_S = 0.05
_LIMIT_S = 300.0
_WAYS = ("urgent", "bulk", "both")
_BULK, _FAST = 0, 1  # channels


@dataclass(frozen=True, slots=True)
class Row:
    """One kind of ports.

    Attributes:
        idle_seconds, beside_seconds: an urgent call's median, alone and beside the bulk one, at the slowest member;
            `worst_seconds`: the longest beside it.
        bulk_alone, bulk_beside: bulk's calls a second.
        bulk_loses: what the urgent calls cost it, as a part.
    """

    ports: str
    hosts: int
    rate_bps: int
    params: int
    idle_seconds: float
    beside_seconds: float
    worst_seconds: float
    of_idle: float
    bulk_alone: float
    bulk_beside: float
    bulk_loses: float


def member(size: int, params: int, seconds: float, socket: str | None = None) -> dict[str, Any]:
    """A member of the group; what it has measured, by way."""
    found: dict[str, Any] = {}
    with Group.form(size=size, socket=socket, urgencies=[0, 6], rooms=[2_800_000, 3600]) as group:
        vector = np.full(params, 1.0, np.float32)
        for way in _WAYS:
            over = threading.Event()
            bulk: list[float] = []
            thread = threading.Thread(target=_keep_sending, args=(group, vector, over, bulk))
            group.barrier().result()
            if way != "urgent":
                thread.start()
                time.sleep(4 * _EVERY_S)
            calls = _urgent_calls(group, seconds) if way != "bulk" else []
            if way == "bulk":
                time.sleep(seconds)
            over.set()
            if way != "urgent":
                thread.join()
            took = [later - end for end, later in pairwise(bulk)]
            found[way] = {"calls": calls, "bulk": took}
    return found


def _urgent_calls(group: Group, seconds: float) -> list[float]:
    """Seconds of each, begun by all members at the same time of the machine's clock."""
    small, took = np.ones(URGENT, np.float32), []
    for _ in range(round(seconds / _EVERY_S)):
        time.sleep(_EVERY_S - time.monotonic() % _EVERY_S)
        began = time.perf_counter()
        total = group.all_reduce(small, channel=_FAST).result()
        took.append(time.perf_counter() - began)
        if total[0] != group.size:
            raise JobFailed(f"the sum of {group.size} ones is {total[0]}")
    return took


def _keep_sending(
    group: Group, vector: np.ndarray[Any, Any], over: threading.Event, ends: list[float]
) -> None:
    """All-reduces, one always waiting behind the one under way; over after one in which a member says so."""
    going_on, last = vector, vector.copy()
    last[0] = -1e6
    under_way = group.all_reduce(going_on, channel=_BULK)
    while True:
        following = group.all_reduce(last if over.is_set() else going_on, channel=_BULK)
        ends_it = under_way.result()[0] < 0
        ends.append(time.perf_counter())
        under_way = following
        if ends_it:
            under_way.result()
            return


def measure(ports: str, hosts: int, rate_bps: int, params: int, seconds: float) -> Row:
    """One row, in a lab of its own."""
    heeds = ports == "priorities"
    settings = LabSettings("urgent", hosts, rate_bps, priorities=heeds, burst_bytes=16 * 1024)
    options = ["--tags", "--shape", format_rate(rate_bps)] if heeds else []
    command = [sys.executable, "-P", "-m", "benchmarks.urgent", "--rank", "--hosts", str(hosts)]
    command += ["--params", str(params), "--seconds", str(seconds)]
    with (
        open_folder("nicps-urgent-") as folder,
        Lab(settings) as lab,
        joined(lab, lab.hosts, folder, "--silence", "2", *options),
        contextlib.ExitStack() as stack,
    ):
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        ranks = [lab.run(host, command, env=environment(), **pipes) for host in lab.hosts]
        for rank in ranks:
            stack.callback(rank.kill)
        said = [_answer(rank) for rank in ranks]
    return _row(ports, hosts, rate_bps, params, said)


def _answer(rank: subprocess.Popen[Any]) -> dict[str, Any]:
    out, err = rank.communicate(timeout=_LIMIT_S)
    if rank.returncode:
        raise JobFailed(f"a member failed: {err.decode(errors='replace').strip()[-1000:]}")
    return dict(orjson.loads(out.splitlines()[-1]))


def _row(ports: str, hosts: int, rate_bps: int, params: int, said: list[dict[str, Any]]) -> Row:
    slowest = {
        way: [max(each) for each in zip(*(of[way]["calls"] for of in said), strict=True)]
        for way in ("urgent", "both")
    }
    idle, beside = (statistics.median(slowest[way]) for way in ("urgent", "both"))
    alone, loaded = (1 / statistics.mean(said[0][way]["bulk"]) for way in ("bulk", "both"))
    return Row(
        ports,
        hosts,
        rate_bps,
        params,
        round(idle, 5),
        round(beside, 5),
        round(max(slowest["both"]), 5),
        round(beside / idle, 2),
        round(alone, 4),
        round(loaded, 4),
        round(1 - loaded / alone, 4),
    )


def rows(args: argparse.Namespace) -> Iterator[Row]:
    """All that is asked for, turn by turn."""
    kinds = ("priorities", "plain") if args.ports == "both" else (args.ports,)
    for _ in range(args.turns):
        for ports in kinds:
            yield measure(ports, args.hosts, args.rate, args.params, args.seconds)


def run(args: argparse.Namespace) -> int:
    """Measure and print."""
    if args.rank:
        print(orjson.dumps(member(args.hosts, args.params, args.seconds)).decode(), flush=True)
        return 0
    found = []
    for row in rows(args):
        found.append(row)
        print(
            f"{row.ports:<11}{1e3 * row.idle_seconds:7.2f} ms alone{1e3 * row.beside_seconds:8.2f} ms beside bulk"
            f" ({row.of_idle:.2f}), at most {1e3 * row.worst_seconds:.1f} ms; bulk loses {row.bulk_loses:.1%}",
            flush=True,
        )
    if args.json:
        print(orjson.dumps([asdict(row) for row in found]).decode())
    return 0


def main(arguments: list[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.urgent",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--hosts", type=host_count(2), default=2, help="(%(default)s)")
    add("--rate", type=as_type(parse_rate), default="250mbit", help="of the line (%(default)s)")
    add("--params", type=whole(URGENT), default=11_500_000, help="of the bulk one (%(default)s)")
    add("--seconds", type=duration, default=10.0, help="of each part (%(default)s)")
    add("--ports", choices=("priorities", "plain", "both"), default="both", help="(%(default)s)")
    add("--turns", type=whole(1), default=3, help="(%(default)s)")
    add("--json", action="store_true", help="a JSON list as the last line")
    add("--rank", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    return finish("urgent", run, args)


if __name__ == "__main__":
    sys.exit(main())
