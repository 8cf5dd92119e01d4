# SPDX-License-Identifier: Apache-2.0
"""`nicps join --tags`: frames leave with the priority of their channel, and are taken with a tag and without."""

from __future__ import annotations

import socket
import struct
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from nicps import wire
from nicps.auth import write_key
from nicps.lab import links, namespaces
from tests.netns.labs import ROOT
from tests.netns.members import Network, tiny_job
from tests.netns.test_wire_order import SETTINGS

_PACKET_AUXDATA, _SOL_PACKET, _ETH_P_ALL = 8, 263, 3
_VLAN_VALID = 0x10
_SO_RCVBUFFORCE = 33


class Listener:
    """Our frames that a host has sent, as they come in at its port of the switch: by type, channel and priority."""

    def __init__(self, network: Network, host: str) -> None:
        self._mac = bytes.fromhex(network.lab.host(host).mac.replace(":", ""))
        port = "p" + host.removeprefix("h")
        netns = namespaces.switch_name(network.lab.name)
        self._socket = namespaces.inside(netns, lambda: self._open(port))

    @staticmethod
    def _open(port: str) -> socket.socket:
        made = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
        made.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, 64 << 20)
        made.setsockopt(_SOL_PACKET, _PACKET_AUXDATA, 1)
        made.bind((port, _ETH_P_ALL))
        made.setblocking(False)
        return made

    def seen(self) -> Counter[tuple[str, int, int | None]]:
        """All of them so far; the priority is None where there was no tag."""
        return Counter(seen for seen, _ in self.frames())

    def frames(self) -> Iterator[tuple[tuple[str, int, int | None], bytes]]:
        """The same one by one, with the frame's first 96 bytes."""
        while True:
            try:
                frame, more, *_ = self._socket.recvmsg(96, 128)
            except BlockingIOError:
                return
            if frame[6:12] != self._mac or frame[12:14] != struct.pack(">H", wire.ETHERTYPE):
                continue
            status, *_, tci, _ = struct.unpack("IIIHHHH", more[0][2])
            kind = wire.FrameType(frame[15]).name
            channel = wire.channel_of(int.from_bytes(frame[16:18], "big"))
            yield (kind, channel, tci >> 13 if status & _VLAN_VALID else None), frame

    def close(self) -> None:
        self._socket.close()


@pytest.fixture(params=[False, True], ids=["offload", "in the frame"])
def network(request: pytest.FixtureRequest) -> Iterator[Network]:
    """Two hosts, the first one with tags. A port takes a tag out of a frame; or leaves it there for XDP, with a key."""
    program = ROOT / "tests" / "netns" / "urgent_program.py"
    with Network(2, program=program, arguments=("--silence", "20")) as made:
        made.lab.up()
        key: tuple[str, ...] = ()
        if request.param:
            key = "--key", str(made.folder / "key")
            write_key(Path(key[1]))
            for port in ("p1", "p2"):
                namespaces.inside(
                    namespaces.switch_name(made.lab.name), partial(links.keep_tags, port)
                )
        made.join("h1", *key, "--tags")
        made.join("h2", *key)
        made.all_stand_by()
        yield made


@pytest.mark.short("in the frame")
def test_a_host_with_tags_trains_with_one_without(network: Network) -> None:
    """Every frame of the first one has a tag, those of the kernel's program too, and none of the other one."""
    listeners = [Listener(network, host) for host in network.names]
    run = network.train(tiny_job(network.folder), **SETTINGS)
    tagged, plain = (listener.seen() for listener in listeners)
    for listener in listeners:
        listener.close()
    assert run.result["weights_identical"]
    assert len(run.metrics("h1")) == SETTINGS["rounds"] + 1, "and a test"
    assert {priority for _, _, priority in plain} == {None}
    assert None not in {priority for _, _, priority in tagged}, tagged
    stripes = {"CONTRIBUTION", "SUM"}
    for kind in stripes:
        # Channel 1 has urgency 0 in the first phase, and 1 in the second one.
        at = {(channel, priority) for name, channel, priority in tagged if name == kind}
        assert at == {(0, 0), (1, 0), (1, 2)}, kind
    rest = {priority for kind, _, priority in tagged if kind in ("WANT", "DECISION")}
    assert rest == {7}
    assert {p for kind, _, p in tagged if kind == "TOKEN"} == {7}


def test_a_switch_that_adds_takes_no_tags(network: Network) -> None:
    ended = network.command("h1", "join", "--iface", "eth1", "--tags", "--trust-switch")
    assert "a switch that adds takes no frames with a tag" in ended.only_error(2)
