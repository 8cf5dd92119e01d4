# SPDX-License-Identifier: Apache-2.0
"""A `simple_switch` with our program, and in place of a lab's bridge: host k is at its port k.

What starts one elsewhere (`vm-lab/mininet_lab.py`, the tests) takes its command lines from here.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from nicps.errors import EnvironmentProblem, NetworkProblem
from nicps.lab import links, namespaces
from nicps.lab.lab import Lab
from nicps.switch import Switch, program
from nicps.switch.runtime import DEFAULT_PORT

#: The controller's port, the interface there, and the cable's other end.
CONTROLLER, NEAR_CPU, CPU = 64, "near-cpu", "cpu"
_READY_S = 20.0
_POLL_S = 0.02
_OFFLOADS = "tx off rx off tso off gso off gro off"


def require() -> None:
    """Look for the switch.

    Raises:
        EnvironmentProblem: there is no simple_switch.
    """
    if shutil.which("simple_switch") is None:
        raise EnvironmentProblem(
            "there is no simple_switch: install the p4lang project's BMv2 (docs/switch.md)"
        )


def switch_command(ports: Mapping[int, str], config: Path | None = None) -> list[str]:
    """The switch on these interfaces, with our program or another (p4c's JSON)."""
    command = ["simple_switch", str(config or program.compiled())]
    command += ["--thrift-port", str(DEFAULT_PORT)]
    return command + [word for port in ports.items() for word in ("-i", "{}@{}".format(*port))]


def controller_arguments(ports: Iterable[int]) -> list[str]:
    """Of `nicps`, for the controller beside the switch; CONTROLLER is not one of the hosts' ports."""
    hosts = ",".join(str(port) for port in ports if port != CONTROLLER)
    run = ["switch", "p4", "run", "--iface", CPU, "--controller", str(CONTROLLER)]
    return [*run, "--ports", hosts]


def quieten(iface: str) -> list[str]:
    """Commands: frames go through as they are, without offloads, and IPv6 does not chatter."""
    return [f"ip link set {iface} addrgenmode none", f"ethtool -K {iface} {_OFFLOADS}"]


def controller_cable() -> list[str]:
    """Commands that make the cable between switch and controller."""
    add = f"ip link add {NEAR_CPU} type veth peer name {CPU}"
    ends = [(*quieten(end), f"ip link set {end} up") for end in (NEAR_CPU, CPU)]
    return [add, *ends[0], *ends[1]]


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
        require()
        self.process = subprocess.Popen(
            ["ip", "netns", "exec", self.netns, *switch_command(self.ports, self.config)],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )
        deadline = time.monotonic() + _READY_S
        try:
            while not self._listens():
                if self.process.poll() is not None or time.monotonic() > deadline:
                    raise EnvironmentProblem(f"simple_switch does not start: {self.said()[-300:]}")
                time.sleep(_POLL_S)
        except BaseException:
            self.stop()
            raise

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
        return namespaces.inside(self.netns, lambda: Switch.connect("127.0.0.1", DEFAULT_PORT))

    def __enter__(self) -> Bmv2:
        try:
            self.start()
        except BaseException:
            self._log.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._log.close()


@contextlib.contextmanager
def in_place_of_the_bridge(lab: Lab, config: Path | None = None) -> Iterator[Bmv2]:
    """Make the lab, with a `simple_switch` where its bridge was; its controller's port ends in CPU.

    Raises:
        EnvironmentProblem, LabProblem: as `Lab.up` and `Bmv2.start`.
    """
    lab.up()
    name = lab.switch_netns
    ports = {host.number: links.port_name(host.number) for host in lab.hosts}
    _in(name, f"ip link del {links.BRIDGE}", *controller_cable())
    for end in ports.values():
        _in(name, *quieten(end), f"ip link set {end} up")
    for host in lab.hosts:
        _in(host.netns, *quieten(links.HOST_INTERFACE))
    with Bmv2(name, {**ports, CONTROLLER: NEAR_CPU}, config) as bmv2:
        yield bmv2


def _in(netns: str, *commands: str) -> None:
    for command in commands:
        words = ["ip", "netns", "exec", netns, *command.split()]
        done = subprocess.run(words, capture_output=True, text=True, timeout=30)
        if done.returncode:
            raise EnvironmentProblem(f"{command}: {done.stderr.strip()}")
