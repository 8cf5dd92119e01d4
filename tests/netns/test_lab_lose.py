# SPDX-License-Identifier: Apache-2.0
"""`nicps lab lose-next`: so many frames of one type that a host sends are lost, for all, and no others."""

from __future__ import annotations

import struct

import pytest

from nicps import wire
from nicps.lab import Lab, LabSettings
from tests.netns.labs import nicps, raw_socket
from tests.netns.traffic import BROADCAST, mac_bytes
from tests.reaper import fresh_name

pytestmark = pytest.mark.xdp


def frame(mac: str, kind: int, number: int, ethertype: int = wire.ETHERTYPE) -> bytes:
    """Only its head is read."""
    head = BROADCAST + mac_bytes(mac) + struct.pack(">HBB", ethertype, wire.VERSION, kind)
    return head + number.to_bytes(46, "big")


def test_lose_next() -> None:
    token, view = wire.FrameType.TOKEN, wire.FrameType.VIEW
    with Lab(LabSettings(fresh_name(), hosts=3)) as lab:
        said = nicps("lab", "lose-next", "h1", "token", "2", "--lab", lab.name)
        assert said.returncode == 0, said.stderr
        assert "h1  loses the next 2 TOKEN" in said.stdout
        first, second, third = lab.hosts
        sent = [(token, 1), (view, 2), (token, 3), (token, 4), (view, 5)]
        with (
            raw_socket(first, wire.ETHERTYPE) as one,
            raw_socket(second, wire.ETHERTYPE) as two,
            raw_socket(third, wire.ETHERTYPE) as three,
        ):
            two.send(frame(second.mac, token, 9))  # another host's
            for kind, number in sent:
                one.send(frame(first.mac, kind, number))
            for sock, expected in ((two, [2, 4, 5]), (three, [9, 2, 4, 5])):
                sock.settimeout(10)
                heard = [sock.recv(2000)[-1] for _ in expected]
                assert heard == expected
        assert lab.counters()["h1"].from_host.dropped == 2
        assert lab.faults()["h1"].lose_left == 0
        lab.lose_next("h1", view, 3)
        lab.clear()
        assert lab.faults()["h1"].lose_left == 0
        refused = nicps("lab", "lose-next", "h1", "token", "-1", "--lab", lab.name)
        assert refused.returncode == 2
