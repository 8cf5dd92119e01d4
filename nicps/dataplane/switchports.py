# SPDX-License-Identifier: Apache-2.0
"""The ports of a Linux switch that adds: its XDP program on each, and the devmap by which sums go to all."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from nicps.dataplane import bpf, xdp
from nicps.dataplane.interface import Interface, LinkChanges, need_mtu, read_interface
from nicps.dataplane.xdp import Mode
from nicps.errors import EnvironmentProblem, InterfaceMissing, UsageProblem
from nicps.layout import layout

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PortChange:
    """A port has come or gone.

    Attributes: `mode`, of the program on it; None: there is no program, and `reason` is the reason in one line.
    """

    name: str
    mode: Mode | None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class _Attached:
    index: int
    link_fd: int


class SwitchPorts:
    """The program on the ports. `check` attaches it anew to a port that has come back.

    All ports have one mode. A program in native mode does not send to a port in generic mode, because that port's
    driver takes only socket buffers. So if one driver has no native mode, all ports are in generic mode.

    Args:
        program_fd, ports_fd: the XDP program, and the devmap; the caller keeps them open as long as this lives.
        names: of the interfaces, in this process's network namespace.

    Attributes: `mode`, of all ports. `changes`, readable when `check` may find something.

    Raises:
        UsageProblem: there are none, too many, or one of them twice.
        InterfaceMissing, InterfaceUnfit, InterfaceBusy, EnvironmentProblem: a port cannot serve.
    """

    def __init__(self, program_fd: int, ports_fd: int, names: Sequence[str]) -> None:
        most = layout().limits["PORTS"]
        if not names or len(names) > most or len(set(names)) < len(names):
            raise UsageProblem(
                f"a switch has from 1 to {most} ports, each of another name, not: {', '.join(names) or 'none'}"
            )
        self._program_fd, self._ports_fd = program_fd, ports_fd
        self._names = tuple(names)
        self._attached: dict[str, _Attached] = {}
        self._reasons: dict[str, str] = {}
        self.mode: Mode = "native"
        self.changes = LinkChanges(None)
        try:
            for name in self._names:
                self._attach(name)
        except BaseException:
            self.close()
            raise

    @property
    def attached(self) -> list[str]:
        """The ports that the program is on."""
        return [name for name in self._names if name in self._attached]

    def check(self) -> list[PortChange]:
        """Detach ports that have gone, and attach those that are back; return the changes."""
        self.changes.drain()
        found = []
        for name in self._names:
            here = self._attached.get(name)
            try:
                interface = read_interface(name)
                if here is not None and here.index == interface.index:
                    continue
                self._detach(name)
                self._attach(name)
                found.append(PortChange(name, self.mode))
                self._reasons.pop(name, None)
            except EnvironmentProblem as problem:
                self._detach(name)
                if self._reasons.get(name) != str(problem):
                    self._reasons[name] = str(problem)
                    found.append(PortChange(name, None, str(problem)))
        return found

    def close(self) -> None:
        """Take the program off all ports; a second call does nothing."""
        for name in self.attached:
            self._detach(name)
        self.changes.close()

    def _attach(self, name: str) -> None:
        interface = read_interface(name)
        need_mtu(interface)
        try:
            self._put(interface, self.mode)
        except InterfaceMissing:
            raise
        except EnvironmentProblem:
            if self.mode == "generic" or xdp.attached(interface.index) is not None:
                raise
            self._be_generic(interface)

    def _be_generic(self, without: Interface) -> None:
        """The driver of that port has no native mode."""
        self._put(without, "generic")  # if that fails, no port changes
        _log.info("all ports in generic mode: %s has no native XDP", without.name)
        self.mode = "generic"
        for name in self.attached:
            if name != without.name:
                self._detach(name)
                self._put(read_interface(name), self.mode)

    def _put(self, interface: Interface, mode: Mode) -> None:
        link_fd, _ = xdp.attach(self._program_fd, interface, [mode])
        try:
            place = self._names.index(interface.name)
            bpf.map_update(self._ports_fd, _word(place), _word(interface.index))
        except BaseException:
            os.close(link_fd)
            raise
        self._attached[interface.name] = _Attached(interface.index, link_fd)

    def _detach(self, name: str) -> None:
        """The kernel itself removes an interface that has gone from a devmap."""
        here = self._attached.pop(name, None)
        if here is not None:
            bpf.map_delete(self._ports_fd, _word(self._names.index(name)))
            os.close(here.link_fd)


def _word(value: int) -> bytes:
    return value.to_bytes(4, sys.byteorder)
