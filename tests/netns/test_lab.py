# SPDX-License-Identifier: Apache-2.0
"""The lab's network: hosts that reach each other, rates, losses, MTU, native XDP."""

from __future__ import annotations

import socket
import struct
import subprocess
import threading
from collections.abc import Iterator

import pytest
from pyroute2 import IPRoute

from nicps.cli import main
from nicps.dataplane import bpf
from nicps.lab import Lab, LabExists, LabNotFound, LabSettings, links, namespaces
from tests.netns.labs import leftovers, own_links, raw_socket, until
from tests.reaper import fresh_name

ETHERTYPE = 0x88B6  # the other local experimental one: nobody filters it
BROADCAST = b"\xff" * 6


@pytest.fixture
def name() -> Iterator[str]:
    """A lab's name; no part of that lab may be left after the test."""
    links_before = own_links()
    chosen = fresh_name()
    yield chosen
    assert leftovers(chosen) == {}
    assert own_links() <= links_before


def ping(lab: Lab, source: str, target: str, *options: str) -> int:
    argv = ["ping", "-q", "-c2", "-i0.05", "-W2", *options, lab.host(target).ip]
    return lab.run(source, argv, stdout=subprocess.DEVNULL).wait(timeout=20)


def frame_from(mac: str, payload: bytes) -> bytes:
    source = bytes.fromhex(mac.replace(":", ""))
    return BROADCAST + source + struct.pack(">H", ETHERTYPE) + payload


def test_hosts_reach_each_other(name: str) -> None:
    with Lab(LabSettings(name, hosts=3)) as lab:
        assert [ping(lab, "h1", other) for other in ("h2", "h3")] == [0, 0]
        assert ping(lab, "h3", "h2") == 0


def test_addresses_are_those_promised(name: str) -> None:
    with Lab(LabSettings(name, hosts=2, mtu=1400)) as lab:
        second = lab.hosts[1]
        assert (second.name, second.netns) == ("h2", f"nicps-{name}-h2")
        assert (second.mac, second.ip) == ("02:00:0a:4d:00:02", "10.77.0.2")
        child = lab.run(second, ["cat", "/sys/class/net/eth1/address"], stdout=subprocess.PIPE)
        assert child.communicate(timeout=10)[0].decode().strip() == second.mac
        assert second.read_link().mtu == 1400
        interfaces = lab.run(second, ["ls", "/sys/class/net"], stdout=subprocess.PIPE)
        assert interfaces.communicate(timeout=10)[0].split() == [b"eth1", b"lo"]


def test_hosts_are_silent_by_themselves(name: str) -> None:
    with Lab(LabSettings(name, hosts=2)) as lab:
        assert [port.link.rx_packets for port in lab.counters().values()] == [0, 0]


def test_a_command_can_run_unprivileged(name: str) -> None:
    with Lab(LabSettings(name, hosts=1)) as lab:
        child = lab.run("h1", ["id", "-un"], user="nobody", stdout=subprocess.PIPE)
        assert child.communicate(timeout=10)[0] == b"nobody\n"


def test_tcp_stream(name: str) -> None:
    payload = bytes(range(256)) * 8192
    with Lab(LabSettings(name, hosts=2, rate_bps=10**9)) as lab:
        first, second = lab.hosts
        server = namespaces.inside(second.netns, lambda: socket.create_server((second.ip, 7000)))
        client = namespaces.inside(
            first.netns, lambda: socket.create_connection((second.ip, 7000), timeout=10)
        )
        with server, client:
            sender = threading.Thread(
                target=lambda: (client.sendall(payload), client.shutdown(socket.SHUT_WR))
            )
            sender.start()
            connection = server.accept()[0]
            with connection, connection.makefile("rb") as stream:
                assert stream.read() == payload
            sender.join()


def test_rate_shapes_both_ends(name: str) -> None:
    def shaped(ipr: IPRoute, interface: str) -> tuple[int, int, int]:
        index = links.index_of(ipr, interface)
        (qdisc,) = [q for q in ipr.get_qdiscs(index=index) if q.get_attr("TCA_KIND") == "tbf"]
        options = qdisc.get_attr("TCA_OPTIONS").get_attr("TCA_TBF_PARMS")
        queue = qdisc.get_attr("TCA_STATS2").get_attr("TCA_STATS_QUEUE")
        return options["rate"], options["limit"], queue["overlimits"]

    with Lab(LabSettings(name, hosts=2, rate_bps=80_000_000, queue_bytes=65_536)) as lab:
        first = lab.hosts[0]
        with raw_socket(first, ETHERTYPE) as sock:
            frame = frame_from(first.mac, bytes(1400))
            for _ in range(500):  # 0.7 MB, more than the bucket's 128 KB
                sock.send(frame)
        at_host = links.with_netlink(first.netns, lambda ipr: shaped(ipr, "eth1"))
        assert at_host[:2] == (10_000_000, 4 * 1024 * 1024)
        assert at_host[2] > 0, "nothing had to wait"
        at_switch = links.with_netlink(lab.switch_netns, lambda ipr: shaped(ipr, "p2"))
        assert at_switch[:2] == (10_000_000, 65_536)


@pytest.mark.xdp
def test_loss_in_each_direction(name: str) -> None:
    sent, loss = 20_000, 0.1
    with Lab(LabSettings(name, hosts=3, loss=loss)) as lab:
        first = lab.hosts[0]
        with raw_socket(first, ETHERTYPE) as sock:
            frame = frame_from(first.mac, bytes(50))
            for _ in range(sent):
                sock.send(frame)

        def arrived() -> bool:
            ports = lab.counters()
            return (
                ports["h1"].from_host.passed + ports["h1"].from_host.dropped == sent
                and ports["h3"].to_host.passed + ports["h3"].to_host.dropped
                == ports["h1"].from_host.passed
            )

        until(arrived, "every frame counted once at each port")
        ports = lab.counters()
        assert ports["h1"].to_host.passed == ports["h2"].from_host.passed == 0
        for count in (ports["h1"].from_host, ports["h2"].to_host, ports["h3"].to_host):
            share = count.dropped / (count.dropped + count.passed)
            assert abs(share - loss) < 0.02, count  # ten standard deviations
        assert ports["h2"].to_host != ports["h3"].to_host, "each port throws its own dice"
        assert lab.hosts[1].read_link().rx_packets == ports["h2"].to_host.passed


@pytest.mark.xdp
def test_total_loss_lets_nothing_through(name: str) -> None:
    with Lab(LabSettings(name, hosts=2, loss=1.0)) as lab:
        assert ping(lab, "h1", "h2", "-W1") != 0
        assert lab.hosts[1].read_link().rx_packets == 0


@pytest.mark.xdp
def test_xdp_tx_comes_back(name: str) -> None:
    for loss in (0.0, 1e-9):  # the pass program, and the loss program
        with Lab(LabSettings(name, hosts=2, loss=loss)) as lab:
            first, second = lab.hosts
            assert {port.link.xdp_mode for port in lab.counters().values()} == {"native"}
            echo = struct.pack("=BBhiBBhi", 0xB7, 0, 0, bpf.XDP_TX, 0x95, 0, 0, 0)
            program = bpf.program_load(bpf.PROGRAM_TYPES["xdp"], echo, 0, "echo")
            attributes = [("IFLA_XDP_FD", program), ("IFLA_XDP_FLAGS", bpf.XDP_FLAGS_DRV_MODE)]

            def attach(ipr: IPRoute, attributes: list[tuple[str, int]] = attributes) -> None:
                ipr.link("set", index=links.index_of(ipr, "eth1"), xdp={"attrs": attributes})

            links.with_netlink(second.netns, attach)
            with raw_socket(first, ETHERTYPE) as sock:
                sock.settimeout(10)
                frame = frame_from(first.mac, b"there and back" + bytes(50))
                sock.send(frame)
                assert sock.recv(2000) == frame


def test_large_mtu_takes_native_xdp(name: str) -> None:
    with Lab(LabSettings(name, hosts=2, mtu=9000)) as lab:
        assert lab.counters()["h1"].link.xdp_mode == "native"
        assert ping(lab, "h1", "h2", "-s8000", "-Mdo") == 0


@pytest.mark.xdp
def test_large_mtu_with_loss(name: str) -> None:
    with Lab(LabSettings(name, hosts=2, mtu=9000, loss=1.0)) as lab:
        assert lab.counters()["h1"].link.xdp_mode == "native"
        assert ping(lab, "h1", "h2", "-c1", "-W1", "-s8000") == 1
        lab.clear()
        assert ping(lab, "h1", "h2", "-s8000", "-Mdo") == 0


def test_a_hosts_interface_can_be_taken_down(name: str) -> None:
    with Lab(LabSettings(name, hosts=2)) as lab:
        second = lab.hosts[1]
        second.set_link(False)
        assert not second.read_link().up
        assert not lab.counters()["h2"].link.carrier
        second.set_link(True)
        until(lambda: lab.counters()["h2"].link.carrier, "the port has its carrier back")
        assert ping(lab, "h1", "h2") == 0


def test_labs_stand_side_by_side(name: str) -> None:
    # The second name begins like the first one's namespaces do.
    with Lab(LabSettings(name, hosts=2)) as one, Lab(LabSettings(f"{name}-h1", hosts=2)) as two:
        assert ping(one, "h1", "h2") == 0
        assert all(port.link.rx_packets == 0 for port in two.counters().values())
        assert ping(two, "h1", "h2") == 0
        one.close()
        assert ping(two, "h2", "h1") == 0
    assert leftovers(f"{name}-h1") == {}


def test_a_name_is_taken_once(name: str) -> None:
    with Lab(LabSettings(name, hosts=2)) as lab:
        with pytest.raises(LabExists, match=f"nicps lab down --lab {name}"):
            Lab(LabSettings(name, hosts=2)).up()
        assert ping(lab, "h1", "h2") == 0, "the one that stands is untouched"


def test_open_finds_what_stands(name: str) -> None:
    with pytest.raises(LabNotFound, match="nicps lab up"):
        Lab.open(name)
    with Lab(LabSettings(name, hosts=2, rate_bps=10**9)):
        with Lab.open(name) as lab:
            assert lab.settings == LabSettings(name, hosts=2, rate_bps=10**9)
            with pytest.raises(LabNotFound, match="h1 to h2"):
                lab.run("h3", ["true"])
        assert ping(Lab.open(name), "h1", "h2") == 0, "leaving an opened lab leaves it standing"


def test_exit_codes_of_the_commands(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The exit codes of README's table: 2 wrong use, 4 no agent."""
    with Lab(LabSettings(name, hosts=2)):
        at, nowhere = ["--lab", name], ["--lab", f"{name}-x"]
        for code, words in (
            (2, ["up", *at]),
            (2, ["exec", *at, "h3", "--", "true"]),
            (2, ["status", *nowhere]),
            (2, ["fault", *at, "h3", "--loss", "1%"]),
            (2, ["fault", *nowhere, "h1", "--clear"]),
            (2, ["lose-next", *at, "h1", "token", "-1"]),
            (2, ["cut", *at, "all"]),
            (2, ["heal", *nowhere]),
            (2, ["link", *at, "h0", "up"]),
            (4, ["pause", *at, "h1"]),
            (4, ["kill", *at, "all", "--trainer"]),
            (0, ["down", *nowhere]),
        ):
            assert main(["lab", *words]) == code, words
            assert capsys.readouterr().err.count("nicps: error: ") == (code > 0), words
