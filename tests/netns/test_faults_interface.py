# SPDX-License-Identifier: Apache-2.0
"""An interface that changes while its agent runs, so that frames get lost without a cable being pulled."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from nicps.wire import LEAST_MTU
from tests.netns.labs import until
from tests.netns.members import DIGITS, LIGHT, Network, tiny_job
from tests.netns.scenes import Drill, Stage


@pytest.fixture(scope="module")
def made() -> Iterator[Drill]:
    with Drill(Stage(3)) as drill:
        yield drill


@pytest.fixture
def drill(made: Drill) -> Drill:
    """Three hosts that train."""
    made.ready()
    return made


@pytest.fixture
def alone() -> Iterator[Network]:
    """A host of its own, whose agent stands by."""
    with Network(1) as network:
        network.up()
        yield network


def ip(network: Network, host: str, command: str) -> None:
    """Run `ip ...` there."""
    assert network.run(host, ["ip", *command.split()]).wait(20.0) == 0


@pytest.mark.short("1400")
@pytest.mark.parametrize("mtu", [1400, LEAST_MTU - 1])
def test_the_mtu_is_lowered_during_a_job(drill: Drill, mtu: int) -> None:
    """The others go on without that host, which reports what to do, and comes back once it is done."""
    host = drill.host(2)
    others = [name for name in drill.stage.names if name != host]
    said = f"interface eth1 has an MTU of {mtu} bytes, {LEAST_MTU} are needed; run: ip link set eth1 mtu {LEAST_MTU}"
    ip(drill.stage, host, f"link set eth1 mtu {mtu}")
    drill.goes_on(*others)
    drill.stands_by(host, saying="the others have gone on without it")
    assert drill.stage.log(host).count(said) == 1
    ip(drill.stage, host, f"link set eth1 mtu {LEAST_MTU}")
    drill.all_train(60.0)
    assert "interface eth1 can be used again" in drill.stage.log(host)
    drill.exact()


def test_the_interface_becomes_a_port_of_a_bridge(drill: Drill) -> None:
    """It receives no control frame then: the others go on without that host, which reports what to do."""
    host = drill.host(2)
    others = [name for name in drill.stage.names if name != host]
    ip(drill.stage, host, "link add br0 type bridge")
    ip(drill.stage, host, "link set eth1 master br0")
    drill.goes_on(*others)
    drill.stands_by(host, saying="there is no majority")
    mend = "give --iface br0, or run: ip link set eth1 nomaster"
    said = f"interface eth1 is a port of the bridge br0, which takes its frames; {mend}"
    assert drill.stage.log(host).count(said) == 1
    ip(drill.stage, host, "link delete br0")
    drill.all_train(60.0)
    assert "interface eth1 can be used again" in drill.stage.log(host)
    drill.exact()


def test_hosts_join_on_a_bridge_in_place_of_its_port(open_path: Path) -> None:
    """One interface is a port of a bridge: `join` refuses it, and trains on the bridge."""
    with Network(2, program=LIGHT) as network:
        network.lab.up()
        ip(network, "h1", "link add br0 type bridge")
        ip(network, "h1", "link set eth1 master br0")
        ip(network, "h1", "link set br0 up")
        network.join("h1")
        assert network.agents.pop("h1").process.wait(60.0) == 3
        (said,) = network.log("h1").splitlines()
        assert said.startswith("nicps: error: interface eth1 is a port of the bridge br0, which")
        network.join("h1", "--iface", "br0")
        network.join("h2")
        for host in network.names:
            network.answered(host)
        run = network.train(tiny_job(open_path), rounds=30)
        assert sorted(run.members) == ["h1", "h2"]
        assert run.result["weights_identical"] is True
        assert run.facts("h1")["xdp_mode"] == "generic"
        assert run.facts("h2")["xdp_mode"] == "native"


def test_the_interface_is_deleted(alone: Network) -> None:
    """The agent ends, and reports the reason."""
    ip(alone, "h1", "link delete eth1")
    assert alone.agents["h1"].process.wait(20.0) == 3
    assert alone.log("h1").splitlines()[-1] == "nicps: error: interface eth1 has gone"


def test_the_interface_is_given_another_name(alone: Network) -> None:
    """That changes nothing, except the name that the agent uses."""
    ip(alone, "h1", "link set eth1 down")
    until(lambda: "interface eth1 is down" in alone.log("h1"), "the agent says so")
    ip(alone, "h1", "link set eth1 name lan")
    ip(alone, "h1", "link set lan up")
    until(lambda: "interface lan is up again" in alone.log("h1"), "the agent says so")


def test_no_job_begins_on_an_interface_that_cannot_be_used(alone: Network) -> None:
    """It would be trained by this host alone."""
    ip(alone, "h1", f"link set eth1 mtu {LEAST_MTU - 1}")
    said = f"interface eth1 has an MTU of {LEAST_MTU - 1} bytes, {LEAST_MTU} are needed"
    until(lambda: said in alone.log("h1"), "the agent says so")
    for command in (["submit", str(DIGITS)], ["doctor", "--network"]):
        assert alone.command("h1", *command).only_error(3).startswith(said)
