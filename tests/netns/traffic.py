# SPDX-License-Identifier: Apache-2.0
"""Numbered broadcasts between the hosts of a lab, for the tests of its faults."""

from __future__ import annotations

import contextlib
import errno
import select
import socket
import struct
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

from nicps.lab import Lab, PortCount
from tests.netns.labs import raw_socket, until

ETHERTYPE = 0x88B6  # the other local experimental one: no program filters it
BROADCAST = b"\xff" * 6
_HEAD = 14
_SO_RCVBUFFORCE = 33
_SOL_PACKET = 263
_PACKET_IGNORE_OUTGOING = 23


def mac_bytes(mac: str) -> bytes:
    """Six bytes."""
    return bytes.fromhex(mac.replace(":", ""))


def numbered(source: str, number: int, target: bytes = BROADCAST) -> bytes:
    """A frame of 64 bytes."""
    body = struct.pack(">I", number) + bytes((number + n) % 256 for n in range(46))
    return target + mac_bytes(source) + struct.pack(">H", ETHERTYPE) + body


def number_of(frame: bytes) -> int:
    """The number in it."""
    return int(struct.unpack_from(">I", frame, _HEAD)[0])


class Traffic:
    """A packet socket on every host of a lab whose ports have had a fault, so that they count."""

    def __init__(self, lab: Lab, sockets: dict[str, socket.socket]) -> None:
        self.lab = lab
        self.sockets = sockets
        self.sent = dict.fromkeys(sockets, 0)
        self.heard: dict[str, list[bytes]] = {name: [] for name in sockets}

    def send(self, host: str, numbers: Iterable[int]) -> None:
        """Broadcast as fast as the receivers take it."""
        mac, sock = self.lab.host(host).mac, self.sockets[host]
        for count, number in enumerate(numbers):
            frame = numbered(mac, number)
            while True:
                try:
                    sock.send(frame)
                    break
                except OSError as error:
                    if error.errno != errno.ENOBUFS:
                        raise
                    self.listen()
            self.sent[host] += 1
            if count % 64 == 0:
                self.listen()

    def listen(self) -> None:
        """Take in what has arrived."""
        for name, sock in self.sockets.items():
            with contextlib.suppress(BlockingIOError):
                while True:
                    self.heard[name].append(sock.recv(2000))

    def hear(self, host: str, count: int) -> None:
        """Until the host has heard that many."""
        while len(self.heard[host]) < count:
            assert select.select([self.sockets[host]], [], [], 10)[0], f"{host} hears nothing"
            self.listen()

    def settle(self) -> None:
        """Until every frame is accounted for: passed and heard, or dropped."""

        def settled() -> bool:
            self.listen()
            ports = self.lab.counters()
            passed = {name: port.from_host.passed for name, port in ports.items()}
            for name, port in ports.items():
                from_host, to_host = _ended(port.from_host), _ended(port.to_host)
                to_come = sum(passed.values()) - passed[name]
                if (from_host, to_host) != (self.sent[name], to_come):
                    return False
                if len(self.heard[name]) != port.to_host.passed:
                    return False
            return True

        until(settled, "every frame is accounted for")

    def numbers(self, host: str) -> list[int]:
        """What the host has heard, by number."""
        return [number_of(frame) for frame in self.heard[host]]


def _ended(count: PortCount) -> int:
    """Frames that a port has done with, a copy not counted."""
    return count.passed + count.dropped + count.severed - count.duplicated


@contextmanager
def traffic(lab: Lab) -> Iterator[Traffic]:
    """Sockets that take a great many frames."""
    with ExitStack() as stack:
        sockets = {}
        for host in lab.hosts:
            sock = stack.enter_context(raw_socket(host, ETHERTYPE))
            sock.setsockopt(_SOL_PACKET, _PACKET_IGNORE_OUTGOING, 1)
            sock.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, 64 << 20)
            sock.setblocking(False)
            sockets[host.name] = sock
        yield Traffic(lab, sockets)
