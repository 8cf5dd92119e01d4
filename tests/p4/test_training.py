# SPDX-License-Identifier: Apache-2.0
"""Hosts that run the unchanged `nicps join` train through a real `simple_switch` in ring mode."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from nicps.bench.bmv2 import Bmv2, in_place_of_the_bridge
from nicps.switch.runtime import Member
from tests import reference
from tests.netns.labs import until
from tests.netns.members import tiny_job
from tests.netns.scenes import Drill, Stage
from tests.p4.bmv2 import controller

#: A gradient of 12 fragments (i32).
LONG = """
def model():
    return nn.Sequential(nn.Linear(16, 160), nn.ReLU(), nn.Linear(160, 8), nn.ReLU(), nn.Linear(8, 4))
"""


@pytest.fixture(scope="module")
def made() -> Iterator[tuple[Stage, Bmv2, Path]]:
    """Hosts that wait for the switch while it is started again."""
    stage = Stage(3, arguments=("--silence", "5"))
    try:
        with in_place_of_the_bridge(stage.lab) as bmv2:
            log = stage.folder / "controller.log"
            with controller(bmv2, log):
                stage.ready()
                yield stage, bmv2, log
    finally:
        stage.close()


def test_a_job_is_trained(made: tuple[Stage, Bmv2, Path]) -> None:
    """Same weights on all hosts, exact sums, every fragment through the switch and none refused without reason."""
    network, bmv2, log = made
    run = network.train(tiny_job(network.folder), save_gradients=True)
    assert run.result["weights_identical"] is True
    assert set(run.members) == set(network.names)
    assert reference.check(16, run.gradients()) > 0
    with bmv2.connect() as switch:
        counters, members = switch.counters(), switch.members()
    numbers = {name: number for number, name in enumerate(run.members, 1)}
    macs = {k: network.lab.host(name).mac for name, k in numbers.items()}
    assert members == {
        k: Member(k, bytes.fromhex(macs[k].replace(":", "")), int(name[1:]))
        for name, k in numbers.items()
    }
    assert counters["fragment"] > 0 and counters["token"] > 0
    assert counters["stranger"] == counters["malformed"] == counters["truncated"] == 0
    assert "view 1: " in log.read_text()


def test_the_switch_is_killed_in_mid_round(made: tuple[Stage, Bmv2, Path]) -> None:
    """Its registers and tables are gone; the controller sets it up anew, and the round that was cut is committed."""
    stage, bmv2, log = made
    drill = Drill(stage, LONG, {"lane": "i32"})
    try:
        drill.begin()
        view = drill.status("h1")["view"]
        with drill.half_sent("h2") as round_:
            with bmv2.connect() as switch:
                until(lambda: switch.registers()["owner"] == drill.number("h2"), "h2 is the holder")
                assert switch.registers()["round"] == round_
            bmv2.stop()
            half = drill.status("h2")["fragments_sent"]
        drill.until(lambda: drill.status("h2")["fragments_sent"] >= half + 6, "the rest is sent")
        bmv2.start()
        until(lambda: "set up anew" in log.read_text(), "the controller", 20.0)
        drill.goes_on(*stage.names)
        assert drill.committed(round_) == set(stage.names)
        assert drill.status("h1")["view"] == view
        done = drill.end()
        assert done.result["weights_identical"] is True
        assert done.result["fragments_sent_again"] >= 6, "what nobody has heard"
    finally:
        drill.close()
