# SPDX-License-Identifier: Apache-2.0
"""XDP programs on interfaces: attach one that goes with its process, read and remove those that are there."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from nicps.dataplane import bpf
from nicps.dataplane.interface import Interface
from nicps.errors import EnvironmentProblem, InterfaceBusy

Mode = Literal["native", "generic"]

#: The kernel keeps 15 characters of a program's name. A program with this name is ours.
PROGRAM = "nicps_xdp"
#: The program on the ports of a Linux switch.
SWITCH_PROGRAM = "nicps_switch"

_FLAGS: dict[Mode, int] = {"native": bpf.XDP_FLAGS_DRV_MODE, "generic": bpf.XDP_FLAGS_SKB_MODE}
#: As pyroute2 names the kernel's XDP_ATTACHED_*.
_MODES = {"xdp": "native", "xdpgeneric": "generic", "xdpoffload": "hardware", "xdpmulti": "several"}

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Attached:
    """A program on an interface: its mode (as the kernel tells it), id and name."""

    mode: str
    id: int
    name: str


def attached(ifindex: int) -> Attached | None:
    """The XDP program on an interface, ours or not."""
    from pyroute2 import IPRoute

    with IPRoute() as route:
        (link,) = route.get_links(ifindex)
        xdp = link.get_attr("IFLA_XDP")
    mode = xdp.get_attr("IFLA_XDP_ATTACHED") if xdp else None
    if mode not in _MODES:
        return None
    ident = _program_id(xdp)
    try:
        name = bpf.program_by_id(ident).name
    except OSError:
        name = "?"
    return Attached(_MODES[mode], ident, name)


def _program_id(xdp: Any) -> int:
    names = (
        "IFLA_XDP_PROG_ID",
        "IFLA_XDP_DRV_PROG_ID",
        "IFLA_XDP_SKB_PROG_ID",
        "IFLA_XDP_HW_PROG_ID",
    )
    return next((int(ident) for name in names if (ident := xdp.get_attr(name))), 0)


def clear(interface: Interface) -> bool:
    """Remove the program that an earlier run of ours left without an owner; return whether there was one.

    Raises:
        InterfaceBusy: the program there belongs to a living process, or is not ours.
    """
    there = attached(interface.index)
    if there is None:
        return False
    if there.name not in (PROGRAM, SWITCH_PROGRAM):
        raise InterfaceBusy(
            f"interface {interface.name} has another XDP program, {there.name} (id {there.id}, {there.mode}); end what"
            f" has put it there, or, if nobody needs it, run: ip link set {interface.name} xdp off"
        )
    from pyroute2 import IPRoute
    from pyroute2.netlink.exceptions import NetlinkError

    try:
        with IPRoute() as route:
            flags = bpf.XDP_FLAGS_SKB_MODE if there.mode == "generic" else bpf.XDP_FLAGS_DRV_MODE
            detach = {"attrs": [("IFLA_XDP_FD", -1), ("IFLA_XDP_FLAGS", flags)]}
            route.link("set", index=interface.index, xdp=detach)
    except NetlinkError as error:
        if error.code != errno.EBUSY:
            raise
        # The kernel does not detach a program that a link holds, and only a process (or a pin) holds a link.
        what = "nicps" if there.name == PROGRAM else "nicps switch xdp"
        raise InterfaceBusy(
            f"{what} runs on interface {interface.name} already (XDP program id {there.id}); see: {what} status"
        ) from None
    _log.warning("took away the XDP program that an older run left on %s", interface.name)
    return True


def attach(
    program_fd: int, interface: Interface, modes: Sequence[Mode] = ("native", "generic")
) -> tuple[int, Mode]:
    """Attach a program in the first of these modes that the driver has: natively, else in generic mode.

    Returns the link's descriptor and the mode. The program goes when the descriptor is closed, at the latest when the
    process ends.

    Raises:
        InterfaceBusy: another program is there.
        EnvironmentProblem: the interface takes XDP programs in none of these modes.
    """
    clear(interface)
    refused: list[str] = []
    for mode in modes:
        try:
            return bpf.xdp_link(program_fd, interface.index, _FLAGS[mode]), mode
        except OSError as error:
            if error.errno in (errno.EBUSY, errno.EEXIST):
                raise InterfaceBusy(
                    f"another XDP program has just been put on {interface.name}"
                ) from None
            refused.append(f"{mode}: {os.strerror(error.errno or 0)}")
            _log.info("no %s XDP on %s: %s", mode, interface.name, error)
    raise EnvironmentProblem(
        f"interface {interface.name} takes no XDP program ({'; '.join(refused)})"
    )
