# SPDX-License-Identifier: Apache-2.0
"""The lab's cables and its switch, through netlink.

  h1             h2           namespaces nicps-<lab>-h<n>
[eth1]         [eth1]         02:00:0a:4d:00:<n>, 10.77.0.<n>/24
  |              |            veth; tbf at both ends where a rate is asked for
[ p1 ]         [ p2 ]         namespace nicps-<lab>-switch; XDP, and clsact where frames
  +----[ br0 ]---+            get lost
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from pyroute2 import IPRoute, NetlinkError

from nicps.dataplane import bpf
from nicps.lab import enter, namespaces
from nicps.lab.errors import LabProblem
from nicps.lab.port import PortPrograms
from nicps.lab.settings import LabSettings

BRIDGE = "br0"
HOST_INTERFACE = "eth1"
BURST_BYTES = 128 * 1024
LIMIT_BYTES = 4 * 1024 * 1024
_CLSACT_EGRESS = 0xFFFFFFF3

_MODES = {"xdp": "native", "xdpgeneric": "generic"}

T = TypeVar("T")


def port_name(number: int) -> str:
    """The switch's end of host `number`'s cable."""
    return f"p{number}"


def mac_of(number: int) -> str:
    """The host's address: locally administered, the same in every lab."""
    return f"02:00:0a:4d:00:{number:02x}"


def port_mac_of(number: int) -> str:
    """The address of the switch's end; nobody speaks to it."""
    return f"02:00:0a:4e:00:{number:02x}"


def ip_of(number: int) -> str:
    """The host's IPv4 address, in 10.77.0.0/24; labs share no wire, so they may share addresses."""
    return f"10.77.0.{number}"


@dataclass(frozen=True)
class LinkStatus:
    """An interface as the kernel has it; packets and bytes as seen from this end."""

    index: int
    up: bool
    carrier: bool
    mtu: int
    rx_packets: int
    rx_bytes: int
    tx_packets: int
    tx_bytes: int
    xdp_mode: str | None


def with_netlink(netns: str, work: Callable[[Any], T]) -> T:
    """Run `work(ipr)` with a route netlink socket inside `netns`."""

    def entered() -> T:
        with IPRoute() as ipr:
            return work(ipr)

    return namespaces.inside(netns, entered)


def build(settings: LabSettings, ports: PortPrograms) -> None:
    """Lay bridge, cables and addresses into the (empty) namespaces of the lab."""
    numbers = range(1, settings.hosts + 1)

    def switch(ipr: Any) -> None:
        bridge = _add_bridge(ipr, settings.mtu)
        for number in numbers:
            netns = namespaces.host_name(settings.name, f"h{number}")
            index = _add_cable(ipr, settings, number, netns, bridge)
            _attach(ipr, index, ports, settings)

    def host(number: int, ipr: Any) -> None:
        ipr.link("set", index=1, state="up")
        index = index_of(ipr, HOST_INTERFACE)
        ipr.addr("add", index=index, address=ip_of(number), prefixlen=24, broadcast="10.77.0.255")
        _shape(ipr, index, settings.rate_bps)
        ipr.link("set", index=index, state="up")

    with_netlink(namespaces.switch_name(settings.name), switch)
    for number in numbers:
        netns = namespaces.host_name(settings.name, f"h{number}")
        with_netlink(netns, partial(host, number))


def clear(netns: str) -> None:
    """Delete our links (veth and bridge) in `netns`; the other end of a veth goes with it."""

    def work(ipr: Any) -> None:
        for link in list(ipr.get_links()):
            info = link.get_attr("IFLA_LINKINFO")
            if info is None or info.get_attr("IFLA_INFO_KIND") not in ("veth", "bridge"):
                continue
            try:
                ipr.link("del", index=link["index"])
            except NetlinkError as error:
                if error.code != errno.ENODEV:
                    raise

    with_netlink(netns, work)


def set_link(netns: str, name: str, up: bool) -> None:
    """Pull the cable's end `name` out, or put it back in."""
    state = "up" if up else "down"
    with_netlink(netns, lambda ipr: ipr.link("set", index=index_of(ipr, name), state=state))


def read_links(netns: str) -> dict[str, LinkStatus]:
    """Every interface of the namespace by name."""

    def work(ipr: Any) -> dict[str, LinkStatus]:
        return {link.get_attr("IFLA_IFNAME"): _status(link) for link in ipr.get_links()}

    return with_netlink(netns, work)


def index_of(ipr: Any, name: str) -> int:
    """The interface's number."""
    found: Sequence[int] = ipr.link_lookup(ifname=name)
    if not found:
        raise LabProblem(f"the lab has lost its interface {name}: run `nicps lab down`")
    return found[0]


def _add_bridge(ipr: Any, mtu: int) -> int:
    ipr.link("set", index=1, state="up")
    ipr.link(
        "add",
        ifname=BRIDGE,
        kind="bridge",
        address="02:00:0a:4e:00:00",
        mtu=mtu,
        br_stp_state=0,
        br_forward_delay=0,
        br_mcast_snooping=0,
    )
    bridge = index_of(ipr, BRIDGE)
    ipr.link("set", index=bridge, state="up")
    return bridge


def _add_cable(ipr: Any, settings: LabSettings, number: int, netns: str, bridge: int) -> int:
    fd = os.open(enter.path_of(netns), os.O_RDONLY | os.O_CLOEXEC)
    try:
        peer = {
            "ifname": HOST_INTERFACE,
            "net_ns_fd": fd,
            "address": mac_of(number),
            "mtu": settings.mtu,
        }
        ipr.link(
            "add",
            ifname=port_name(number),
            kind="veth",
            address=port_mac_of(number),
            mtu=settings.mtu,
            peer=peer,
        )
    finally:
        os.close(fd)
    index = index_of(ipr, port_name(number))
    ipr.link("set", index=index, master=bridge, state="up")
    _shape(ipr, index, settings.rate_bps)
    return index


def _shape(ipr: Any, index: int, rate_bps: int | None) -> None:
    if rate_bps is not None:
        # pyroute2 takes a plain number as bytes per second.
        ipr.tc("add", "tbf", index, rate=rate_bps // 8, burst=BURST_BYTES, limit=LIMIT_BYTES)


def _attach(ipr: Any, index: int, ports: PortPrograms, settings: LabSettings) -> None:
    attributes = [
        ("IFLA_XDP_FD", ports.from_host),
        ("IFLA_XDP_FLAGS", bpf.XDP_FLAGS_DRV_MODE),
    ]
    try:
        ipr.link("set", index=index, xdp={"attrs": attributes})
    except NetlinkError as error:
        if error.code == errno.ERANGE and settings.mtu > 1500:
            raise LabProblem(
                f"the kernel takes no loss program at an MTU of {settings.mtu}: "
                "leave --loss away, or make the MTU 3500 at most"
            ) from error
        raise
    if ports.to_host is not None:
        ipr.tc("add", "clsact", index)
        ipr.tc(
            "add-filter",
            "bpf",
            index,
            ":1",
            fd=ports.to_host,
            name="lab_to_host",
            parent=_CLSACT_EGRESS,
            classid=1,
            direct_action=True,
        )


def _status(link: Any) -> LinkStatus:
    stats = link.get_attr("IFLA_STATS64")
    xdp = link.get_attr("IFLA_XDP")
    mode = xdp.get_attr("IFLA_XDP_ATTACHED") if xdp else None
    return LinkStatus(
        index=link["index"],
        up=bool(link["flags"] & 1),
        carrier=bool(link.get_attr("IFLA_CARRIER")),
        mtu=link.get_attr("IFLA_MTU"),
        rx_packets=stats["rx_packets"],
        rx_bytes=stats["rx_bytes"],
        tx_packets=stats["tx_packets"],
        tx_bytes=stats["tx_bytes"],
        xdp_mode=_MODES.get(mode) if mode else None,
    )
