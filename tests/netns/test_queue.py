# SPDX-License-Identifier: Apache-2.0
"""Channels change no bit: weights are those of a run that takes the same rounds one after the other, in one queue
(docs/channels.md). The networks that ship, networks of random shape, and the DDP script of docs/pytorch.md.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nicps.lab import Lab, LabSettings
from tests.netns.labs import ROOT
from tests.netns.members import DIGITS, Network, Run
from tests.netns.scripts import Scripts
from tests.netns.test_overlap import PROGRAM, finished
from tests.netns.test_run import write_images
from tests.netns.test_steps import same_weights
from tests.reaper import fresh_name
from tests.spans import most_open

SETTINGS = {
    "exchange": "stripes",
    "lane": "i8",
    "quorum": 1.0,
    "micro_batches": 1,
    "priorities": 3,
    "priority_cuts": "equal",
}
#: By job, what it takes to have several rounds a channel, and a test in the middle.
JOBS: dict[str, dict[str, Any]] = {
    "digits": {"rounds": 20, "test_every": 10, "bucket_mb": 0.004},
    "mnist": {"rounds": 6, "test_every": 3, "bucket_mb": 0.05},
    "branches": {"rounds": 6, "test_every": 3, "bucket_mb": 0.006},
    # Of a larger model the weights are not hashed in each step.
    "text": {"rounds": 4, "test_every": 2, "bucket_mb": 0.3, "width": 256},
}


@pytest.fixture(scope="module")
def two() -> Iterator[Network]:
    """No host is taken for silent, however busy the machine is: both are counted in every step."""
    with Network(2, arguments=("--silence", "20")) as made:
        made.up()
        yield made


def trained(network: Network, job: Path, scope: str, **settings: Any) -> dict[int, str]:
    """The weights after each step. In a queue a host never has more than one round open; otherwise it has."""
    run = network.train(job, **SETTINGS, **settings, priority_scope=scope)
    assert run.result["rounds"] == settings["rounds"] and run.result["channels"] == 3
    found = same_weights(run, *network.names)
    assert sorted(found) == [*range(1, settings["rounds"] + 1)]
    assert len({*found.values()}) == len(found), "every step changes the weights"
    first, second = run.training("h1")[:2]
    assert second["round"] - first["round"] > 1, "channel 0 has several rounds a step"
    for host in network.names:
        assert (most_open(spans(run, host)) == 1) == (scope == "queue"), (host, scope)
    return found


def spans(run: Run, host: str) -> list[tuple[float, float]]:
    """From the offer to the commit of each round, on all channels, in milliseconds."""
    text = (run.of(host) / "timeline.jsonl").read_text()
    rows = [row for row in map(json.loads, text.splitlines()) if row["kind"] == "rounds"]
    found = [
        (1000 * row["t0"] + offered, 1000 * row["t0"] + committed)
        for row in rows
        for offered, _, _, committed, *_ in row["rounds"]
    ]
    assert {row.get("channel", 0) for row in rows} == {0, 1, 2}
    return found


@pytest.mark.short("digits")
@pytest.mark.parametrize("job", JOBS)
def test_networks_that_ship(two: Network, open_path: Path, job: str) -> None:
    settings = dict(JOBS[job])
    if job == "mnist":
        write_images(open_path / "mnist")
        settings["data"] = str(open_path)
    folder = ROOT / "trainer" / "jobs" / job
    queue, order = (trained(two, folder, scope, **settings) for scope in ("queue", "order"))
    assert queue == order


@pytest.mark.long
def test_ports_with_priorities(two: Network) -> None:
    """Where tags let the urgent channel overtake in the switch, too."""
    queue = trained(two, DIGITS, "queue", **JOBS["digits"])
    with Network(2, arguments=("--silence", "20", "--tags")) as network:
        network.lab = Lab(LabSettings(fresh_name(), 2, rate_bps=200_000_000, priorities=True))
        network.up()
        assert trained(network, DIGITS, "order", **JOBS["digits"]) == queue


@pytest.fixture
def scripts(two: Network) -> Iterator[Scripts]:
    two.ready()
    made = Scripts(two, PROGRAM)
    yield made
    made.close()


@pytest.mark.parametrize("networks", [5, pytest.param(20, marks=pytest.mark.long)])
def test_networks_of_random_shape(scripts: Scripts, networks: int) -> None:
    """In one group, one after the other, each in a queue and on channels."""
    first, second = finished(scripts.start("h1", "h2", what="networks", networks=networks))
    assert [line["digests"] for line in first] == [line["digests"] for line in second]
    for lines in (first, second):
        assert [(line["seed"], line["scope"]) for line in lines] == [
            (seed, scope) for seed in range(networks) for scope in ("queue", "channels")
        ]
        for queue, channels in zip(lines[::2], lines[1::2], strict=True):
            assert queue["digests"] == channels["digests"], queue["seed"]
            assert queue["plan"] == channels["plan"] and len({*queue["digests"]}) == 3
        assert {line["open"] for line in lines[::2]} == {1}
        assert max(line["open"] for line in lines[1::2]) > 1


@pytest.mark.long
def test_the_ddp_script(scripts: Scripts, open_path: Path) -> None:
    """docs/examples/ddp/overlap.py as it is, with the same cuts in a queue and on channels."""
    write_images(open_path / "mnist")
    first, second = finished(
        scripts.start("h1", "h2", what="example", data=str(open_path / "mnist"))
    )
    assert first == second
    queue, channels = first
    assert (queue.pop("scope"), channels.pop("scope")) == ("queue", "channels")
    assert queue == channels and {channel for _, channel in queue["plan"]} == {0, 1, 2}
