# SPDX-License-Identifier: Apache-2.0
"""Faults of a lab's network: on its switch ports, by host.

The ports' maps in the kernel are the one place where faults are kept; they go with the lab.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from nicps.dataplane import bpf
from nicps.dataplane.loader import Loaded
from nicps.errors import UsageProblem
from nicps.lab import delayline, links, port, processes, state
from nicps.lab.errors import LabNotFound, LabProblem
from nicps.lab.port import PortCount, PortFaults
from nicps.lab.settings import Faults
from nicps.lab.state import LabState, ProcessRecord

#: The owner of the delay line's process, in the lab's state; and the name of the switch in a cut.
SWITCH = "switch"
#: An index of no interface, at which the side of a switch that adds in a cut is kept.
SWITCH_INDEX = 0

Change = Callable[[PortFaults], PortFaults]


def install(found: LabState, loaded: Loaded) -> LabState:
    """Put the programs onto the ports; return the state that describes them, which the caller writes."""
    ports, line = links.add_faults(found.settings, loaded)
    maps = loaded.maps
    if found.settings.adds:
        numbers = {int(host.removeprefix("h")): index for host, index in ports.items()}
        port.write_middles(maps["ports"], numbers)
    for index in ports.values():
        loss = Faults(loss=found.settings.loss)
        port.write_faults(maps["faults"], index, PortFaults(loss, line=line))
    faults_map, counts_map = (bpf.map_info(maps[name]).id for name in ("faults", "counts"))
    return replace(found, faults_map=faults_map, counts_map=counts_map)


def told(lab: str, ports: dict[str, int]) -> dict[str, PortFaults]:
    """The settings of the ports, by host; `ports` are their indices."""
    found = state.read(lab)
    if found is None or found.faults_map is None:
        return {host: PortFaults() for host in ports}
    with port.opened(found.faults_map) as faults:
        return {host: port.read_faults(faults, index) for host, index in ports.items()}


def counted(lab: str, ports: dict[str, int]) -> dict[str, tuple[PortCount, PortCount]]:
    """The counts of the ports, by host: from it, to it."""
    found = state.read(lab)
    if found is None or found.counts_map is None:
        return {host: (PortCount(), PortCount()) for host in ports}
    with port.opened(found.counts_map) as counts:
        return {host: port.read_counts(counts, index) for host, index in ports.items()}


def change(lab: str, ports: dict[str, int], hosts: Iterable[str], how: Change) -> None:
    """Change the settings of these hosts' ports; the first time, the programs are loaded.

    A switch that adds is no host, but it may be on a side of a cut: `ports` may name it, by an index of its own.
    """
    with _installed(lab) as (found, faults):
        new = {host: how(port.read_faults(faults, ports[host])) for host in hosts}
        if any(_delays(told.faults) for told in new.values()):
            _start_line(found, faults)
        for host, told in new.items():
            port.write_faults(faults, ports[host], told)


def cut(lab: str, ports: dict[str, int], hosts: Collection[str]) -> None:
    """These hosts leave all others, and stay together.

    Raises:
        UsageProblem: there are no others.
    """
    if set(hosts) >= set(ports):
        raise UsageProblem("a cut leaves hosts on both sides: name fewer")
    with _installed(lab) as (_, faults):
        before = {host: port.read_faults(faults, index) for host, index in ports.items()}
        side = 1 + max(told.side for told in before.values())
        for host in hosts:
            port.write_faults(faults, ports[host], replace(before[host], side=side))


def line_lost(lab: str, ports: dict[str, int]) -> bool:
    """Whether frames are sent to a delay line that has ended: they are lost."""
    found = state.read(lab)
    delayed = any(_delays(what.faults) for what in told(lab, ports).values())
    return delayed and found is not None and not _line_serves(found)


def _delays(faults: Faults) -> bool:
    return faults.reorder > 0.0 or faults.delay_ms > 0.0


@contextmanager
def _installed(lab: str) -> Iterator[tuple[LabState, int]]:
    """The lab's state, its lock, and a descriptor of the map of faults."""
    with state.lock():
        found = _read(lab)
        if found.faults_map is not None:
            with port.opened(found.faults_map) as faults:
                yield found, faults
            return
    # A compiler may run for seconds, so it does not run under the lock.
    with port.fault_programs() as loaded, state.lock():
        found = _read(lab)
        if found.faults_map is None:
            found = install(found, loaded)
            state.write(found)
        assert found.faults_map is not None
        with port.opened(found.faults_map) as faults:
            yield found, faults


def _read(lab: str) -> LabState:
    found = state.read(lab)
    if found is None or not found.ready:
        raise LabNotFound(f"no lab {lab} stands: run `nicps lab up --lab {lab}`")
    return found


def _line_serves(found: LabState) -> bool:
    return any(delayline.__file__ in p.argv and processes.alive(p) for p in found.processes)


def _start_line(found: LabState, faults: int) -> None:
    """Start the delay line, unless it runs. It lives until the lab is taken down."""
    if _line_serves(found):
        return
    argv = [sys.executable, "-I", "-S", delayline.__file__, str(faults), links.LINE_FAR_END]
    lab = found.settings.name
    child = processes.start(
        lab,
        links.ports_netns(found.settings),
        argv,
        None,
        {
            "pass_fds": [faults],
            "stdin": subprocess.DEVNULL,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.PIPE,
            "text": True,
        },
    )
    out, err = child.communicate()
    if child.returncode != 0:
        raise LabProblem(f"frames cannot be delayed: {(err.strip().splitlines() or [''])[-1]}")
    pid = int(out)
    start = processes.start_time(pid)
    if start is None:
        raise LabProblem("frames cannot be delayed: the delay line ended at once")
    record = ProcessRecord(pid, start, SWITCH, tuple(argv))
    kept = tuple(filter(processes.alive, found.processes))
    state.write(replace(found, processes=(*kept, record)))
