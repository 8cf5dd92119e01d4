# SPDX-License-Identifier: Apache-2.0
"""`nicps bench`: measure. Each benchmark is a module of `nicps.bench`; results are kept in benchmarks/."""

from __future__ import annotations

import importlib
from typing import Any

BENCHMARKS = (
    "allreduce",
    "comeback",
    "flood",
    "handout",
    "idle",
    "kernel",
    "memory",
    "silence",
    "sums",
    "switch",
)


def add_parser(subparsers: Any) -> None:
    """One sub-command a benchmark."""
    parser = subparsers.add_parser("bench", help="measure", description=__doc__)
    own = parser.add_subparsers(dest="benchmark", metavar="BENCHMARK", required=True)
    for name in BENCHMARKS:
        importlib.import_module(f"nicps.bench.{name}").add_parser(own)
    in_order = importlib.import_module("nicps.bench.arguments").in_order
    for benchmark in own.choices.values():
        benchmark.set_defaults(func=in_order(benchmark.get_default("func")))
