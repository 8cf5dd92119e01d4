# SPDX-License-Identifier: Apache-2.0
"""`nicps lab`: the commands, without a lab."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from nicps import cli
from nicps.cli import lab

pytestmark = pytest.mark.unit

PROCESS = SimpleNamespace(pid=7, command="nicps join")


class Standing:
    """A lab of that name."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.pause = self.resume = self.kill = lambda hosts, part: [PROCESS]

    def faults(self) -> dict[str, Any]:
        return {}

    def _take(self, *given: Any, **named: Any) -> None:
        """Anything that changes it."""

    link = cut = heal = lose_next = fault = clear = _take


@pytest.mark.parametrize(
    "line",
    [
        *("kill h1", "pause h1 --agent", "resume all", "link h1 down", "cut h1", "heal"),
        *("fault h1 --loss 5%", "fault h1 --clear", "lose-next h1 token 1", "start switch"),
    ],
)
def test_the_only_lab_is_named_by_what_changes_it(
    line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On stderr: what a command prints on stdout is the same with `--lab`."""
    monkeypatch.setattr(lab.Lab, "open", lambda name: Standing(name or "here"))
    monkeypatch.setattr(lab.adding, "start_again", lambda _: PROCESS)
    command, *arguments = line.split()
    assert cli.main(["lab", command, *arguments]) == 0
    without = capsys.readouterr()
    assert without.err == "nicps: in lab here, the only one that stands\n"
    assert cli.main(["lab", command, "--lab", "that", *arguments]) == 0
    assert capsys.readouterr() == (without.out, "")
