# SPDX-License-Identifier: Apache-2.0
"""`nicps bench memory`: the memory of a host's part in a job, in the kernel and in its processes."""

from __future__ import annotations

import argparse
import itertools
import os
import re
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import orjson

from nicps.bench.allreduce import EXCHANGES, LANES
from nicps.bench.arguments import host_count, names, need_memory, several, whole
from nicps.bench.engines import Nicps, Running, Size
from nicps.errors import UsageProblem
from nicps.lab.agents import open_folder
from nicps.rates import parse_rate
from nicps.wire import MAX_CHANNELS

DESCRIPTION = """\
Memory of a host whose network sums float32 vectors, each round's in the last and the next to last bank: the BPF maps
of its agent, as the kernel accounts for them; the memory that agent and training program share; and what each of the
two has for itself, less what it has with vectors of one number. The training program's own vectors are two, what it
gives and the sum: 8 bytes a value of what `program` says. Figures are means over the hosts. Of a Linux switch that adds
(exchange `switch`) they are the BPF maps of the box, and the memory of its process. With --channels a step has one
round on each channel, which share the vector out; the training program's own vectors are then the vector and what
rounding leaves over; and `of one` is all of it beside the same job with one channel."""
_ROUNDS = 4  # both banks are used, and every page of the residual
_READY_S = 120.0
_RATE = "1gbit"


@dataclass(frozen=True, slots=True)
class Held:
    """Bytes of a host, and of a Linux switch that adds."""

    maps: float
    shared: float
    program: float
    agent: float
    switch_maps: float = 0.0
    switch_process: float = 0.0

    @property
    def total(self) -> float:
        """All of the host."""
        return self.maps + self.shared + self.program + self.agent

    def less(self, other: Held) -> Held:
        """The part of it beyond that."""
        mine, theirs = asdict(self), asdict(other)
        return Held(**{name: mine[name] - theirs[name] for name in mine})


@dataclass(frozen=True, slots=True)
class Measured:
    """One exchange with lanes of one width; bytes a host, and of a Linux switch that adds.

    Attributes: `channels`, 0: steps of one round; `of_one`, all bytes to those with one channel, where these were
    measured.
    """

    exchange: str
    lane: str
    hosts: int
    params: int
    maps: int
    shared: int
    program: int
    agent: int
    bytes_a_value: float
    switch_maps: int
    switch_process: int
    channels: int = 0
    of_one: float | None = None


def add_parser(subparsers: Any) -> None:
    """The arguments."""
    parser = subparsers.add_parser("memory", help="memory of a host", description=DESCRIPTION)
    parser.add_argument("--hosts", type=several(host_count()), default=(4,))
    parser.add_argument("--params", type=whole(1), default=11_700_000, help="values (11700000)")
    parser.add_argument("--lane", type=names(LANES), default=LANES, help="lanes (i32,i16,i8)")
    parser.add_argument(
        "--exchange",
        type=names(EXCHANGES),
        help="exchanges to measure: broadcast,stripes,switch (broadcast,stripes; with --channels stripes)",
    )
    parser.add_argument(
        "--channels",
        type=several(whole(1, MAX_CHANNELS)),
        default=(0,),
        metavar="N,...",
        help="steps with a round on each of so many channels, by the exchange stripes",
    )
    parser.add_argument("--json", action="store_true", help="a JSON object as the last line")
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Measure and print.

    Raises:
        UsageProblem: an exchange that has no channels is asked for with several.
    """
    planned = args.channels != (0,)
    exchanges = args.exchange or (EXCHANGES[1:2] if planned else EXCHANGES[:2])
    if planned and exchanges != EXCHANGES[1:2]:
        raise UsageProblem(
            f"--channels is for --exchange stripes, not {','.join(exchanges)}: other exchanges have one channel"
        )
    found: list[Measured] = []
    empty: dict[str, Held] = {}
    one: dict[tuple[int, str], Held] = {}
    with open_folder("nicps-bench-") as folder:
        numbers = itertools.count(1)

        def measure(exchange: str, lane: str, hosts: int, params: int, channels: int) -> Held:
            size = Size(hosts, params, parse_rate(_RATE))
            engine = Nicps.of(exchange, lane, size, channels=channels)
            need_memory(engine.memory, f"--params {params:,}")
            number = next(numbers)
            lab = f"bench-{os.getpid()}-{number}"
            with engine.start(folder / str(number), lab, _ROUNDS) as running:
                return _hold(running, hosts)

        for hosts, lane, exchange, channels in itertools.product(
            args.hosts, args.lane, exchanges, args.channels
        ):
            if exchange not in empty:  # with one channel: what others take for themselves counts
                empty[exchange] = measure(exchange, lane, 2, 1, min(channels, 1))
            held = measure(exchange, lane, hosts, args.params, channels).less(empty[exchange])
            if channels == 1:
                one[hosts, lane] = held
            row = _row(exchange, lane, hosts, args.params, held)
            if base := one.get((hosts, lane)):
                row = replace(row, of_one=round(held.total / base.total, 4))
            found.append(replace(row, channels=channels))
            _show(found[-1])
    if args.json:
        print(orjson.dumps({"results": [asdict(each) for each in found]}).decode())
    return 0


def _row(exchange: str, lane: str, hosts: int, params: int, held: Held) -> Measured:
    parts = (held.maps, held.shared, held.program, held.agent)
    maps, shared, program, agent = (round(part) for part in parts)
    each = round(held.total / params, 2)
    switch = round(held.switch_maps), round(held.switch_process)
    of = exchange, lane, hosts, params
    return Measured(*of, maps, shared, program, agent, each, *switch)


def _hold(running: Running, hosts: int) -> Held:
    """The memory of each host after all rounds but one."""
    server = running.server
    server.accept(_READY_S, running.check)
    server.gather()
    agents, programs = running.pids()
    for _ in range(_ROUNDS - 1):
        server.start()
        server.gather()  # their times
        server.gather()  # they wait for the next round
    held = Held(
        sum(map(map_bytes, agents)) / hosts,
        sum(map(file_bytes, agents)) / hosts,
        sum(map(anonymous_bytes, programs)) / hosts,
        sum(map(anonymous_bytes, agents)) / hosts,
        sum(map(map_bytes, running.switch)),
        sum(map(anonymous_bytes, running.switch)),
    )
    server.start()
    server.gather()
    server.gather()
    running.end()
    return held


def map_bytes(pid: int) -> int:
    """Bytes of the BPF maps that a process has open, each once."""
    found: dict[str, int] = {}
    for path in _listed(Path(f"/proc/{pid}/fdinfo")):
        try:
            text = path.read_text()
        except FileNotFoundError:  # it has been closed meanwhile
            continue
        number = re.search(r"^map_id:\s*(\d+)", text, re.M)
        size = re.search(r"^memlock:\s*(\d+)", text, re.M)
        if number and size:
            found[number[1]] = int(size[1])
    return sum(found.values())


def file_bytes(pid: int) -> int:
    """Bytes of the memory files that a process has open, as far as they have been written."""
    sizes = {}
    for path in _listed(Path(f"/proc/{pid}/fd")):
        if os.readlink(path).startswith("/memfd:"):
            status = path.stat()
            sizes[status.st_ino] = status.st_blocks * 512
    return sum(sizes.values())


def anonymous_bytes(pid: int) -> int:
    """Bytes of memory that a process has for itself."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    found = re.search(r"^Anonymous:\s*(\d+) kB", text, re.M)
    return int(found[1]) * 1024 if found else 0


def _listed(folder: Path) -> Iterable[Path]:
    return sorted(folder.iterdir())


def _show(row: Measured) -> None:
    parts = (row.maps, row.shared, row.program, row.agent)
    maps, shared, program, agent = (f"{part / 1e6:z6.1f}" for part in parts)
    more = ""
    if row.switch_maps:
        box = row.switch_maps / 1e6, row.switch_process / 1e6
        more = f"; switch: maps {box[0]:.1f} MB  process {box[1]:z.1f}"
    if row.of_one is not None:
        more += f", {row.of_one:.2%} of one channel's"
    channels = f"  {row.channels} channels" if row.channels else ""
    print(
        f"{row.hosts} hosts  {row.exchange:<9} {row.lane:<3}{channels}  maps {maps} MB  shared {shared}  "
        f"program {program}  agent {agent}  all {sum(parts) / 1e6:6.1f} MB, {row.bytes_a_value} bytes a value{more}",
        file=sys.stderr,
        flush=True,
    )
