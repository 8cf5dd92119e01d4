# SPDX-License-Identifier: Apache-2.0
"""The step of a job with priority flows beside one without, in labs of namespaces, as root.

    .venv/bin/python -m benchmarks.priorities --hosts 2 --networks even,resnet50,vgg16 --rate 200mbit --json

The networks have published shapes (`benchmarks.networks`), and compute by sleeping. `--ratio` is the gradients' time on
the wire, at the line's limit, to that of computing. Ways take turns.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import orjson

from benchmarks.command import finish
from benchmarks.networks import NETWORKS, Shape
from benchmarks.overlap import run_ranks
from benchmarks.rendezvous import gloo_variables
from benchmarks.time_to_accuracy import train
from nicps import wire
from nicps.bench.arguments import as_type, host_count, names, several, whole
from nicps.lab import Lab, LabSettings
from nicps.lab.agents import joined, open_folder
from nicps.rates import format_rate, parse_rate

JOB = Path(__file__).parent / "sleeping"
_LANE_BYTES = {"i8": 1, "i16": 2, "i32": 4}
_SILENCE_S = "2"  # all hosts share a machine
_LIMIT_S = 600.0
_FRAME_BYTES = wire.ETHERNET_BYTES + wire.CONTRIBUTION_HEADER_BYTES + wire.PAYLOAD_BYTES
#: Buckets of a step where nothing is prioritised, about as many as DDP's 25 MB make of a large network.
_BUCKETS = 12

#: Of scripts with DDP, and which kind of overlap each has: on Gloo in float32; `nicps.torch.compress`, and `overlap`.
_SCRIPTS = {"gloo": None, "compress": "backward", "overlap": "priorities"}
#: By way: the job's settings. `network` also has hosts that order and tag their frames, and ports that heed tags.
WAYS: Mapping[str, Mapping[str, Any]] = {
    "gloo": {},
    "compress": {},
    "overlap": {},
    "none": {},
    "backward": {"bucket_mb": None},
    "order": {"priority_scope": "queue"},
    "sender": {"priority_scope": "order"},
    "network": {"priority_scope": "order"},
}


@dataclass(frozen=True, slots=True)
class Row:
    """One way with one network.

    Attributes:
        step_seconds: median of the measured steps, of all turns; `turns`: those of each turn.
        bound_seconds: what its kind of overlap takes if nothing but the line and computing took time; None for Gloo.
        efficiency: computing, as a part of the step: what one host alone needs to what each of these needs.
        predicted_seconds: what the lead has predicted, in the last turn.
    """

    hosts: int
    network: str
    way: str
    rate_bps: int
    wire_seconds: float
    compute_seconds: float
    step_seconds: float
    bound_seconds: float | None
    efficiency: float
    of_backward: float | None
    channels: int
    predicted_seconds: float | None
    turns: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Bench:
    """What all runs have in common."""

    hosts: int
    rate_bps: int
    numbers: int
    ratio: float
    lane: str
    channels: int
    steps: int

    @property
    def wire_seconds(self) -> float:
        """Of a step's gradients at the limit of stripes: contributions and sums, through one port, in one direction."""
        frames = self.numbers * _LANE_BYTES[self.lane] / wire.PAYLOAD_BYTES
        return 2 * frames * (self.hosts - 1) / self.hosts * _FRAME_BYTES * 8 / self.rate_bps

    @property
    def compute(self) -> float:
        """Seconds of a forward and a backward pass."""
        return self.wire_seconds / self.ratio

    @property
    def _bucket_mb(self) -> float:
        return 4e-6 * self.numbers / _BUCKETS

    def settings(self, network: str, way: str) -> dict[str, Any]:
        """Of the job."""
        asked = dict(WAYS[way])
        if "bucket_mb" in asked:
            asked["bucket_mb"] = self._bucket_mb
        elif asked:
            asked["priorities"] = self.channels
        shape = {"network": network, "numbers": self.numbers, "compute": self.compute}
        return {**shape, **asked, "lane": self.lane, "rounds": self.steps, "batch": self.hosts}

    def run(self, lab: Lab, network: str, way: str) -> tuple[list[float], Mapping[str, Any]]:
        """Seconds of the measured steps, and the result."""
        if way == "gloo":
            return self._run_script(lab, network, way, gloo_variables(lab))
        options = ["--silence", _SILENCE_S]
        if lab.settings.priorities:
            options += ["--tags", "--shape", format_rate(self.rate_bps)]
        with open_folder("nicps-prio-") as folder, joined(lab, lab.hosts, folder, *options) as all_:
            if way in _SCRIPTS:
                return self._run_script(lab, network, way, [{}] * self.hosts)
            rows, result = train(all_, JOB, self.settings(network, way), None, _LIMIT_S)
        ends = [row["t_end"] for row in rows[0] if row["phase"] == "train"]
        seconds = [later - end for end, later in pairwise(ends)]
        return seconds[len(seconds) // 2 :], result  # the last plan is in force by then

    def _run_script(
        self, lab: Lab, network: str, way: str, variables: Sequence[Mapping[str, str]]
    ) -> tuple[list[float], Mapping[str, Any]]:
        settings = {**self.settings(network, way), "priorities": self.channels}
        given = {"way": way, "settings": orjson.dumps(settings).decode()}
        options = [f"--{name}={value}" for name, value in given.items()]
        options.append(f"--bucket-mb={self._bucket_mb}")
        printed = run_ranks(lab, "benchmarks.sleeping_rank", options, variables)
        return [printed["median"]], printed


def measure(
    bench: Bench, networks: Sequence[str], ways: Sequence[str], turns: int
) -> Iterator[Row]:
    """A row for each network and way."""
    with ExitStack() as stack:
        plain = LabSettings("prio", bench.hosts, bench.rate_bps, burst_bytes=16 * 1024)
        labs = {False: stack.enter_context(Lab(plain))}
        if "network" in ways:
            heeding = LabSettings("prio-tags", bench.hosts, bench.rate_bps, priorities=True)
            labs[True] = stack.enter_context(Lab(heeding))
        for network in networks:
            shape = Shape.of(network, bench.numbers, bench.compute)
            bounds = shape.bounds(bench.wire_seconds)
            found: dict[str, list[float]] = {way: [] for way in ways}
            results: dict[str, Mapping[str, Any]] = {}
            for turn in range(1, turns + 1):
                for way in ways:
                    steps, results[way] = bench.run(labs[way == "network"], network, way)
                    found[way].append(statistics.median(steps))
                    said = f"{network} {way:<9} turn {turn}: {1e3 * found[way][-1]:.0f} ms"
                    print(said, file=sys.stderr, flush=True)
            medians = {way: statistics.median(each) for way, each in found.items()}
            beside = medians.get("backward")
            for way in ways:
                yield Row(
                    bench.hosts,
                    network,
                    way,
                    bench.rate_bps,
                    round(bench.wire_seconds, 4),
                    round(shape.compute, 4),
                    round(medians[way], 4),
                    _bound(bounds, way),
                    round(shape.compute / medians[way], 4),
                    round(medians[way] / beside, 3) if beside else None,
                    results[way].get("channels", 1),
                    results[way].get("predicted_seconds"),
                    tuple(round(each, 4) for each in found[way]),
                )


def _bound(bounds: Mapping[str, float], way: str) -> float | None:
    kind = _SCRIPTS.get(way, way)
    return None if kind is None else round(bounds.get(kind, bounds["priorities"]), 4)


def run(args: argparse.Namespace) -> int:
    """Measure and print."""
    rows = []
    for hosts in args.hosts:
        about = args.numbers, args.ratio, args.lane, args.priorities, args.steps
        bench = Bench(hosts, args.rate, *about)
        for row in measure(bench, args.networks, args.ways, args.turns):
            rows.append(row)
            print(
                f"{row.hosts} hosts  {row.network:<9}{row.way:<9}"
                f"{1e3 * row.step_seconds:6.0f} ms  computing {row.efficiency:.1%}"
                + (f"  bound {1e3 * row.bound_seconds:.0f} ms" if row.bound_seconds else "")
                + (f"  {row.of_backward:.2f} of backward's" if row.of_backward else ""),
                flush=True,
            )
    if args.json:
        print(orjson.dumps([asdict(row) for row in rows]).decode())
    return 0


def _ratio(text: str) -> float:
    try:
        ratio = float(text)
    except ValueError:
        ratio = 0.0
    if not 0.01 <= ratio <= 100:
        raise argparse.ArgumentTypeError(f"takes a number from 0.01 to 100, not {text!r}")
    return ratio


def main(arguments: list[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.priorities",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--hosts", type=several(host_count(2)), default="2", metavar="N,...", help="(%(default)s)")
    add("--networks", type=names(tuple(NETWORKS)), default=",".join(NETWORKS), help="(%(default)s)")
    add("--ways", type=names(tuple(WAYS)), default=",".join(WAYS), help="(%(default)s)")
    add("--rate", type=as_type(parse_rate), default="200mbit", help="of the line (%(default)s)")
    add("--numbers", type=whole(1000), default=8_000_000, help="parameters (%(default)s)")
    add("--ratio", type=_ratio, default=1.0, help="wire time to computing (%(default)s)")
    add("--lane", choices=_LANE_BYTES, default="i8", help="(%(default)s)")
    add("--priorities", type=whole(1, 8), default=4, help="channels at most (%(default)s)")
    add("--steps", type=whole(24), default=60, help="of a run; half are measured (%(default)s)")
    add("--turns", type=whole(1), default=3, help="(%(default)s)")
    add("--json", action="store_true", help="a JSON list as the last line")
    args = parser.parse_args(arguments)
    return finish("priorities", run, args)


if __name__ == "__main__":
    sys.exit(main())
