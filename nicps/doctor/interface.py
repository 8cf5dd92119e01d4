# SPDX-License-Identifier: Apache-2.0
"""The checks of one network interface."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import socket
import struct
from dataclasses import dataclass
from typing import Any

from nicps.doctor.check import Check, fail, ok, warn

SIOCETHTOOL = 0x8946
ETHTOOL_GDRVINFO = 0x00000003

IFF_UP = 0x1
IFF_LOOPBACK = 0x8
ARPHRD_ETHER = 1
XDP_MODES = {1: "native", 2: "generic", 3: "offloaded", 4: "several"}

LEAST_MTU = 1500
#: Above this, native XDP (on veth, say) asks for programs with frags, which BCC cannot load.
MOST_MTU = 3500

#: The kernel names of our programs begin so.
OUR_PROGRAMS = "nicps"


@dataclass(frozen=True)
class Interface:
    """What the kernel says of an interface.

    `xdp_mode` and `xdp_program` (its id) are None where no program is attached.
    """

    name: str
    index: int
    up: bool
    ethernet: bool
    mtu: int
    state: str
    xdp_mode: str | None
    xdp_program: int | None


def list_interfaces() -> list[Interface]:
    """All interfaces of this network namespace but loopback ones."""
    from pyroute2 import IPRoute

    with IPRoute() as netlink:
        links = [
            _interface(link) for link in netlink.get_links() if not link["flags"] & IFF_LOOPBACK
        ]
    return sorted(links, key=lambda link: link.index)


def _interface(link: Any) -> Interface:
    xdp = link.get_attr("IFLA_XDP")
    attached = xdp.get_attr("IFLA_XDP_ATTACHED") if xdp is not None else 0
    return Interface(
        name=link.get_attr("IFLA_IFNAME"),
        index=link["index"],
        up=bool(link["flags"] & IFF_UP),
        ethernet=link["ifi_type"] == ARPHRD_ETHER,
        mtu=link.get_attr("IFLA_MTU") or 0,
        state=(link.get_attr("IFLA_OPERSTATE") or "unknown").lower(),
        xdp_mode=XDP_MODES.get(attached or 0),
        xdp_program=xdp.get_attr("IFLA_XDP_PROG_ID") if attached else None,
    )


def driver(name: str) -> str:
    """The driver of interface `name` as ethtool tells it; "unknown" where it does not."""
    info = ctypes.create_string_buffer(struct.pack("=I", ETHTOOL_GDRVINFO), 196)
    request = struct.pack("16sP", name.encode(), ctypes.addressof(info))
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
            fcntl.ioctl(control, SIOCETHTOOL, request)
    except OSError:
        return "unknown"
    return info.raw[4:36].split(b"\0")[0].decode(errors="replace") or "unknown"


def check_interface(name: str | None) -> list[Check]:
    """Rows for the interface `name`; with no name, one row that lists what could be named."""
    interfaces = list_interfaces()
    usable = [link.name for link in interfaces if link.ethernet]
    choice = f"--iface with one of: {', '.join(usable)}" if usable else "add an Ethernet interface"
    if name is None:
        return [warn("interface", "none was named, so none was checked", choice)]
    found = next((link for link in interfaces if link.name == name), None)
    if found is None:
        return [fail("interface", f"no interface {name!r} here", choice)]
    if not found.ethernet:
        return [fail("interface", f"{name} is not Ethernet", choice)]
    rows = [_check_up(found), _check_mtu(found)]
    if found.up:
        rows.append(_check_xdp(found))
    return rows


def _check_up(link: Interface) -> Check:
    text = f"{link.name}, driver {driver(link.name)}"
    if not link.up:
        return fail("interface", f"{text}, is down", f"ip link set {link.name} up")
    if link.state in ("down", "lowerlayerdown"):
        mend = "plug the cable in, or look at the other end"
        return fail("interface", f"{text}, is up but has no carrier", mend)
    return ok("interface", f"{text}, up")


def _check_mtu(link: Interface) -> Check:
    mend = f"ip link set {link.name} mtu {LEAST_MTU}"
    if link.mtu < LEAST_MTU:
        return fail("MTU", f"{link.mtu}: a fragment's frame needs {LEAST_MTU}", mend)
    if link.mtu > MOST_MTU:
        text = f"{link.mtu}: most drivers refuse native XDP above {MOST_MTU}"
        return warn("MTU", text, mend)
    return ok("MTU", str(link.mtu))


def _check_xdp(link: Interface) -> Check:
    """The mode that `join` will get, tried with a program attached for a moment."""
    if link.xdp_program is not None:
        return _check_attached(link)
    try:
        refusal = try_attach(link.index)
    except OSError as error:
        if error.errno in (errno.EPERM, errno.EACCES):
            return warn("XDP", "not tried: needs root", "run this with sudo")
        mend = "the driver may want another MTU, fewer queues, or large receive offload off"
        return fail("XDP", f"{link.name} takes no XDP program: {error.strerror}", mend)
    if refusal is None:
        return ok("XDP", "native")
    text = f"generic only: the driver {driver(link.name)} refuses native mode ({refusal})"
    mend = "works, at a lower rate; `dmesg` may say why, and `ethtool -K` turns offloads off"
    return warn("XDP", text, mend)


def _check_attached(link: Interface) -> Check:
    from nicps.dataplane import bpf

    assert link.xdp_program is not None
    mend = f"ip link set dev {link.name} xdp off (if nothing needs it)"
    try:
        name = bpf.program_by_id(link.xdp_program).name
    except OSError:
        return warn("XDP", f"program {link.xdp_program} is attached", "run this with sudo")
    if not name.startswith(OUR_PROGRAMS):
        text = f"another program, {name or link.xdp_program}, is attached ({link.xdp_mode})"
        return fail("XDP", text, mend)
    return ok("XDP", f"{link.xdp_mode}, the program {name} of a running agent is attached")


def try_attach(ifindex: int) -> str | None:
    """Attach a program that passes every frame, and detach it.

    None where native mode works; where only generic mode does, why native mode was refused.

    Raises:
        OSError: neither mode works, or the privileges are missing.
    """
    from nicps.dataplane import bpf

    program = load_pass_program("nicps_doctor")
    try:
        try:
            os.close(bpf.xdp_link(program, ifindex, bpf.XDP_FLAGS_DRV_MODE))
            return None
        except OSError as error:
            if error.errno in (errno.EPERM, errno.EACCES):
                raise
            refusal = os.strerror(error.errno or 0)
        os.close(bpf.xdp_link(program, ifindex, bpf.XDP_FLAGS_SKB_MODE))
        return refusal
    finally:
        os.close(program)


def load_pass_program(name: str) -> int:
    """A descriptor of the smallest XDP program: `return XDP_PASS`."""
    from nicps.dataplane import bpf

    # mov64 r0, XDP_PASS; exit
    code = struct.pack("=BBhiBBhi", 0xB7, 0, 0, bpf.XDP_PASS, 0x95, 0, 0, 0)
    return bpf.program_load_xdp(code, 0, name)
