# SPDX-License-Identifier: Apache-2.0
"""Hosts that run the unchanged `nicps join` train through a real `simple_switch` in ring mode."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from nicps.bench.bmv2 import Bmv2, in_place_of_the_bridge
from nicps.switch.runtime import Member
from tests import reference
from tests.netns.labs import until
from tests.netns.members import tiny_job
from tests.netns.scenes import Drill, Stage
from tests.p4.bmv2 import Controller, controller

#: Some seconds of training, with every gradient kept.
SECONDS = """
settings = Settings(batch=64, rounds=60, quorum=1.0, test_every=1000, lane="i32", microbatch_seconds=0.02)
"""
#: Of a gradient of LONG.
FRAGMENTS = {"i32": 12, "i16": 6, "i8": 3}
LONG = """
def model():
    return nn.Sequential(nn.Linear(16, 160), nn.ReLU(), nn.Linear(160, 8), nn.ReLU(), nn.Linear(8, 4))
"""


@pytest.fixture(scope="module")
def made() -> Iterator[tuple[Stage, Bmv2, Controller]]:
    """Hosts that wait for the switch while it is started again."""
    with (
        Stage(3, arguments=("--silence", "5")) as stage,
        in_place_of_the_bridge(stage.lab) as bmv2,
        controller(bmv2, stage.folder / "controller.log") as running,
    ):
        stage.ready()
        yield stage, bmv2, running


def test_a_job_is_trained(made: tuple[Stage, Bmv2, Controller]) -> None:
    """Same weights on all hosts, exact sums, every fragment through the switch and none refused without reason."""
    network, bmv2, running = made
    settings = {"save_gradients": True, "lane": "i16"}
    channel = network.submit("h1", tiny_job(network.folder, SECONDS), **settings)
    try:
        network.in_training("h1", rounds=5)
        # The switch refuses frames of members that the controller has not recorded yet.
        with bmv2.connect() as switch:
            before = switch.counters()
        run = network.finished(channel)
    finally:
        channel.close()
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
    assert counters["stranger"] == before["stranger"]
    assert counters["malformed"] == counters["truncated"] == 0
    assert "view 1: " in running.log.read_text()


def counted_in_training(stage: Stage, bmv2: Bmv2, **settings: str) -> dict[str, int]:
    """Train a job, whose sums must be exact: what the switch has counted meanwhile."""
    with bmv2.connect() as switch:
        before = switch.counters()
    drill = Drill(stage, LONG, settings=settings)
    try:
        drill.begin()
        drill.goes_on(*stage.names)
        assert drill.exact() > 2
        assert drill.end().result["weights_identical"] is True
    finally:
        drill.close()
    with bmv2.connect() as switch:
        return {name: count - before[name] for name, count in switch.counters().items()}


@pytest.mark.parametrize("lane", ["i32", "i8"])
def test_a_job_is_trained_in_stripes(made: tuple[Stage, Bmv2, Controller], lane: str) -> None:
    """Members add for each other: their contributions and sums pass, and are exact."""
    stage, bmv2, _ = made
    counters = counted_in_training(stage, bmv2, lane=lane, exchange="stripes")
    assert counters["stripe"] > 3 * FRAGMENTS[lane], "of each two contributions, and a sum"
    assert not counters["added"] + counters["type"] + counters["malformed"]


def test_a_job_is_trained_with_a_server(made: tuple[Stage, Bmv2, Controller]) -> None:
    """Workers' steps and questions pass to the server, and its answers back: all that this system sends."""
    network, bmv2, _ = made
    with bmv2.connect() as switch:
        before = switch.counters()
    wider = (
        "\ndef model():\n    return nn.Sequential(nn.Linear(16, 300))\n"  # 8 fragments of 16 bits
    )
    settings = {"system": "S", "exchange": "auto", "lane": "i16", "sync_every": 4, "test_every": 10}
    job = tiny_job(network.folder, wider)
    run = network.train(job, rounds=20, batch=48, quorum=1.0, **settings)
    assert run.result["system"] == "S" and run.result["weights_identical"]
    assert run.result["versions"] >= 20 and run.result["forced_synchronisations"] > 0
    with bmv2.connect() as switch:
        counters = {name: count - before[name] for name, count in switch.counters().items()}
    assert counters["server"] > 20 * 8 * 2, "of each step what is pushed, and the answers"
    assert counters["stripe"] > 0, "of each synchronisation, a step of every worker's"
    assert not counters["type"] + counters["malformed"] + counters["truncated"]


def test_the_controller_is_killed_in_mid_job(made: tuple[Stage, Bmv2, Controller]) -> None:
    """Started again it finds the switch at work, and leaves it so: not one frame of a member's is refused."""
    network, bmv2, running = made
    channel = network.submit("h1", tiny_job(network.folder, SECONDS, "long"), save_gradients=True)
    try:
        network.in_training("h1", rounds=5)
        status = network.status("h1")
        with bmv2.connect() as switch:
            counters, members = switch.counters(), switch.members()
        running.kill()
        said = len(running.log.read_text())
        running.start()
        until(lambda: "view " in running.log.read_text()[said:], "it has found the view")
        network.in_training("h1", rounds=5)
        run = network.finished(channel)
    finally:
        channel.close()
    assert status is not None and run.result["rounds"] == 60
    said_since = running.log.read_text()[said:]
    assert "whom the switch serves already" in said_since
    assert f"view {status['view']}: " in said_since
    assert all(f"h{k} at port {k}" in said_since for k in (1, 2, 3))
    assert all(f"view {status['view'] + 1}" not in network.log(name) for name in network.names)
    assert reference.check(32, run.gradients()) > 0
    with bmv2.connect() as switch:
        after = switch.counters()
        assert switch.members() == members
    assert after["fragment"] > counters["fragment"] and after["stranger"] == counters["stranger"]


def test_the_switch_is_killed_in_mid_round(made: tuple[Stage, Bmv2, Controller]) -> None:
    """Its registers and tables are gone; the controller sets it up anew, and the round that was cut is committed."""
    stage, bmv2, running = made
    drill = Drill(stage, LONG, settings={"lane": "i32"})
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
        until(lambda: "set up anew" in running.log.read_text(), "the controller")
        drill.goes_on(*stage.names)
        assert drill.committed(round_) == set(stage.names)
        assert drill.status("h1")["view"] == view
        done = drill.end()
        assert done.result["weights_identical"] is True
        assert done.result["fragments_sent_again"] >= 6, "what nobody has heard"
    finally:
        drill.close()
