# SPDX-License-Identifier: Apache-2.0
"""Two hosts: one that departs by itself leaves the job to the other, whichever it is (R17, R18, docs/faults.md)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.netns.scenes import Drill, Stage


@pytest.fixture(scope="module")
def made() -> Iterator[Drill]:
    with Drill(Stage(2, keyed=True)) as drill:
        yield drill


@pytest.fixture
def drill(made: Drill) -> Drill:
    """Two hosts that train."""
    made.ready()
    return made


@pytest.mark.short("h1-h2")
@pytest.mark.parametrize(("gone", "stays"), [("h1", "h2"), ("h2", "h1")])
def test_a_training_program_is_killed(drill: Drill, gone: str, stays: str) -> None:
    """Its agent is there to agree to the other's going on, and comes back with a new one."""
    drill.stage.lab.kill(gone, "trainer")
    drill.goes_on(stays)
    assert drill.lead() == stays
    drill.all_train(60.0)
    drill.exact()


@pytest.mark.short("h1-h2")
@pytest.mark.parametrize(("gone", "stays"), [("h1", "h2"), ("h2", "h1")])
def test_a_host_leaves_and_joins_again(drill: Drill, gone: str, stays: str) -> None:
    """`nicps leave`: the agent waits until the other has gone on."""
    stage = drill.stage
    assert stage.command(gone, "leave").code == 0
    assert stage.agents.pop(gone).process.wait(10.0) == 0
    drill.goes_on(stays)
    stage.nothing_left(gone)
    stage.join(gone)
    drill.all_train(60.0)
    drill.exact()


def test_the_job_ends_well_after_all_this(drill: Drill) -> None:
    assert drill.end().result["rounds"] > 20
