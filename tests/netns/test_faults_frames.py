# SPDX-License-Identifier: Apache-2.0
"""Frames that are lost, doubled, late, or damaged; with a key, which alone detects a damaged fragment (docs/faults.md).

Without a key nothing in a fragment checks its payload: a byte that changed on the way would be added as it is.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from nicps import wire
from tests.netns.scenes import Drill, Stage


@pytest.fixture(scope="module")
def made() -> Iterator[Drill]:
    with Drill(Stage(4, keyed=True, arguments=("--silence", "2"))) as drill:
        yield drill


@pytest.fixture
def drill(made: Drill) -> Iterator[Drill]:
    """Four hosts that train."""
    made.ready()
    yield made
    made.stage.lab.clear()


def lost_all(drill: Drill, host: str) -> bool:
    return not drill.stage.lab.faults()[host].lose_left


@pytest.mark.short("5")
@pytest.mark.parametrize("count", [1, 5])
def test_token_frames_are_lost(drill: Drill, count: int) -> None:
    """R16: the last broadcaster broadcasts again; no host is taken for dead."""
    before = drill.views()
    for host in drill.stage.names:
        drill.stage.lab.lose_next(host, wire.FrameType.TOKEN, count)
        drill.until(lambda host=host: lost_all(drill, host), "all are lost")
        drill.goes_on(*drill.stage.names)
    assert drill.views() == before
    drill.exact()


@pytest.mark.short("10")
@pytest.mark.parametrize("kind", [wire.FrameType.VIEW, wire.FrameType.VOTE])
def test_departure_frames_are_lost(drill: Drill, kind: wire.FrameType) -> None:
    """The first of the frames with which the others agree to go on, at every host."""
    stage = drill.stage
    for host in ("h1", "h2", "h4"):
        stage.lab.lose_next(host, kind, 2)
    stage.lab.pause("h3", "agent")
    try:
        drill.goes_on("h1", "h2", "h4")
        if kind is wire.FrameType.VOTE:  # members that did not propose vote
            assert sum(lost_all(drill, host) for host in ("h1", "h2", "h4")) >= 2
        else:
            assert any(lost_all(drill, host) for host in ("h1", "h2", "h4"))
    finally:
        stage.lab.resume("h3", "agent")
    drill.all_train(60.0)
    drill.exact()


def test_a_farewell_is_lost(drill: Drill) -> None:
    """LEAVE is repeated, and the failure detector finds a host that is not heard at all."""
    stage = drill.stage
    stage.lab.lose_next("h3", wire.FrameType.LEAVE, 3)
    stage.lab.kill("h3", "trainer")
    drill.goes_on("h1", "h2", "h4", rounds=1)  # its next program is ready by then: it is soon back
    assert lost_all(drill, "h3")
    drill.all_train(60.0)
    drill.exact()


def test_loss_duplicates_corruption_and_reordering(drill: Drill) -> None:
    """5 % loss, 1 % of all else, at every port and in each direction: the job takes longer, and nothing else
    changes.
    """
    lab = drill.stage.lab
    lab.fault("all", loss=0.05, duplicate=0.01, corrupt=0.01, reorder=0.01)
    for _ in range(3):
        drill.all_train(60.0)
    spoilt = sum(
        port.from_host.corrupted + port.to_host.corrupted for port in lab.counters().values()
    )
    assert spoilt > 0
    lab.clear()
    drill.all_train(60.0)
    refused = 0
    for host in drill.stage.names:
        status = drill.status(host)
        refused += sum(status["control_refused"].values()) + sum(
            status["counters"][reason] for reason in ("forged", "replayed")
        )
    assert refused > 0
    drill.exact()


def test_the_job_ends_well_after_all_this(drill: Drill) -> None:
    lossy = drill.stage.lab
    lossy.fault("all", loss=0.05, duplicate=0.01, corrupt=0.01, reorder=0.01)
    drill.end(timeout_s=90.0)
