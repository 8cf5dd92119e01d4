# SPDX-License-Identifier: Apache-2.0
"""Damaged memory at one host: the digest shows it, and the host takes the state again (docs/faults.md)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.netns.members import RECORDING
from tests.netns.scenes import Drill, Stage

#: A round takes 0.2 s: programs of PyTorch's leave something of the processors to the agents.
SLOWLY = {"microbatch_seconds": 0.02}


@pytest.fixture(scope="module")
def made() -> Iterator[Drill]:
    with Drill(Stage(4, keyed=True, program=RECORDING), settings=SLOWLY) as drill:
        yield drill


@pytest.fixture
def drill(made: Drill) -> Drill:
    """Four hosts that train."""
    made.ready()
    return made


@pytest.fixture(scope="module")
def damaged() -> list[str]:
    """The hosts whose memory has gone bad, each time."""
    return []


@pytest.mark.short("h3-weights", "the lead-buffers", "the lead-optimizer")
@pytest.mark.parametrize("what", ["weights", "buffers", "optimizer"])
@pytest.mark.parametrize("who", ["h3", "the lead"])
def test_damage(drill: Drill, damaged: list[str], who: str, what: str) -> None:
    """A weight, BatchNorm's statistics, or the optimizer's momentum changes without the training program's
    knowledge.
    """
    host = drill.lead() if who == "the lead" else who
    astray = drill.damage(host, what)
    damaged.append(host)
    assert len(astray) <= 4  # it was evicted at once
    drill.goes_on(*drill.stage.names, rounds=5)
    drill.exact()  # from here on all have the same again


@pytest.mark.long
def test_a_tie_raises_the_alarm() -> None:
    """Two hosts whose digests differ: it cannot be decided which is right. The model is saved, and all stand by
    (R22).
    """
    with Drill(Stage(2, program=RECORDING), settings=SLOWLY) as drill:
        stage = drill.stage
        drill.begin()
        (drill.place / "weights.h2").touch()
        drill.until(
            lambda: drill.status("h1")["last_job"].get("job_id") == drill.job_id, "the alarm", 30.0
        )
        error = drill.status("h1")["last_job"]["error"]
        assert "the members' weights differ, and no half agrees" in error
        stage.all_stand_by()
        kept = stage.place("h1", "runs") / drill.job_id / "checkpoint" / "checkpoint.npz"
        assert kept.is_file()


def test_the_job_ends_well_after_all_this(drill: Drill, damaged: list[str]) -> None:
    """The damage is in the records of the damaged hosts, and in the result."""
    run = drill.end(astray=drill.stage.names)
    differed = run.result["differed"]
    assert set(damaged) <= {entry["name"] for entry in differed}
    assert len(differed) >= len(damaged)
