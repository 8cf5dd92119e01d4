# SPDX-License-Identifier: Apache-2.0
"""The checks of one network interface."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import socket
import struct
from pathlib import Path

from nicps.dataplane import bpf, egress, htb, xdp
from nicps.dataplane.interface import Interface, read_interface
from nicps.dataplane.ports import find_port, find_ports
from nicps.doctor.check import Check, fail, ok, warn
from nicps.errors import EnvironmentProblem, InterfaceBusy, InterfaceMissing, InterfaceUnfit
from nicps.rates import format_rate
from nicps.wire import LEAST_MTU

SIOCETHTOOL = 0x8946
ETHTOOL_GDRVINFO = 0x03
ETHTOOL_GLINK = 0x0A

TC_ACT_UNSPEC = -1  # go on as if there were no program

#: Above this, native XDP (on veth, say) asks for programs with frags, which BCC cannot load.
MOST_MTU = 3500


def check_interface(name: str | None, keyed: bool = False) -> list[Check]:
    """Rows for the interface `name`; without a name, one row that lists the interfaces that could be named.

    Removes programs that an earlier run of ours left, and attaches one for a moment if there is none.

    Args:
        keyed: whether the network has a key, so that tokens and fragments are to be signed.
    """
    usable = _usable()
    choice = f"--iface with one of: {', '.join(usable)}" if usable else "add an Ethernet interface"
    if name is None:
        return [warn("interface", "none was named, so none was checked", choice)]
    try:
        found = read_interface(name)
    except InterfaceMissing:
        return [fail("interface", f"there is no interface {name}", choice)]
    except InterfaceUnfit as error:
        return [fail("interface", str(error), choice)]
    rows = [_check_up(found), check_mtu(found)]
    if found.up:
        row, shaped = _check_xdp(found)
        rows += [row, check_queue(found, shaped)]
        if keyed:
            rows.append(check_signing(found))
    return rows


def _usable() -> list[str]:
    """Names of the interfaces that could be given to `join`."""
    ports = find_ports()
    names = [name for index, name in socket.if_nameindex() if index not in ports]
    return [name for name in names if _read_or_none(name) is not None]


def _read_or_none(name: str) -> Interface | None:
    try:
        return read_interface(name)
    except (InterfaceMissing, InterfaceUnfit):
        return None


def _ethtool(name: str, command: int, size: int) -> bytes | None:
    """The driver's answer, `size` bytes from the command on; None if it gives none."""
    answer = ctypes.create_string_buffer(struct.pack("=I", command), size)
    request = struct.pack("16sP", name.encode(), ctypes.addressof(answer))
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
            fcntl.ioctl(control, SIOCETHTOOL, request)
    except OSError:
        return None
    return answer.raw


def driver(name: str) -> str:
    """The driver of an interface as ethtool reports it; "unknown" if it does not."""
    answer = _ethtool(name, ETHTOOL_GDRVINFO, 196)
    return answer[4:36].split(b"\0")[0].decode(errors="replace") if answer else "unknown"


def has_carrier(name: str) -> bool:
    """Whether a link partner is there; assumed if the driver does not report it."""
    answer = _ethtool(name, ETHTOOL_GLINK, 8)
    return answer is None or struct.unpack("=II", answer)[1] != 0


def _check_up(link: Interface) -> Check:
    text = f"{link.name}, driver {driver(link.name)}"
    if not link.up:
        return fail("interface", f"{text}, is down", f"ip link set {link.name} up")
    if (port := find_port(link.index)) is not None:
        return fail("interface", f"{text}, is {port}", port.mend(link.name))
    if not has_carrier(link.name):
        mend = "plug the cable in, or look at the other end"
        return fail("interface", f"{text}, is up but has no carrier", mend)
    return ok("interface", f"{text}, up")


def check_mtu(link: Interface) -> Check:
    """Room for every frame, and not more than native XDP takes."""
    mend = f"ip link set {link.name} mtu {LEAST_MTU}"
    if link.mtu < LEAST_MTU:
        return fail("MTU", f"{link.mtu}: the longest frame needs {LEAST_MTU}", mend)
    if link.mtu > MOST_MTU:
        text = f"{link.mtu}: most drivers refuse native XDP above {MOST_MTU}"
        return warn("MTU", text, mend)
    return ok("MTU", str(link.mtu))


def _check_xdp(link: Interface) -> tuple[Check, bool]:
    """The mode of a later `join`, tried with a program attached for a moment; and whether classes that an earlier run
    had left were taken away. Only with a program has a veth the threads that are switched off with them.
    """
    try:
        program = load_pass_program("nicps_doctor")
    except OSError as error:
        if error.errno in (errno.EPERM, errno.EACCES):
            return warn("XDP", "not tried: needs root", "run this with sudo"), False
        return fail("XDP", f"the kernel takes no XDP program: {error.strerror}", "see dmesg"), False
    try:
        there = xdp.attached(link.index)
        left = xdp.clear(link) | egress.clear(link)
        link_fd, mode = xdp.attach(program, link)
        try:
            shaped = htb.clear(link)
        finally:
            os.close(link_fd)
    except InterfaceBusy as error:
        if there is not None and there.name == xdp.PROGRAM:
            text = f"{there.mode}, in use by a running agent (program {there.id})"
            return ok("XDP", text), False
        text, _, mend = str(error).partition("; ")
        return fail("XDP", text, mend or "try again"), False
    except EnvironmentProblem as error:
        mend = "the driver may want another MTU, fewer queues, or large receive offload off"
        return fail("XDP", str(error), mend), False
    finally:
        os.close(program)
    text = f"{mode}; a program that an older run had left was taken away" if left else mode
    if mode == "native":
        return ok("XDP", text), shaped
    mend = "works, at a lower rate; `dmesg` may say why, and `ethtool -K` turns offloads off"
    text = f"{text} only: the driver {driver(link.name)} refuses native mode here"
    return warn("XDP", text, mend), shaped


def check_queue(link: Interface, shaped: bool = False) -> Check:
    """Whether `nicps join --shape` could put its classes there; run after XDP has been tried.

    Args:
        shaped: classes that an earlier run had left were taken away with that.
    """
    there = xdp.attached(link.index)
    in_use = there is not None and there.name == xdp.PROGRAM
    if shaped or (not in_use and os.geteuid() == 0 and htb.clear(link)):
        return ok("queue", "classes that an older run had left were taken away")
    rate_bps, speed_bps = htb.rate_of(link), _speed_bps(link.name)
    if rate_bps is not None:
        text = f"classes at {format_rate(rate_bps)}"
        if speed_bps is not None and rate_bps > speed_bps:
            text += (
                f", and the line has {format_rate(speed_bps)}: frames wait in the NIC, in no order"
            )
            return warn("queue", text, f"join with --shape below {format_rate(speed_bps)}")
        return ok("queue", f"{text}, of a running agent")
    if (found := htb.described(link)) is not None:
        return ok("queue", f"{found}, which `nicps join --shape` would not replace")
    return ok("queue", "as the kernel chose it: `nicps join --shape` can put classes there")


def _speed_bps(name: str) -> int | None:
    """The line's rate as the driver tells it; None if it does not."""
    try:
        speed = int(Path(f"/sys/class/net/{name}/speed").read_text())
    except (OSError, ValueError):
        return None
    return speed * 10**6 if speed > 0 else None


def check_signing(link: Interface) -> Check:
    """Whether a program can be attached at the egress, tried with one for a moment; run after XDP has been tried."""
    try:
        program = _load("sched_cls", TC_ACT_UNSPEC, "nicps_doctor")
    except OSError as error:
        if error.errno in (errno.EPERM, errno.EACCES):
            return warn("signing", "not tried: needs root", "run this with sudo")
        return fail("signing", f"the kernel takes no TC program: {error.strerror}", "see dmesg")
    try:
        there = xdp.attached(link.index)
        if there is not None and there.name == xdp.PROGRAM:  # it may sign with a filter like ours
            return warn("signing", "not tried: an agent runs here", "again after `nicps leave`")
        detach, mode = egress.attach(program, link)
        detach()
    except EnvironmentProblem as error:
        text, _, mend = str(error).partition(": a network with a key needs ")
        return fail("signing", text, mend or "Linux 6.6, or `modprobe -a sch_ingress cls_bpf`")
    finally:
        os.close(program)
    return ok("signing", mode)


def load_pass_program(name: str) -> int:
    """A descriptor of the smallest XDP program: `return XDP_PASS`."""
    return _load("xdp", bpf.XDP_PASS, name)


def _load(kind: str, verdict: int, name: str) -> int:
    # mov64 r0, VERDICT; exit
    code = struct.pack("=BBhiBBhi", 0xB7, 0, 0, verdict, 0x95, 0, 0, 0)
    return bpf.program_load(bpf.PROGRAM_TYPES[kind], code, 0, name)
