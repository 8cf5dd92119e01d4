# SPDX-License-Identifier: Apache-2.0
"""`benchmarks.servers` in labs, in tiny sizes, and the figures that it promises. No time is judged here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nicps.lab import processes, state


def measure(checkout: Path, command: str) -> tuple[list[dict[str, Any]], str]:
    """The list as JSON, and the lines of progress; nothing is left of it."""
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.servers", *command.split(), "--json"],
        cwd=checkout,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        stdout, stderr = process.communicate(timeout=240.0)
    finally:
        process.kill()
    assert process.returncode == 0, stderr
    for name in (f"pulls-{process.pid}", f"servers-{process.pid}"):
        assert not list(state.LABS_DIR.glob(f"{name}*.json")) and processes.find(name) == []
    return json.loads(stdout.splitlines()[-1]), stderr


@pytest.mark.long
def test_pulls(checkout: Path) -> None:
    found, _ = measure(checkout, "pulls --rate 1gbit --workers 2 --params 40000 --pulls 2")
    (row,) = found
    assert (row["rate_bps"], row["workers"], row["params"]) == (10**9, 2, 40_000)
    assert 0 < row["seconds_min"] <= row["seconds_median"]
    assert row["gbit_per_s"] == pytest.approx(
        2 * 112 * 1510 * 8 / row["seconds_median"] / 1e9, 0.01
    )
    assert row["of_line"] == pytest.approx(row["gbit_per_s"], 0.01)
    assert 50 < row["kernel_ns"] < 100_000
    assert 0 <= row["server_user"] < 1 and 0 <= row["server_processor"] < 1


@pytest.mark.long
def test_all_ways_train_and_are_not_run_again(checkout: Path, tmp_path: Path) -> None:
    ways = "s-4,s-0,asynchronous,synchronous,ring-0.75"
    command = f"training --target 0.5 --seeds 1 --ways {ways} --rates 0.3 --test-every 8"
    command += f" --microbatch 0.001 --limit 30 --out {tmp_path / 'rows.jsonl'}"
    found, said = measure(checkout, command)
    assert [row["way"] for row in found] == [*ways.split(","), "alone"]
    assert len(said.splitlines()) == len(found)
    for row in found:
        assert row["reached"] == 1 and 0 < row["seconds_median"] < 30, row
        assert row["samples_per_second"] >= row["fast_samples_per_second"] > 0, row
    means = {row["way"]: row["staleness_mean"] for row in found}
    assert means["s-4"] > 1 and means["asynchronous"] > 1 and means["ring-0.75"] is None
    again, said = measure(checkout, command)
    assert again == found and said == "", "all was in the file"
