# SPDX-License-Identifier: Apache-2.0
"""The ports of a Linux switch that adds: the checks before it begins, and the changes afterwards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nicps import wire
from nicps.dataplane import xdp
from nicps.dataplane.interface import Interface, read_interface
from nicps.dataplane.ports import find_ports, is_bridge
from nicps.errors import (
    InterfaceDown,
    InterfaceMissing,
    InterfaceUnfit,
    UsageProblem,
)

MOST_PORTS = 64


@dataclass(frozen=True, slots=True)
class PortState:
    """A port that exists. `carrier`: it is up, and something is at the other end of its cable."""

    interface: Interface
    carrier: bool


def check_ports(names: Sequence[str], bridge: str | None) -> Interface:
    """Check that a switch can add on these ports; return the bridge that they are in.

    Args:
        bridge: the one that they must be in; None: any.

    Raises:
        UsageProblem: a port is named twice, or there are too many or too few.
        InterfaceMissing, InterfaceUnfit, InterfaceDown: a port or the bridge does not exist, or cannot serve.
        InterfaceBusy: an XDP program is on a port.
    """
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise UsageProblem(f"--ports names {', '.join(twice)} twice")
    if not 2 <= len(names) <= MOST_PORTS:
        raise UsageProblem(f"--ports takes 2 to {MOST_PORTS} interfaces, not {len(names)}")
    if bridge is not None:
        read_interface(bridge)
        if not is_bridge(bridge):
            raise InterfaceUnfit(
                f"--bridge {bridge}: that interface is not a bridge (one is made with: ip link add br0 type bridge)"
            )
        if bridge in names:
            raise UsageProblem(f"--ports names {bridge}, which is the bridge: name its ports alone")
    found = [read_interface(name) for name in names]
    ports = find_ports()
    masters = {}
    for interface in found:
        name, port = interface.name, ports.get(interface.index)
        if port is None or port.kind != "bridge":
            into = bridge or "br0"
            raise InterfaceUnfit(
                f"interface {name} is not a port of a bridge; run: ip link set {name} master {into}"
                " (a bridge is made with: ip link add br0 type bridge)"
            )
        if bridge is not None and port.master != bridge:
            raise InterfaceUnfit(
                f"interface {name} is a port of {port.master}, not of {bridge};"
                f" run: ip link set {name} master {bridge}"
            )
        masters[port.master] = name
        if interface.mtu < wire.LEAST_MTU:
            raise InterfaceUnfit(
                f"interface {name} has an MTU of {interface.mtu} bytes, {wire.LEAST_MTU} are needed;"
                f" run: ip link set {name} mtu {wire.LEAST_MTU}"
            )
    if len(masters) > 1:
        told = ", ".join(f"{name} in {master}" for master, name in sorted(masters.items()))
        raise InterfaceUnfit(f"the ports must be in one bridge: {told}")
    for interface in found:
        xdp.clear(interface)
    (master,) = masters
    made = read_interface(master)
    if not made.up:
        raise InterfaceDown(f"bridge {master} is down; run: ip link set {master} up")
    if made.mtu < wire.LEAST_MTU:
        raise InterfaceUnfit(
            f"bridge {master} has an MTU of {made.mtu} bytes, {wire.LEAST_MTU} are needed;"
            f" run: ip link set {master} mtu {wire.LEAST_MTU}"
        )
    return made


def read_ports(names: Sequence[str], bridge: int) -> dict[str, PortState]:
    """The ports that are in the bridge with that index now, by name.

    Raises:
        InterfaceMissing: the bridge has gone.
    """
    from pyroute2 import IPRoute

    with IPRoute() as route:
        links = {link["index"]: link for link in route.get_links()}
    if bridge not in links:
        raise InterfaceMissing("the bridge has gone")
    found = {}
    for index, link in links.items():
        name = str(link.get_attr("IFLA_IFNAME"))
        if name in names and link.get_attr("IFLA_MASTER") == bridge:
            up = bool(link["flags"] & 1)
            mac = bytes.fromhex(link.get_attr("IFLA_ADDRESS").replace(":", ""))
            interface = Interface(name, index, mac, link.get_attr("IFLA_MTU"), up)
            found[name] = PortState(interface, up and bool(link.get_attr("IFLA_CARRIER")))
    return found
