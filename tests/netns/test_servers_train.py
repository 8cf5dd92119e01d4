# SPDX-License-Identifier: Apache-2.0
"""Servers that have a share of the batch (`servers_train`): their own steps reach the own part without a frame."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.netns.labs import until
from tests.netns.members import LIGHT, Network, tiny_job
from tests.netns.stage import Stage
from tests.netns.test_servers import SYSTEM, WIDER, Counters, Slow, checked

BOTH = {**SYSTEM, "servers_train": True}


@pytest.fixture(scope="module")
def three() -> Iterator[Network]:
    with Network(3, arguments=("--silence", "2"), program=LIGHT) as made:
        made.up()
        yield made


@pytest.fixture(scope="module")
def job(three: Network) -> Path:
    return tiny_job(three.folder, WIDER)


@pytest.mark.short("i16")
@pytest.mark.parametrize("lane", ["i32", "i16", "i8"])
def test_the_same_bits_as_with_a_server_that_does_not_train(
    three: Network, job: Path, lane: str
) -> None:
    """Three workers, of which the first serves, and three beside a server: each step is a synchronisation."""
    counters = Counters(three)
    run = three.train(job, rounds=6, lane=lane, sync_every=1, **BOTH)
    found = checked(run)
    assert len(found) == 6 and run.result["forced_synchronisations"] == 6
    assert {row["own_samples"] for host in run.members for row in run.training(host)} == {16}
    assert (
        len(counters.of("pulled")) == 1
    )  # a question that comes too early is refused, and comes again
    with Network(4, program=LIGHT) as four:
        four.up()
        beside = four.train(
            tiny_job(four.folder, WIDER), rounds=6, lane=lane, sync_every=1, **SYSTEM
        )
        assert checked(beside) == found


def test_steps_are_pushed_by_servers_too(three: Network, job: Path) -> None:
    """Two of three serve: of the 8 fragments of a step each has four."""
    counters = Counters(three)
    run = three.train(job, rounds=20, sync_every=6, test_every=20, servers=2, **BOTH)
    checked(run)
    pushes = {
        host: [row for row in run.metrics(host) if row["phase"] == "push"] for host in run.members
    }
    assert all(pushes.values()) and run.result["staleness_mean"] > 1
    pushed = list(counters.of("pushed").values())
    assert pushed == [4 * sum(map(len, pushes.values()))] * 2


@pytest.mark.long
def test_a_key(three: Network) -> None:
    """What does not travel needs no tag."""
    with Stage(2, keyed=True, program=LIGHT) as keyed:
        keyed.up()
        counters = Counters(keyed)
        run = keyed.train(
            tiny_job(keyed.folder, WIDER), rounds=10, sync_every=4, test_every=10, **BOTH
        )
        checked(run)
        assert not counters.of("forged") and not counters.of("replayed")


@pytest.mark.long
@pytest.mark.parametrize("servers", ["h2", "h2,h3"])
def test_a_server_that_trains_is_killed(three: Network, job: Path, servers: str) -> None:
    """Another host serves in its place, or the other server has all parts."""
    three.ready()
    slow = Slow(three, job, servers=servers, servers_train=True, rounds=120, test_every=120)
    three.end("h2", signal.SIGKILL)
    said = "h2 served parameters, and left: "
    until(lambda: said in three.log("h1"), "said at the lead")
    checked(three.finished(slow.channel))
    slow.channel.close()
