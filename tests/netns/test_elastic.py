# SPDX-License-Identifier: Apache-2.0
"""Hosts that go and come in a DDP script with a State (docs/pytorch.md), with real agents."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator

import pytest

from tests.netns.members import Network
from tests.netns.scripts import Script, Scripts

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.long


@pytest.fixture
def scripts(three: Network) -> Iterator[Scripts]:
    made = Scripts(three, "tests.netns.elastic_program", pace_s=0.05)
    yield made
    made.close()


def check(scripts: Scripts, optimizer: str = "sgd") -> None:
    """All that did a step hold the same weights after it, and in the end those of one process alone."""
    from tests.netns.elastic_program import flat, loss_of, make

    by_step = scripts.agree()
    model, alone = make(optimizer, 0)
    for step in range(len(by_step)):
        alone.zero_grad()
        torch.stack(
            [loss_of(model, step, rank) for rank in by_step[step]["here"]]
        ).mean().backward()
        alone.step()
    found = [
        line["weights"] for script in scripts.all for line in script.lines if "weights" in line
    ]
    assert found
    for each in found:
        torch.testing.assert_close(torch.tensor(each), flat(model).detach(), rtol=1e-3, atol=1e-4)


def finish(*scripts: Script) -> None:
    ended = [script.ended() for script in scripts]
    assert all(line == {"done": True} for line in ended), ended


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_a_program_is_killed_and_comes_back(scripts: Scripts, optimizer: str) -> None:
    """It has another model, and no momentum, until it has synced; then all are the same, bit for bit."""
    scripts.settings["optimizer"] = optimizer
    first = scripts.start("h1", "h2", "h3")
    killed = first[1]
    killed.until(5)
    killed.kill()
    for script in (first[0], first[2]):
        script.until(killed.lines[-1]["step"] + 5)
    (back,) = scripts.start("h2")
    finish(first[0], first[2], back)
    formed = back.lines[0]
    assert formed["late"] and formed["size"] == 3
    assert back.lines[2]["came"] and back.lines[2]["rank"] == killed.lines[0]["formed"]
    assert back.lines[2]["here"] == [0, 1, 2]
    assert [len(back.steps), first[0].lines[-2]["changes"]] == [8, 2]
    check(scripts, optimizer)


def test_the_host_that_leads_is_stopped_for_10_s(scripts: Scripts) -> None:
    """Its backward raises one line then, or it is in `sync`, which brings it back at once."""
    first = scripts.start("h1", "h2", "h3", returns=True)
    for script in first:
        script.until(5)
    stopped = next(script for script in first if script.lines[0]["formed"] == 0)
    rest = [script for script in first if script is not stopped]
    agent = scripts.network.agents[stopped.host].process
    for process in (agent, stopped.process):
        process.send_signal(signal.SIGSTOP)
    began = time.monotonic()
    for script in rest:
        script.until(script.lines[-1]["step"] + 10)
    time.sleep(max(0.0, began + 10 - time.monotonic()))
    for process in (agent, stopped.process):
        process.send_signal(signal.SIGCONT)
    finish(*first)
    for line in stopped.lines:
        assert "this host is out of the group" in line.get("out", "this host is out of the group")
    assert any(line.get("came") for line in stopped.lines)
    check(scripts)


def test_a_script_without_a_state_that_comes_late(scripts: Scripts) -> None:
    """It gets an error at its first backward: alone it would train another model."""
    first = scripts.start("h1", "h2", "h3")
    first[1].until(3)
    first[1].kill()
    first[0].until(first[1].lines[-1]["step"] + 3)
    (late,) = scripts.start("h2", stateless=True)
    said = late.ended()
    assert said["kind"] == "RuntimeError" and "has come late to a group" in said["error"]
    first[0].until(first[0].lines[-1]["step"] + 3)
