# SPDX-License-Identifier: Apache-2.0
"""The picture of all-reduce times: `python -m benchmarks.picture`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.picture import lines_of, main

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


@pytest.mark.parametrize("text", ["", "no line of JSON", '{"results": []}', '{"results": [{}]}'])
def test_no_result(tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    result = tmp_path / "result"
    result.write_text(text)
    assert main([str(result), "--out", str(tmp_path / "sizes.svg")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "does not end with the results of `nicps bench allreduce --json`" in line
