# SPDX-License-Identifier: Apache-2.0
"""A training program that stands still, in any state, holds up the others only for a while (docs/faults.md).

Its own agent ends it, and comes back with another one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from nicps.lab.errors import LabProblem
from tests.netns.scenes import Drill, Stage

pytestmark = pytest.mark.long

#: Where there is a file `hold.WHAT`, programs wait in the middle of WHAT, and say so.
SETTINGS = {"test_every": 20, "stall_s": 6.0}
HOLDS = """
def hold(what):
    while os.path.exists(PLACE + "/hold." + what):
        open("%s/%s.%s" % (PLACE, what, host()), "w").close()
        time.sleep(0.02)

def before_load():
    hold("load")

def before_test():
    hold("test")
"""


@pytest.fixture(scope="module")
def made() -> Iterator[Drill]:
    with Drill(Stage(3, keyed=True), hooks=HOLDS, settings=SETTINGS) as drill:
        yield drill


@pytest.fixture
def drill(made: Drill) -> Drill:
    """Three hosts that train, and test every now and then."""
    made.ready()
    return made


@contextlib.contextmanager
def held(drill: Drill, what: str) -> Iterator[Path]:
    """Programs wait in the middle of that."""
    order = drill.place / f"hold.{what}"
    order.touch()
    try:
        yield drill.place
    finally:
        order.unlink(missing_ok=True)
        for said in drill.place.glob(f"{what}.*"):
            said.unlink()


def is_started_again(drill: Drill, host: str) -> None:
    """The agent has found it; the others go on at once, and with it once it has another one."""
    before, said = drill.stage.log(host), "the training program ended: it has not moved for"
    drill.until(lambda: drill.stage.log(host).count(said) > before.count(said), "it is found", 60.0)
    drill.goes_on(*(other for other in drill.stage.names if other != host))
    drill.all_train(90.0)
    drill.exact()


@pytest.mark.parametrize("host", ["h3", "h1"])
def test_in_training(drill: Drill, host: str) -> None:
    drill.stage.lab.pause(host, "trainer")
    is_started_again(drill, host)


def test_in_a_test(drill: Drill) -> None:
    with held(drill, "test") as place:
        drill.until(lambda: len(list(place.glob("test.*"))) == 3, "all test")
        drill.stage.lab.pause("h2", "trainer")
    is_started_again(drill, "h2")


def test_as_it_loads_the_state(drill: Drill) -> None:
    """All wait for the host that comes back, which is to be counted from the next phase on."""
    with held(drill, "load") as place:
        drill.stage.lab.kill("h3", "trainer")
        drill.until(lambda: list(place.glob("load.*")), "another one loads", 60.0)
        drill.stage.lab.pause("h3", "trainer")
    is_started_again(drill, "h3")


def test_as_it_starts(drill: Drill) -> None:
    """The others train on meanwhile."""
    stage = drill.stage

    def paused() -> bool:
        with contextlib.suppress(LabProblem):
            return bool(stage.lab.pause("h2", "trainer"))
        return False

    stage.lab.kill("h2", "trainer")
    drill.until(paused, "another one starts")
    is_started_again(drill, "h2")


def test_the_job_ends_well_after_all_this(drill: Drill) -> None:
    run = drill.end()
    assert run.result["rounds"] > 20
