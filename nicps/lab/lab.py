# SPDX-License-Identifier: Apache-2.0
"""A lab: made, opened, used and taken down."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from pyroute2 import NetlinkError

from nicps.dataplane.loader import Loaded
from nicps.errors import UsageProblem
from nicps.lab import enter, faults, links, namespaces, port, processes, signals, state
from nicps.lab.errors import LabExists, LabNotFound, LabProblem
from nicps.lab.links import LinkStatus
from nicps.lab.port import PortCount, PortFaults
from nicps.lab.processes import Running
from nicps.lab.settings import Faults, LabSettings
from nicps.lab.shield import shielded
from nicps.lab.signals import Part
from nicps.lab.state import LabState, ProcessRecord
from nicps.lab.teardown import (
    describe_error,
    down,
    remove,
    require_root,
    standing,
    the_only,
)

Cable = Literal["up", "down", "unplugged"]


@dataclass(frozen=True)
class Host:
    """One host of a lab; `mac` and `ip` are those of its eth1."""

    number: int
    name: str
    netns: str
    mac: str
    ip: str

    def set_link(self, up: bool) -> None:
        """Take the host's eth1 down, or up again."""
        links.set_link(self.netns, links.HOST_INTERFACE, up)

    def read_link(self) -> LinkStatus:
        """The host's eth1 as the kernel has it."""
        return links.read_links(self.netns)[links.HOST_INTERFACE]


@dataclass(frozen=True)
class PortCounters:
    """The switch port of one host. Link counters are those of the port: rx came from the host."""

    link: LinkStatus
    from_host: PortCount
    to_host: PortCount


class Lab:
    """A lab that this process makes, and takes down when the context ends.

        with Lab(LabSettings(name="two", hosts=2)) as lab:
            lab.run("h1", ["ping", "-c1", lab.hosts[1].ip]).wait()

    `Lab.open` opens one that is up already; leaving its context then leaves it up. `scratch` is a folder that is
    removed with the lab, also by `down` when this process has been killed.

    Raises:
        NotRoot: namespaces need root.
        LabExists: the name is taken.
    """

    def __init__(self, settings: LabSettings, scratch: Path | None = None) -> None:
        self.settings = settings
        self._scratch = scratch
        self._owned = True
        self._made = False
        self._children: list[subprocess.Popen[Any]] = []

    @property
    def name(self) -> str:
        """The lab's name."""
        return self.settings.name

    @property
    def switch_netns(self) -> str:
        """The namespace of the switch; its ports are p1 to pN, or eth1 to ethN where it adds."""
        return namespaces.switch_name(self.name)

    @property
    def ports_netns(self) -> str:
        """The namespace of p1 to pN, whose programs apply the lab's faults to frames."""
        return links.ports_netns(self.settings)

    @property
    def hosts(self) -> tuple[Host, ...]:
        """h1 to hN."""
        return tuple(_host(self.name, n) for n in range(1, self.settings.hosts + 1))

    @classmethod
    def open(cls, name: str | None = None) -> Lab:
        """The lab of that name, which must be up; without a name the only one that is up."""
        require_root()
        if name is None:
            name = the_only()
        found = state.read(name)
        if found is None or not found.ready:
            if found is not None or name in namespaces.find():
                raise LabNotFound(f"lab {name} is half made: run `nicps lab down --lab {name}`")
            raise LabNotFound(f"no lab {name} stands: run `nicps lab up --lab {name}`")
        lab = cls(found.settings)
        lab._owned = False
        made = {lab.switch_netns, lab.ports_netns, *(host.netns for host in lab.hosts)}
        if gone := sorted(made - {*namespaces.find().get(name, ())}):
            raise LabNotFound(
                f"lab {name} has lost {', '.join(gone)}: run `nicps lab down --lab {name}`"
            )
        return lab

    def __enter__(self) -> Lab:
        if self._owned:
            self.up()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def up(self) -> None:
        """Make the lab; after any error no part of it is left.

        If Ctrl-C may come between this and the next statement, put both into a `try` whose `finally` calls `close`:
        that does nothing before `up` has begun to make something.
        """
        require_root()
        self._refuse_if_taken()
        try:
            # A compiler may run for seconds, so it does not run under the lock.
            lossy = port.fault_programs() if self.settings.loss else nullcontext()
            with port.pass_program() as xdp_program, lossy as loaded, state.lock():
                self._refuse_if_taken()
                self._made = True
                try:
                    self._make(xdp_program, loaded)
                except BaseException:
                    with shielded():
                        remove(self.name)
                    raise
        except (OSError, NetlinkError) as error:
            raise LabProblem(f"lab {self.name} cannot be made: {describe_error(error)}") from error

    def close(self) -> None:
        """Take the lab down, if this process made it, with all processes that were started in it."""
        with shielded():
            try:
                if self._made:
                    down(self.name)
                    self._made = False
            finally:
                for child in self._children:
                    child.wait()

    def host(self, name: str) -> Host:
        """The host `h1` to `hN` of that name."""
        for host in self.hosts:
            if host.name == name:
                return host
        last = self.hosts[-1].name
        raise LabNotFound(f"lab {self.name} has no host {name!r}: its hosts are h1 to {last}")

    def run(
        self, host: str | Host, argv: Sequence[str], *, user: str | None = None, **options: Any
    ) -> subprocess.Popen[Any]:
        """Start `argv` on a host, or at a `switch` that adds, as a direct child with a session of its own.

        `options` go to `subprocess.Popen`. The process ends with the lab, if it has not before.
        A command that does not exist ends with exit code 127.
        """
        name, netns = (host.name, host.netns) if isinstance(host, Host) else self._place(host)
        child = processes.start(self.name, netns, argv, user, options)
        self._children.append(child)
        self.record(child.pid, name, argv)
        return child

    def become(self, host: str, argv: Sequence[str]) -> int:
        """Replace this process by `argv` on a host; returns only if that fails (126, 127)."""
        name, netns = self._place(host)
        self.record(os.getpid(), name, argv)
        os.environ.update(processes.environment(self.name, {}))
        enter.enter(netns)
        return enter.become_command(list(argv))

    def record(self, pid: int, host: str, argv: Sequence[str]) -> None:
        """Note in the lab's state that a process belongs to it."""
        start = processes.start_time(pid)
        if start is not None:
            record = ProcessRecord(pid, start, host, tuple(argv))
            state.add_process(self.name, record, processes.alive)

    def processes(self) -> dict[str, list[Running]]:
        """The live processes that were started in the lab, by host, and at a `switch` that adds: in its namespace, or,
        where they have one of their own, by a process that is."""
        found = state.read(self.name)
        netns = {host.name: host.netns for host in self.hosts}
        if self.settings.adds:
            netns[faults.SWITCH] = self.switch_netns
        result: dict[str, list[Running]] = {name: [] for name in netns}
        places = {namespaces.identity(enter.path_of(at)): name for name, at in netns.items()}
        ours = processes.find(self.name, found.processes if found else ())
        by_pid = {process.pid: process for process in ours}
        for process in ours:
            place: Running | None = process
            while place is not None and place.netns not in places:
                place = by_pid.get(place.parent)
            if place is not None:
                result[places[place.netns]].append(process)
        return result

    def counters(self) -> dict[str, PortCounters]:
        """Every switch port's counters, by host."""
        found = self._port_links()
        counted = faults.counted(self.name, {name: link.index for name, link in found.items()})
        return {name: PortCounters(link, *counted[name]) for name, link in found.items()}

    def faults(self) -> dict[str, PortFaults]:
        """The faults of every switch port, and its side of a cut, by host."""
        return faults.told(self.name, self._ports())

    def switch_side(self) -> int:
        """The side of a cut of a switch that adds."""
        return faults.told(self.name, self._sides())[faults.SWITCH].side

    def switch_ports(self) -> dict[str, LinkStatus]:
        """The existing ports of eth1 to ethN of a switch that adds."""
        found = links.read_links(self.switch_netns)
        names = [links.switch_port_name(host.number) for host in self.hosts]
        return {name: found[name] for name in names if name in found}

    def line_lost(self) -> bool:
        """Whether the process in which delayed frames wait has ended, so that they are lost."""
        return faults.line_lost(self.name, self._ports())

    def fault(
        self,
        hosts: str,
        *,
        loss: float | None = None,
        duplicate: float | None = None,
        corrupt: float | None = None,
        reorder: float | None = None,
        delay_ms: float | None = None,
    ) -> None:
        """Change the faults of the switch ports of some hosts (`h1`, `h1,h3`, `all`), in each direction on its own;
        see `Faults`. None leaves a value as it is, 0 removes it.
        """
        given = {
            "loss": loss,
            "duplicate": duplicate,
            "corrupt": corrupt,
            "reorder": reorder,
            "delay_ms": delay_ms,
        }
        changes = {name: value for name, value in given.items() if value is not None}
        Faults(**changes)  # refuse invalid values before a compiler runs

        def how(before: PortFaults) -> PortFaults:
            return replace(before, faults=replace(before.faults, **changes))

        faults.change(self.name, self._ports(), self.select(hosts), how)

    def clear(self, hosts: str = "all") -> None:
        """Take all faults off the ports of these hosts, the lab's own loss too; a cut stays."""
        chosen = self.select(hosts)
        faults.change(
            self.name, self._ports(), chosen, lambda b: replace(b, faults=Faults(), lose_left=0)
        )

    def lose_next(self, hosts: str, frame_type: int, count: int) -> None:
        """Lose the next `count` frames of a type (`wire.FrameType`) that each of these hosts sends, at its port, so
        that no host receives them. This replaces a former number of frames to lose.
        """
        if count < 0:
            raise UsageProblem(f"the number of frames to be lost must be at least 0, not {count}")

        def how(before: PortFaults) -> PortFaults:
            return replace(before, lose_left=count, lose_type=frame_type)

        faults.change(self.name, self._ports(), self.select(hosts), how)

    def cut(self, hosts: str) -> None:
        """Cut these hosts from all others, but not from one another. Cuts add up until `heal`.

        A `switch` that adds is on a side too: hosts on the other side do not receive its own frames, nor it theirs.
        """
        faults.cut(self.name, self._sides(), self._select_all(hosts))

    def heal(self) -> None:
        """Undo all cuts."""
        sides = self._sides()
        faults.change(self.name, sides, sides, lambda b: replace(b, side=0))

    def link(self, hosts: str, how: Cable) -> None:
        """`down`: take the hosts' eth1 down; `unplugged`: pull their cables, so that eth1 is up but
        has no carrier; `up`: both back."""
        for name in self.select(hosts):
            host = self.host(name)
            host.set_link(how != "down")
            ends = [links.port_name(host.number)]
            if self.settings.adds:
                ends.append(links.far_port_name(host.number))
            for end in ends:
                links.set_link(self.ports_netns, end, how != "unplugged")

    def pause(self, hosts: str, part: Part = "both") -> list[Running]:
        """Stop (SIGSTOP) the hosts' agents, the processes that agents have started, or both; return the hosts.

        `all` leaves out hosts without such a process, here and below. `switch` is the one that adds.
        """
        return self._signalled(hosts, part, signals.pause)

    def resume(self, hosts: str, part: Part = "both") -> list[Running]:
        """Let the processes that `pause` has stopped go on."""
        return self._signalled(hosts, part, signals.resume)

    def kill(self, hosts: str, part: Part = "both") -> list[Running]:
        """Kill (SIGKILL) the hosts' agents, the processes that agents have started, or both; return the hosts.

        Processes that an agent has started end with it in any case.
        """
        return self._signalled(hosts, part, signals.kill)

    def select(self, hosts: str) -> list[str]:
        """The names in `h1`, `h1,h3` or `all`."""
        if hosts == "all":
            return [host.name for host in self.hosts]
        return [self.host(name.strip()).name for name in hosts.split(",")]

    def _select_all(self, hosts: str) -> list[str]:
        """The names, a `switch` that adds included."""
        given = [name.strip() for name in hosts.split(",")]
        if faults.SWITCH not in given or not self.settings.adds:
            return self.select(hosts)
        rest = ",".join(name for name in given if name != faults.SWITCH)
        return [faults.SWITCH, *(self.select(rest) if rest else ())]

    def _place(self, name: str) -> tuple[str, str]:
        """A host, or a switch that adds: its name and its namespace."""
        if name == faults.SWITCH and self.settings.adds:
            return name, self.switch_netns
        host = self.host(name)
        return host.name, host.netns

    def _signalled(
        self, hosts: str, part: Part, act: Callable[[Sequence[Running]], None]
    ) -> list[Running]:
        running = self.processes()
        if hosts == "all":  # those without an agent are left out
            everyone = [process for host in self.hosts for process in running[host.name]]
            chosen = signals.choose("any host", everyone, part)
        else:
            chosen = [
                process
                for name in self._select_all(hosts)
                for process in signals.choose(name, running[name], part)
            ]
        act(chosen)
        return chosen

    def _ports(self) -> dict[str, int]:
        """The indices of the switch ports, by host."""
        return {name: link.index for name, link in self._port_links().items()}

    def _sides(self) -> dict[str, int]:
        """All indices that can be cut off: those of the ports, and the one of a switch that adds."""
        switch = {faults.SWITCH: faults.SWITCH_INDEX} if self.settings.adds else {}
        return self._ports() | switch

    def _port_links(self) -> dict[str, LinkStatus]:
        """The switch ports, by host."""
        found = links.read_links(self.ports_netns)
        ports = {host.name: links.port_name(host.number) for host in self.hosts}
        if lost := [port for port in ports.values() if port not in found]:
            raise LabProblem(
                f"lab {self.name} has lost its switch port{'s' * (len(lost) > 1)} {', '.join(lost)}: "
                f"run `nicps lab down --lab {self.name}`"
            )
        return {host: found[port] for host, port in ports.items()}

    def _refuse_if_taken(self) -> None:
        if self.name in standing():
            raise LabExists(
                f"there is a lab named {self.name} already: take it down with "
                f"`nicps lab down --lab {self.name}`, or choose another --lab name"
            )

    def _make(self, xdp_program: int, loaded: Loaded | None) -> None:
        made = LabState(self.settings, scratch=self._scratch)
        state.write(made)
        middle = [self.ports_netns] if self.settings.adds else []
        namespaces.create([self.switch_netns, *middle, *(host.netns for host in self.hosts)])
        links.build(self.settings, xdp_program)
        if loaded is not None:
            made = faults.install(made, loaded)
        state.write(replace(made, ready=True))


def _host(lab: str, number: int) -> Host:
    name = f"h{number}"
    return Host(
        number,
        name,
        namespaces.host_name(lab, name),
        links.mac_of(number),
        links.ip_of(number),
    )
