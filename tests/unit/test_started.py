# SPDX-License-Identifier: Apache-2.0
"""A run of `nicps run` at the host that has started it: its scripts' group, and how it ends (`nicps.agent.started`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest

from nicps import wire
from nicps.agent.started import Started
from nicps.job.script import LaunchScript
from nicps.session.events import Warned
from nicps.session.messages import Error, Result
from nicps.wire import ScriptStep

pytestmark = pytest.mark.unit

HOSTS = tuple((f"h{k}", bytes([k] * 6)) for k in (1, 2, 3))
START = 100.0


class Shown:
    """`nicps run`, as far as it is told something."""

    full = False

    def __init__(self) -> None:
        self.told: list[Any] = []
        self.send = self.told.append

    def forward(self, *_: object) -> None:
        pass

    forward_own = forward

    def has_own(self, _: object) -> bool:
        return True


class Run:
    """One of three hosts; that of rank 1 has started it."""

    def __init__(self) -> None:
        self.shown = Shown()
        launch = LaunchScript("run-1", "trainer.script", {}, HOSTS, 1, 1, 1)
        args: Any = (self.shown, START, Path("runs"), None, lambda *_: None)
        self.started = Started(launch, *args)
        self.gives_up = False

    def frame(self, now: float, name: str, *, waits: bool, code: int | None = None) -> None:
        """A sign of life of that host, or its script's end."""
        rank = [each for each, _ in HOSTS].index(name)
        ends = code is not None
        step = ScriptStep.END if ends else ScriptStep.OUTPUT
        tail = orjson.dumps({"code": code}) if ends else b""
        body = wire.Script(1, 0, step, rank, int(waits))
        self.started.take_output(now, HOSTS[rank][1], body, tail)

    def tick(self, now: float, *, forming: bool = False, in_group: bool = False) -> None:
        self.gives_up |= self.started.tick(now, forming, in_group)

    @property
    def warnings(self) -> list[str]:
        return [each.message for each in self.shown.told if isinstance(each, Warned)]


@pytest.mark.parametrize(("codes", "code", "name"), [((None, 3), 3, "h3"), ((7, 3), 7, "h1")])
def test_a_script_that_ends_while_others_wait_for_it_gives_the_run_its_exit_code(
    codes: tuple[int | None, int], code: int, name: str
) -> None:
    """The first one by rank, as in any other run."""
    run = Run()
    for host, own in (("h3", codes[1]), ("h1", codes[0])):
        run.frame(START, host, waits=own is None, code=own)
    run.tick(START + 1, forming=True)
    assert run.gives_up
    run.started.note_end("h2", orjson.dumps({"code": 137}))
    run.frame(START, "h1", waits=False, code=137)
    run.tick(START + 2)
    (told,) = run.shown.told
    assert isinstance(told, Error) and run.started.over
    assert told.exit_code == told.error.exit_code == code
    assert (
        told.message
        == f"the script on {name} ended with exit code {code} before all had joined the group"
    )


def test_a_host_that_is_lost_while_others_wait_for_it_is_exit_code_5() -> None:
    run = Run()
    run.frame(START, "h1", waits=True)
    run.frame(START, "h3", waits=False)
    run.frame(START + 6, "h1", waits=True)
    run.tick(START + 6, forming=True)
    for name in ("h1", "h2"):
        run.started.note_end(name, orjson.dumps({"code": 137}))
    run.tick(START + 7)
    told = run.shown.told[-1]
    assert isinstance(told, Error) and told.exit_code == 5
    assert told.message == "the script on h3 was lost before all had joined the group"


def test_a_group_that_does_not_form_is_told_once_with_the_hosts_that_are_waited_for() -> None:
    run = Run()
    for second in range(30):
        now = START + second
        run.frame(now, "h1", waits=second > 5)
        run.frame(now, "h3", waits=second > 20)
        run.tick(now)
        assert len(run.warnings) == (second > 16)
    (text,) = run.warnings
    assert text == (
        "no group has formed for 10 s: the script has not called init_process_group (or Group.form) on h2, h3"
    )


def test_a_script_that_has_ended_without_the_group_is_told_as_such() -> None:
    run = Run()
    run.frame(START, "h3", waits=False, code=0)
    for now in (START, START + 11):
        run.frame(now, "h1", waits=True)
        run.tick(now, forming=True)
    (text,) = run.warnings
    assert text.endswith(" on h3; on h3 it has ended without")


def test_scripts_that_have_formed_the_group_are_not_warned() -> None:
    """What other hosts have said may be half a second old as the group forms."""
    run = Run()
    for second in range(40):
        run.frame(START + second, "h1", waits=second < 30)
        run.frame(START + second, "h3", waits=False)
        run.tick(START + second, in_group=second == 9)
    assert run.shown.told == []


@pytest.mark.parametrize("comes", ["never", "for a moment", "elsewhere"])
def test_scripts_that_come_to_no_group_are_told_once_how_they_may_wait_elsewhere(
    comes: str,
) -> None:
    """They may need none: nothing is said of a group that has begun to form at any time."""
    run = Run()
    for second in range(70):
        now = START + second
        run.frame(now, "h1", waits=comes == "elsewhere" and second == 20)
        run.frame(now, "h3", waits=False)
        run.tick(now, in_group=comes == "for a moment" and second == 20)
        assert len(run.warnings) == (comes == "never" and second > 30)
    assert all("within 30 s" in text and "import nicps.torch" in text for text in run.warnings)


def test_nothing_is_said_of_groups_where_a_script_has_ended() -> None:
    run = Run()
    run.frame(START, "h3", waits=False, code=0)
    for second in range(40):
        run.frame(START + second, "h1", waits=False)
        run.tick(START + second)
    assert run.warnings == []


def test_files_that_are_removed_are_in_the_result() -> None:
    """What a host says of them is not trusted."""
    run = Run()
    told: list[Any] = [{"files": 2, "first": ["a", "b\n"]}, {"files": "x", "first": []}, 3]
    for (name, _), removed in zip(HOSTS, told, strict=True):
        run.started.note_end(name, orjson.dumps({"code": 0, "removed": removed}))
    run.tick(START)
    (end,) = run.shown.told
    assert isinstance(end, Result)
    assert end.result["removed"] == {"h1": {"files": 2, "first": ["a", "b"]}}
    assert end.result["exit_codes"] == {"h1": 0, "h2": 5, "h3": 5}
