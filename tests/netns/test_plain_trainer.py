# SPDX-License-Identifier: Apache-2.0
"""Training programs that need nothing but Python, and send nothing but what docs/socket.md demands."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from nicps.session.events import Warned
from tests.netns.labs import ROOT
from tests.netns.members import Network, tiny_job

PROGRAM = ROOT / "tests" / "netns" / "plain_trainer.py"


class Plain(Network):
    """Hosts with such programs; those of h2 leave the names in `lacks` out of their last row."""

    lacks = ""

    def more_arguments(self, host: str) -> list[str]:
        lacks = self.lacks if host == "h2" else ""
        return [*self.arguments, "--trainer", f"{sys.executable} -S {PROGRAM} {lacks}"]


@pytest.fixture
def network() -> Iterator[Plain]:
    with Plain(2, program=PROGRAM) as made:
        yield made


def test_a_run_has_its_result_and_its_report(network: Plain, open_path: Path) -> None:
    network.up()
    run = network.train(tiny_job(open_path), rounds=4)
    assert run.result["weights_identical"] and run.result["rounds"] == 4
    assert not [event for event in run.events if isinstance(event, Warned)]
    assert run.metrics("h1")[0].keys() == {"round", "weights_sha256"}
    page = Path(run.result["report"]).read_text()
    assert "<b>4</b><span>training rounds" in page and "identical" in page


@pytest.mark.short("round")
@pytest.mark.parametrize("field", ["round", "weights_sha256"])
def test_a_field_that_is_demanded(network: Plain, open_path: Path, field: str) -> None:
    network.lacks = field
    network.up()
    ended = network.command("h1", "submit", str(tiny_job(open_path)), "--wait", "--set", "rounds=2")
    assert ended.error(5).startswith(f'h2: metrics.jsonl: row 3: "{field}" is missing; it must be')
    network.all_stand_by()
