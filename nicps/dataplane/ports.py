# SPDX-License-Identifier: Apache-2.0
"""Interfaces that are ports of another one, and so receive none or not all of their host's frames.

The XDP program sees the frames of a bridge's port. Frames that it passes go to the port's receive handler
(`br_handle_frame`, `netdev_frame_hook` of Open vSwitch), and from there to the master, not to a socket on the port. A
link of a bond or a team receives its frames, but the other end may send them on any of the links. The kernel names
master and kind in every link's message: IFLA_MASTER, IFLA_INFO_SLAVE_KIND.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

#: A master of this kind takes no frames from its interfaces: it only chooses a routing table for them.
_TAKES_NONE = "vrf"
_OPEN_VSWITCH = "openvswitch"
_SHARED = ("bond", "team")


@dataclass(frozen=True, slots=True)
class Port:
    """The master of an interface, and the interfaces that receive its frames in its place."""

    kind: str
    master: str
    instead: tuple[str, ...]

    def __str__(self) -> str:
        """`a port of the bridge br0, which takes its frames`"""
        if self.kind in _SHARED:
            return (
                f"a link of the {self.kind} {self.master}, whose frames come in at any of its links"
            )
        what = "Open vSwitch" if self.kind == _OPEN_VSWITCH else f"the {self.kind} {self.master}"
        return f"a port of {what}, which takes its frames"

    def mend(self, name: str) -> str:
        """The advice to the user, given the port's own name."""
        if self.kind == _OPEN_VSWITCH:
            there = f" ({', '.join(self.instead)})" if self.instead else ""
            return f"give --iface an internal port of its bridge{there}, or run: ovs-vsctl del-port {name}"
        return f"give --iface {self.master}, or run: ip link set {name} nomaster"


def find_port(index: int) -> Port | None:
    """The master of the interface with that index; None if the interface receives its own frames."""
    from pyroute2 import IPRoute

    with IPRoute() as route:
        (link,) = route.get_links(index)
        if _kind(link) is None:
            return None
        return _ports(route.get_links()).get(index)


def find_ports() -> dict[int, Port]:
    """All interfaces of this namespace that are ports, by index."""
    from pyroute2 import IPRoute

    with IPRoute() as route:
        return _ports(route.get_links())


def is_bridge(name: str) -> bool:
    """Whether the interface of that name is a bridge of the kernel's."""
    from pyroute2 import IPRoute

    with IPRoute() as route:
        (link,) = route.get_links(ifname=name)
    return bool(link.get_nested("IFLA_LINKINFO", "IFLA_INFO_KIND") == "bridge")


def _kind(link: Any) -> str | None:
    """The index of the master that takes this link's frames."""
    if link.get_attr("IFLA_MASTER") is None:
        return None
    kind = str(link.get_nested("IFLA_LINKINFO", "IFLA_INFO_SLAVE_KIND") or "interface")
    return None if kind == _TAKES_NONE else kind


def _ports(links: Iterable[Any]) -> dict[int, Port]:
    links = list(links)
    names = {link["index"]: str(link.get_attr("IFLA_IFNAME")) for link in links}
    switched = {
        link["index"]
        for link in links
        if link.get_nested("IFLA_LINKINFO", "IFLA_INFO_KIND") == _OPEN_VSWITCH
    }
    ports = {}
    for link in links:
        kind = _kind(link)
        if kind is not None:
            master = link.get_attr("IFLA_MASTER")
            others = switched - {master} if kind == _OPEN_VSWITCH else {master}
            instead = tuple(sorted(names[other] for other in others if other in names))
            ports[link["index"]] = Port(kind, names.get(master, "?"), instead)
    return ports
