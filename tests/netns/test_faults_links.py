# SPDX-License-Identifier: Apache-2.0
"""Cables that are pulled and networks that fall apart (docs/faults.md)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from nicps.session.commands import await_result
from tests.netns.scenes import Drill, Stage


@pytest.fixture(scope="module")
def made() -> Iterator[Drill]:
    with Drill(Stage(4)) as drill:
        yield drill


@pytest.fixture
def drill(made: Drill) -> Iterator[Drill]:
    """Four hosts that train."""
    made.ready()
    yield made
    made.stage.lab.heal()
    made.stage.lab.link("all", "up")


@pytest.mark.short("unplugged")
@pytest.mark.parametrize("how", ["down", "unplugged"])
def test_a_link_goes_down_and_comes_up(drill: Drill, how: str) -> None:
    lab = drill.stage.lab
    lab.link("h3", how)  # type: ignore[arg-type]
    drill.goes_on("h1", "h2", "h4")
    drill.stands_by("h3", saying="there is no majority")
    lab.link("h3", "up")
    drill.all_train(60.0)
    drill.exact()


def test_a_link_flaps(drill: Drill) -> None:
    """For less time than it takes to be missed: at most a view with all in it comes of it."""
    lab = drill.stage.lab
    for _ in range(3):
        lab.link("h2", "down")
        lab.link("h2", "up")
        drill.goes_on(*drill.stage.names, rounds=2, timeout_s=40.0)
    drill.exact()


def test_halves(drill: Drill) -> None:
    """2 + 2: the half with the lowest member goes on, the other waits and reports this."""
    by_number = [drill.host(number) for number in range(1, 5)]
    low, high = by_number[:2], by_number[2:]
    drill.stage.lab.cut(",".join(high))
    drill.goes_on(*low)
    drill.stands_by(*high, saying="there is no majority")
    stood = {host: drill.last(host) for host in high}
    for host in high:
        assert "there is no majority without: standing by" in drill.stage.log(host)
    for host in high:  # the way out, should the others never come back
        kept = drill.stage.path(host, "runs") / drill.job_id / "checkpoint"
        drill.stands_by(host, saying=f"rounds of training in {kept}")
        told = drill.stage.command(host, "status").out.splitlines()
        assert f"trouble    {drill.status(host)['trouble']}" in told
        assert (kept / "checkpoint.npz").stat().st_size and (kept / "job.tar").stat().st_size
    drill.goes_on(*low)
    assert {host: drill.last(host) for host in high} == stood
    assert "trouble" not in drill.stage.command(low[0], "status").out
    drill.stage.lab.heal()
    drill.all_train(60.0)
    drill.exact()


def test_one_against_three(drill: Drill) -> None:
    """3 + 1, and the one has led."""
    lead = drill.lead()
    rest = [host for host in drill.stage.names if host != lead]
    drill.stage.lab.cut(lead)
    drill.goes_on(*rest)
    drill.stands_by(lead, saying="there is no majority")
    drill.stage.lab.heal()
    drill.all_train(60.0)
    assert drill.lead() in rest
    drill.exact()


def test_nobody_hears_anybody(drill: Drill) -> None:
    """Four parts: no host may go on, and all do as soon as they hear each other again."""
    for host in ("h2", "h3", "h4"):
        drill.stage.lab.cut(host)
    names = drill.stage.names
    drill.stands_by(*names, saying="there is no majority")
    stood = {host: drill.last(host) for host in names}
    assert len(set(stood.values())) <= 2
    drill.stage.lab.heal()
    drill.all_train(60.0)
    drill.exact()


def test_the_job_ends_well_after_all_this(drill: Drill) -> None:
    """The user that has submitted it is told so, though that host no longer leads."""
    if drill.lead() == "h1":
        drill.stage.lab.cut("h1")
        drill.goes_on("h2", "h3", "h4")
        drill.stage.lab.heal()
        drill.all_train(60.0)
    run = drill.end()
    lead = run.members[0]
    assert lead != "h1" and drill.channel is not None
    told, _ = await_result(drill.channel, timeout_s=10.0)
    assert told == {"job_id": drill.job_id, "lead": lead}


@pytest.mark.long
def test_two_hosts_that_may_go_on_alone() -> None:
    """Cut apart both train; healed, the one takes the other's state, and what it has trained alone is lost."""
    with Drill(Stage(2, arguments=("--go-on-alone",))) as drill:
        stage = drill.stage
        drill.begin()
        stage.lab.cut("h2")
        for host in stage.names:
            drill.goes_on(host)
        stage.lab.heal()
        drill.all_train(60.0)
        lost = [host for host in stage.names if "gone on without it" in stage.log(host)]
        assert len(lost) == 1
        assert drill.disown(lost[0]) >= 3
        drill.exact()
        drill.end(apart=lost)
