# SPDX-License-Identifier: Apache-2.0
"""Frames to a multicast group instead of to all: over a wire, and a job over a switch that snoops."""

from __future__ import annotations

import select
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from nicps import wire
from nicps.dataplane import DataPlane
from nicps.lab import namespaces
from tests.netns.labs import port_socket
from tests.netns.members import LIGHT, Network, tiny_job
from tests.netns.planes import (
    NETWORK,
    VIEW,
    fragments,
    random_lanes,
    send_all,
    token,
    until,
)
from tests.netns.wires import run, veth_pair

ETH_P_ALL = 3  # frames that go out are shown to no other socket
OTHER = bytes.fromhex("03aabbccddee")
THIRD = b"\2\0\0\0\0\3"
DESTINATIONS = [
    (wire.GROUP, wire.GROUP),
    (wire.GROUP, wire.BROADCAST),
    (wire.BROADCAST, wire.GROUP),
    (OTHER, OTHER),
]


@pytest.mark.parametrize(("of_left", "of_right"), DESTINATIONS)
def test_over_a_wire(of_left: bytes, of_right: bytes) -> None:
    """Small frames, fragments and tokens that the kernel hands on, both ways."""
    with veth_pair() as names, ExitStack() as stack:
        left, right = (
            stack.enter_context(DataPlane(name, NETWORK, destination=destination))
            for name, destination in zip(names, (of_left, of_right), strict=True)
        )
        for number, host in enumerate((left, right), 1):
            host.maps.allocate(8)
            host.enter_view(VIEW, number, [left.mac, right.mac, THIRD], number + 1)
            config = host.maps.config
            config["round_low"] = config["round_high"] = config["round"] = config["enabled"] = 1
        for name, here, there, number, destination in (
            ("left", left, right, 1, of_left),
            ("right", right, left, 2, of_right),
        ):
            with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0) as outside:
                outside.bind((name, ETH_P_ALL))
                talk(here, there, number)
                assert destination in {frame[:6] for frame in heard(outside)}


def talk(here: DataPlane, there: DataPlane, number: int) -> None:
    """Member `number` sends some frames of each kind, and they arrive."""
    headers, payload = fragments(20, random_lanes(20))
    headers[:, 17] = number
    send_all(here, headers, payload)
    until(lambda: there.maps.count(1, VIEW, number) == 20, "all have come")
    assert here.send(token(number, number, 3))
    until(lambda: there.maps.counters()["heard"] == 1, "the token, for another")
    assert here.send(control := wire.pack(wire.Header(network=NETWORK), wire.Fail()))
    until(lambda: there.maps.counters()["control"] == 1, "the control frame")
    assert (here.mac, control) in [(mac, frame[:40]) for mac, frame in there.receive()]


def heard(sock: socket.socket) -> Iterator[bytes]:
    """Frames of ours that a packet socket has seen, in either direction."""
    while select.select([sock], [], [], 0)[0]:
        frame = sock.recv(2000)
        if frame[12:14] == wire.ETHERTYPE.to_bytes(2, "big"):
            yield frame


@pytest.mark.parametrize("group", [wire.GROUP, OTHER])
def test_the_interface_lets_the_group_through(group: bytes) -> None:
    """The list of a NIC's filter names the group, and always the usual one, while the agent runs."""
    with veth_pair() as (left, _):

        def joined() -> set[str]:
            lines = Path("/proc/thread-self/net/dev_mcast").read_text().splitlines()
            return {line.split()[4] for line in lines if line.split()[1] == left}

        before = joined()
        with DataPlane(left, NETWORK, destination=group):
            assert joined() - before == {wire.GROUP.hex(), group.hex()}
        assert joined() == before


@pytest.fixture(scope="module")
def snooping() -> Iterator[Network]:
    """Three hosts at a switch that forwards multicast only to ports with listeners, as far as it can tell."""
    with Network(3, program=LIGHT) as made:
        made.lab.up()
        switch = namespaces.switch_name(made.lab.name)
        command = "ip link set br0 type bridge mcast_snooping 1 mcast_querier 1"
        namespaces.inside(switch, lambda: run(command))
        shown = namespaces.inside(switch, lambda: run("ip -d link show br0"))
        assert "mcast_snooping 1" in shown
        assert "mcast_querier 1" in shown
        yield made


@pytest.mark.short("03:aa:bb:cc:dd:ee")
@pytest.mark.parametrize("group", ["", "03:aa:bb:cc:dd:ee"])
def test_a_job(snooping: Network, open_path: Path, group: str) -> None:
    network = snooping
    for host in network.names:
        network.leave(host)
        network.join(host, "--multicast", *filter(None, [group]))
    for host in network.names:
        network.answered(host)
    with port_socket(network.lab, network.lab.host("h3"), ETH_P_ALL) as outside:
        outside.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 24)
        outcome = network.train(tiny_job(open_path))
        frames = list(heard(outside))
    assert outcome.result["weights_identical"]
    assert len(frames) > 20
    expected = bytes.fromhex(group.replace(":", "")) if group else wire.GROUP
    assert {frame[:6] for frame in frames} == {expected}
    assert {frame[6:12] for frame in frames} == {
        bytes.fromhex(network.lab.host(name).mac.replace(":", "")) for name in network.names
    }


def test_a_job_where_one_host_broadcasts(snooping: Network, open_path: Path) -> None:
    network = snooping
    for host in network.names:
        network.leave(host)
        network.join(host, *([] if host == "h2" else ["--multicast"]))
    for host in network.names:
        network.answered(host)
    outcome = network.train(tiny_job(open_path))
    assert outcome.result["weights_identical"]
    assert len(outcome.members) == 3


def test_what_is_no_group(snooping: Network) -> None:
    """Refused in one line, before anything is touched."""
    for text in ("02:00:00:00:00:01", "ff:ff:ff:ff:ff:ff", "01:80:c2:00:00:0e", "group", "03"):
        ended = snooping.command("h1", "join", "--iface", "eth1", "--multicast", text)
        assert f"such as 03:6e:69:63:70:73, not {text!r}" in ended.only_error(2)
