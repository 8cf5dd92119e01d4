# SPDX-License-Identifier: Apache-2.0
"""A `simple_switch` with our program, in place of a lab's bridge: host k is at its port k."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from nicps.errors import EnvironmentProblem, NetworkProblem
from nicps.lab import links, namespaces
from nicps.lab.lab import Lab
from nicps.switch import Switch, program

CONTROLLER = 64  # its port
THRIFT = 9090
_READY_S = 20.0
_POLL_S = 0.02
_OFFLOADS = "tx off rx off tso off gso off gro off"


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
        """Start it, and wait until it listens.

        Raises:
            EnvironmentProblem: there is no simple_switch, or it does not start.
        """
        if shutil.which("simple_switch") is None:
            raise EnvironmentProblem(
                "there is no simple_switch: install the p4lang project's BMv2 (docs/switch.md)"
            )
        arguments = [str(self.config), "--thrift-port", str(THRIFT)]
        for number, iface in self.ports.items():
            arguments += ["-i", f"{number}@{iface}"]
        self.process = subprocess.Popen(
            ["ip", "netns", "exec", self.netns, "simple_switch", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )
        deadline = time.monotonic() + _READY_S
        while not self._listens():
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.stop()
                raise EnvironmentProblem(f"simple_switch does not start: {self.said()[-300:]}")
            time.sleep(_POLL_S)

    def _listens(self) -> bool:
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


@contextlib.contextmanager
def in_place_of_the_bridge(lab: Lab, config: Path | None = None) -> Iterator[Bmv2]:
    """Make the lab, with a `simple_switch` where its bridge was; its controller's port ends in `cpu`.

    Raises:
        EnvironmentProblem, LabProblem: as `Lab.up` and `Bmv2.start`.
    """
    lab.up()
    name = lab.switch_netns
    ports = {host.number: links.port_name(host.number) for host in lab.hosts}
    ports[CONTROLLER] = "near-cpu"
    _in(name, f"ip link del {links.BRIDGE}")
    _in(name, "ip link add near-cpu type veth peer name cpu")
    for end in (*ports.values(), "cpu"):
        _in(name, f"ip link set {end} up")
        _in(name, f"ethtool -K {end} {_OFFLOADS}")
    for host in lab.hosts:
        _in(host.netns, f"ethtool -K {links.HOST_INTERFACE} {_OFFLOADS}")
    with Bmv2(name, ports, config) as bmv2:
        yield bmv2


def _in(netns: str, command: str) -> None:
    done = subprocess.run(
        ["ip", "netns", "exec", netns, *command.split()], capture_output=True, text=True, timeout=30
    )
    if done.returncode:
        raise EnvironmentProblem(f"{command}: {done.stderr.strip()}")
