# SPDX-License-Identifier: Apache-2.0
"""Frames are heard at a bridge's ports before the bridge takes them, and sent to all of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from nicps import wire
from nicps.dataplane.interface import read_interface
from nicps.dataplane.tap import Sender, Tap
from nicps.lab import Lab, LabSettings, links, namespaces
from tests.netns.labs import raw_socket, until
from tests.reaper import fresh_name

KINDS = (wire.FrameType.VIEW, wire.FrameType.SWITCH)


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with Lab(LabSettings(fresh_name(), hosts=2)) as made:
        yield made


def frame(kind: int, ethertype: int = wire.ETHERTYPE) -> bytes:
    mac = bytes.fromhex("02000a4d0001")
    head = wire.SWITCH + mac + ethertype.to_bytes(2, "big")
    return head + bytes((wire.VERSION, kind)).ljust(60, b"\0")


def test_a_tap_hears_what_it_asks_for(lab: Lab) -> None:
    """By its type, at whatever port, though it is for another address, and once for each time that it comes in."""
    tap = namespaces.inside(lab.switch_netns, lambda: Tap(wire.ETHERTYPE, KINDS))
    heard: list[tuple[str, bytes, bytes]] = []
    with raw_socket(lab.hosts[0], wire.ETHERTYPE) as sock:
        for kind in wire.FrameType:
            sock.send(frame(kind))
        sock.send(frame(wire.FrameType.VIEW, 0x88B6))
        sock.send(frame(wire.FrameType.SWITCH)[:15])
        sock.send(frame(wire.FrameType.SWITCH))

    def complete() -> bool:
        heard.extend(tap.receive())
        return len(heard) >= 3

    until(complete, "three frames")
    tap.close()
    assert [(name, source, data[1]) for name, source, data in heard] == [
        ("p1", bytes.fromhex("02000a4d0001"), kind) for kind in (*KINDS, wire.FrameType.SWITCH)
    ]


def test_a_sender_reaches_all_ports(lab: Lab) -> None:
    def make() -> Sender:
        return Sender(read_interface(links.BRIDGE), wire.ETHERTYPE, wire.SWITCH)

    sender = namespaces.inside(lab.switch_netns, make)
    socks = [raw_socket(host, wire.ETHERTYPE) for host in lab.hosts]
    for sock in socks:
        sock.settimeout(10)
    assert sender.send(b"\1" * 50)
    for sock in socks:
        assert sock.recv(2000)[:14] == wire.BROADCAST + wire.SWITCH + b"\x88\xb5"
        sock.close()
    sender.close()
