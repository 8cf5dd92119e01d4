# SPDX-License-Identifier: Apache-2.0
"""A `simple_switch` with our program, in place of a lab's bridge: host k is at its port k.

Code that starts a switch elsewhere (`vm-lab/mininet_lab.py`, the tests) takes its command lines from here.
"""

from __future__ import annotations

import contextlib
import subprocess
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from pyroute2 import IPRoute

from nicps.errors import EnvironmentProblem, NetworkProblem
from nicps.lab import links, namespaces, processes
from nicps.lab.lab import Lab
from nicps.programs import require_programs
from nicps.switch import Switch, program
from nicps.switch.runtime import DEFAULT_PORT, require_modules

#: The controller's port, the interface there, and the cable's other end.
CONTROLLER, NEAR_CPU, CPU = 64, "near-cpu", "cpu"
_READY_S = 20.0
_POLL_S = 0.02
SIMPLE_SWITCH = "simple_switch"
# Nothing listens to it. By default it is a file in /tmp that all switches of a machine share, and the second switch
# ends.
_NOTIFICATIONS = f"tcp://127.0.0.1:{DEFAULT_PORT + 1}"
_IPV6 = Path("/proc/sys/net/ipv6/conf")
_NO_ADDRESS = "1"  # of addr_gen_mode: `ip link set IF addrgenmode none`


def require_bmv2() -> str:
    """The path of `simple_switch`; its Python modules are there too.

    Raises:
        EnvironmentProblem: the switch or a module is not installed.
    """
    (switch,) = require_programs(SIMPLE_SWITCH, purpose="a P4 switch")
    require_modules()
    return switch


def switch_command(
    ports: Mapping[int, str], config: Path | None = None, queues: int = 1
) -> list[str]:
    """The switch on these interfaces, with our program or another (p4c's JSON), and so many queues at each port."""
    command = [require_bmv2(), str(config or program.compiled())]
    command += ["--thrift-port", str(DEFAULT_PORT), "--notifications-addr", _NOTIFICATIONS]
    command += [word for port in ports.items() for word in ("-i", "{}@{}".format(*port))]
    # What the target takes, and not BMv2 itself.
    return [*command, "--", "--priority-queues", str(queues)] if queues > 1 else command


def controller_arguments(ports: Iterable[int]) -> list[str]:
    """Arguments of `nicps`, for the controller beside the switch; CONTROLLER is not one of the hosts' ports."""
    hosts = ",".join(str(port) for port in ports if port != CONTROLLER)
    run = ["switch", "p4", "run", "--iface", CPU, "--controller", str(CONTROLLER)]
    return [*run, "--ports", hosts]


def quieten(iface: str) -> None:
    """Pass frames unchanged, without offloads and IPv6 traffic; in this thread's namespace."""
    links.disable_offloads(iface)
    mode = _IPV6 / iface / "addr_gen_mode"
    if mode.exists():  # it does not exist without IPv6 in the kernel
        mode.write_text(_NO_ADDRESS)


def add_cable(near: str, far: str) -> None:
    """A veth pair, quiet and up; in this thread's namespace."""
    with IPRoute() as ipr:
        ipr.link("add", ifname=near, kind="veth", peer={"ifname": far})
        for end in (near, far):
            quieten(end)
            ipr.link("set", index=links.index_of(ipr, end), state="up")


def add_controller_cable() -> None:
    """The cable between switch and controller; in this thread's namespace."""
    add_cable(NEAR_CPU, CPU)


class Bmv2:
    """The process, in a namespace that has its interfaces. Use as a context manager.

    Args:
        netns: the namespace's name.
        ports: interface by port number.
        config: p4c's JSON; ours by default.
        queues: of each port, by the priority of frames.
    """

    def __init__(
        self, netns: str, ports: Mapping[int, str], config: Path | None = None, queues: int = 1
    ) -> None:
        self.netns, self.ports = netns, dict(ports)
        self.config, self.queues = config or program.compiled(), queues
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - as long as the process

    def start(self) -> None:
        """Start it, and wait until it listens.

        Raises:
            EnvironmentProblem: there is no simple_switch, or it does not start.
        """
        self.process = subprocess.Popen(
            processes.launcher(self.netns, switch_command(self.ports, self.config, self.queues)),
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
        """kill -9: the switch loses its state."""
        self.process.kill()
        self.process.wait(10.0)

    def said(self) -> str:
        """The output of the process."""
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
def in_place_of_the_bridge(lab: Lab, config: Path | None = None, queues: int = 1) -> Iterator[Bmv2]:
    """Make the lab, with a `simple_switch` where its bridge was; its controller's port ends in CPU.

    Raises:
        EnvironmentProblem, LabProblem: as `Lab.up` and `Bmv2.start`.
    """
    require_bmv2()
    lab.up()
    ports = {host.number: links.port_name(host.number) for host in lab.hosts}

    def rebuild() -> None:
        with IPRoute() as ipr:
            ipr.link("del", index=links.index_of(ipr, links.BRIDGE))
            for end in ports.values():
                quieten(end)
                ipr.link("set", index=links.index_of(ipr, end), state="up")
        add_controller_cable()

    namespaces.inside(lab.switch_netns, rebuild)
    for host in lab.hosts:
        namespaces.inside(host.netns, lambda: quieten(links.HOST_INTERFACE))
    with Bmv2(lab.switch_netns, {**ports, CONTROLLER: NEAR_CPU}, config, queues) as bmv2:
        yield bmv2
