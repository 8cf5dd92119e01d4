# SPDX-License-Identifier: Apache-2.0
"""The report of a run with events: hosts are killed and come back, the lead among them."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.netns.labs import until
from tests.netns.members import LIGHT, Network, tiny_job
from tests.netns.test_leaving import programs
from trainer.rundata import Run, read

SETTINGS = {"batch": 60, "rounds": 10**6, "test_every": 40, "microbatch_seconds": 0.003}
ENDLESS = """
def done(state):
    return os.path.exists({end!r})
"""


@pytest.fixture
def network() -> Iterator[Network]:
    """Three hosts."""
    with Network(3, program=LIGHT) as made:
        made.up()
        yield made


def states(network: Network, host: str) -> dict[str, str]:
    """That host's status of all members."""
    status = network.status(host) or {"members": []}
    return {member["name"]: member["state"] for member in status["members"]}


def trains(network: Network, host: str, witness: str) -> bool:
    """Whether the host's gradients come, as another host reports."""
    return states(network, witness).get(host) == "sent"


def kill_and_join(network: Network, host: str, witness: str) -> None:
    """kill -9 of the agent, whose training program ends with it; then `nicps join`, until it trains again."""
    until(lambda: trains(network, host, witness), f"{host} trains", 60.0)
    until(lambda: has_noted_the_token(network, host), f"{host} has written when it had the token")
    network.end(host, signal.SIGKILL)
    until(lambda: states(network, witness).get(host) == "left", f"{host} is evicted", 30.0)
    network.join(host)
    network.answered(host)
    until(lambda: trains(network, host, witness), f"{host} trains again", 60.0)


def has_noted_the_token(network: Network, host: str) -> bool:
    """Its time line is written once a second."""
    files = network.place(host, "work").rglob("timeline.jsonl")
    return any('"hold"' in file.read_text() for file in files)


def of_kind(run: Run, kind: str) -> list[Any]:
    return [event for event in run.events if event.kind == kind]


@pytest.mark.long
def test_hosts_that_were_killed_and_came_back(network: Network, open_path: Path) -> None:
    """A member, then the lead: the report is made by the next lead, and shows both lives of each, and the events."""
    end = open_path / "end"
    channel = network.submit(
        "h1", tiny_job(open_path, hooks=ENDLESS.format(end=str(end))), **SETTINGS
    )
    network.in_training()
    status = network.status("h1")
    assert status is not None
    job = str(status["job"])
    kill_and_join(network, "h3", "h1")
    kill_and_join(network, "h1", "h2")
    channel.close()
    status = network.status("h2")
    assert status is not None
    lead = status["members"][status["lead"] - 1]["name"]
    assert lead != "h1"
    seen = len(re.findall("differs|not whole", network.log(lead)))
    end.touch()
    folder = network.place(lead, "runs") / job
    until((folder / "report.html").exists, "the report", 60.0)
    network.all_stand_by()
    run = read(folder)
    assert seen == 0 and run.result["weights_identical"]
    assert [event.hosts for event in of_kind(run, "evicted")] == [("h3",), ("h1",)]
    assert [event.hosts for event in of_kind(run, "returned")] == [("h3",), ("h1",)]
    assert [event.hosts for event in of_kind(run, "lead")] == [(lead,)]
    assert len(of_kind(run, "test")) == len(run.tests) >= 1
    for host in run.hosts:  # each has been counted before and after
        counted = [r["round"] for r in host.rounds if str(host.number) in (r["counted"] or ())]
        assert len(counted) >= len([r for r in host.rounds if r["phase"] == "train"]) - 2
    gone = {event.hosts[0]: event for event in of_kind(run, "evicted")}
    back = {event.hosts[0]: event for event in of_kind(run, "returned")}
    for host in run.hosts:
        rounds = {row["round"] for row in host.rounds}
        assert min(rounds) == min(row["round"] for row in run.rounds), host.name
        assert max(rounds) == max(row["round"] for row in run.rounds), host.name
        if host.name in gone:
            away = (gone[host.name].time, back[host.name].time)
            assert 0 < away[0] < away[1] < run.seconds
            missed = range(gone[host.name].round + 1, back[host.name].round)
            assert missed and not rounds & set(missed), host.name
            assert any(row["t1"] < away[0] for row in host.token), host.name
            assert not any(away[0] + 0.5 < row["t_start"] < away[1] for row in host.timed)
    page = (folder / "report.html").read_text()
    for mark in ("evicted", "returned", "lead", "test"):
        assert f'class="mark {mark}"' in page
    assert "h3 was away" in page and "h1 was away" in page


@pytest.mark.long
def test_a_training_program_that_is_started_again(network: Network, open_path: Path) -> None:
    """Its agent stays, and reports why it was gone; the records of the first program are there as well."""
    end = open_path / "end"
    channel = network.submit(
        "h1", tiny_job(open_path, hooks=ENDLESS.format(end=str(end))), **SETTINGS
    )
    try:
        network.in_training()
        until(lambda: trains(network, "h3", "h1"), "h3 trains", 30.0)
        (program,) = programs(network, "h3")
        os.kill(program.pid, signal.SIGKILL)
        until(lambda: not trains(network, "h3", "h1"), "h3 is gone", 30.0)
        until(lambda: trains(network, "h3", "h1"), "h3 trains again", 60.0)
        end.touch()
        finished = network.finished(channel)
    finally:
        channel.close()
    run = read(Path(finished.result["report"]).parent)
    (host,) = [host for host in run.hosts if host.name == "h3"]
    (evicted,) = of_kind(run, "evicted")
    assert evicted.hosts == ("h3",)
    assert re.fullmatch(r"h3: .* ended: SIGKILL has ended it in round \d+.*", evicted.why)
    rounds = {row["round"] for row in host.rounds}
    assert min(rounds) < evicted.round < max(rounds)
