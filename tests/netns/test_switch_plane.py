# SPDX-License-Identifier: Apache-2.0
"""A Linux switch that adds, on real ports of a bridge: contributions in, sums out, and all other frames through it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack

import numpy as np
import pytest

from nicps import wire
from nicps.dataplane import bpf, xdp
from nicps.dataplane.interface import read_interface
from nicps.dataplane.switch import OtherView, SwitchPlane, TooLong
from nicps.dataplane.switchports import PortChange
from nicps.errors import InterfaceBusy, InterfaceMissing, InterfaceUnfit, UsageProblem
from nicps.wire import FrameType
from tests.linux_switch import SwitchModel
from tests.model import tag_of
from tests.netns.bridged import Host, bridged, join
from tests.netns.planes import until
from tests.netns.wires import run
from tests.stripes import NATIVE, NETWORK

VIEW, SEED, WIDTH, FRAGMENTS, LIST = 5, bytes(range(16)), 16, 40, 0b111
PORTS = ("eth1", "eth2", "eth3")


@pytest.fixture
def hosts() -> Iterator[list[Host]]:
    with bridged(3) as made:
        yield made


def enter(
    plane: SwitchPlane, hosts: list[Host], view: int = VIEW, key: bytes | None = None
) -> None:
    plane.enter_view(view, SEED, {host.number: host.mac for host in hosts}, key)


def lanes(host: Host, index: int) -> bytes:
    rng = np.random.default_rng([host.number, index])
    return rng.integers(-(2**15), 2**15, 720).astype(NATIVE[WIDTH]).tobytes()


def frame(
    host: Host,
    index: int,
    kind: FrameType = FrameType.CONTRIBUTION,
    round_: int = 1,
    key: bytes = b"",
    sequence: int = 0,
    **fields: int,
) -> bytes:
    header = wire.Header(
        network=NETWORK, view=VIEW, round=round_, sender=host.number, sequence=sequence
    )
    values = {"number": 0, "fragments": FRAGMENTS, "exponent": -20, "unit": -40} | fields
    body = wire.Contribution(members=LIST, index=index, width=WIDTH, **values)
    cls = wire.FORMATS[kind][0]
    named = {name: getattr(body, name) for name in wire.Layout.of(wire.Contribution).names}
    made = wire.pack(header, cls(**named), tail=lanes(host, index))
    if key:
        made = made[:24] + tag_of(made, len(made), key).to_bytes(8, "big") + made[32:]
    return wire.ethernet(host.mac, made, wire.SWITCH)


def sums(host: Host) -> dict[int, wire.Frame]:
    """By index, those that the host has heard."""
    found = {}
    for one in host.ours():
        unpacked = wire.unpack(one[wire.ETHERNET_BYTES :])
        if unpacked.type == FrameType.SUM:
            assert one[6:12] == wire.SWITCH and one[:6] in (wire.BROADCAST, host.mac)
            found[unpacked.body.index] = unpacked
    return found


def model(hosts: list[Host], key: bytes = b"") -> SwitchModel:
    """Compare with the expected sums."""
    made = SwitchModel(frozenset({1, 2, 3}), FRAGMENTS, WIDTH, VIEW)
    for index in range(FRAGMENTS):
        for host in hosts:
            one = bytearray(frame(host, index))
            one[6:12] = bytes((2, 0, 0, 0, 0, host.number))  # as tests/stripes.py names them
            made.run(bytes(one))
    return made


def contribute(hosts: list[Host], indices: range = range(FRAGMENTS), **fields: int) -> None:
    for index in indices:
        for host in hosts:
            host.send(frame(host, index, **fields))


@pytest.mark.parametrize("mode", ["native", "generic"])
def test_sums_reach_all_and_all_else_passes(hosts: list[Host], mode: str) -> None:
    ports = [*PORTS]
    if mode == "generic":  # one driver has no native mode, so all ports are in generic mode
        run("ip link add eth9 type ifb")
        run("ip link set eth9 addrgenmode none master br0 up")
        ports.insert(2, "eth9")
    with SwitchPlane(ports, NETWORK) as plane:
        assert plane.ports.mode == mode and plane.ports.attached == ports
        plane.grow(FRAGMENTS, WIDTH)
        enter(plane, hosts)
        passes(hosts)
        assert not any(plane.counters().values()), "what is not ours is not counted"
        contribute(hosts)
        for host in hosts:
            until(lambda host=host: len(sums(host)) == FRAGMENTS, "all sums have come")
        expected = model(hosts)
        for index in range(FRAGMENTS):
            place = expected.places[index][0]
            assert place is not None
            for host in hosts:
                found = sums(host)[index]
                assert (found.tail, found.body.exponent) == (place.lanes, place.exponent)
                assert found.header.sender == 0 and found.body.members == LIST
        risen = {name: count for name, count in plane.counters().items() if count}
        assert risen == {"gathered": 2 * FRAGMENTS, "summed": FRAGMENTS}
        asks(plane, hosts)
        passes(hosts)
        ours_pass(plane, hosts)
        assert plane.messages() == []
    assert all(xdp.attached(read_interface(name).index) is None for name in ports)
    passes(hosts)


def asks(plane: SwitchPlane, hosts: list[Host]) -> None:
    """The answer goes to the host that asked, and to no other."""
    for host in hosts:
        host.ours().clear()
    one = hosts[1]
    one.send(frame(one, 3, FrameType.ASK, number=1))
    (whole,) = until(one.ours, "an answer comes")
    found = wire.unpack(whole[wire.ETHERNET_BYTES :])
    assert found.type == FrameType.SUM and found.body.index == 3 and whole[:6] == one.mac
    one.ours().clear()
    one.send(frame(one, 4, round_=2))
    one.send(frame(one, 4, FrameType.ASK, round_=2, number=2))
    (whole,) = until(one.ours, "an answer comes")
    found = wire.unpack(whole[wire.ETHERNET_BYTES :])
    assert found.type == FrameType.LACKING and found.body.members == 0b101
    one.ours().clear()
    assert plane.counters()["answered"] == 2
    assert not hosts[0].ours() and not hosts[2].ours()


def ours_pass(plane: SwitchPlane, hosts: list[Host]) -> None:
    """Frames of nicps that are not for the switch come out at the others as they went in."""
    first, *others = hosts
    before = plane.counters()
    control = wire.pack(
        wire.Header(network=NETWORK, view=VIEW, sender=1), wire.Fail(), tail=b"x" * 9
    )
    other_network = wire.Header(network=NETWORK + 1, view=VIEW, round=1, sender=1)
    body = wire.Contribution(LIST, 0, 1, 0, WIDTH, 0, 0)
    sent = [
        wire.ethernet(first.mac, control),
        wire.ethernet(first.mac, control, wire.SWITCH),
        wire.BROADCAST + frame(first, 0)[6:],
        others[1].mac + frame(first, 1)[6:],
        wire.ethernet(first.mac, wire.pack(other_network, body, tail=bytes(1440)), wire.SWITCH),
        frame(first, 2)[:80],  # to the switch, and not all there
    ]
    for one in sent:
        first.send(one)
    until(lambda: plane.counters()["truncated"] > before["truncated"], "the last one has come")
    assert others[1].ours() == sent[:5]
    # The bridge has learnt from the pings where the third host is.
    assert others[0].ours() == sent[:3] + sent[4:5]
    risen = {name for name, count in plane.counters().items() if count > before[name]}
    assert risen == {"truncated"}


def passes(hosts: list[Host]) -> None:
    """ARP, ping and a TCP stream between the hosts."""
    one, other = hosts[0], hosts[2]
    run(f"{one.there} ip neighbour flush dev eth0")
    run(f"{one.there} ping -c 3 -i 0.01 -W 5 {other.address}")
    serve = (
        "import socket\n"
        f"server = socket.create_server(('{other.address}', 5000))\n"
        "print('there', flush=True)\n"
        "stream = server.accept()[0]\n"
        "while data := stream.recv(65536): stream.sendall(data)\n"
    )
    call = (
        "import random, socket\n"
        f"stream = socket.create_connection(('{other.address}', 5000), 20)\n"
        "data = random.Random(1).randbytes(1 << 18)\n"
        "for at in range(0, len(data), 1 << 14):\n"
        "    piece, back = data[at : at + (1 << 14)], b''\n"
        "    stream.sendall(piece)\n"
        "    while len(back) < len(piece): back += stream.recv(1 << 16)\n"
        "    assert back == piece\n"
    )
    with subprocess.Popen(
        [*other.there.split(), sys.executable, "-c", serve], stdout=subprocess.PIPE, text=True
    ) as server:
        try:
            assert server.stdout is not None and server.stdout.readline() == "there\n"
            subprocess.run([*one.there.split(), sys.executable, "-c", call], check=True, timeout=60)
            assert server.wait(20) == 0
        finally:
            server.kill()


def test_a_network_with_a_key(hosts: list[Host]) -> None:
    """Frames that are not signed, or signed with another key, are refused; frames that come out are signed, and
    numbered.
    """
    key = bytes(range(100, 116))
    with SwitchPlane(PORTS, NETWORK) as plane:
        plane.grow(FRAGMENTS, WIDTH)
        enter(plane, hosts, key=key)
        for host in hosts:
            host.send(frame(host, 0))
            host.send(frame(host, 0, key=bytes(16), sequence=1))
        until(lambda: plane.counters()["forged"] == 6, "all are refused")
        for index in range(FRAGMENTS):
            for host in hosts:
                host.send(frame(host, index, key=key, sequence=index + 1))
        numbers = []
        for host in hosts:
            until(lambda host=host: len(sums(host)) == FRAGMENTS, "all sums have come")
            ours = [one[wire.ETHERNET_BYTES :] for one in host.ours()]
            headers = [wire.unpack_header(one) for one in ours]
            assert [h.tag for h in headers] == [tag_of(one, len(one), key) for one in ours]
            assert all(h.flags == wire.Flag.ANSWER for h in headers)
            numbers.append(sorted(h.sequence for h in headers))
        assert numbers == [list(range(1, FRAGMENTS + 1))] * 3
        assert plane.sequence == FRAGMENTS


def test_messages(hosts: list[Host]) -> None:
    """Each once: of a view that is not in force, and of vectors for which there is no room."""
    with SwitchPlane(PORTS, NETWORK) as plane:
        contribute(hosts, range(2))
        until(lambda: plane.counters()["disabled"] == 6, "all have come")
        assert plane.messages() == [OtherView(VIEW)]
        enter(plane, hosts, VIEW + 1)
        contribute(hosts, range(2))
        until(lambda: plane.counters()["view"] == 6, "all have come")
        assert plane.messages() == [OtherView(VIEW)]
        enter(plane, hosts)
        contribute(hosts, range(2))
        until(lambda: plane.counters()["range"] + plane.counters()["malformed"] == 6, "all came")
        plane.grow(FRAGMENTS - 1, WIDTH)
        assert plane.view == VIEW, "there was no room before: nothing is lost"
        contribute(hosts, range(2))
        until(lambda: plane.counters()["range"] + plane.counters()["malformed"] == 12, "all came")
        assert plane.messages() == [TooLong(FRAGMENTS)]
        plane.grow(FRAGMENTS, WIDTH)
        assert plane.view is None and plane.seed is None
        enter(plane, hosts)
        contribute(hosts)
        until(lambda: len(sums(hosts[0])) == FRAGMENTS, "all sums have come")
        assert plane.messages() == []


def test_a_port_that_goes_and_comes_back(hosts: list[Host]) -> None:
    with SwitchPlane(PORTS, NETWORK) as plane, ExitStack() as programs:
        plane.grow(FRAGMENTS, WIDTH)
        enter(plane, hosts)
        assert plane.check_ports() == []
        hosts[1].packets.close()
        run("ip link delete eth2")
        changes = until(plane.check_ports, "it is noticed")
        said = "there is no interface eth2; there are: br0, eth1, eth3, lo"
        assert changes == [PortChange("eth2", None, said)]
        assert plane.check_ports() == [] and plane.ports.attached == ["eth1", "eth3"]
        contribute([hosts[0], hosts[2]], range(3))
        until(lambda: plane.counters()["gathered"] == 6, "the others go on")
        hosts[1] = join(2, hosts[1].pid, programs)
        assert until(plane.check_ports, "it is noticed") == [PortChange("eth2", "native")]
        until(lambda: "state forwarding" in run("bridge link show dev eth2"), "it forwards")
        contribute([hosts[1]], range(3))
        for host in hosts:
            until(lambda host=host: len(sums(host)) == 3, "all sums have come")
        run("ip link set eth3 down")
        plane.check_ports()
        run("ip link set eth3 up")
        until(lambda: "state forwarding" in run("bridge link show dev eth3"), "it forwards")
        assert plane.check_ports() == []
        contribute(hosts, range(3, 5))
        for host in hosts:
            until(lambda host=host: len(sums(host)) == 5, "all sums have come")


def test_a_port_that_comes_back_with_another_program(hosts: list[Host]) -> None:
    """It is told once; when the other program has gone, the port is one again."""
    del hosts
    with SwitchPlane(("eth1", "eth2"), NETWORK) as plane:
        run("ip link delete eth2")
        until(plane.check_ports, "it is noticed")
        run("ip link add eth2 type veth peer name other2")
        code = bytes.fromhex("b7000000020000009500000000000000")
        program = bpf.program_load(bpf.PROGRAM_TYPES["xdp"], code, 0, "theirs")
        link = bpf.xdp_link(program, socket.if_nametoindex("eth2"), bpf.XDP_FLAGS_DRV_MODE)
        os.close(program)
        (change,) = until(plane.check_ports, "it is noticed")
        assert change.mode is None and "eth2 has another XDP program, theirs" in change.reason
        assert plane.check_ports() == []
        os.close(link)
        assert until(plane.check_ports, "it is noticed") == [PortChange("eth2", "native")]


@pytest.mark.parametrize(
    ("ports", "error", "said"),
    [
        ((), UsageProblem, "not: none"),
        (("eth1", "eth1"), UsageProblem, "not: eth1, eth1"),
        (("eth1", "nowhere"), InterfaceMissing, "there is no interface nowhere"),
        (("eth1", "lo"), InterfaceUnfit, "lo is not an Ethernet interface"),
        (("eth1", "eth2"), InterfaceUnfit, "interface eth2 has an MTU of 1400 bytes"),
        (("eth1", "eth3"), InterfaceBusy, "nicps switch xdp runs on interface eth3 already"),
    ],
)
def test_ports_that_cannot_serve(
    hosts: list[Host], ports: tuple[str, ...], error: type[Exception], said: str
) -> None:
    """One line, and nothing is left on the others."""
    del hosts
    run("ip link set eth2 mtu 1400")
    with SwitchPlane(["eth3"], NETWORK):
        with pytest.raises(error, match=said):
            SwitchPlane(ports, NETWORK)
        assert xdp.attached(read_interface("eth1").index) is None
        assert xdp.attached(read_interface("eth3").index) is not None
