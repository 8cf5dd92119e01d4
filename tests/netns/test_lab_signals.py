# SPDX-License-Identifier: Apache-2.0
"""Agents and training programs of a lab's hosts, stopped, going on, and killed."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from nicps.lab import Lab, LabProblem, LabSettings
from tests.netns.labs import leftovers, nicps, until
from tests.netns.members import LIGHT, Network, tiny_job
from tests.netns.warm_programs import STEM
from tests.reaper import fresh_name

# In the place of `nicps`: an agent, with a training program that has started something itself.
STAND_IN = """
import subprocess, sys
script = "import subprocess; subprocess.run(['sleep', '1001'])"
subprocess.run([sys.executable, "-c", script], start_new_session=True)
"""
AGENT, TRAINER = "nicps join", "import subprocess"


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    """Two hosts, with a stand-in for an agent and another process on each."""
    name = fresh_name()
    stand_in = tmp_path / "nicps"
    stand_in.write_text(STAND_IN)
    with Lab(LabSettings(name, hosts=2)) as made:
        for host in ("h1", "h2"):
            made.run(host, [sys.executable, str(stand_in), "join", "--iface", "eth1"])
            made.run(host, ["sleep", "1000"])
            until(lambda h=host: running(made, h) == WHOLE, "agent, trainer and two sleeps")
        yield made
    assert leftovers(name) == {}


def running(lab: Lab, host: str) -> list[str]:
    """The processes on a host, in a word each; small letters are stopped."""
    words = {AGENT: "AGENT", TRAINER: "TRAINER", "sleep 1001": "WORKER", "sleep 1000": "OTHER"}
    found = []
    for process in lab.processes()[host]:
        for part, word in words.items():
            if part in process.command:
                found.append(word.lower() if process.stopped else word)
    return sorted(found, key=str.upper)


WHOLE = ["AGENT", "OTHER", "TRAINER", "WORKER"]


def test_pause_and_resume(lab: Lab) -> None:
    assert len(lab.pause("h1")) == 3
    assert running(lab, "h1") == ["agent", "OTHER", "trainer", "worker"]
    assert running(lab, "h2") == WHOLE
    lab.resume("h1", "agent")
    assert running(lab, "h1") == ["AGENT", "OTHER", "trainer", "worker"]
    lab.resume("h1")
    assert running(lab, "h1") == WHOLE
    lab.pause("all", "trainer")
    assert running(lab, "h1") == running(lab, "h2") == ["AGENT", "OTHER", "trainer", "worker"]


def test_kill_the_trainer(lab: Lab) -> None:
    lab.pause("h2")  # a stopped process is killed as well
    killed = lab.kill("h2", "trainer")
    assert len(killed) == 2
    assert running(lab, "h2") == ["agent", "OTHER"]
    with pytest.raises(LabProblem, match="no training program runs on h2"):
        lab.kill("h2", "trainer")
    assert running(lab, "h1") == WHOLE


def test_kill_both(lab: Lab) -> None:
    assert len(lab.kill("h1")) == 3
    assert running(lab, "h1") == ["OTHER"]
    with pytest.raises(LabProblem, match="no agent runs on h1"):
        lab.pause("h2,h1")
    assert running(lab, "h2") == WHOLE, "nothing is done to some when it cannot be done to all"


def test_of_all_hosts_those_without_an_agent_are_left_out(lab: Lab) -> None:
    lab.kill("h1")
    assert len(lab.kill("all")) == 3
    assert running(lab, "h2") == ["OTHER"]
    with pytest.raises(LabProblem, match="no agent runs on any host"):
        lab.kill("all")


def test_down_ends_what_is_paused(lab: Lab) -> None:
    lab.pause("all")
    lab.close()
    assert leftovers(lab.name) == {}


def test_commands(lab: Lab) -> None:
    def said(*arguments: str, code: int = 0) -> list[str]:
        done = nicps("lab", arguments[0], "--lab", lab.name, *arguments[1:])
        assert done.returncode == code, done.stderr
        return (done.stderr if code else done.stdout).splitlines()

    (line,) = said("pause", "h1", "--agent")
    assert line.startswith("paused ") and "nicps join" in line
    assert running(lab, "h1") == ["agent", "OTHER", "TRAINER", "WORKER"]
    assert "(paused)" in "".join(said("status"))
    assert len(said("resume", "h1")) == 3
    assert running(lab, "h1") == WHOLE
    assert [line.split()[0] for line in said("kill", "h1")] == ["killed"] * 3
    (error,) = said("kill", "h1", code=4)
    assert error == "nicps: error: no agent runs on h1: start one with `nicps join`"


@pytest.mark.xdp
def test_real_ones(open_path: Path) -> None:
    with Network(2, program=LIGHT) as network:
        network.up()
        channel = network.submit("h1", tiny_job(open_path), rounds=100_000, microbatch_seconds=0.02)
        network.in_training("h1")
        agent = network.agents["h2"].process

        network.lab.pause("h2")
        stopped = {p.pid: p.stopped for p in network.lab.processes()["h2"]}
        assert stopped[agent.pid] and all(stopped.values()) and len(stopped) > 1
        assert not any(p.stopped for p in network.lab.processes()["h1"])
        network.lab.resume("h2")
        assert not any(p.stopped for p in network.lab.processes()["h2"])
        network.in_training("h1")

        (trainer,) = [p for p in network.lab.kill("h2", "trainer") if p.command != STEM]
        assert trainer.pid != agent.pid and "trainer" in trainer.command
        assert agent.poll() is None
        network.lab.kill("h2", "agent")
        assert agent.wait(10) == -signal.SIGKILL
        channel.close()
