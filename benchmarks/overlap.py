# SPDX-License-Identifier: Apache-2.0
"""How much of the exchange DDP's backward pass hides, on Gloo and on nicps, in the same lab.

`python -m benchmarks.overlap [--hosts 2] [--rate 1gbit] [--compute 0.3] [--steps 8] [--repeat 3] [--json]` trains a
model of 10 million parameters whose layers compute by sleeping. Each way runs with buckets of 4 MB, which are exchanged
while backward goes on, and with one bucket, which is ready at its end. The ways take turns.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from benchmarks.overlap_rank import WAYS
from benchmarks.rendezvous import gloo_variables
from nicps.bench.arguments import as_type, host_count, whole
from nicps.errors import JobFailed
from nicps.lab import Lab, LabSettings
from nicps.lab.agents import environment, joined, open_folder
from nicps.rates import parse_rate

_LIMIT_S = 600.0


def run_ranks(
    lab: Lab, module: str, arguments: list[str], variables: Sequence[Mapping[str, str]]
) -> Mapping[str, Any]:
    """What that module prints last at the slowest rank: `median`, seconds of an iteration, and what else it measures.

    Raises:
        JobFailed: a rank failed.
    """
    command = [sys.executable, "-m", module, *arguments]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    ranks = [
        lab.run(
            host,
            command,
            env={**environment(), "OMP_NUM_THREADS": "1", **extra},
            stdin=subprocess.DEVNULL,
            **pipes,
        )
        for host, extra in zip(lab.hosts, variables, strict=True)
    ]
    found: list[Mapping[str, Any]] = []
    try:
        for process in ranks:
            out, err = process.communicate(timeout=_LIMIT_S)
            if process.returncode:
                raise JobFailed(f"{' '.join(arguments)}: {err[-2000:]}")
            found.append(orjson.loads(out.splitlines()[-1]))
    finally:
        for process in ranks:
            process.kill()
    return max(found, key=lambda line: line["median"])


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overlap", description=__doc__)
    parser.add_argument("--hosts", type=host_count(), default=2)
    parser.add_argument("--rate", type=as_type(parse_rate), default="1gbit")
    parser.add_argument("--compute", type=float, default=0.3, help="seconds of a backward pass")
    parser.add_argument("--layers", type=whole(1), default=10, help="of a million parameters each")
    parser.add_argument("--steps", type=whole(1), default=8)
    parser.add_argument("--repeat", type=whole(1), default=3)
    parser.add_argument("--ways", default=",".join(WAYS), help=f"some of {', '.join(WAYS)}")
    parser.add_argument("--json", action="store_true", help="a JSON object as the last line")
    args = parser.parse_args()
    lines: list[dict[str, Any]] = []
    with (
        open_folder("nicps-bench-") as folder,
        Lab(LabSettings("overlap", args.hosts, args.rate)) as lab,
        joined(lab, lab.hosts, folder),
    ):
        gloo = gloo_variables(lab)
        given = {"layers": args.layers, "compute": args.compute, "steps": args.steps}
        plain = [f"--{name}={value}" for name, value in given.items()]
        for turn in range(args.repeat):
            for way in args.ways.split(","):
                for extra in ([], ["--one-bucket"]):
                    variables = gloo if way == "gloo" else [{}] * args.hosts
                    asked = [f"--way={way}", *plain, *extra]
                    printed = run_ranks(lab, "benchmarks.overlap_rank", asked, variables)
                    seconds = printed["median"]
                    line = {"way": way, "overlap": not extra, "turn": turn + 1, "seconds": seconds}
                    lines.append(line)
                    print(
                        f"{way:<6}{'overlap' if not extra else 'one bucket':<12}{seconds * 1e3:7.0f} ms",
                        file=sys.stderr,
                        flush=True,
                    )
    table = []
    for way in args.ways.split(","):
        medians = {
            overlap: statistics.median(
                line["seconds"]
                for line in lines
                if (line["way"], line["overlap"]) == (way, overlap)
            )
            for overlap in (True, False)
        }
        table.append({"way": way, "overlap_s": medians[True], "one_bucket_s": medians[False]})
    if args.json:
        print(orjson.dumps({"runs": lines, "medians": table}).decode())
        return 0
    print(f"{'way':<6}{'overlap':>10}{'one bucket':>13}   of {args.compute * 1e3:.0f} ms backward")
    for row in table:
        overlap, one = row["overlap_s"] * 1e3, row["one_bucket_s"] * 1e3
        print(f"{row['way']:<6}{overlap:7.0f} ms{one:10.0f} ms")
    return 0


if __name__ == "__main__":
    sys.exit(main())
