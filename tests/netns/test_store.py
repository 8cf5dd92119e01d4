# SPDX-License-Identifier: Apache-2.0
"""The store of torch.distributed that the agents carry (docs/collective.md): three hosts, a key, and no TCP."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any

import pytest

from tests.netns.scripts import Script, Scripts
from tests.netns.stage import Stage

pytest.importorskip("torch")
HOSTS = ("h1", "h2", "h3")


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    with Stage(3, keyed=True) as made:
        made.up()
        yield made


@pytest.fixture
def scripts(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scripts]:
    monkeypatch.setenv("NICPS_TORCH_TCP", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    stage.ready()
    made = Scripts(stage, "tests.netns.store_program")
    yield made
    made.close()


def until(script: Script, key: str) -> dict[str, Any]:
    while (line := script.take()) is not None:
        if key in line:
            return line
    raise AssertionError(f"{script.host} has ended: {script.lines[-3:]} {script.errors()}")


def finish(scripts: list[Script]) -> None:
    assert [script.ended() for script in scripts] == [{"done": True}] * len(scripts)


@pytest.mark.long
@pytest.mark.short("0.03")
@pytest.mark.parametrize("loss", [0.0, 0.03])
def test_every_call_from_several_threads(scripts: Scripts, loss: float) -> None:
    """While sums are made and others wait; with frames that are lost, too."""
    lab = scripts.network.lab
    lab.fault("all", loss=loss)
    try:
        finish(scripts.start(*HOSTS, what="shares"))
    finally:
        lab.fault("all", loss=0.0)


@pytest.mark.short("1")
@pytest.mark.parametrize("number", [1, 3])
def test_a_host_dies(scripts: Scripts, number: int) -> None:
    """The one that puts calls in order, or another one: its values stay, and calls that wait are answered."""
    started = scripts.start(*HOSTS, what="loses")
    rank = {until(script, "ready")["ready"]: script for script in started}
    dies = rank[number - 1]
    scripts.network.end(dies.host, signal.SIGKILL)
    dies.kill()
    rest = [script for script in started if script is not dies]
    finish(rest)
    for script in rest:
        said = next(line for line in script.lines if "longest" in line)
        assert said["lost"] == [number - 1] and said["longest"] < 10


@pytest.mark.long
def test_a_late_host_shares_it(scripts: Scripts) -> None:
    first = scripts.start(*HOSTS, what="comes")
    killed = first[0]
    for script in first:
        script.until(3)
    killed.kill()
    first[1].until(first[1].lines[-1]["step"] + 3)
    (back,) = scripts.start(killed.host, what="comes")
    finish([first[1], first[2], back])
    assert back.lines[0]["late"]
    said = [line for script in scripts.all for line in script.lines if "steps" in line]
    steps = max(script.lines[-3]["step"] for script in (first[1], back)) + 1
    assert len({line["steps"] for line in said}) == 1 and said[0]["back"] == 1
    assert said[0]["steps"] > 2 * steps
