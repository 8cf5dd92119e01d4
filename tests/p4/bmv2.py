# SPDX-License-Identifier: Apache-2.0
"""A `simple_switch` with our program in a network namespace, for tests.

+----------- namespace -----------+
|  far1 --- 1 +---------------+   |      far1 ...: where hosts would be
|  far2 --- 2 | simple_switch |   |      the controller's port ends in `cpu`
|  far3 --- 3 |               | 64 --- cpu
|             +---------------+   |
+---------------------------------+
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from nicps.bench.bmv2 import (
    CONTROLLER,
    CPU,
    NEAR_CPU,
    Bmv2,
    add_cable,
    add_controller_cable,
    controller_arguments,
)
from nicps.lab import links, namespaces, processes
from nicps.switch import Switch
from tests.netns.labs import ROOT, until
from tests.netns.members import NICPS

_ETH_P_ALL = 3
_PACKET_AUXDATA, _PACKET_IGNORE_OUTGOING, _SOL_PACKET = 8, 23, 263
_VLAN_VALID = 0x10  # of tp_status


class Wires:
    """Sockets at the far ends of the ports: whole frames in, and out."""

    def __init__(self, netns: str, numbers: Iterator[int] | range) -> None:
        def dial(name: str) -> socket.socket:
            made = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ETH_P_ALL))
            made.setsockopt(_SOL_PACKET, _PACKET_IGNORE_OUTGOING, 1)
            made.setsockopt(_SOL_PACKET, _PACKET_AUXDATA, 1)
            made.bind((name, _ETH_P_ALL))
            made.settimeout(0.0)
            return made

        self._sockets = {
            number: namespaces.inside(netns, lambda n=number: dial(f"far{n}")) for number in numbers
        }
        self._sockets[CONTROLLER] = namespaces.inside(netns, lambda: dial(CPU))

    def send(self, port: int, frame: bytes) -> None:
        """A host sends."""
        self._sockets[port].send(frame.ljust(60, b"\0"))

    def wait(self, wait_s: float) -> None:
        """Until something comes to a far end, or that long."""
        select.select([*self._sockets.values()], (), (), wait_s)

    def heard(self) -> dict[int, list[bytes]]:
        """What has come to each far end since the last time."""
        found: dict[int, list[bytes]] = {}
        for port, wire in self._sockets.items():
            with contextlib.suppress(BlockingIOError):
                while True:
                    frame = _receive(wire)
                    found.setdefault(port, []).append(frame)
        return found

    def exchange(self, port: int, *frames: bytes, wait_s: float = 0.15) -> dict[int, list[bytes]]:
        """Send, and what has come out by the time that nothing more does."""
        self.heard()
        for frame in frames:
            self.send(port, frame)
        found: dict[int, list[bytes]] = {}
        quiet = time.monotonic() + wait_s
        while time.monotonic() < quiet:
            for number, more in self.heard().items():
                found.setdefault(number, []).extend(more)
                quiet = time.monotonic() + wait_s
            time.sleep(0.002)
        return found

    def close(self) -> None:
        """Close the sockets."""
        for wire in self._sockets.values():
            wire.close()


def _receive(wire: socket.socket) -> bytes:
    """A frame as it came: the kernel has taken its tag out."""
    frame, ((_, _, beside),), *_ = wire.recvmsg(2048, 128)
    status, *_, tci, tpid = struct.unpack("IIIHHHH", beside)
    tag = struct.pack(">HH", tpid, tci) if status & _VLAN_VALID else b""
    return frame[:12] + tag + frame[12:]


@contextlib.contextmanager
def bench(name: str, ports: int, queues: int = 1) -> Iterator[tuple[Bmv2, Wires]]:
    """A switch on veth pairs whose far ends are in the same namespace; all gone at the end."""
    namespaces.create([name])
    try:
        pairs = {number: (f"near{number}", f"far{number}") for number in range(1, ports + 1)}

        def lay() -> None:
            add_controller_cable()
            for near, far in pairs.values():
                add_cable(near, far)

        links.with_netlink(name, lambda ipr: ipr.link("set", index=1, state="up"))
        namespaces.inside(name, lay)
        hosts = {number: near for number, (near, _) in pairs.items()}
        with Bmv2(name, {**hosts, CONTROLLER: NEAR_CPU}, queues=queues) as bmv2:
            wires = Wires(name, range(1, ports + 1))
            try:
                yield bmv2, wires
            finally:
                wires.close()
    finally:
        namespaces.remove([name])


@contextlib.contextmanager
def pace(switch: Switch, frames_per_s: int) -> Iterator[None]:
    """Each queue of each port sends at most so many frames a second."""
    switch.limit_queues(frames_per_s)
    try:
        yield
    finally:
        switch.limit_queues(0)


class Controller:
    """`nicps switch p4 run` beside the switch."""

    def __init__(self, bmv2: Bmv2, log: Path, *arguments: str) -> None:
        command = [*NICPS, *controller_arguments(bmv2.ports), "--config", str(bmv2.config)]
        self._command = processes.launcher(bmv2.netns, [*command, *arguments])
        self.log = log
        self.start()

    def start(self) -> None:
        """Start it, and wait until it records."""
        before = self.log.read_text() if self.log.exists() else ""
        with self.log.open("ab") as file:
            self._process = subprocess.Popen(
                self._command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=file, stderr=file
            )
        until(
            lambda: "recording the members" in self.log.read_text()[len(before) :],
            "the controller",
            20.0,
        )

    def kill(self) -> None:
        """kill -9"""
        self._process.kill()
        self._process.wait(10.0)

    def end(self) -> None:
        """As a service manager does it."""
        self._process.terminate()
        assert self._process.wait(10.0) == 0, self.log.read_text()


@contextlib.contextmanager
def controller(bmv2: Bmv2, log: Path, *arguments: str) -> Iterator[Controller]:
    """One that ends with the block."""
    running = Controller(bmv2, log, *arguments)
    try:
        yield running
    finally:
        running.end()
