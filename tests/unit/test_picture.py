# SPDX-License-Identifier: Apache-2.0
"""The pictures of all-reduce times and of steps: `python -m benchmarks.picture`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.picture import lines_of, main
from benchmarks.which import WAYS, periods

pytestmark = pytest.mark.unit


def row(engine: str, exchange: str, lane: str, params: int, seconds: float) -> dict[str, Any]:
    return {
        "engine": engine,
        "exchange": exchange,
        "lane": lane,
        "hosts": 4,
        "rate_bps": 10**9,
        "params": params,
        "seconds_median": seconds,
    }


ROWS = [
    row("nicps", "stripes", "i8", 1 << 20, 0.05),
    row("nicps", "stripes", "i8", 1 << 10, 0.004),
    row("nicps", "stripes", "i8", 1 << 10, 0.005),
    row("gloo", "", "float32", 1 << 10, 0.006),
]


def test_lines() -> None:
    """By size; what is measured again counts."""
    assert lines_of(ROWS) == {
        ("nicps", "stripes", "i8"): [(4 << 10, 0.005), (4 << 20, 0.05)],
        ("gloo", "", "float32"): [(4 << 10, 0.006)],
    }


def test_a_picture(tmp_path: Path) -> None:
    result, out = tmp_path / "result", tmp_path / "sizes.svg"
    result.write_text("a table\n" + json.dumps({"results": ROWS}))
    assert main([str(result), "--out", str(out)]) == 0
    text = out.read_text()
    assert all(name in text for name in ("stripes i8", "gloo float32", "4 hosts, 1gbit"))


def step(way: str, rate_bps: int, seconds: float) -> dict[str, Any]:
    return {
        "way": way,
        "rate_bps": rate_bps,
        "hosts": 2,
        "params": 11_539_608,
        "seconds_median": seconds,
    }


def test_a_picture_of_steps(tmp_path: Path) -> None:
    result, out = tmp_path / "result", tmp_path / "ways.svg"
    rows = [step(way, rate, 1.0) for way in WAYS for rate in (10**9, 10**7)]
    result.write_text(json.dumps({"results": rows}))
    assert main([str(result), "--out", str(out)]) == 0
    text = out.read_text()
    named = ("DDP on Gloo", "compress(rank=2)", "local SGD, 8 steps", "10mbit", "11.5 million")
    assert all(name in text for name in named)


def test_both_kinds_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = tmp_path / "sizes", tmp_path / "steps"
    for file, rows in zip(files, (ROWS, [step("i8", 10**9, 1.0)]), strict=True):
        file.write_text(json.dumps({"results": rows}))
    assert main([*map(str, files), "--out", str(tmp_path / "both.svg")]) == 2
    assert "do not go into one picture" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "no line of JSON", '{"results": []}', '{"results": [{}]}'])
def test_no_result(tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    result = tmp_path / "result"
    result.write_text(text)
    assert main([str(result), "--out", str(tmp_path / "sizes.svg")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "does not end with the results of `nicps bench allreduce --json`" in line


def test_periods() -> None:
    """Of `benchmarks.which`: as many steps as the line allows, and an average of local SGD at least."""
    assert periods(WAYS["plain"], 24, 37.0) == (3, 2)
    assert periods(WAYS["rank-2"], 24, 3.7) == (8, 2)
    assert periods(WAYS["i8"], 24, 0.37) == (24, 2)
    assert periods(WAYS["local-8"], 24, 37.0) == (1, 1)
    assert periods(WAYS["local-8"], 24, 0.37) == (3, 1)
