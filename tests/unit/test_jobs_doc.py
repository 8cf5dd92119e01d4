# SPDX-License-Identifier: Apache-2.0
"""docs/jobs.md: its example runs as it stands, and its table of settings is true."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.trainer_lab import run_job
from trainer import Settings
from trainer.settings import flat


@pytest.fixture
def text(checkout: Path) -> str:
    return (checkout / "docs" / "jobs.md").read_text()


def example(text: str) -> str:
    """The Python block that is a job."""
    section = text.split("## A complete example")[1].split("\n## ")[0]
    (block,) = re.findall(r"^```python\n(.*?)^```$", section, re.DOTALL | re.MULTILINE)
    return block


def test_the_example_trains(text: str, tmp_path: Path) -> None:
    (tmp_path / "circle").mkdir()
    (tmp_path / "circle" / "job.py").write_text(example(text))
    outcome = run_job(tmp_path / "circle", tmp_path / "run", epochs=8, quorum=1.0)
    assert outcome.errors == [None] * 4
    lines = [outcome.metrics(number) for number in range(1, 5)]
    for of_round in zip(*lines, strict=True):
        assert len({line["weights_sha256"] for line in of_round}) == 1
    accuracies = [line["accuracy"] for line in lines[0] if line["phase"] == "test"]
    assert len(accuracies) == 8 or accuracies[-1] >= 0.99  # its done()
    assert accuracies[-1] > 0.9


def test_the_table_of_settings_is_true(text: str) -> None:
    section = text.split("## Settings")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (`[a-z_.`, A-Z]+`) \| ([^|]+) \|", section, re.M)
    said = {key: default for keys, default in rows for key in re.findall(r"`([^`]+)`", keys)}
    del said["slow.HOST"]
    defaults = flat(Settings())
    assert said.keys() == defaults.keys()
    for key, value in defaults.items():
        stands = said[key].strip("` ")
        if value is None:
            assert stands in ("none", "an epoch")
        else:
            text_of = f"{value:g}" if type(value) is float else str(value)
            assert stands == (text_of.lower() if type(value) is bool else text_of)
