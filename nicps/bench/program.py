# SPDX-License-Identifier: Apache-2.0
"""Shared parts of the benchmarks' training programs: agents start them as `prepare`, `run` and `report`."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import orjson


def main(
    entry: str,
    run: Callable[[Path], None],
    prepare: Callable[[Path, Mapping[str, Any]], list[str]] = lambda out, settings: [],
) -> int:
    """Do what the agent asks for.

    Args:
        entry: the program's module.
        run: trains in the folder that was handed out.
        prepare: makes further files in a folder, from the settings; their names.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("prepare", "run", "report"))
    parser.add_argument("folder", nargs="?")
    parser.add_argument("--job")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--data")
    parser.add_argument("--settings", default="{}")
    parser.add_argument("--workdir", type=Path)
    args = parser.parse_args()
    if args.what == "prepare":
        settings = orjson.loads(args.settings)
        names = ["prepared.json", *prepare(args.out, settings)]
        prepared = {
            "job": entry.rpartition(".")[2],
            "entry": entry,
            "data": "random",
            "settings": settings,
            "files": [{"path": name, "store": "all"} for name in names],
        }
        (args.out / "prepared.json").write_bytes(orjson.dumps(prepared))
    elif args.what == "run":
        run(args.workdir)
    return 0


def leave_record(workdir: Path, digest: str) -> None:
    """The one line of metrics that the agent wants of every training program."""
    line = orjson.dumps({"round": 1, "weights_sha256": digest}) + b"\n"
    (workdir / "out" / "metrics.jsonl").write_bytes(line)
