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
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from nicps.errors import NetworkProblem
from nicps.lab import links, namespaces
from nicps.switch import Switch, program
from tests.netns.labs import ROOT, until
from tests.netns.members import NICPS, Network
from tests.netns.wires import run

CONTROLLER = 64
THRIFT = 9090
_READY_S = 20.0
_ETH_P_ALL = 3


class Bmv2:
    """The process, in a namespace that has its interfaces. Use as a context manager.

    Args:
        netns: the namespace's name.
        ports: interface by port number.
        config: p4c's JSON; ours, if it is not named.
    """

    def __init__(self, netns: str, ports: Mapping[int, str], config: Path | None = None) -> None:
        self.netns, self.ports = netns, dict(ports)
        self.config = config or program.compiled()
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - as long as the process

    def start(self) -> None:
        """Start it, and wait until it listens."""
        arguments = [str(self.config), "--thrift-port", str(THRIFT)]
        for number, iface in self.ports.items():
            arguments += ["-i", f"{number}@{iface}"]
        self.process = subprocess.Popen(
            ["ip", "netns", "exec", self.netns, "simple_switch", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )
        until(self._listens, "simple_switch", _READY_S)

    def _listens(self) -> bool:
        assert self.process.poll() is None, self.said()
        try:
            self.connect().close()
        except NetworkProblem:
            return False
        return True

    def stop(self) -> None:
        """kill -9: what it knew is gone."""
        self.process.kill()
        self.process.wait(10.0)

    def said(self) -> str:
        """What it has printed."""
        self._log.seek(0)
        return self._log.read()

    def connect(self) -> Switch:
        """A connection to its run-time API."""
        return namespaces.inside(self.netns, lambda: Switch.connect("127.0.0.1", THRIFT))

    def __enter__(self) -> Bmv2:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._log.close()


class Wires:
    """Sockets at the far ends of the ports: whole frames in, and out."""

    def __init__(self, netns: str, numbers: Iterator[int] | range) -> None:
        def dial(name: str) -> socket.socket:
            made = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ETH_P_ALL))
            made.setsockopt(263, 23, 1)  # SOL_PACKET, PACKET_IGNORE_OUTGOING
            made.bind((name, _ETH_P_ALL))
            made.settimeout(0.0)
            return made

        self._sockets = {
            number: namespaces.inside(netns, lambda n=number: dial(f"far{n}")) for number in numbers
        }
        self._sockets[CONTROLLER] = namespaces.inside(netns, lambda: dial("cpu"))

    def send(self, port: int, frame: bytes) -> None:
        """A host sends."""
        self._sockets[port].send(frame.ljust(60, b"\0"))

    def heard(self) -> dict[int, list[bytes]]:
        """What has come to each far end since the last time."""
        found: dict[int, list[bytes]] = {}
        for port, wire in self._sockets.items():
            with contextlib.suppress(BlockingIOError):
                while True:
                    frame = wire.recv(2048)
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


@contextlib.contextmanager
def bench(name: str, ports: int) -> Iterator[tuple[Bmv2, Wires]]:
    """A switch on veth pairs whose far ends are in the same namespace; all gone at the end."""
    namespaces.create([name])
    try:
        inside = f"ip netns exec {name} "
        run(inside + "ip link set lo up")
        pairs = {number: (f"near{number}", f"far{number}") for number in range(1, ports + 1)}
        pairs[CONTROLLER] = ("near-cpu", "cpu")
        for near, far in pairs.values():
            run(inside + f"ip link add {near} type veth peer name {far}")
            for end in (near, far):
                run(inside + f"ip link set {end} addrgenmode none")
                run(inside + f"ip link set {end} up")
                run(inside + f"ethtool -K {end} tx off rx off tso off gso off gro off")
        with Bmv2(name, {number: near for number, (near, _) in pairs.items()}) as bmv2:
            wires = Wires(name, range(1, ports + 1))
            try:
                yield bmv2, wires
            finally:
                wires.close()
    finally:
        namespaces.remove([name])


@contextlib.contextmanager
def in_place_of_the_bridge(network: Network, config: Path | None = None) -> Iterator[Bmv2]:
    """Make the network's lab, with a `simple_switch` where its bridge was; host k is at port k."""
    network.lab.up()
    name = network.lab.switch_netns
    inside = f"ip netns exec {name} "
    run(inside + f"ip link del {links.BRIDGE}")
    run(inside + "ip link add near-cpu type veth peer name cpu")
    ports = {int(host.name[1:]): links.port_name(int(host.name[1:])) for host in network.lab.hosts}
    ports[CONTROLLER] = "near-cpu"
    for end in (*ports.values(), "cpu"):
        run(inside + f"ip link set {end} up")
        run(inside + f"ethtool -K {end} tx off rx off tso off gso off gro off")
    for host in network.lab.hosts:
        offloads = "ethtool -K eth1 tx off rx off tso off gso off gro off"
        run(f"ip netns exec {host.netns} {offloads}")
    with Bmv2(name, ports, config) as bmv2:
        yield bmv2


@contextlib.contextmanager
def controller(bmv2: Bmv2, log: Path, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """`nicps switch p4 run` beside the switch, until the end."""
    hosts = ",".join(str(port) for port in bmv2.ports if port != CONTROLLER)
    command = ["ip", "netns", "exec", bmv2.netns, *NICPS, "switch", "p4", "run", "--iface", "cpu"]
    command += ["--ports", hosts, "--controller", str(CONTROLLER)]
    command += ["--config", str(bmv2.config), *arguments]
    with log.open("ab") as file:
        process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=file, stderr=file
        )
    try:
        until(lambda: "recording the members" in log.read_text(), "the controller", 20.0)
        yield process
    finally:
        process.terminate()
        assert process.wait(10.0) == 0, log.read_text()
