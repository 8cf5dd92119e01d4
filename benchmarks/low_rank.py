# SPDX-License-Identifier: Apache-2.0
"""`compress(model, rank=R)` beside PowerSGD on Gloo: the time of a step of DDP above computing, in the same lab.

`python -m benchmarks.low_rank [--rate 1gbit] [--ranks 1,2,4] [--repeat 3] [--json]`: benchmarks/above.py says what is
measured. PowerSGD has one bucket, as it needs on Gloo; `gradient_as_bucket_view` is set in both. Ways take turns:
`nicps`, `powersgd` as it is installed, and `powersgd-tuned`, in whose processes malloc keeps what was freed instead of
giving it back to the kernel.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from typing import Any

import orjson

from benchmarks.above import Way, opened
from benchmarks.command import finish
from nicps.bench.arguments import as_type, several, whole
from nicps.rates import parse_rate

_WARM_UP = 5
#: glibc's: no mapping of its own for large pieces, and nothing given back.
_TUNED = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
    "MALLOC_TOP_PAD_": str(64 << 20),
}
_WAYS = {
    "nicps": ("rank", {}),
    "powersgd": ("powersgd", {}),
    "powersgd-tuned": ("powersgd", _TUNED),
}


def compare(args: argparse.Namespace) -> int:
    """Measure and print."""
    lines: list[dict[str, Any]] = []
    with opened("low-rank", args.rate, args.width) as bench:
        for turn in range(args.repeat):
            for rank in args.ranks:
                for way, (kind, variables) in _WAYS.items():
                    found = bench.measure(Way(kind, str(rank), variables), args.steps, _WARM_UP)
                    line = {"turn": turn + 1, "way": way, "rank": rank, **found}
                    lines.append(line)
                    print(
                        f"rank {rank} {way:<15} step {line['step'] * 1e3:7.1f} ms, computing"
                        f" {line['computing'] * 1e3:6.1f} ms, above {line['above'] * 1e3:7.1f} ms,"
                        f" processor {line['processor'] * 1e3:6.1f} ms",
                        file=sys.stderr if args.json else sys.stdout,
                        flush=True,
                    )
    medians = []
    for rank in args.ranks:
        for way in _WAYS:
            same = [line for line in lines if (line["rank"], line["way"]) == (rank, way)]
            found = {f: statistics.median(line[f] for line in same) for f in ("above", "processor")}
            medians.append({"rank": rank, "way": way, **found})
    if args.json:
        print(orjson.dumps({"runs": lines, "medians": medians}).decode())
        return 0
    print("medians above computing:")
    for each in medians:
        print(
            f"rank {each['rank']} {each['way']:<15} {each['above'] * 1e3:7.1f} ms,"
            f" processor {each['processor'] * 1e3:6.1f} ms"
        )
    return 0


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.low_rank", description=__doc__)
    parser.add_argument("--rate", type=as_type(parse_rate), default="1gbit")
    parser.add_argument("--ranks", type=several(whole(1)), default=(1, 2, 4))
    parser.add_argument("--width", type=whole(2), default=1698, help="of each of four layers")
    parser.add_argument("--steps", type=whole(1), default=20)
    parser.add_argument("--repeat", type=whole(1), default=3)
    parser.add_argument("--json", action="store_true", help="a JSON object as the last line")
    args = parser.parse_args()
    return finish("low_rank", compare, args)


if __name__ == "__main__":
    sys.exit(main())
