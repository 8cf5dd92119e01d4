# SPDX-License-Identifier: Apache-2.0
"""Programs that come late into a group, or come back (docs/collective.md), with real agents and real kernels."""

from __future__ import annotations

import hashlib
import signal
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.netns.late_program import LENGTH, vector_of
from tests.netns.members import Network
from tests.netns.scripts import Script, Scripts

PROGRAM = "tests.netns.late_program"


@pytest.fixture
def scripts(three: Network) -> Iterator[Scripts]:
    made = Scripts(three, PROGRAM)
    yield made
    made.close()


@pytest.fixture
def four(network: Network) -> Iterator[Scripts]:
    made = Scripts(network, PROGRAM)
    yield made
    made.close()


def check(scripts: Scripts) -> dict[int, dict[str, Any]]:
    """All members had the same result after every step, equal to NumPy's for the members that were there."""
    by_step, total = scripts.agree(), np.zeros(LENGTH, np.int64)
    for step, line in by_step.items():
        total = sum((vector_of(rank, step) for rank in line["here"]), total)
        assert line["digest"] == hashlib.sha256(total.tobytes()).hexdigest()[:16], step
    return by_step


def finish(*scripts: Script) -> list[dict[str, Any]]:
    ended = [script.ended() for script in scripts]
    assert all(line.get("done") for line in ended), ended
    return ended


def number_1(started: list[Script]) -> Script:
    """Rank 0 is number 1, which leads, if no program asks for a rank."""
    for script in started:
        script.until(3)
    return next(script for script in started if script.lines[0]["formed"] == 0)


@pytest.mark.long
def test_a_program_is_killed_and_comes_back(scripts: Scripts) -> None:
    first = scripts.start("h1", "h2", "h3")
    lost = first[1]
    lost.until(5)
    lost.kill()
    for script in (first[0], first[2]):
        script.until(lost.lines[-1]["step"] + 10)
    (back,) = scripts.start("h2")
    for line in finish(first[0], first[2], back):
        assert (line["lost"], line["world"]) == ([], 3)
    assert back.lines[0]["late"] and back.lines[1]["rank"] == lost.lines[0]["formed"]
    check(scripts)
    slowest = max(
        line["seconds"] for script in (first[0], first[2]) for line in script.steps.values()
    )
    assert slowest < 10


@pytest.mark.long
def test_the_host_that_leads_is_killed_and_comes_back(scripts: Scripts) -> None:
    """Agent and program; the agent is started anew, and has its number and its rank again."""
    started = scripts.start("h1", "h2", "h3")
    lost = number_1(started)
    scripts.network.end(lost.host, signal.SIGKILL)
    lost.kill()
    rest = [script for script in started if script is not lost]
    for script in rest:
        script.until(script.lines[-1]["step"] + 10)
    scripts.network.join(lost.host)
    scripts.network.answered(lost.host)
    (back,) = scripts.start(lost.host)
    finish(*rest, back)
    assert back.lines[1]["rank"] == 0
    check(scripts)


def test_new_hosts_come(four: Scripts) -> None:
    """h4 takes the rank of one that is lost; that one comes back, and gets a new rank."""
    first = four.start("h1", "h2", "h3", comes=2)
    lost = number_1(first)
    lost.kill()
    rest = [script for script in first if script is not lost]
    for script in rest:
        script.until(script.lines[-1]["step"] + 5)
    (new,) = four.start("h4")
    new.until(0)
    assert new.lines[1]["rank"] == 0
    (back,) = four.start(lost.host)
    for line in finish(*rest, new, back):
        assert len(line["names"]) == 4 and (line["lost"], line["world"]) == ([], 3)
    assert back.lines[1]["rank"] == 3
    check(four)


@pytest.mark.parametrize(
    "delays", [[0.1], pytest.param([0.0, 0.2, 0.3, 0.4, 0.6], marks=pytest.mark.long)]
)
def test_those_that_come_in_are_killed(scripts: Scripts, delays: list[float]) -> None:
    """At any moment of it; the others' steps go on, and in the end one comes in for good."""
    first = scripts.start("h1", "h2", "h3", comes=100)
    first[1].until(5)
    first[1].kill()
    rank, step = first[1].lines[0]["formed"], first[1].lines[-1]["step"]
    for delay in delays:
        first[0].until(step + 5)
        (dies,) = scripts.start("h2")
        assert (line := dies.take()) is not None
        assert line["late"]
        time.sleep(delay)
        dies.kill()
        dies.ended()
        first[0].until(step := first[0].lines[-1]["step"] + 10)
    (back,) = scripts.start("h2")
    step = back.until(0)["step"]
    assert back.lines[1]["rank"] == rank
    for script in (first[0], first[2], back):
        script.until(step + 10)
    check(scripts)


@pytest.mark.long
def test_a_host_that_was_stopped_comes_back_by_itself(scripts: Scripts) -> None:
    """10 s: its program is told that the group went on without it, and its next `admit` takes it in."""
    first = scripts.start("h1", "h2", "h3", returns=True)
    stopped = first[2]
    for script in first:
        script.until(5)
    agent = scripts.network.agents["h3"].process
    for process in (agent, stopped.process):
        process.send_signal(signal.SIGSTOP)
    began = time.monotonic()
    for script in first[:2]:
        script.until(script.lines[-1]["step"] + 20)
    assert time.monotonic() - began < 8
    time.sleep(max(0.0, began + 10 - time.monotonic()))
    for process in (agent, stopped.process):
        process.send_signal(signal.SIGCONT)
    finish(*first)
    assert any("closed" in line for line in stopped.lines)
    check(scripts)


@pytest.mark.long
def test_a_host_that_was_unplugged_comes_back_by_itself(scripts: Scripts) -> None:
    """It has no majority, and reports this; once it is heard again it is taken in."""
    first = scripts.start("h1", "h2", "h3", returns=True)
    for script in first:
        script.until(5)
    scripts.network.lab.host("h3").set_link(False)
    first[0].until(first[0].lines[-1]["step"] + 20)
    time.sleep(6)
    scripts.network.lab.host("h3").set_link(True)
    finish(*first)
    (closed,) = [line["closed"] for line in first[2].lines if "closed" in line]
    assert "this host is out of the group" in closed or "no majority" in closed, closed
    check(scripts)


def test_a_program_that_does_not_want_to_come_late(scripts: Scripts) -> None:
    first = scripts.start("h1", "h2", "h3", comes=100)
    first[2].until(3)
    first[2].kill()
    first[0].until(first[2].lines[-1]["step"] + 3)
    (late,) = scripts.start("h3", late=False)
    said = late.ended()
    assert said["kind"] == "UnderWay" and "must say late=True" in said["error"]
    first[0].until(first[0].lines[-1]["step"] + 3)


@pytest.mark.long
def test_a_group_that_is_over(scripts: Scripts) -> None:
    """A program has come late, and the others end before it calls `admit`: one line."""
    first = scripts.start("h1", "h2", "h3", comes=1)
    first[2].until(3)
    first[2].kill()
    first[0].until(first[2].lines[-1]["step"] + 3)
    (late,) = scripts.start("h3")
    assert late.take() == {"formed": 2, "size": 3, "late": True}
    for script in first:
        script.kill()
    said = late.ended()
    assert "step" in said or said["kind"] in ("NetworkProblem", "MemberLost", "GroupClosed"), said
