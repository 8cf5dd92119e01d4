# SPDX-License-Identifier: Apache-2.0
"""Faults of the lab's network: each of them happens, as often as asked, and to no other host.

h1      h2      h3      h4
p1 ---- p2 - br0 - p3 - p4       faults are on p1 (what h1 says), or on p2 (what h2 hears)
"""

from __future__ import annotations

import os
import signal
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Iterator

import pytest

from nicps.dataplane import bpf
from nicps.lab import (
    Lab,
    LabSettings,
    PortCount,
    down,
    links,
    namespaces,
    state,
)
from nicps.lab.delayline import LATE_S
from tests.netns.labs import leftovers, nicps, own_links, raw_socket, until
from tests.netns.traffic import ETHERTYPE, numbered, traffic
from tests.reaper import fresh_name

pytestmark = pytest.mark.xdp

HOSTS = ("h1", "h2", "h3", "h4")


@pytest.fixture
def name() -> Iterator[str]:
    """A lab's name; no part of that lab may be left after the test."""
    links_before = own_links()
    chosen = fresh_name()
    yield chosen
    assert leftovers(chosen) == {}
    assert own_links() <= links_before


@pytest.fixture
def lab(name: str) -> Iterator[Lab]:
    """Four hosts."""
    with Lab(LabSettings(name, hosts=4)) as made:
        yield made


def counts(lab: Lab, where: str) -> PortCount:
    """The counts of the one port and direction that a fault of `where` can hit when h1 sends."""
    port = lab.counters()[where]
    return port.from_host if where == "h1" else port.to_host


def hit_and_spared(where: str) -> tuple[list[str], list[str]]:
    """The hosts that hear h1 through the port of `where`, and those that do not."""
    return (["h2", "h3", "h4"], []) if where == "h1" else ([where], ["h3", "h4"])


@pytest.mark.parametrize("where", ["h1", "h2"])
def test_loss(lab: Lab, where: str) -> None:
    sent, loss = 10_000, 0.1
    lab.fault(where, loss=loss)
    with traffic(lab) as net:
        net.send("h1", range(sent))
        net.settle()
        hit, spared = hit_and_spared(where)
        lost = counts(lab, where).dropped
        assert abs(lost / sent - loss) < 0.02  # six standard deviations
        for host in hit:
            assert len(net.numbers(host)) == sent - lost
            assert len(set(net.numbers(host))) == sent - lost
        for host in spared:
            assert net.numbers(host) == list(range(sent))


@pytest.mark.parametrize("where", ["h1", "h2"])
def test_duplication(lab: Lab, where: str) -> None:
    sent, share = 5_000, 0.2
    lab.fault(where, duplicate=share)
    with traffic(lab) as net:
        net.send("h1", range(sent))
        net.settle()
        hit, spared = hit_and_spared(where)
        duplicated = counts(lab, where).duplicated
        assert abs(duplicated / sent - share) < 0.04  # seven standard deviations
        for host in hit:
            times = Counter(Counter(net.heard[host]).values())
            assert times == {1: sent - duplicated, 2: duplicated}
        for host in spared:
            assert net.numbers(host) == list(range(sent))


@pytest.mark.parametrize("where", ["h1", "h2"])
def test_corruption(lab: Lab, where: str) -> None:
    sent, share = 5_000, 0.3
    lab.fault(where, corrupt=share)
    with traffic(lab) as net:
        net.send("h1", range(sent))
        net.settle()
        hit, spared = hit_and_spared(where)
        corrupted = counts(lab, where).corrupted
        assert abs(corrupted / sent - share) < 0.05
        right = [numbered(lab.hosts[0].mac, number) for number in range(sent)]
        for host in hit:
            assert len(net.heard[host]) == sent
            wrong = [
                [at for at in range(64) if frame[at] != expected[at]]
                for frame, expected in zip(net.heard[host], right, strict=True)
            ]
            assert {len(bytes_) for bytes_ in wrong} == {0, 1}
            offsets = [bytes_[0] for bytes_ in wrong if bytes_]
            assert len(offsets) == corrupted
            assert set(offsets) == set(range(14, 64)), "any byte but the Ethernet header's"
        for host in spared:
            assert net.heard[host] == right, "whoever shares the frame's memory has it unspoilt"


@pytest.mark.parametrize("where", ["h1", "h2"])
def test_reordering(lab: Lab, where: str) -> None:
    sent, share = 10_000, 0.05
    lab.fault(where, reorder=share)
    with traffic(lab) as net:
        net.send("h1", range(sent))
        net.settle()
        hit, spared = hit_and_spared(where)
        reordered = counts(lab, where).reordered
        assert abs(reordered / sent - share) < 0.015
        for host in hit:
            heard = net.numbers(host)
            assert sorted(heard) == list(range(sent)), "none is lost, none comes twice"
            newest, overtaken = -1, 0
            for number in heard:
                overtaken += number < newest
                newest = max(newest, number)
            # Those at the very end have no frame to overtake them.
            assert reordered / 2 < overtaken <= reordered
        for host in spared:
            assert net.numbers(host) == list(range(sent))


@pytest.mark.parametrize("where", ["h1", "h2"])
def test_delay(lab: Lab, where: str) -> None:
    delay_ms = 30.0
    lab.fault(where, delay_ms=delay_ms)
    hit, spared = hit_and_spared(where)
    waited_ms: list[float] = []
    spared_ms: list[float] = []
    with traffic(lab) as net:
        for number in range(20):
            begun = time.monotonic()
            net.send("h1", [number])
            for host in spared:
                net.hear(host, number + 1)
                spared_ms.append((time.monotonic() - begun) * 1e3)
            for host in hit:
                net.hear(host, number + 1)
                waited_ms.append((time.monotonic() - begun) * 1e3)
        net.send("h1", range(20, 2000))
        net.settle()
        for host in (*hit, *spared):
            assert net.numbers(host) == list(range(2000)), "all wait alike, so none overtakes"
    assert delay_ms <= min(waited_ms) < delay_ms + 15
    assert min(spared_ms, default=0.0) < delay_ms / 2
    assert counts(lab, where).delayed == 2000


def test_all_at_once_is_all_accounted_for(lab: Lab) -> None:
    lab.fault("all", loss=0.05, duplicate=0.05, corrupt=0.05, reorder=0.05, delay_ms=2)
    with traffic(lab) as net:
        for host in HOSTS:
            net.send(host, range(1000))
        net.settle()
        for port in lab.counters().values():
            for count in (port.from_host, port.to_host):
                assert all((count.dropped, count.duplicated, count.corrupted, count.reordered))
                assert count.delayed == count.passed


def test_copies_of_a_delayed_port_wait_too(lab: Lab) -> None:
    lab.fault("h2", duplicate=1.0, delay_ms=40)
    with traffic(lab) as net:
        begun = time.monotonic()
        net.send("h1", [7])
        net.hear("h2", 1)
        assert time.monotonic() - begun >= 0.04
        net.hear("h2", 2)
        assert net.numbers("h2") == [7, 7]


def test_a_frame_held_back_waits_no_longer_than_told(lab: Lab) -> None:
    lab.fault("h2", reorder=1.0)
    waited_s = []
    with traffic(lab) as net:
        for number in range(100):
            begun = time.monotonic()
            net.send("h1", [number])
            net.hear("h2", number + 1)
            waited_s.append(time.monotonic() - begun)
    assert LATE_S[0] <= min(waited_s) < LATE_S[1]


@pytest.mark.parametrize("mtu", [1500, 9000])
def test_tcp_through_every_fault_but_corruption(name: str, mtu: int) -> None:
    # What segmentation offload has left together, and checksums that are still to be computed.
    payload = bytes(range(256)) * 2048
    with Lab(LabSettings(name, hosts=2, rate_bps=10**9, mtu=mtu)) as lab:
        lab.fault("all", loss=0.002, duplicate=0.01, reorder=0.01, delay_ms=1)
        assert lab.counters()["h1"].link.xdp_mode == "native"
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
            connection.settimeout(20)
            with connection, connection.makefile("rb") as stream:
                assert stream.read() == payload
            sender.join()
        assert lab.counters()["h1"].from_host.delayed > 0


def test_frames_that_xdp_sends_back_are_hit_too(name: str) -> None:
    echo = struct.pack("=BBhiBBhi", 0xB7, 0, 0, bpf.XDP_TX, 0x95, 0, 0, 0)
    with Lab(LabSettings(name, hosts=2)) as lab:
        first, second = lab.hosts
        program = bpf.program_load(bpf.PROGRAM_TYPES["xdp"], echo, 0, "echo")
        attributes = [("IFLA_XDP_FD", program), ("IFLA_XDP_FLAGS", bpf.XDP_FLAGS_DRV_MODE)]
        links.with_netlink(
            second.netns,
            lambda ipr: ipr.link(
                "set", index=links.index_of(ipr, "eth1"), xdp={"attrs": attributes}
            ),
        )
        os.close(program)
        lab.fault("h2", duplicate=1.0)
        with raw_socket(first, ETHERTYPE) as sock:
            sock.settimeout(10)
            frame = numbered(first.mac, 1)
            sock.send(frame)
            # Once to h2 makes two; XDP sends both back; each makes two again.
            assert [sock.recv(2000) for _ in range(4)] == [frame] * 4
            lab.clear("h2")
            lab.fault("h2", delay_ms=20)
            begun = time.monotonic()
            sock.send(frame)
            assert sock.recv(2000) == frame
            assert time.monotonic() - begun >= 0.04, "there and back"


def line_of(lab: Lab) -> int:
    """The process in which delayed frames wait."""
    found = state.read(lab.name)
    assert found is not None
    (pid,) = [process.pid for process in found.processes if process.host == "switch"]
    return pid


def test_a_delay_line_that_died_is_told_and_started_anew(lab: Lab) -> None:
    lab.fault("h2", delay_ms=1)
    assert not lab.line_lost()
    os.kill(line_of(lab), signal.SIGKILL)
    until(lab.line_lost, "it is gone")
    text = nicps("lab", "status", "--lab", lab.name).stdout
    assert "say `nicps lab fault` again" in text
    lab.fault("h2", delay_ms=2)
    assert not lab.line_lost()
    with traffic(lab) as net:
        net.send("h1", [1])
        net.settle()
        assert net.numbers("h2") == [1]


def test_what_waits_arrives_though_the_delay_is_taken_off(lab: Lab) -> None:
    lab.fault("h2", delay_ms=300)
    with traffic(lab) as net:
        net.send("h1", range(100))
        lab.clear()
        net.settle()
        # Frames that came to the port after that have overtaken the others.
        assert sorted(net.numbers("h2")) == list(range(100))


def test_down_while_frames_wait(name: str) -> None:
    lab = Lab(LabSettings(name, hosts=2))
    lab.up()
    try:
        lab.fault("all", delay_ms=10_000)
        pid = line_of(lab)
        with raw_socket(lab.hosts[0], ETHERTYPE) as sock:
            for number in range(100):
                sock.send(numbered(lab.hosts[0].mac, number))
    finally:
        removed = down(name)
    assert [process.pid for process in removed.ended] == [pid]
