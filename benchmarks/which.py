# SPDX-License-Identifier: Apache-2.0
"""Which way of exchanging gradients takes how long at which rate: steps of DDP above computing, on two hosts.

    python -m benchmarks.which --json > RESULT
    python -m benchmarks.picture RESULT --out docs/ways.svg

benchmarks/above.py says what is measured. The ways, all with nicps but for the first: `gloo`, plain DDP on Gloo;
`plain`, plain DDP; `i8`, compress(model, lane="i8"); `rank-2`, compress(model, rank=2); `local-8`, local SGD, whose
models are averaged every 8 steps (the mean step). At a slow rate fewer steps are measured, but at least three, and at
least one average. Ways take turns.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from typing import Any

import orjson

from benchmarks.above import BURST_BYTES, HOSTS, Way, opened, parameters
from benchmarks.command import finish
from nicps.bench.arguments import as_type, names, several, whole
from nicps.rates import format_rate, parse_rate

WAYS = {
    "gloo": Way("gloo"),
    "plain": Way("plain"),
    "i8": Way("lane", "i8"),
    "rank-2": Way("rank", "2"),
    "local-8": Way("local", "8"),
}
_LEAST, _WARM_UP = 3, 2  # DDP makes its buckets anew after the first step
_ENOUGH_S = 30.0  # for the steps of plain DDP, if the line decides
_BURST_S = 600e-6  # of the line; at 1 Gbit/s more than the 64 KB that TCP hands over at once


def periods(way: Way, steps: int, line_s: float) -> tuple[int, int]:
    """To measure, and before that: of local SGD averages, else steps."""
    most = max(_LEAST, min(steps, round(_ENOUGH_S / line_s)))
    return (max(1, most // int(way.value)), 1) if way.kind == "local" else (most, _WARM_UP)


def compare(args: argparse.Namespace) -> int:
    """Measure and print."""
    rows: list[dict[str, Any]] = []
    for rate in args.rate:
        found: dict[str, list[dict[str, float]]] = {way: [] for way in args.ways}
        burst_bytes = max(BURST_BYTES, round(rate / 8 * _BURST_S))
        with opened("which", rate, args.width, burst_bytes) as bench:
            for _ in range(args.repeat):
                for way in args.ways:
                    steps, warm_up = periods(WAYS[way], args.steps, bench.line_s)
                    found[way].append(bench.measure(WAYS[way], steps, warm_up))
                    print(
                        f"{format_rate(rate)} {way:<8}{found[way][-1]['above'] * 1e3:9.1f} ms",
                        file=sys.stderr,
                        flush=True,
                    )
        rows += [
            {
                "way": way,
                "rate_bps": rate,
                "hosts": HOSTS,
                "params": parameters(args.width),
                "seconds_median": statistics.median(run["above"] for run in runs),
                "seconds_line": bench.line_s,
                "runs": runs,
            }
            for way, runs in found.items()
        ]
    if args.json:
        print(orjson.dumps({"results": rows}).decode())
        return 0
    print(f"{'milliseconds':<14}" + "".join(f"{way:>10}" for way in args.ways))
    for rate in args.rate:
        medians = [row["seconds_median"] for row in rows if row["rate_bps"] == rate]
        print(f"{format_rate(rate):<14}" + "".join(f"{1e3 * each:>10.1f}" for each in medians))
    return 0


def main(arguments: list[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.which",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--rate", type=as_type(several(parse_rate)), default="10mbit,50mbit,100mbit,250mbit,1gbit")
    add("--ways", type=names(tuple(WAYS)), default=",".join(WAYS), help="(%(default)s)")
    add("--width", type=whole(2), default=1698, help="of each of four layers (%(default)s)")
    add("--steps", type=whole(_LEAST), default=24, help="of a run, at most (%(default)s)")
    add("--repeat", type=whole(1), default=2, help="(%(default)s)")
    add("--json", action="store_true", help="a JSON object as the last line")
    args = parser.parse_args(arguments)
    return finish("which", compare, args)


if __name__ == "__main__":
    sys.exit(main())
