# SPDX-License-Identifier: Apache-2.0
"""How long an epoch of a deep belief network takes where Spark's driver adds, and where the hosts' kernels do.

    .venv/bin/python -m benchmarks.dbn_reduce --data DIR [--hosts 3] [--rate 1gbit] [--repeat 1] [--json] [-- OPTIONS]

starts a standalone cluster of Spark in a lab, as root: the master and the driver on h1, a worker with one processor on
each other host, and `nicps join` on all (docs/dbn.md). `nicps dbn --reduce spark` and `--reduce nicps` take turns, with
the options after `--`; the default is `--epochs 3 --finetune 3`. A line for each run: the median seconds of an epoch of
each phase, without the phase's first one, and the digest of the weights, which must be the same.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson

from nicps.bench.arguments import as_type, whole
from nicps.errors import JobFailed
from nicps.lab import Lab
from nicps.rates import parse_rate
from tests.netns.members import Network
from tests.netns.spark_cluster import Cluster

REDUCERS = ("spark", "nicps")
_LIMIT_S = 1800.0


def phases_of(history: list[dict[str, Any]]) -> dict[str, float]:
    """The median seconds of an epoch, by phase; of one with several epochs the first is left out."""
    seconds: dict[str, list[float]] = {}
    for row in history:
        name = "fine-tuning" if "loss" in row else f"layer {row['phase'] + 1}"
        seconds.setdefault(name, []).append(row["seconds"])
    return {
        phase: round(statistics.median(found[1:] or found), 3) for phase, found in seconds.items()
    }


def run(network: Network, cluster: Cluster, reduce: str, arguments: list[str]) -> dict[str, Any]:
    """One run of `nicps dbn`.

    Raises:
        JobFailed: it has failed.
    """
    ended = network.finish(cluster.dbn(*arguments, "--reduce", reduce, "--json"), _LIMIT_S)
    if ended.code:
        raise JobFailed(f"nicps dbn --reduce {reduce} ended with {ended.code}: {ended.err[-500:]}")
    result = orjson.loads(ended.out.splitlines()[-1])
    whole_result = orjson.loads((Path(result["report"]).parent / "result.json").read_bytes())
    return {
        "reduce": reduce,
        "seconds": result["seconds"],
        "epoch_seconds": phases_of(whole_result["history"]),
        "test_error": result["test_error"],
        "weights_sha256": result["weights_sha256"],
    }


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.dbn_reduce", description=__doc__)
    parser.add_argument("--data", required=True, help="the folder with MNIST, or the one above it")
    parser.add_argument("--hosts", type=whole(2), default=3)
    parser.add_argument("--rate", type=as_type(parse_rate), default="1gbit")
    parser.add_argument("--repeat", type=whole(1), default=1)
    parser.add_argument("--json", action="store_true", help="a JSON object as the last line")
    parser.add_argument("options", nargs="*", metavar="OPTION", help="of nicps dbn, after --")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with Network(args.hosts) as network:
        network.lab = Lab(replace(network.lab.settings, rate_bps=args.rate))
        network.up()
        network.all_stand_by()
        folder = network.folder / "spark"
        folder.mkdir()
        options = args.options or ["--epochs", "3", "--finetune", "3"]
        arguments = ["--data", args.data, "--runs", str(folder / "runs"), *options]
        with Cluster(network, folder) as cluster:
            for _ in range(args.repeat):
                for reduce in REDUCERS:
                    row = run(network, cluster, reduce, arguments)
                    rows.append(row)
                    epochs = "  ".join(f"{k} {s:.2f} s" for k, s in row["epoch_seconds"].items())
                    print(
                        f"{reduce:<6} {row['seconds']:7.1f} s  an epoch: {epochs}  "
                        f"weights {row['weights_sha256'][:12]}",
                        file=sys.stderr if args.json else sys.stdout,
                        flush=True,
                    )
    identical = len({row["weights_sha256"] for row in rows}) == 1
    if args.json:
        print(orjson.dumps({"runs": rows, "weights_identical": identical}).decode())
    return 0 if identical else 1


if __name__ == "__main__":
    sys.exit(main())
