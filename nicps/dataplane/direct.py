# SPDX-License-Identifier: Apache-2.0
"""What a training program gets for direct calls (docs/direct.md): an interface of its own, and memory to read.

It writes frames to the interface (a TAP). A TC program there takes only frames of direct calls, makes them this host's,
and sends them on. The interface is gone once no process has it open, or with `close`.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from nicps.dataplane import bpf, egress
from nicps.errors import EnvironmentProblem
from nicps.layout import layout

_DEVICE = "/dev/net/tun"
_NAME = b"nicps-call%d"
# linux/if_tun.h, linux/sockios.h, linux/if.h
_TUNSETIFF, _TAP, _NO_PACKET_INFO = 0x400454CA, 0x0002, 0x1000
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _UP, _NOARP = 0x8913, 0x8914, 0x1, 0x80
_REQUEST = struct.Struct("16sH22x")


@dataclass(frozen=True, slots=True)
class Shared:
    """Descriptors for a training program: the frozen maps `desks` and `numbers`, the interface, and the rings that wake
    the channels' threads.
    """

    desks: int
    numbers: int
    tap: int
    bells: tuple[int, ...]

    @property
    def descriptors(self) -> tuple[int, ...]:
        """In this order."""
        return self.desks, self.numbers, self.tap, *self.bells


class DirectCalls:
    """The interface of one training program, until `close`.

    Args:
        fds: the loaded maps' descriptors by name; the caller keeps them open as long as this lives.
        program: the TC program.

    Raises:
        EnvironmentProblem: the kernel has no such interfaces, or takes no program there.
    """

    def __init__(self, fds: Mapping[str, int], program: int) -> None:
        with contextlib.ExitStack() as undo:
            tap, name = _open_tap()
            undo.callback(os.close, tap)
            index = socket.if_nametoindex(name)
            _attach(program, name, index)
            _bring_up(name)
            undo.callback(_remove, index)
            self._undo = undo.pop_all()
        rings = (fds[f"call_bell_{channel}"] for channel in range(layout().limits["CHANNELS"]))
        self.shared = Shared(fds["desks"], fds["numbers"], tap, tuple(rings))

    def close(self) -> None:
        """Take the interface away: what is written to it goes nowhere."""
        self._undo.close()


def freeze(fds: Mapping[str, int]) -> None:
    """From now on only the kernel's programs write desks and numbers."""
    for name in ("desks", "numbers"):
        bpf.map_freeze(fds[name])


def _open_tap() -> tuple[int, str]:
    try:
        tap = os.open(_DEVICE, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise EnvironmentProblem(f"{_DEVICE}: {error.strerror} (the module tun)") from None
    try:
        asked = _REQUEST.pack(_NAME, _TAP | _NO_PACKET_INFO)
        made = fcntl.ioctl(tap, _TUNSETIFF, asked)
    except OSError as error:
        os.close(tap)
        raise EnvironmentProblem(
            f"the kernel makes no interface for direct calls: {error.strerror}"
        ) from None
    return tap, _REQUEST.unpack(made)[0].rstrip(b"\0").decode()


def _attach(program: int, name: str, index: int) -> None:
    """It goes with the interface, not with this process: a program that outlives it must not be free there."""
    try:
        bpf.tcx_attach(program, index)
    except OSError as error:
        if error.errno != errno.EINVAL:  # the error of kernels that do not have TCX
            raise EnvironmentProblem(
                f"interface {name} takes no program: {os.strerror(error.errno or 0)}"
            ) from None
        egress.add_ingress_filter(program, name, index)


def _bring_up(name: str) -> None:
    # Without IPv6 there is no such file; where it must not be written, the host greets its neighbours there.
    with contextlib.suppress(OSError):
        Path(f"/proc/sys/net/ipv6/conf/{name}/disable_ipv6").write_text("1")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        flags = _REQUEST.unpack(
            fcntl.ioctl(any_socket, _SIOCGIFFLAGS, _REQUEST.pack(name.encode(), 0))
        )[1]
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, _REQUEST.pack(name.encode(), flags | _UP | _NOARP))


def _remove(index: int) -> None:
    from pyroute2 import IPRoute
    from pyroute2.netlink.exceptions import NetlinkError

    with IPRoute() as route:
        try:
            route.link("del", index=index)
        except NetlinkError as error:
            if error.code != errno.ENODEV:
                raise
