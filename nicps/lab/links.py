# SPDX-License-Identifier: Apache-2.0
"""The lab's cables and its switch, through netlink.

  h1             h2           namespaces nicps-<lab>-h<n>
[eth1]         [eth1]         02:00:0a:4d:00:<n>, 10.77.0.<n>/24
  |              |            veth; tbf at both ends where a rate is asked for; with priorities an HTB at the port's
[ p1 ]         [ p2 ]         namespace nicps-<lab>-switch; XDP, and clsact once there is
  +----[ br0 ]---+            a fault

               [line]---[wait]  there too: a veth between the ports' programs and the delay line

If the switch adds, each cable has a middle, because frames sent by XDP pass no queueing discipline:

[ p1 ]         [ p2 ]         namespace nicps-<lab>-cables; tbf towards the host, faults
  |b1            |b2          a bridge for each cable
[ q1 ]         [ q2 ]         tbf towards the switch
  |              |            veth
[eth1]         [eth2]         namespace nicps-<lab>-switch, where `nicps switch xdp run` works
  +----[ br0 ]---+
"""

from __future__ import annotations

import array
import contextlib
import errno
import fcntl
import os
import socket
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from pyroute2 import IPRoute, NetlinkError

from nicps.dataplane import bpf
from nicps.dataplane.loader import Loaded
from nicps.lab import enter, namespaces, priorities
from nicps.lab.errors import LabProblem
from nicps.lab.filters import add_filter
from nicps.lab.settings import LabSettings

BRIDGE = "br0"
HOST_INTERFACE = "eth1"
LIMIT_BYTES = 4 * 1024 * 1024
LINE = "line"
LINE_FAR_END = "wait"
_CLSACT_INGRESS = 0xFFFFFFF2
_CLSACT_EGRESS = 0xFFFFFFF3
_SIOCETHTOOL = 0x8946
# The commands that read an offload; the next number sets it.
_ETHTOOL_GRXCSUM, _ETHTOOL_GTXCSUM = 0x14, 0x16
_ETHTOOL_GTSO, _ETHTOOL_GGSO, _ETHTOOL_GGRO = 0x1E, 0x23, 0x2B
_ETHTOOL_GFLAGS, _FLAG_TXVLAN = 0x25, 1 << 7

_QUEUES_S = 10.0
_MODES = {"xdp": "native", "xdpgeneric": "generic"}

T = TypeVar("T")


def port_name(number: int) -> str:
    """The switch's end of host `number`'s cable."""
    return f"p{number}"


def far_port_name(number: int) -> str:
    """If the switch adds: the other end of the middle of host `number`'s cable."""
    return f"q{number}"


def switch_port_name(number: int) -> str:
    """If the switch adds: its port for host `number`."""
    return f"eth{number}"


def ports_netns(settings: LabSettings) -> str:
    """The namespace of p1 to pN: that of the switch, or of the cables' middle."""
    name = namespaces.cables_name if settings.adds else namespaces.switch_name
    return name(settings.name)


def mac_of(number: int) -> str:
    """The host's address: locally administered, the same in every lab."""
    return f"02:00:0a:4d:00:{number:02x}"


def port_mac_of(number: int) -> str:
    """The address of the switch's end; no frame is sent to it."""
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


def build(settings: LabSettings, xdp_program: int) -> None:
    """Lay bridge, cables and addresses into the (empty) namespaces of the lab; the XDP program goes
    onto every port. Frames that are sent from then on arrive."""
    numbers = range(1, settings.hosts + 1)

    def switch(ipr: Any) -> None:
        bridge = _add_bridge(ipr, BRIDGE, settings.mtu)
        for number in numbers if settings.adds else ():
            index = index_of(ipr, switch_port_name(number))
            ipr.link("set", index=index, master=bridge, state="up")

    def ports(ipr: Any) -> None:
        bridge = 0 if settings.adds else _add_bridge(ipr, BRIDGE, settings.mtu)
        for number in numbers:
            if settings.adds:
                bridge = _add_bridge(ipr, f"b{number}", settings.mtu)
                far = _add_far_port(ipr, settings, number, bridge)
                attach(ipr, far, xdp_program)
            netns = namespaces.host_name(settings.name, f"h{number}")
            index = _add_cable(ipr, settings, number, netns, bridge)
            attach(ipr, index, xdp_program)
            if settings.priorities and settings.rate_bps is not None:
                priorities.add_queues(ipr, index, settings.rate_bps)
                keep_tags(port_name(number))

    def host(number: int, ipr: Any) -> None:
        ipr.link("set", index=1, state="up")
        index = index_of(ipr, HOST_INTERFACE)
        ipr.addr("add", index=index, address=ip_of(number), prefixlen=24, broadcast="10.77.0.255")
        _shape(ipr, index, settings)
        ipr.link("set", index=index, state="up")

    with_netlink(ports_netns(settings), ports)
    if settings.adds:
        with_netlink(namespaces.switch_name(settings.name), switch)
    for number in numbers:
        netns = namespaces.host_name(settings.name, f"h{number}")
        with_netlink(netns, partial(host, number))
        with_netlink(netns, await_queues)
    for netns in {ports_netns(settings), namespaces.switch_name(settings.name)}:
        with_netlink(netns, await_queues)


def await_queues(ipr: Any) -> None:
    """Until all veths of the namespace have their queues: before that the kernel drops what is sent.

    A worker of the kernel attaches them once there is a carrier, which takes a while on a busy machine.
    """
    until = time.monotonic() + _QUEUES_S
    while lower := [
        link.get_attr("IFLA_IFNAME")
        for link in ipr.get_links(kind="veth")
        if link.get_attr("IFLA_OPERSTATE") != "UP"
    ]:
        if time.monotonic() > until:
            raise LabProblem(f"{', '.join(lower)}: no carrier after {_QUEUES_S:.0f} s")
        time.sleep(0.002)
    ipr.link("set", index=1, state="up")  # waits for the lock under which the worker does both


def add_faults(settings: LabSettings, loaded: Loaded) -> tuple[dict[str, int], int]:
    """Put the programs of `lab_port.c` onto every port, and lay the veth to the delay line.

    Returns the ports' indices by host, and the index of the veth.
    """
    programs = loaded.programs

    def work(ipr: Any) -> tuple[dict[str, int], int]:
        line = _add_line(ipr, settings.mtu)
        _hook(ipr, line, [(_CLSACT_INGRESS, "lab_release", programs["lab_release"])])
        ports = {}
        for number in range(1, settings.hosts + 1):
            ports[f"h{number}"] = index = index_of(ipr, port_name(number))
            from_host = (_CLSACT_INGRESS, "lab_from_host", programs["lab_from_host"])
            to_host = (_CLSACT_EGRESS, "lab_to_host", programs["lab_to_host"])
            _hook(ipr, index, [from_host, to_host])
        return ports, line

    return with_netlink(ports_netns(settings), work)


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


def _add_bridge(ipr: Any, name: str, mtu: int) -> int:
    ipr.link("set", index=1, state="up")
    ipr.link(
        "add",
        ifname=name,
        kind="bridge",
        address="02:00:0a:4e:00:00",
        mtu=mtu,
        br_stp_state=0,
        br_forward_delay=0,
        br_mcast_snooping=0,
    )
    bridge = index_of(ipr, name)
    ipr.link("set", index=bridge, state="up")
    return bridge


def _add_cable(ipr: Any, settings: LabSettings, number: int, netns: str, bridge: int) -> int:
    peer = {"ifname": HOST_INTERFACE, "address": mac_of(number)}
    return _add_veth(ipr, settings, port_name(number), port_mac_of(number), netns, peer, bridge)


def _add_far_port(ipr: Any, settings: LabSettings, number: int, bridge: int) -> int:
    netns = namespaces.switch_name(settings.name)
    peer = {"ifname": switch_port_name(number), "address": f"02:00:0a:4c:00:{number:02x}"}
    name, mac = far_port_name(number), f"02:00:0a:4f:00:{number:02x}"
    return _add_veth(ipr, settings, name, mac, netns, peer, bridge)


def _add_veth(
    ipr: Any,
    settings: LabSettings,
    name: str,
    mac: str,
    netns: str,
    peer: dict[str, Any],
    bridge: int,
) -> int:
    """A bridge's port, shaped, whose other end is in `netns`; its index."""
    fd = os.open(enter.path_of(netns), os.O_RDONLY | os.O_CLOEXEC)
    try:
        there = {**peer, "net_ns_fd": fd, "mtu": settings.mtu}
        ipr.link("add", ifname=name, kind="veth", address=mac, mtu=settings.mtu, peer=there)
    finally:
        os.close(fd)
    index = index_of(ipr, name)
    ipr.link("set", index=index, master=bridge, state="up")
    _shape(ipr, index, settings, settings.queue_bytes)
    return index


def _shape(ipr: Any, index: int, settings: LabSettings, queue_bytes: int = LIMIT_BYTES) -> None:
    if settings.rate_bps is not None and not settings.priorities:
        # pyroute2 takes a plain number as bytes per second.
        rate = settings.rate_bps // 8
        burst = min(settings.burst_bytes, max(queue_bytes // 4, 2 * settings.mtu))
        ipr.tc("add", "tbf", index, rate=rate, burst=burst, limit=queue_bytes)


def attach(ipr: Any, index: int, xdp_program: int) -> None:
    attributes = [("IFLA_XDP_FD", xdp_program), ("IFLA_XDP_FLAGS", bpf.XDP_FLAGS_DRV_MODE)]
    ipr.link("set", index=index, xdp={"attrs": attributes})


def disable_offloads(name: str) -> None:
    """Like `ethtool -K NAME tx off rx off tso off gso off gro off`; in this thread's namespace."""
    _switch_off(
        name, _ETHTOOL_GTXCSUM, _ETHTOOL_GRXCSUM, _ETHTOOL_GTSO, _ETHTOOL_GGSO, _ETHTOOL_GGRO
    )


def _switch_off(name: str, *offloads: int) -> None:
    """The offloads that are on: a veth whose peer has an XDP program refuses to set those that the program has
    switched off.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        for read in offloads:
            if _ethtool(control, name, read):
                _ethtool(control, name, read + 1)


def keep_tags(name: str) -> None:
    """Let frames leave there with their VLAN tags in them, as from a real switch; in this thread's namespace.

    Otherwise a veth hands a tag over beside the frame, where no XDP program sees it.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        flags = _ethtool(control, name, _ETHTOOL_GFLAGS)
        _ethtool(control, name, _ETHTOOL_GFLAGS + 1, flags & ~_FLAG_TXVLAN)


def _ethtool(control: socket.socket, name: str, command: int, argument: int = 0) -> int:
    """The value after a command with the value 0."""
    value = array.array("I", [command, argument])
    request = struct.pack("16sQ16x", name.encode(), value.buffer_info()[0])
    fcntl.ioctl(control, _SIOCETHTOOL, request)
    return value[1]


def _add_line(ipr: Any, mtu: int) -> int:
    """The veth to the delay line; the index of its near end."""
    if not ipr.link_lookup(ifname=LINE):
        ends = {"mtu": mtu, "txqlen": 10_000}
        ipr.link("add", ifname=LINE, kind="veth", peer={"ifname": LINE_FAR_END, **ends}, **ends)
    index = index_of(ipr, LINE)
    # A packet socket must receive frames unchanged: whole, with their checksums. This also ends segmentation offload
    # for this interface.
    _switch_off(LINE, _ETHTOOL_GTXCSUM)
    for end in (index, index_of(ipr, LINE_FAR_END)):
        ipr.link("set", index=end, state="up")
    return index


def _hook(ipr: Any, index: int, programs: Sequence[tuple[int, str, int]]) -> None:
    """Give the interface a clsact with (parent, name, program) and nothing else."""
    with contextlib.suppress(NetlinkError):  # from an attempt that was interrupted
        ipr.tc("del", "clsact", index)
    ipr.tc("add", "clsact", index)
    for parent, name, program in programs:
        add_filter(ipr, index, parent, name, program)


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
