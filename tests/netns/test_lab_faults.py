# SPDX-License-Identifier: Apache-2.0
"""Faults of the lab's network: each of them happens, as often as asked, and to nobody else.

h1      h2      h3      h4
p1 ---- p2 - br0 - p3 - p4       faults are on p1 (what h1 says), or on p2 (what h2 hears)
"""

from __future__ import annotations

import json
import os
import signal
import socket
import statistics
import struct
import threading
import time
from collections import Counter
from collections.abc import Iterator

import pytest

from nicps.dataplane import bpf
from nicps.errors import NicpsError, UsageProblem
from nicps.lab import (
    Faults,
    Lab,
    LabNotFound,
    LabSettings,
    PortCount,
    down,
    links,
    namespaces,
    state,
)
from nicps.lab.delayline import LATE_S
from tests.netns.labs import fresh_name, leftovers, nicps, own_links, raw_socket, until
from tests.netns.traffic import ETHERTYPE, mac_bytes, numbered, traffic

pytestmark = pytest.mark.xdp

HOSTS = ("h1", "h2", "h3", "h4")


@pytest.fixture
def name() -> Iterator[str]:
    """A name, of which nothing may be left after the test."""
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
    """Of the one port and direction that a fault of `where` can hit when h1 speaks."""
    port = lab.counters()[where]
    return port.from_host if where == "h1" else port.to_host


def hit_and_spared(where: str) -> tuple[list[str], list[str]]:
    """Who hears h1 through the port of `where`, and who does not."""
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
            # Those at the very end have nobody to overtake them.
            assert reordered / 2 < overtaken <= reordered
        for host in spared:
            assert net.numbers(host) == list(range(sent))


@pytest.mark.parametrize("where", ["h1", "h2"])
def test_delay(lab: Lab, where: str) -> None:
    delay_ms = 30.0
    lab.fault(where, delay_ms=delay_ms)
    hit, spared = hit_and_spared(where)
    waited_ms: list[float] = []
    spared_ms: list[float] = [0.0]
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
    assert min(waited_ms) >= delay_ms
    assert statistics.median(waited_ms) < delay_ms + 15
    assert statistics.median(spared_ms) < delay_ms / 2
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
    assert min(waited_s) >= LATE_S[0]
    assert statistics.median(waited_s) < LATE_S[1]


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
        program = bpf.program_load_xdp(echo, 0, "echo")
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


def severed(lab: Lab) -> int:
    return sum(port.to_host.severed for port in lab.counters().values())


def hearing(lab: Lab) -> set[str]:
    """Who hears whose broadcasts, as `hearer<speaker`."""
    before = severed(lab)
    with traffic(lab) as net:
        for number, host in enumerate(HOSTS, 1):
            net.send(host, [number])

        def complete() -> bool:
            net.listen()
            return sum(map(len, net.heard.values())) + severed(lab) - before == 12

        until(complete, "each broadcast has been heard or severed at three ports")
        return {f"{host}<h{number}" for host in HOSTS for number in net.numbers(host)}


EVERYBODY = {f"{a}<{b}" for a in HOSTS for b in HOSTS if a != b}
HALVES = {"h1<h2", "h2<h1", "h3<h4", "h4<h3"}


def test_a_cut_makes_halves_until_it_is_healed(lab: Lab) -> None:
    assert hearing(lab) == EVERYBODY
    lab.cut("h1,h2")
    assert hearing(lab) == HALVES
    lab.cut("h4")
    assert hearing(lab) == {"h1<h2", "h2<h1"}, "cuts add up"
    lab.clear()
    assert hearing(lab) == {"h1<h2", "h2<h1"}, "other faults are another matter"
    lab.heal()
    assert hearing(lab) == EVERYBODY


def test_a_cut_severs_late_frames_and_single_receivers_too(lab: Lab) -> None:
    lab.fault("h1", delay_ms=5)
    lab.cut("h1,h2")
    assert hearing(lab) == HALVES
    second, fourth = (mac_bytes(lab.host(name).mac) for name in ("h2", "h4"))
    before = severed(lab)
    with traffic(lab) as net:
        # The switch has learned where both are: each frame goes to one port.
        net.sockets["h1"].send(numbered(lab.hosts[0].mac, 1, second))
        net.sockets["h1"].send(numbered(lab.hosts[0].mac, 2, fourth))

        def complete() -> bool:
            net.listen()
            return net.numbers("h2") == [1] and severed(lab) == before + 1

        until(complete, "h2 has its frame, and h4's is severed")
        assert net.numbers("h4") == []


def test_a_cut_needs_two_sides(lab: Lab) -> None:
    for hosts in ("all", "h4,h3,h2,h1"):
        with pytest.raises(UsageProblem, match="both sides"):
            lab.cut(hosts)
    with pytest.raises(LabNotFound, match="no host h5"):
        lab.cut("h1,h5")
    assert {told.side for told in lab.faults().values()} == {0}


def test_only_what_is_named_changes(lab: Lab) -> None:
    lab.fault("h1,h3", loss=0.02, delay_ms=3)
    lab.fault("h1", loss=0.0, corrupt=0.01)
    lab.cut("h1")
    told = lab.faults()
    assert told["h1"].faults == Faults(corrupt=0.01, delay_ms=3.0)
    assert told["h2"].faults == Faults()
    assert told["h3"].faults == Faults(loss=0.02, delay_ms=3.0)
    lab.clear("h1")
    assert (lab.faults()["h1"].faults, lab.faults()["h1"].side) == (Faults(), 1)
    assert lab.faults()["h3"].faults == Faults(loss=0.02, delay_ms=3.0)


def test_the_loss_that_a_lab_was_made_with_is_a_fault_like_any(name: str) -> None:
    with Lab(LabSettings(name, hosts=2, loss=0.25)) as lab:
        assert {told.faults for told in lab.faults().values()} == {Faults(loss=0.25)}
        lab.clear()
        assert {told.faults for told in lab.faults().values()} == {Faults()}


@pytest.mark.parametrize(
    "wrong", [{"loss": 1.5}, {"corrupt": -0.1}, {"delay_ms": -1.0}, {"delay_ms": 1e6}]
)
def test_what_cannot_be_is_refused(lab: Lab, wrong: dict[str, float]) -> None:
    with pytest.raises(UsageProblem):
        lab.fault("h1", **wrong)
    found = state.read(lab.name)
    assert found is not None and found.faults_map is None, "nothing was loaded for it"


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
        assert net.numbers("h2") == list(range(100))


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


def test_commands(name: str) -> None:
    def lab(*arguments: str, code: int = 0) -> str:
        done = nicps("lab", arguments[0], "--lab", name, *arguments[1:])
        assert done.returncode == code, done.stderr
        if code:
            assert done.stdout == ""
            assert done.stderr.startswith("nicps: error: ") and done.stderr.count("\n") == 1
        return done.stderr if code else done.stdout

    lab("up", "--hosts", "3")
    try:
        lab("fault", "h1", "--loss", "5%", "--duplicate", "0.01", "--corrupt", "1%")
        lab("fault", "h1", "--reorder", "2%", "--delay", "3.5")
        text = lab("cut", "h1,h2")
        rows = dict(line.split(maxsplit=1) for line in text.splitlines())
        assert rows == {
            "h1": "loss 5%, duplicate 1%, corrupt 1%, reorder 2%, delay 3.5 ms, cut (side 1)",
            "h2": "cut (side 1)",
            "h3": "-",
        }
        assert rows["h1"] in lab("status")
        lab("link", "h2", "down")
        lab("link", "h3", "unplugged")
        (shown,) = json.loads(lab("status", "--json"))["labs"]
        first, second, third = shown["hosts"]
        assert first["faults"] == {
            "loss": 0.05,
            "duplicate": 0.01,
            "corrupt": 0.01,
            "reorder": 0.02,
            "delay_ms": 3.5,
        }
        assert [host["side"] for host in shown["hosts"]] == [1, 1, 0]
        assert (second["up"], second["port"]["up"]) == (False, True)
        assert (third["up"], third["port"]["up"]) == (True, False)
        lab("link", "all", "up")
        lab("heal")
        assert lab("fault", "all", "--clear").split() == ["h1", "-", "h2", "-", "h3", "-"]

        assert "--clear alone" in lab("fault", "h1", code=2)
        assert "--clear alone" in lab("fault", "h1", "--clear", "--loss", "1%", code=2)
        assert "is not a corruption" in lab("fault", "h1", "--corrupt", "much", code=2)
        assert "is not a delay" in lab("fault", "h1", "--delay", "long", code=2)
        assert "0 to 10000" in lab("fault", "h1", "--delay", "10001", code=2)
        assert "both sides" in lab("cut", "all", code=2)
        assert "no host h4" in lab("fault", "h4", "--loss", "1%", code=3)
        assert "no host h4" in lab("cut", "h1,h4", code=3)
        assert "invalid choice" in lab("link", "h1", "sideways", code=2)
    finally:
        lab("down")
    assert "nicps lab up" in lab("heal", code=3)


def test_an_unplugged_cable_takes_the_carrier_and_leaves_the_interface_up(lab: Lab) -> None:
    second = lab.hosts[1]
    lab.link("h2", "unplugged")
    until(lambda: not second.read_link().carrier, "h2 has no carrier")
    assert second.read_link().up
    lab.link("h2", "down")
    assert not second.read_link().up
    lab.link("h2", "up")
    until(lambda: second.read_link().carrier, "h2 has its carrier back")
    assert hearing(lab) == EVERYBODY


def test_no_lab_no_fault(name: str) -> None:
    with pytest.raises(NicpsError, match="nicps lab up"):
        Lab.open(name).fault("h1", loss=0.5)
