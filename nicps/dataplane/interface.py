# SPDX-License-Identifier: Apache-2.0
"""A network interface, seen from the network namespace that this process is in."""

from __future__ import annotations

import fcntl
import socket
import struct
from dataclasses import dataclass

from nicps.errors import InterfaceDown, InterfaceMissing, InterfaceUnfit
from nicps.wire import FRAGMENT_HEADER_BYTES, PAYLOAD_BYTES

_SIOCGIFFLAGS, _SIOCGIFMTU, _SIOCGIFHWADDR = 0x8913, 0x8921, 0x8927
_IFF_UP, _IFF_LOOPBACK = 0x1, 0x8
_ARPHRD_ETHER = 1

#: What a fragment needs behind the Ethernet header.
LEAST_MTU = FRAGMENT_HEADER_BYTES + PAYLOAD_BYTES


@dataclass(frozen=True, slots=True)
class Interface:
    """Name, index, MAC address (6 bytes), MTU in bytes, and whether it is up."""

    name: str
    index: int
    mac: bytes
    mtu: int
    up: bool


def look(name: str) -> Interface:
    """Look at an interface.

    Raises:
        InterfaceMissing: there is none of that name; the message lists those that there are.
        InterfaceUnfit: it is not an Ethernet interface.
    """
    try:
        index = socket.if_nametoindex(name)
    except (OSError, ValueError):
        there = ", ".join(sorted(other for _, other in socket.if_nameindex())) or "none"
        raise InterfaceMissing(f"there is no interface {name}; there are: {there}") from None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as query:

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
        InterfaceMissing, InterfaceUnfit: as `look`; or the MTU is too small.
        InterfaceDown: it is down.
    """
    found = look(name)
    if not found.up:
        raise InterfaceDown(f"interface {name} is down; run: ip link set {name} up")
    if found.mtu < LEAST_MTU:
        raise InterfaceUnfit(
            f"interface {name} has an MTU of {found.mtu} bytes, {LEAST_MTU} are needed; "
            f"run: ip link set {name} mtu 1500"
        )
    return found
