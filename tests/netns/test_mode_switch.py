# SPDX-License-Identifier: Apache-2.0
"""`nicps join --mode switch` without a switch that adds, and with hosts that are not all told so."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from nicps.errors import JobFailed
from nicps.session.events import Warned
from tests import reference
from tests.netns.members import LIGHT, Network, tiny_job
from tests.netns.stage import SUMMING, Stage


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    with Network(3, arguments=("--mode", "switch"), program=LIGHT) as made:
        made.up()
        yield made


def test_no_switch_adds(network: Network) -> None:
    """The hosts find out in the first round with a gradient, report it, and train on by themselves."""
    run = network.train(tiny_job(network.folder), save_gradients=True)
    assert run.result["weights_identical"] is True
    said = [event.message for event in run.events if isinstance(event, Warned)]
    assert len(said) == 2
    for text, words in zip(said, ("sums of the switch have not come", "does not add"), strict=True):
        assert words in text and text.removeprefix("h1: ") in network.log("h1")
    rounds = run.gradients()
    assert reference.check(16, rounds) == 9
    members = [int(saved[1]["members"]) for _, saved in sorted(rounds.items())]
    assert members[0] == 3 and set(members[1:]) == {0}


@pytest.mark.long
def test_all_reduce_where_no_switch_adds() -> None:
    """The program of docs/jobs.md offers again in the round with which the hosts begin to add."""
    with Stage(3, arguments=("--mode", "switch", "--silence", "5"), program=SUMMING) as stage:
        stage.up()
        done = stage.train(tiny_job(stage.folder), batch=3, lane="i32")
        said = [event.message for event in done.events if isinstance(event, Warned)]
        assert any("the switch does not add" in text for text in said)
        rounds = stage.recorded()
        summed = {r: of for r, of in rounds.items() if all("total" in own for own in of.values())}
        assert len(summed) == 10
        assert reference.check(32, summed) == 30
        assert not any(own["members"] for of in summed.values() for own in of.values())


def test_a_host_that_believes_no_switch(network: Network) -> None:
    """The job ends with one line that says what to do."""
    network.leave("h3")
    network.arguments = ()
    network.join("h3")
    network.answered("h3")
    with pytest.raises(JobFailed, match="with --mode switch there too"):
        network.train(tiny_job(network.folder), exchange="auto")
    network.all_stand_by()
