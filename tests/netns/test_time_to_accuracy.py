# SPDX-License-Identifier: Apache-2.0
"""`benchmarks.time_to_accuracy` in a lab of two hosts: each kind of way trains the digits. No time is judged here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nicps.lab import processes, state

WAYS = ("ddp", "fp16", "powersgd-1:4", "lowrank-1", "local-4:4", "stripes-i16", "stripes-i8")
SETTINGS = ("rounds=120", "test_every=10")


def measure(checkout: Path, out: Path, target: str, ways: str) -> tuple[list[Any], str]:
    """The table as JSON, and the lines of progress; nothing is left of it."""
    command = [sys.executable, "-m", "benchmarks.time_to_accuracy", "--job", "digits", "--json"]
    command += ["--rate", "100mbit", "--seeds", "1", "--target", target, "--ways", ways]
    command += ["--out", str(out), *(word for text in SETTINGS for word in ("--set", text))]
    process = subprocess.Popen(
        command, cwd=checkout, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        stdout, stderr = process.communicate(timeout=240.0)
    finally:
        process.kill()
    assert process.returncode == 0, stderr
    name = f"tta-{process.pid}"
    assert not list(state.LABS_DIR.glob(f"{name}*.json")) and processes.find(name) == []
    return json.loads(stdout.splitlines()[-1]), stderr


@pytest.mark.long
def test_all_ways_reach_the_target_and_are_not_run_again(checkout: Path, tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    lines, said = measure(checkout, out, "0.8", ",".join(WAYS))
    assert tuple(line["way"] for line in lines) == WAYS
    assert len(said.splitlines()) == len(WAYS)
    for line in lines:
        assert line["reached"] == 1 and 0 < line["seconds_median"] < 60, line
    rows = [json.loads(text) for text in out.read_text().splitlines()]
    assert all(row["steps"] == row["steps_in_all"] < 120 for row in rows), "it ends at the target"
    first = {row["way"]: row["tests"][0][2] for row in rows}
    tenth = [first[way] for way in ("ddp", "fp16", "stripes-i16")]
    assert max(tenth) - min(tenth) < 0.02, "the same samples from the same weights"
    again, said = measure(checkout, out, "0.8", ",".join(WAYS))
    assert again == lines and said == "", "all was in the file"


@pytest.mark.long
def test_a_target_that_is_too_high(checkout: Path, tmp_path: Path) -> None:
    lines, said = measure(checkout, tmp_path / "rows.jsonl", "1", "ddp,stripes-i8")
    for line in lines:
        assert (line["reached"], line["seconds_median"]) == (0, None)
        assert 0.8 < line["best"] < 1
    assert said.count("not reached: at best 0.") == 2 and said.count("after 120 steps") == 2
