# SPDX-License-Identifier: Apache-2.0
"""An urgent all-reduce of 4 KB, 20 a second, beside a load that never pauses, in labs of namespaces, as root.

    .venv/bin/python -m benchmarks.urgent --rate 250mbit --ports both
    .venv/bin/python -m benchmarks.urgent --rate 250mbit --ports both --beside stream
    .venv/bin/python -m benchmarks.urgent --rate 12mbit --ports all --beside stream --switch bmv2

The load is an all-reduce of 46 MB on a second channel of the group (docs/collective.md, "Channels"), or another
program's TCP stream from the first host to the second and back (iperf3). In one kind of lab ports heed priorities, and
agents tag and order their frames; in the second ("plain") neither is so, in the third ("unheeded") agents tag.
With --switch bmv2 a BMv2 is in place of the lab's bridge: ports that heed priorities have a queue for each, the others
have one. Frames wait in its ports only, as hosts are not shaped. Each queue sends as many frames a second as the rate
has full frames, whatever their size; so an urgent frame takes nothing of the stream's rate.
Each turn measures the urgent call alone, the load alone, and both.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import orjson

from benchmarks.command import finish
from nicps.bench.arguments import as_type, duration, host_count, whole
from nicps.bench.bmv2 import controller_arguments, in_place_of_the_bridge
from nicps.bench.watch import until
from nicps.collective import Group
from nicps.dataplane.tags import PRIORITIES
from nicps.errors import JobFailed
from nicps.lab import Host, Lab, LabSettings, processes
from nicps.lab.agents import environment, joined, nicps_command, open_folder
from nicps.lab.links import HOST_INTERFACE
from nicps.programs import require_programs
from nicps.rates import format_rate, parse_rate
from nicps.wire import ETHERNET_BYTES

URGENT = 1024  # float32, 4 KB
_EVERY_S = 0.05
_LIMIT_S = 300.0
_WAYS = ("urgent", "load", "both")
_BULK, _FAST = 0, 1  # channels
_PORTS = ("priorities", "plain", "unheeded")
_ROOM = 100  # frames in a queue of BMv2
_READY_S = 20.0
_LEAD_S = 4 * _EVERY_S  # so long before the first urgent call the load begins


@dataclass(frozen=True, slots=True)
class Row:
    """One kind of ports, beside one kind of load.

    Attributes:
        idle_seconds, beside_seconds: an urgent call's median, alone and beside the load, at the slowest member;
            `worst_seconds`: the longest beside it.
        bulk_alone, bulk_beside: bulk's calls a second; of a stream bits a second, of both directions together.
        bulk_loses: what the urgent calls cost the load, as a part.
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
    beside: str = "bulk"
    switch: str = "bridge"


class Load(Protocol):
    """What one member does beside the urgent calls."""

    def begin(self, seconds: float) -> None:
        """Begin; a load that ends by itself does after so long."""

    def end(self) -> float:
        """End; its rate, 0 if another member measures it."""


class _Bulk:
    """All-reduces, one always waiting behind the one under way; over after one in which a member says so."""

    def __init__(self, group: Group, params: int) -> None:
        self._group = group
        self._going_on = np.full(params, 1.0, np.float32)
        self._last = self._going_on.copy()
        self._last[0] = -1e6

    def begin(self, seconds: float) -> None:
        self._over, self._ends = threading.Event(), list[float]()
        self._thread = threading.Thread(target=self._keep_sending)
        self._thread.start()

    def end(self) -> float:
        self._over.set()
        self._thread.join()
        return 1 / statistics.mean(later - end for end, later in pairwise(self._ends))

    def _keep_sending(self) -> None:
        under_way = self._group.all_reduce(self._going_on, channel=_BULK)
        while True:
            vector = self._last if self._over.is_set() else self._going_on
            following = self._group.all_reduce(vector, channel=_BULK)
            ends_it = under_way.result()[0] < 0
            self._ends.append(time.perf_counter())
            under_way = following
            if ends_it:
                under_way.result()
                return


class _Stream:
    """Another program's TCP stream, both ways, which the first member begins."""

    def __init__(self, server: str, first: bool) -> None:
        self._server, self._first = server, first

    def begin(self, seconds: float) -> None:
        if not self._first:
            return
        command = ["iperf3", "--json", "--bidir", "-c", self._server, "-t", str(math.ceil(seconds))]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE)

    def end(self) -> float:
        if not self._first:
            return 0.0
        out, _ = self._process.communicate(timeout=_LIMIT_S)
        said = orjson.loads(out)
        if "error" in said:
            raise JobFailed(f"iperf3: {said['error']}")
        ends = said["end"]["sum_received"], said["end"]["sum_received_bidir_reverse"]
        return float(sum(each["bits_per_second"] for each in ends))


def member(args: argparse.Namespace) -> dict[str, Any]:
    """A member of the group; what it has measured, by way."""
    found: dict[str, Any] = {}
    with Group.form(size=args.hosts, urgencies=[0, 6], rooms=[2_800_000, 3600]) as group:
        load: Load = (
            _Bulk(group, args.params) if args.beside == "bulk" else _Stream(args.server, args.first)
        )
        for way in _WAYS:
            rate = 0.0
            group.barrier().result()
            if way != "urgent":
                load.begin(args.seconds + _LEAD_S)
                time.sleep(_LEAD_S)
            calls = _urgent_calls(group, args.seconds) if way != "load" else []
            if way == "load":
                time.sleep(args.seconds)
            if way != "urgent":
                rate = load.end()
            found[way] = {"calls": calls, "rate": rate}
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


def measure(args: argparse.Namespace, ports: str) -> Row:
    """One row, in a lab of its own."""
    heeds, rate_bps, bmv2 = ports == "priorities", args.rate, args.switch == "bmv2"
    settings = LabSettings("urgent", args.hosts)
    if not bmv2:
        settings = replace(settings, rate_bps=rate_bps, priorities=heeds, burst_bytes=16 * 1024)
    # A plain lab shapes at the hosts, too.
    options = [] if ports == "plain" else ["--tags"]
    options += ["--shape", format_rate(rate_bps)] if heeds and not bmv2 else []
    command = [sys.executable, "-P", "-m", "benchmarks.urgent", "--rank"]
    for option in ("hosts", "params", "seconds", "beside"):
        command += [f"--{option}", str(getattr(args, option))]
    with open_folder("nicps-urgent-") as folder, contextlib.ExitStack() as stack:
        lab = Lab(settings)
        stack.callback(lab.close)
        if bmv2:
            stack.enter_context(_bmv2(lab, folder, PRIORITIES if heeds else 1, rate_bps))
        else:
            lab.up()
        stack.enter_context(joined(lab, lab.hosts, folder, "--silence", "2", *options))

        def start(host: Host, *command: str) -> subprocess.Popen[Any]:
            pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
            process = lab.run(host, list(command), env=environment(), **pipes)
            stack.callback(process.kill)
            return process

        first, second = lab.hosts[:2]
        if args.beside == "stream":
            # On a real line no frame is longer than the MTU, and an urgent one waits for one at most.
            for host in lab.hosts:
                start(host, "ip", "link", "set", HOST_INTERFACE, "gso_max_segs", "1").wait(_LIMIT_S)
            start(second, "iperf3", "-s")
        command += ["--server", second.ip]
        ranks = [start(first, *command, "--first")]
        ranks += [start(host, *command) for host in lab.hosts[1:]]
        said = [_answer(rank) for rank in ranks]
    return _row(args, ports, said)


@contextlib.contextmanager
def _bmv2(lab: Lab, folder: Path, queues: int, rate_bps: int) -> Iterator[None]:
    """A BMv2 in place of the lab's bridge, and its controller."""
    log = folder / "controller.log"
    with in_place_of_the_bridge(lab, queues=queues) as bmv2, log.open("wb") as file:
        command = nicps_command(*controller_arguments(bmv2.ports))
        controller = subprocess.Popen(
            processes.launcher(bmv2.netns, command),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            env=environment(),
        )
        try:
            until(lambda: "recording" in log.read_text() or None, "the controller", _READY_S)
            with bmv2.connect() as switch:
                frame_bits = 8 * (lab.settings.mtu + ETHERNET_BYTES)
                switch.limit_queues(max(1, rate_bps // frame_bits), _ROOM)
            yield
        finally:
            controller.terminate()
            controller.wait(_LIMIT_S)


def _answer(rank: subprocess.Popen[Any]) -> dict[str, Any]:
    out, err = rank.communicate(timeout=_LIMIT_S)
    if rank.returncode:
        raise JobFailed(f"a member failed: {err.decode(errors='replace').strip()[-1000:]}")
    return dict(orjson.loads(out.splitlines()[-1]))


def _row(args: argparse.Namespace, ports: str, said: list[dict[str, Any]]) -> Row:
    slowest = {
        way: [max(each) for each in zip(*(of[way]["calls"] for of in said), strict=True)]
        for way in ("urgent", "both")
    }
    idle, beside = (statistics.median(slowest[way]) for way in ("urgent", "both"))
    alone, loaded = (said[0][way]["rate"] for way in ("load", "both"))
    return Row(
        ports,
        args.hosts,
        args.rate,
        args.params,
        round(idle, 5),
        round(beside, 5),
        round(max(slowest["both"]), 5),
        round(beside / idle, 2),
        round(alone, 4),
        round(loaded, 4),
        round(1 - loaded / alone, 4),
        args.beside,
        args.switch,
    )


def rows(args: argparse.Namespace) -> Iterator[Row]:
    """All that is asked for, turn by turn."""
    kinds = {"both": ("priorities", "plain"), "all": _PORTS}.get(args.ports, (args.ports,))
    if args.beside == "stream":
        require_programs("iperf3", purpose="--beside stream")
    for _ in range(args.turns):
        for ports in kinds:
            yield measure(args, ports)


def run(args: argparse.Namespace) -> int:
    """Measure and print."""
    if args.rank:
        print(orjson.dumps(member(args)).decode(), flush=True)
        return 0
    found = []
    for row in rows(args):
        found.append(row)
        print(
            f"{row.ports:<11}{1e3 * row.idle_seconds:7.2f} ms alone{1e3 * row.beside_seconds:8.2f} ms beside"
            f" {row.beside} ({row.of_idle:.2f}), at most {1e3 * row.worst_seconds:.1f} ms; {row.beside} loses"
            f" {row.bulk_loses:.1%}",
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
    add(
        "--ports",
        choices=(*_PORTS, "both", "all"),
        default="both",
        help="that heed tags; plain; plain, while agents tag (unheeded); the first two, or all (%(default)s)",
    )
    add("--beside", choices=("bulk", "stream"), default="bulk", help="(%(default)s)")
    add("--switch", choices=("bridge", "bmv2"), default="bridge", help="(%(default)s)")
    add("--turns", type=whole(1), default=3, help="(%(default)s)")
    add("--json", action="store_true", help="a JSON list as the last line")
    add("--rank", action="store_true", help=argparse.SUPPRESS)
    add("--first", action="store_true", help=argparse.SUPPRESS)
    add("--server", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    return finish("urgent", run, args)


if __name__ == "__main__":
    sys.exit(main())
