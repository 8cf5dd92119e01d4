# SPDX-License-Identifier: Apache-2.0
"""The data plane on real interfaces: frames over a wire, and changes of the interface."""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack

import numpy as np
import pytest

from nicps import wire
from nicps.dataplane import DataPlane
from nicps.errors import InterfaceDown, InterfaceMissing, InterfaceUnfit
from tests.netns.planes import (
    HOUR_NS,
    NETWORK,
    VIEW,
    form,
    fragments,
    random_lanes,
    send_all,
    token,
    until,
)
from tests.netns.wires import run, veth_pair


@pytest.fixture
def pair() -> Iterator[tuple[DataPlane, DataPlane]]:
    """Two hosts at the ends of a wire, as members 1 and 2, with 64 blocks each."""
    with veth_pair() as names, ExitStack() as stack:
        left, right = (stack.enter_context(DataPlane(name, NETWORK)) for name in names)
        form(left, right)
        yield left, right


def test_an_interface_becomes_a_port(pair: tuple[DataPlane, DataPlane]) -> None:
    """The kernel gives notice, and the program sees frames that the socket no longer receives."""
    left, right = pair
    run("ip link add br0 type bridge")
    run("ip link set br0 addrgenmode none up")
    left.link_changes.drain()  # those of the program's attachment
    run("ip link set left master br0")
    assert left.link_changes.drain()
    with pytest.raises(InterfaceUnfit, match="left is a port of the bridge br0"):
        left.check_interface()
    assert right.send(wire.pack(wire.Header(network=NETWORK), wire.Fail()))
    until(lambda: left.maps.counters()["control"] == 1, "the program has seen it")
    assert not select.select([left.rx_fileno()], [], [], 0.2)[0]
    run("ip link set left nomaster")
    assert left.link_changes.drain()
    left.check_interface()


@pytest.mark.parametrize(
    "tag", ["", "81000000", "81000005", "88a80005", "8100000081000000", "88a8000081000007"]
)
def test_what_the_program_has_not_looked_at_is_not_heard(
    pair: tuple[DataPlane, DataPlane], tag: str
) -> None:
    """Linux takes VLAN tags off after the XDP program: to a socket a frame behind one looks like any other frame.

    The program takes one off that has a priority only, and looks at what is left.
    """
    left, right = pair
    expected = 2 if tag in ("", "81000000") else 1
    frame = wire.pack(wire.Header(network=NETWORK), wire.Fail())
    ours = (
        wire.BROADCAST + left.mac + bytes.fromhex(tag) + wire.ETHERTYPE.to_bytes(2, "big") + frame
    )
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0) as stranger:
        stranger.bind(("left", 0))
        stranger.send(ours)
        assert left.send(frame)  # in its order
        got: list[tuple[bytes, bytes]] = []
        until(lambda: got.extend(right.receive()) or len(got) >= expected, "all have come")
    assert len(got) == right.maps.counters()["control"] == expected


def test_fragments_over_the_wire(pair: tuple[DataPlane, DataPlane]) -> None:
    left, right = pair
    count = 256
    lanes = random_lanes(count)
    send_all(left, *fragments(count, lanes))
    until(lambda: right.maps.count(1, VIEW, 1) == count, "all have come")
    assert (right.maps.accumulators[1].reshape(-1, 360) == lanes << 4).all()
    assert right.maps.missing(1, VIEW, 1, count, 10) == []
    assert right.maps.counters()["added"] == count
    # One frame wakes the agent, the one that completes the sender; a ring's own sender receives nothing.
    (frame,) = until(right.receive, "the last fragment is raised")
    assert frame[0] == left.mac
    assert wire.unpack_header(frame[1]).type == wire.FrameType.FRAGMENT
    assert left.receive() == []


def test_the_rings_slots_stay_in_order() -> None:
    """Batches of all sizes, a few times round the ring: index and kernel never part."""
    count = 2000
    with veth_pair() as names, ExitStack() as stack:
        left, right = (stack.enter_context(DataPlane(name, NETWORK)) for name in names)
        form(left, right, blocks=count // 4)
        lanes = random_lanes(count)
        headers, payload = fragments(count, lanes)
        rng, at = np.random.default_rng(5), 0
        assert left.tx.free() == left.tx.frames
        while at < count:
            batch = int(rng.integers(1, 300))
            at += left.tx.push(headers[at : at + batch], payload[at : at + batch])
            assert left.tx.unsent() > 0
            left.tx.flush()
        until(lambda: left.tx.pending() == 0, "all have left")
        until(lambda: right.maps.count(1, VIEW, 1) == count, "all have come")
        assert (right.maps.accumulators[1].reshape(-1, 360) == lanes << 4).all()


def test_more_than_the_ring_holds(pair: tuple[DataPlane, DataPlane]) -> None:
    left, right = pair
    headers, payload = fragments(256, random_lanes(256))
    assert left.tx.push(headers, payload) == 256
    assert left.tx.push(headers, payload) == 256
    assert left.tx.push(headers, payload) == 0
    assert left.tx.free() == 0
    assert left.tx.unsent() == left.tx.pending() == left.tx.frames
    left.tx.flush()
    until(lambda: left.tx.pending() == 0, "all have left")
    assert left.tx.free() == left.tx.frames
    counters = until(
        lambda: (found := right.maps.counters())["added"] + found["duplicate"] == 512 and found,
        "all came",
    )
    assert counters["added"] == counters["duplicate"] == 256


def test_a_shaped_port_is_filled_and_not_overrun() -> None:
    count = 4000
    with veth_pair(rate="50mbit") as names, ExitStack() as stack:
        left, right = (stack.enter_context(DataPlane(name, NETWORK)) for name in names)
        form(left, right, blocks=count // 4)
        began = time.monotonic()
        waits = send_all(left, *fragments(count, random_lanes(count)))
        took = time.monotonic() - began
        until(lambda: right.maps.count(1, VIEW, 1) == count, "all have come, without a repair")
        assert "dropped 0" in run("tc -s qdisc show dev left")
        line = count * (wire.PAYLOAD_BYTES + 48 + 14) * 8 / 50e6
        assert line * 0.9 < took < line * 1.5
        assert 0 < waits < count / 20, "it waits for a part of the ring, not for single frames"


def test_floods_keep_no_control_frame_of_a_member_away(pair: tuple[DataPlane, DataPlane]) -> None:
    """One of 16 members floods, and a stranger; the others' offers and marks of 100 rounds are among that."""
    left, right = pair
    macs = [left.mac, right.mac, *(bytes([2, 0, 0, 0, 1, k]) for k in range(3, 17))]
    left.enter_view(VIEW, 1, macs, 2)

    def control(sender: int, source: bytes) -> bytes:
        header = wire.Header(network=NETWORK, view=VIEW, sender=sender)
        return wire.ethernet(source, wire.pack(header, wire.Want(1, 1)))

    floods = [control(2, right.mac), control(0, b"\2outer")]
    others = [control(number, macs[number - 1]) for number in range(3, 17)]
    sent, heard = 0, Counter[int]()

    def arrived() -> bool:
        for _, frame in left.receive():
            heard[wire.unpack(frame).header.sender] += 1
        counters = left.maps.counters()
        return counters["control"] + counters["limited"] == sent

    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0) as sock:
        sock.bind(("right", 0))
        for _ in range(200):
            for frame in [*floods * 40, *others]:
                sock.send(frame)
                sent += 1
            until(arrived, "all have come")
    until(lambda: left.receive() == [], "all have been received")
    assert {number: heard[number] for number in range(3, 17)} == dict.fromkeys(range(3, 17), 200)
    assert heard[2] < 8000 / 2 and heard[0] < 8000 / 2, "the floods were cut"


def test_an_interface_that_goes_down(pair: tuple[DataPlane, DataPlane]) -> None:
    left, _ = pair
    headers, payload = fragments(4, random_lanes(4))
    run("ip link set left down")
    left.tx.push(headers, payload)
    with pytest.raises(InterfaceDown, match="left has gone down"):
        left.tx.flush()
    with pytest.raises(InterfaceDown, match="left has gone down"):
        left.receive()
    with pytest.raises(InterfaceDown, match="left has gone down"):
        left.send(b"frame")


def test_an_mtu_that_is_lowered(pair: tuple[DataPlane, DataPlane]) -> None:
    """What was in the ring goes out once the MTU has been mended: the kernel does not get stuck."""
    left, right = pair
    headers, payload = fragments(4, random_lanes(4))
    longest = bytes(wire.MAX_FRAME_BYTES)
    left.link_changes.drain()
    assert left.send(longest)
    run("ip link set left mtu 1400")
    left.tx.push(headers, payload)
    for attempt in (left.tx.flush, left.tx.flush, lambda: left.send(longest)):
        with pytest.raises(InterfaceUnfit, match="left has an MTU below 1500 bytes; run: ip link"):
            attempt()
    assert left.link_changes.drain() and left.tx.unsent() == 4
    with pytest.raises(InterfaceUnfit, match="left has an MTU of 1400 bytes, 1500 are needed"):
        left.check_interface()
    run("ip link set left mtu 1500")
    left.check_interface()
    assert left.link_changes.drain() and not left.link_changes.drain()
    run("ip link set right alias other")
    assert not left.link_changes.drain()
    left.tx.flush()
    until(lambda: right.maps.count(1, VIEW, 1) == 4, "all have come")
    assert left.tx.unsent() == 0


def test_an_interface_that_is_deleted(pair: tuple[DataPlane, DataPlane]) -> None:
    left, _ = pair
    left.link_changes.drain()
    run("ip link delete left")
    assert left.link_changes.drain()
    left.tx.push(*fragments(4, random_lanes(4)))
    with pytest.raises(InterfaceDown, match="left has gone down"):
        left.receive()
    for attempt in (left.tx.flush, lambda: left.send(b"frame"), left.check_interface):
        with pytest.raises(InterfaceMissing, match="interface left has gone"):
            attempt()


def test_a_token_is_bounced_by_the_kernel(pair: tuple[DataPlane, DataPlane]) -> None:
    """Out of XDP_TX it reaches the other end only because that has an XDP program too (veth)."""
    left, right = pair
    third = b"\2\0\0\0\0\3"
    for number, host in enumerate(pair, 1):
        host.enter_view(VIEW, number, [left.mac, right.mac, third], number + 1)
        host.maps.config["round_high"] = host.maps.config["enabled"] = 1
    right.maps.config["bounce"] = 1
    right.maps.config["alive_until_ns"] = time.monotonic_ns() + HOUR_NS
    left.maps.saw(1, 1)
    assert left.send(token(1, 1, 2))
    (frame,) = until(
        lambda: [] if left.maps.counters()["heard"] == 0 else [b""], "it is back"
    ) and [right.maps.bounced()]
    assert frame is not None
    bounced = wire.unpack(frame)
    assert isinstance(bounced.body, wire.Token)
    assert (bounced.header.sender, bounced.body.hop, bounced.body.owner) == (2, 2, 3)
    assert int(left.maps.ring["seen"]) == int(right.maps.ring["seen"]) == 1 << 32 | 2
    assert int(left.maps.ring["heard_ns"]) > 0
    assert right.receive() == left.receive() == []


def test_frames_for_the_agent(pair: tuple[DataPlane, DataPlane]) -> None:
    left, right = pair
    header = wire.Header(network=NETWORK, view=VIEW, sender=1)
    frames = [wire.pack(header, wire.Fail(), tail=f"reason {at}".encode()) for at in range(40)]
    for frame in frames:
        assert left.send(frame)
    left.send(wire.pack(wire.Header(network=NETWORK + 1), wire.Fail()))
    assert select.select([right.rx_fileno()], [], [], 5)[0]
    got: list[tuple[bytes, bytes]] = []
    until(lambda: got.extend(right.receive()) or len(got) >= len(frames), "all have come")
    assert [source for source, _ in got] == [left.mac] * len(frames)
    assert [wire.unpack(frame).tail for _, frame in got] == [wire.unpack(f).tail for f in frames]
    until(lambda: right.maps.counters()["network"] == 1, "the other network's is counted")
    assert right.maps.counters()["control"] == len(frames)
    assert left.receive() == [], "a host does not hear itself"


def test_garbage_is_counted_and_harmless(pair: tuple[DataPlane, DataPlane]) -> None:
    left, right = pair
    rng = np.random.default_rng(9)
    good = wire.pack(
        wire.Header(network=NETWORK, view=VIEW, round=1, sender=1),
        wire.Fragment(0, 1, 360, 32, 0, 1),
        tail=bytes(1440),
    )
    sent = 0
    for _ in range(300):
        frame = bytearray(good[: int(rng.integers(1, len(good)))])
        for _ in range(int(rng.integers(0, 4))):
            frame[int(rng.integers(len(frame)))] = int(rng.integers(256))
        assert left.send(bytes(frame))
        sent += 1
    names = set(right.maps.counters())
    until(
        lambda: sum(right.maps.counters()[name] for name in names) == sent, "each is counted once"
    )
    assert right.maps.counters()["added"] == 0
    assert not right.maps.accumulators.any()


def test_what_is_not_ours_passes_untouched() -> None:
    """Ping and a TCP stream through the program, in a pair whose other end is in a namespace of its own."""
    with veth_pair() as (left, right):
        outside = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        inside = subprocess.Popen(["unshare", "--net", "sleep", "60"])
        try:
            until(
                lambda: (
                    os.readlink(f"/proc/{inside.pid}/ns/net")
                    != os.readlink("/proc/thread-self/ns/net")
                ),
                "the other namespace is there",
            )
            run(f"ip link set {right} netns {inside.pid}")
            there = f"nsenter --target {inside.pid} --net"
            run(f"{there} ip address add 10.9.0.2/24 dev {right}")
            run(f"{there} ip link set {right} up")
            run(f"ip address add 10.9.0.1/24 dev {left}")
            with DataPlane(left, NETWORK) as host:
                form(host)
                run("ping -c 3 -i 0.01 -W 5 10.9.0.2")
                data = np.random.default_rng(1).bytes(1 << 20)
                with socket.create_server(("10.9.0.1", 0)) as server:
                    code = (
                        "import socket, sys; s = socket.create_connection(('10.9.0.1', int(sys.argv[1])))\n"
                        "while d := s.recv(65536): s.sendall(d)"
                    )
                    port = server.getsockname()[1]
                    peer = subprocess.Popen([*there.split(), sys.executable, "-c", code, str(port)])
                    server.settimeout(20)
                    stream, _ = server.accept()
                    stream.settimeout(20)
                    back = b""
                    for at in range(0, len(data), 1 << 16):
                        piece = data[at : at + (1 << 16)]
                        stream.sendall(piece)
                        until_at = len(back) + len(piece)
                        while len(back) < until_at:
                            back += stream.recv(1 << 16)
                    stream.close()
                    assert peer.wait(20) == 0
                assert back == data
                assert not any(host.maps.counters().values())
        finally:
            inside.kill()
            inside.wait()
            os.close(outside)
