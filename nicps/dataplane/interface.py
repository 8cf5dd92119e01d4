# SPDX-License-Identifier: Apache-2.0
"""A network interface in the network namespace of this process."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from nicps.dataplane.ports import find_port
from nicps.errors import InterfaceDown, InterfaceMissing, InterfaceUnfit, NicpsError
from nicps.wire import LEAST_MTU

_SIOCGIFFLAGS, _SIOCGIFMTU, _SIOCGIFHWADDR = 0x8913, 0x8921, 0x8927
_IFF_UP, _IFF_LOOPBACK = 0x1, 0x8
_ARPHRD_ETHER = 1
_RTMGRP_LINK, _RTM_NEWLINK, _RTM_DELLINK = 1, 16, 17
_MESSAGE = struct.Struct("=IHHIIBxHi")  # struct nlmsghdr, and struct ifinfomsg up to its index

#: A send's errors if the interface's queue has no room, or the kernel no memory: try again.
QUEUE_FULL = (errno.ENOBUFS, errno.ENOMEM)


@dataclass(frozen=True, slots=True)
class Interface:
    """Name, index, MAC address (6 bytes), MTU in bytes, and whether it is up."""

    name: str
    index: int
    mac: bytes
    mtu: int
    up: bool


def read_interface(name: str) -> Interface:
    """Read an interface's properties.

    Raises:
        InterfaceMissing: there is none of that name; the message lists the interfaces that exist.
        InterfaceUnfit: it is not an Ethernet interface.
    """
    try:
        index = socket.if_nametoindex(name)
    except (OSError, ValueError):
        there = ", ".join(sorted(other for _, other in socket.if_nameindex())) or "none"
        raise InterfaceMissing(f"there is no interface {name}; there are: {there}") from None
    with _unless_gone(name), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as query:

        def ask(request: int) -> bytes:
            return fcntl.ioctl(query, request, struct.pack("16s24x", name.encode()))[16:]

        (flags,) = struct.unpack_from("H", ask(_SIOCGIFFLAGS))
        (mtu,) = struct.unpack_from("i", ask(_SIOCGIFMTU))
        hardware = ask(_SIOCGIFHWADDR)
    if struct.unpack_from("H", hardware)[0] != _ARPHRD_ETHER or flags & _IFF_LOOPBACK:
        raise InterfaceUnfit(f"{name} is not an Ethernet interface")
    return Interface(name, index, hardware[2:8], mtu, bool(flags & _IFF_UP))


def usable(name: str) -> Interface:
    """An interface that can carry our frames now.

    Raises:
        InterfaceMissing, InterfaceUnfit: as `read_interface`; or the MTU is too small, or the interface is a port of a
            bridge or the like.
        InterfaceDown: it is down.
    """
    found = read_interface(name)
    if not found.up:
        raise InterfaceDown(f"interface {name} is down; run: ip link set {name} up")
    need_mtu(found)
    with _unless_gone(name):
        port = find_port(found.index)
    if port is not None:
        raise InterfaceUnfit(f"interface {name} is {port}; {port.mend(name)}")
    return found


def need_mtu(interface: Interface) -> None:
    """Raise InterfaceUnfit if our frames are too long for an interface."""
    if interface.mtu < LEAST_MTU:
        raise InterfaceUnfit(
            f"interface {interface.name} has an MTU of {interface.mtu} bytes, {LEAST_MTU} are needed; "
            f"run: ip link set {interface.name} mtu {LEAST_MTU}"
        )


@contextlib.contextmanager
def _unless_gone(name: str) -> Iterator[None]:
    """Handle that the interface may be deleted between two questions about it."""
    from pyroute2.netlink.exceptions import NetlinkError

    try:
        yield
    except (OSError, NetlinkError) as error:
        if errno.ENODEV not in (getattr(error, "errno", 0), getattr(error, "code", 0)):
            raise
        raise InterfaceMissing(f"interface {name} has gone") from None


def current_name(index: int, name: str) -> str:
    """The name of the interface with that index, which was `name` before.

    Raises:
        InterfaceMissing: the interface has gone.
    """
    try:
        return socket.if_indextoname(index)
    except OSError:
        raise InterfaceMissing(f"interface {name} has gone") from None


def still_usable(name: str) -> None:
    """Check that an interface that was usable still is.

    Raises:
        InterfaceMissing: it has gone, perhaps since its name was read.
        InterfaceUnfit, InterfaceDown: as `usable`.
    """
    try:
        usable(name)
    except InterfaceMissing:
        raise InterfaceMissing(f"interface {name} has gone") from None


def explain_send(name: str, error: OSError) -> NicpsError:
    """The error to raise for a frame that the kernel did not take, for another reason than a full queue."""
    if error.errno == errno.ENETDOWN:
        return InterfaceDown(f"interface {name} has gone down")
    if error.errno in (errno.ENXIO, errno.ENODEV):
        return InterfaceMissing(f"interface {name} has gone")
    if error.errno == errno.EMSGSIZE:
        return InterfaceUnfit(
            f"interface {name} has an MTU below {LEAST_MTU} bytes; run: ip link set {name} mtu {LEAST_MTU}"
        )
    return NicpsError(f"cannot send on {name}: {os.strerror(error.errno or 0)}")


def read_traffic(name: str) -> tuple[int, int, int, int] | None:
    """Bytes and frames received, bytes and frames sent; None if the interface has gone.

    Counted by the kernel (proc_net(5)), of all protocols.
    """
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        found, _, figures = line.partition(":")
        if figures and found.strip() == name:
            received, sent = figures.split()[:2], figures.split()[8:10]
            return int(received[0]), int(received[1]), int(sent[0]), int(sent[1])
    return None


class LinkChanges:
    """The kernel's notices that an interface has changed: up or down, its MTU, its master (rtnetlink(7)).

    Args:
        index: the interface's; None for all interfaces of this network namespace.
    """

    def __init__(self, index: int | None) -> None:
        self._index = index
        kind = socket.SOCK_RAW | socket.SOCK_NONBLOCK
        self._socket = socket.socket(socket.AF_NETLINK, kind, socket.NETLINK_ROUTE)
        try:
            self._socket.bind((0, _RTMGRP_LINK))
        except BaseException:
            self._socket.close()
            raise

    def fileno(self) -> int:
        """Readable when a notice is there, of any interface."""
        return self._socket.fileno()

    def drain(self) -> bool:
        """Take all notices; return whether one is about this interface (about any, without an index)."""
        changed = False
        while True:
            try:
                changed |= self._concerns(self._socket.recv(1 << 16))
            except BlockingIOError:
                return changed
            except OSError as error:
                if error.errno != errno.ENOBUFS:
                    raise
                changed = True  # there were more than the socket holds: some were lost

    def _concerns(self, data: bytes) -> bool:
        at = 0
        while at + _MESSAGE.size <= len(data):
            length, kind, *_, index = _MESSAGE.unpack_from(data, at)
            if kind in (_RTM_NEWLINK, _RTM_DELLINK) and self._index in (None, index):
                return True
            at += max(length + 3 & ~3, _MESSAGE.size)
        return False

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()
