# SPDX-License-Identifier: Apache-2.0
"""docs/monitoring.md: its table of metrics is whole, its picture and its tracker are as the code has them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from nicps.agent.families import FAMILIES, ROUND_SECONDS, ROUND_SECONDS_HELP
from tests.netns.members import tiny_job
from tests.trainer_lab import run_job
from tests.unit.test_top_cli import look, shown


@pytest.fixture
def text(checkout: Path) -> str:
    return (checkout / "docs" / "monitoring.md").read_text()


def test_the_table_of_metrics_is_whole(text: str) -> None:
    rows = re.findall(r"^\| `(nicps_\w+)` \| (\w+) \| (.*?) ?\| (.+) \|$", text, re.M)
    wanted = [
        (f.name, f.kind, ", ".join(f"`{label}`" for label in f.labels), f.help) for f in FAMILIES
    ]
    assert rows == [*wanted, (ROUND_SECONDS, "histogram", "`le`", ROUND_SECONDS_HELP)]


def test_the_picture_has_the_lines_that_top_has(text: str) -> None:
    picture = text.split("```")[1].splitlines()[2:]
    told = {"loss": 0.1, "accuracy": 0.9, "epoch": 1.0, "share_compute": 0.5}
    lines = shown([look(1.0, 1, progress=told), look(2.0, 2, progress=told)])

    def labels(of: list[str]) -> list[str]:
        return [line[:10].strip() for line in of[1 : of.index("")]]

    assert labels(picture) == labels(lines)
    assert picture[picture.index("") + 1].split() == lines[lines.index("") + 1].split()
    assert max(map(len, picture)) <= 80


def test_the_tracker_works(text: str, tmp_path: Path) -> None:
    (block,) = re.findall(r"^```python\n(# figures.py.*?)^```$", text, re.M | re.S)
    job = tiny_job(tmp_path)
    (job / "figures.py").write_text(block)
    outcome = run_job(job, tmp_path / "run", 1, trackers="figures:Lines")
    assert outcome.errors == [None]
    assert "'loss': " in (outcome.folders[0] / "out" / "figures.txt").read_text()
