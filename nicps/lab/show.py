# SPDX-License-Identifier: Apache-2.0
"""The views of a lab, for programs and for users."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from nicps import wire
from nicps.lab import state
from nicps.lab.lab import Host, Lab
from nicps.lab.port import PortFaults
from nicps.lab.processes import Running, program
from nicps.rates import format_rate


def describe_process(process: Running) -> dict[str, Any]:
    """For JSON."""
    return {"pid": process.pid, "command": process.command, "stopped": process.stopped}


def describe(lab: Lab) -> dict[str, Any]:
    """The lab, for JSON."""
    counters, processes, faults = lab.counters(), lab.processes(), lab.faults()
    hosts = []
    for host in lab.hosts:
        port = counters[host.name]
        hosts.append(
            {
                **asdict(host),
                "up": host.read_link().up,
                "faults": asdict(faults[host.name].faults),
                "side": faults[host.name].side,
                "port": {
                    "up": port.link.up,
                    "xdp_mode": port.link.xdp_mode,
                    "from_host": {
                        "packets": port.link.rx_packets,
                        "bytes": port.link.rx_bytes,
                        **asdict(port.from_host),
                    },
                    "to_host": {
                        "packets": port.link.tx_packets,
                        "bytes": port.link.tx_bytes,
                        **asdict(port.to_host),
                    },
                },
                "processes": [describe_process(process) for process in processes[host.name]],
            }
        )
    described = {**asdict(lab.settings), "switch_netns": lab.switch_netns, "hosts": hosts}
    if lab.settings.adds:
        running = [describe_process(process) for process in processes["switch"]]
        described["adding_switch"] = {
            "side": lab.switch_side(),
            "log": str(state.switch_log(lab.name)),
            "ports": {name: link.xdp_mode for name, link in lab.switch_ports().items()},
            "processes": running,
        }
    return described


def headline(lab: Lab) -> str:
    """The lab in a line."""
    shape = lab.settings
    adds = ", a switch that adds" if shape.adds else ""
    return (
        f"lab {lab.name}: {shape.hosts} hosts, {format_rate(shape.rate_bps)}, MTU {shape.mtu}{adds}, "
        f"namespaces {lab.hosts[0].netns} ..."
    )


def rows(lab: Lab) -> list[tuple[str, ...]]:
    """A heading, and a row a host."""
    counters, processes, faults = lab.counters(), lab.processes(), lab.faults()
    found: list[tuple[str, ...]] = [
        ("HOST", "IP", "MAC", "LINK", "SENT", "RECEIVED", "LOST", "FAULTS", "PROCESSES")
    ]
    for host in lab.hosts:
        port, running = counters[host.name], processes[host.name]
        lost = [count.dropped + count.severed for count in (port.from_host, port.to_host)]
        found.append(
            (
                host.name,
                host.ip,
                host.mac,
                _link(host, port.link.up),
                str(port.link.rx_packets),
                str(port.link.tx_packets),
                "+".join(map(str, lost)) if any(lost) else "-",
                faults_text(faults[host.name]),
                "; ".join(map(_process, running)) or "-",
            )
        )
    if lab.settings.adds:
        shown = "; ".join(map(_process, processes["switch"])) or "-"
        cut = faults_text(PortFaults(side=lab.switch_side()))
        found.append(("switch", "-", wire.mac_text(wire.SWITCH), "-", "-", "-", "-", cut, shown))
    return found


def faults_text(told: PortFaults) -> str:
    """`loss 5%, loses the next 3 TOKEN, cut (side 1)`, or `-`."""
    cut = f"cut (side {told.side})" if told.side else ""
    lose = ""
    if told.lose_left:
        lose = f"loses the next {told.lose_left} {wire.FrameType(told.lose_type).name}"
    return ", ".join(filter(None, [str(told.faults), lose, cut])) or "-"


def _link(host: Host, plugged: bool) -> str:
    if not host.read_link().up:
        return "down"
    return "up" if plugged else "unplugged"


def _process(process: Running) -> str:
    return f"{process.pid} {program(process.command)}{' (paused)' if process.stopped else ''}"
