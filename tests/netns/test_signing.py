# SPDX-License-Identifier: Apache-2.0
"""A network with a key, over a wire: frames that a member signs are taken, those of others are refused and counted."""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pyroute2 import IPRoute

from nicps import wire
from nicps.dataplane import DataPlane, bpf, egress, interface, loader
from nicps.doctor.interface import check_interface, check_signing
from nicps.errors import BpfLoadError, EnvironmentProblem
from nicps.layout import layout
from tests.netns.planes import (
    HOUR_NS,
    NETWORK,
    VIEW,
    fragments,
    random_lanes,
    send_all,
    token,
    until,
)
from tests.netns.wires import run, veth_pair
from tests.vectors import encode

KEY = bytes(range(100, 116))
THIRD = b"\2\0\0\0\0\3"


def enter(left: DataPlane, right: DataPlane, keys: tuple[bytes, bytes] = (KEY, KEY)) -> None:
    """Both into one view, as members 1 and 2 of 3, with round 1 open."""
    for number, (host, key) in enumerate(zip((left, right), keys, strict=True), 1):
        host.enter_view(VIEW, number, [left.mac, right.mac, THIRD], number + 1, key)
        config = host.maps.config
        config["round_low"] = config["round_high"] = config["round"] = config["enabled"] = 1


@pytest.fixture
def pair() -> Iterator[tuple[DataPlane, DataPlane]]:
    """Two hosts of one network with a key."""
    with veth_pair() as names, ExitStack() as stack:
        left, right = (stack.enter_context(DataPlane(name, NETWORK, keyed=True)) for name in names)
        for host in (left, right):
            host.maps.allocate(64)
        enter(left, right)
        yield left, right


@pytest.fixture
def outsider(pair: tuple[DataPlane, DataPlane]) -> Iterator[socket.socket]:
    """A socket on the left interface that is not the agent's: frames with a member's MAC address from anywhere."""
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0) as raw:
        raw.bind(("left", 0))
        yield raw


def one_fragment(lanes: Any, index: int = 0, sequence: int = 1, key: bytes = KEY) -> bytes:
    """A fragment of 256 as member 1 signs it, from its version byte on."""
    headers, payload = fragments(1, lanes, 256)
    frame = bytearray(headers.tobytes() + payload.tobytes())
    frame[20:24], frame[32:36] = sequence.to_bytes(4, "big"), index.to_bytes(4, "big")
    return encode.sign(bytes(frame), key)


def settled(host: DataPlane, before: dict[str, int], frames: int) -> Counter[str]:
    """The counters of the frames that were sent, once all of them have come."""

    def risen() -> Counter[str]:
        return (
            Counter({name: n - before[name] for name, n in host.maps.counters().items()})
            - Counter()
        )

    return until(lambda: (found := risen()).total() >= frames and found, f"{frames} have come")


def test_what_members_send_is_taken(pair: tuple[DataPlane, DataPlane]) -> None:
    left, right = pair
    count = 256
    lanes = random_lanes(count)
    send_all(left, *fragments(count, lanes))
    until(lambda: right.maps.count(1, VIEW, 1) == count, "all have come")
    assert (right.maps.accumulators[1].reshape(-1, 360) == lanes << 4).all()
    assert right.maps.counters()["added"] == left.maps.sequence == count
    assert left.send(token(1, 1, 3))
    until(lambda: right.maps.counters()["heard"] == 1, "the token, for another")
    assert left.maps.sequence == count + 1
    send_all(left, *fragments(count, lanes))
    until(lambda: right.maps.counters()["duplicate"] == count, "a repair has new numbers")
    assert left.maps.sequence == 2 * count + 1
    assert set(Counter(right.maps.counters()) - Counter()) == {"added", "duplicate", "heard"}


def test_a_bounced_token_is_signed_too(pair: tuple[DataPlane, DataPlane]) -> None:
    left, right = pair
    right.maps.config["bounce"] = 1
    right.maps.config["alive_until_ns"] = time.monotonic_ns() + HOUR_NS
    left.maps.saw(1, 1)
    assert left.send(token(1, 1, 2))
    until(lambda: left.maps.counters()["heard"] == 1, "it is back, and believed")
    assert (left.maps.sequence, right.maps.sequence) == (1, 1)
    frame = right.maps.bounced()
    assert frame is not None
    assert frame == encode.sign(frame, KEY)
    assert left.maps.counters()["forged"] == right.maps.counters()["forged"] == 0


def test_a_shaped_port(checkout: Path) -> None:
    """Frames that a full queue refuses are signed once more, with new numbers, and none is lost."""
    count = 2000
    with veth_pair(rate="200mbit") as names, ExitStack() as stack:
        left, right = (stack.enter_context(DataPlane(name, NETWORK, keyed=True)) for name in names)
        for host in (left, right):
            host.maps.allocate(count // 4)
        enter(left, right)
        send_all(left, *fragments(count, random_lanes(count)))
        until(lambda: right.maps.count(1, VIEW, 1) == count, "all have come")
        assert left.maps.sequence >= count
        assert set(Counter(right.maps.counters()) - Counter()) == {"added"}


def test_another_key(pair: tuple[DataPlane, DataPlane]) -> None:
    left, right = pair
    enter(left, right, (KEY, bytes(16)))
    send_all(left, *fragments(20, random_lanes(20)))
    assert left.send(token(1, 1, 2))
    before = dict.fromkeys(right.maps.counters(), 0)
    assert settled(right, before, 21) == {"forged": 21}
    assert not right.maps.accumulators.any()
    assert int(right.maps.ring["heard_ns"]) == int(right.maps.ring["seen"]) == 0


def test_any_byte_changed(pair: tuple[DataPlane, DataPlane], outsider: socket.socket) -> None:
    left, right = pair
    good = one_fragment(random_lanes(1))
    passed = encode.sign(token(1, 1, 2), KEY)
    before = right.maps.counters()
    rng = np.random.default_rng(4)
    for frame in (good, passed):
        for at in range(len(frame)):
            flipped = frame[at] ^ int(rng.integers(1, 256))
            changed = frame[:at] + bytes([flipped]) + frame[at + 1 :]
            outsider.send(wire.ethernet(left.mac, changed))
    outsider.send(wire.ethernet(left.mac, good[:24] + bytes(8) + good[32:]))
    sent = len(good) + len(passed) + 1
    found = settled(right, before, sent)
    assert found.total() == sent
    taken = {"added", "bounced", "raised", "heard", "duplicate", "stale", "replayed"}
    assert not taken & set(found)
    # All but the few bytes that a cheaper check finds: version, type, network, view, sender, length, sizes, ...
    assert found["forged"] > sent - 60
    assert not right.maps.accumulators.any()
    assert int(right.maps.ring["heard_ns"]) == int(right.maps.ring["seen"]) == 0
    assert right.maps.count(1, VIEW, 0) == 0
    before = right.maps.counters()
    outsider.send(wire.ethernet(left.mac, good))
    outsider.send(wire.ethernet(left.mac, passed))
    assert settled(right, before, 2) == {"added": 1, "raised": 1}, "as they were, they are good"


def test_replayed(pair: tuple[DataPlane, DataPlane], outsider: socket.socket) -> None:
    """A stranger records what members send, and sends all of it again and again."""
    left, right = pair
    lanes = random_lanes(2)
    recorded = [one_fragment(lanes[:1], 0, sequence=1), one_fragment(lanes[1:], 1, sequence=2)]
    again = token(1, 7, 3)
    again = encode.sign(again[:2] + b"\0\1" + again[4:20] + b"\0\0\0\4" + again[24:], KEY)
    passed = token(1, 7, 3)
    passed = encode.sign(passed[:20] + b"\0\0\0\3" + passed[24:], KEY)
    recorded += [passed, again]
    before = right.maps.counters()
    for frame in recorded:
        outsider.send(wire.ethernet(left.mac, frame))
    assert settled(right, before, 4) == {"added": 2, "heard": 1, "raised": 1}
    sums, heard = right.maps.accumulators.copy(), int(right.maps.ring["heard_ns"])
    seen = int(right.maps.ring["seen"])
    before = right.maps.counters()
    for _ in range(500):
        for frame in recorded:
            outsider.send(wire.ethernet(left.mac, frame))
    found = settled(right, before, 2000)
    assert found == {"duplicate": 1000, "stale": 500, "replayed": 500}
    enough = one_fragment(lanes[:1], 2, sequence=5000)
    outsider.send(wire.ethernet(left.mac, enough))
    until(lambda: right.maps.count(1, VIEW, 1) == 3, "the member goes on")
    before = right.maps.counters()
    later = token(1, 8, 3)  # tokens have a window of their own
    later = encode.sign(later[:20] + (5000).to_bytes(4, "big") + later[24:], KEY)
    outsider.send(wire.ethernet(left.mac, later))
    assert settled(right, before, 1) == {"heard": 1}
    seen = int(right.maps.ring["seen"])
    sums, heard = right.maps.accumulators.copy(), int(right.maps.ring["heard_ns"])
    before = right.maps.counters()
    for _ in range(500):
        for frame in recorded:
            outsider.send(wire.ethernet(left.mac, frame))
    assert settled(right, before, 2000) == {"replayed": 2000}
    assert (right.maps.accumulators == sums).all()
    assert int(right.maps.ring["heard_ns"]) == heard
    assert int(right.maps.ring["seen"]) == seen


def test_other_sockets_are_not_signed_for(
    pair: tuple[DataPlane, DataPlane], outsider: socket.socket
) -> None:
    left, right = pair
    before = right.maps.counters()
    frame = wire.ethernet(left.mac, token(1, 1, 3))
    outsider.send(frame)
    outsider.setsockopt(socket.SOL_SOCKET, socket.SO_MARK, layout().limits["MARK"] + 1)
    outsider.send(frame)
    assert settled(right, before, 2) == {"forged": 2}
    assert left.maps.sequence == 0


def test_a_key_is_for_networks_that_have_one(pair: tuple[DataPlane, DataPlane]) -> None:
    left, _ = pair
    with pytest.raises(ValueError, match="the network has one: True"):
        left.set_key(None)
    left.close()
    with DataPlane("left", NETWORK) as unkeyed, pytest.raises(ValueError, match="has one: False"):
        unkeyed.set_key(KEY)


# ---- attaching

CHILD = """
import sys, time
from nicps.dataplane import DataPlane
plane = DataPlane(sys.argv[1], int(sys.argv[2]), keyed=True)
plane.set_key(bytes.fromhex(sys.argv[3]))
print("up", flush=True)
time.sleep(60)
"""


def test_gone_with_its_process(checkout: Path) -> None:
    """After a kill -9 no frame is signed any more, whatever mark it carries."""
    with veth_pair() as (left, right), DataPlane(right, NETWORK, keyed=True) as host:
        mac = interface.read_interface(left).mac
        host.enter_view(VIEW, 2, [mac, host.mac, THIRD], 3, KEY)
        host.maps.config["enabled"] = 1
        raw = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
        child = subprocess.Popen(
            [sys.executable, "-c", CHILD, left, str(NETWORK), KEY.hex()],
            cwd=checkout,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == b"up\n"
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_MARK, layout().limits["MARK"])
            raw.bind((left, 0))
            raw.send(wire.ethernet(mac, token(1, 1, 3)))
            until(lambda: host.maps.counters()["raised"] == 1, "it was signed")
            child.send_signal(signal.SIGKILL)
            child.wait(10)

            def unsigned() -> bool:
                raw.send(wire.ethernet(mac, token(1, 1, 3)))
                return bool(host.maps.counters()["forged"])

            until(unsigned, "the program is gone")
        finally:
            child.kill()
            child.wait()
            raw.close()
            if child.stdout is not None:
                child.stdout.close()


@pytest.fixture
def no_tcx(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel before 6.6."""

    def tcx_link(*_: int) -> int:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr(bpf, "tcx_link", tcx_link)


def egress_of(name: str) -> str:
    return run(f"tc qdisc show dev {name}") + run(f"tc filter show dev {name} egress")


@pytest.mark.usefixtures("no_tcx")
def test_older_kernels_have_a_filter() -> None:
    with veth_pair() as (left, right), DataPlane(right, NETWORK, keyed=True) as host:
        with DataPlane(left, NETWORK, keyed=True) as sender:
            assert "nicps_egress" in egress_of(left)
            sender.maps.allocate(8)
            host.maps.allocate(8)
            enter(sender, host)
            send_all(sender, *fragments(20, random_lanes(20)))
            until(lambda: host.maps.count(1, VIEW, 1) == 20, "all have come, signed")
        assert "clsact" not in egress_of(left)
        assert "nicps_egress" not in egress_of(left)


@pytest.mark.usefixtures("no_tcx")
def test_other_filters_stay() -> None:
    with veth_pair() as (left, _):
        loaded = loader.load("nicps.c", {egress.PROGRAM: "sched_cls"})
        run(f"tc qdisc add dev {left} clsact")
        with IPRoute() as route:
            other = {"fd": loaded.programs[egress.PROGRAM], "name": "other", "direct_action": True}
            index = interface.read_interface(left).index
            route.tc("add-filter", "bpf", index, ":1", parent=0xFFFFFFF2, classid=1, **other)
        loaded.close()
        with DataPlane(left, NETWORK, keyed=True):
            assert "handle 0x1 flowid :1 nicps_egress" in egress_of(left)
        assert "nicps_egress" not in egress_of(left)
        assert "handle 0x1 flowid :1 other" in run(f"tc filter show dev {left} ingress")


def test_what_an_older_run_left_is_cleared(caplog: pytest.LogCaptureFixture) -> None:
    with veth_pair() as (left, _):
        found = interface.read_interface(left)
        loaded = loader.load("nicps.c", {egress.PROGRAM: "sched_cls"})
        egress.add_filter(loaded.programs[egress.PROGRAM], found)
        loaded.close()
        assert "nicps_egress" in egress_of(left)
        DataPlane(left, NETWORK).close()
        assert "the filter that an older run left on left" in caplog.text
        assert "nicps_egress" not in egress_of(left)
        assert "clsact" not in egress_of(left)
        assert not egress.clear(found)


def test_a_kernel_that_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    """One line that names what is missing."""

    def refuse(*_: int) -> int:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    with veth_pair() as (left, _):
        monkeypatch.setattr(bpf, "tcx_link", refuse)
        with pytest.raises(EnvironmentProblem, match=r"left takes no program at its egress: Oper"):
            DataPlane(left, NETWORK, keyed=True)
        assert "prog/xdp" not in run(f"ip -d link show {left}")
        program = loader.load("nicps.c", {"nicps_xdp": "xdp"})
        with pytest.raises(EnvironmentProblem, match=r"needs Linux 6\.6, or the modules") as caught:
            egress.add_filter(program.programs["nicps_xdp"], interface.read_interface(left))
        program.close()
        assert "\n" not in str(caught.value)
        assert not isinstance(caught.value, BpfLoadError)


# ---- what `nicps doctor --key` finds


@pytest.mark.parametrize("kernel", ["this", "older"])
def test_doctor_tries_it_and_leaves_nothing(kernel: str, request: pytest.FixtureRequest) -> None:
    if kernel == "older":
        request.getfixturevalue("no_tcx")
    with veth_pair() as (left, _):
        row = check_signing(interface.read_interface(left))
        assert (row.name, row.state) == ("signing", "ok")
        assert row.found == "clsact" if kernel == "older" else row.found in ("tcx", "clsact")
        assert "clsact" not in egress_of(left)
        assert "nicps" not in egress_of(left)


@pytest.mark.usefixtures("no_tcx")
def test_doctor_takes_nothing_from_an_agent() -> None:
    with veth_pair() as (left, _), DataPlane(left, NETWORK, keyed=True):
        row = check_signing(interface.read_interface(left))
        assert row.state == "warn" and row.mend
        assert "nicps_egress" in egress_of(left)


def test_doctor_says_what_a_kernel_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: int) -> int:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    with veth_pair() as (left, _):
        monkeypatch.setattr(bpf, "tcx_link", refuse)
        row = check_signing(interface.read_interface(left))
        assert row.state == "fail" and "Linux 6.6" in row.mend
        names = [row.name for row in check_interface(left, keyed=True)]
        assert names == ["interface", "MTU", "XDP", "queue", "signing"]
        assert "signing" not in [row.name for row in check_interface(left)]
