# SPDX-License-Identifier: Apache-2.0
"""Hosts that run the unchanged `nicps join` train through a real `simple_switch` in ring mode."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from nicps.bench.bmv2 import Bmv2, in_place_of_the_bridge
from nicps.switch.runtime import Member
from tests import reference
from tests.netns.labs import until
from tests.netns.members import Network, tiny_job
from tests.p4.bmv2 import controller

#: Some seconds of training, with every gradient kept.
LONG = """
settings = Settings(batch=64, rounds=60, quorum=1.0, test_every=1000, lane="i32", microbatch_seconds=0.02)
"""


@pytest.fixture(scope="module")
def made() -> Iterator[tuple[Network, Bmv2, Path]]:
    network = Network(3)
    try:
        with in_place_of_the_bridge(network.lab) as bmv2:
            log = network.folder / "controller.log"
            with controller(bmv2, log):
                network.ready()
                yield network, bmv2, log
    finally:
        network.close()


def test_a_job_is_trained(made: tuple[Network, Bmv2, Path]) -> None:
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


def test_the_switch_is_killed_in_mid_round(made: tuple[Network, Bmv2, Path]) -> None:
    """Its registers and tables are gone; the controller sets it up anew, and the hosts go on."""
    network, bmv2, log = made
    channel = network.submit("h1", tiny_job(network.folder, LONG, "long"), save_gradients=True)
    try:
        network.in_training("h1", rounds=5)
        bmv2.stop()
        time.sleep(0.3)
        bmv2.start()
        until(lambda: "set up anew" in log.read_text(), "the controller", 20.0)
        run = network.finished(channel)
    finally:
        channel.close()
    assert run.result["weights_identical"] is True
    assert run.result["rounds"] == 60
    assert reference.check(32, run.gradients()) > 0
