# SPDX-License-Identifier: Apache-2.0
"""What goes over TCP: Gloo, for the calls that nicps does not have.

The ranks tell each other their addresses through the group. Where all of them have one in the same IP network, and can
connect to rank 0 there, a group of Gloo can be made. It is not signed with the network's key.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Self

import numpy as np
import orjson
from pyroute2 import IPRoute
from torch._C import _distributed_c10d
from torch._C._distributed_c10d import Store

from nicps.collective import Group
from nicps.errors import UsageProblem

#: "0" keeps everything off TCP.
SWITCH = "NICPS_TORCH_TCP"
_BYTES = 1024  # of what a rank says of its addresses
_CONNECT_S = 5.0

Interface = ipaddress.IPv4Interface | ipaddress.IPv6Interface


@dataclass(frozen=True, slots=True)
class Address:
    """One of this host's: `interface` is the name of the device, `at` an address with its network."""

    interface: str
    at: Interface


@dataclass(frozen=True, slots=True)
class Tcp:
    """What the ranks have agreed on. `refusal`: why there is no TCP between them; empty where there is.

    `own` is this rank's address, and `root` the address of rank 0, in the network that all are in.
    """

    refusal: str
    own: Address | None = None
    root: str = ""

    @classmethod
    def agree(cls, group: Group) -> Self:
        """Find the IP network that all ranks are in; calls of the group, the same at all of them."""
        if getattr(group, "late", False):
            return cls("this process has come late, when the others had agreed on it")
        wanted = os.environ.get(SWITCH, "1") != "0"
        mine = addresses() if wanted else []
        said = orjson.dumps([str(each.at) for each in mine])
        if len(said) > _BYTES:
            said = orjson.dumps([str(each.at) for each in mine[:16]])
        rows = group.all_gather(np.frombuffer(said.ljust(_BYTES), np.uint8)).result()
        told = [
            [ipaddress.ip_interface(text) for text in orjson.loads(row.tobytes())] for row in rows
        ]
        network = shared_network(told)
        if network is None:
            return cls(_refusal(group, told))
        own = next(each for each in mine if each.at.network == network)
        root = next(each for each in told[0] if each.network == network)
        tcp = cls("", own, str(root.ip))
        if not tcp._reached(group):
            return cls(f"not all hosts could connect to {tcp.root}, where rank 0 is")
        os.environ.setdefault("GLOO_SOCKET_IFNAME", own.interface)
        return tcp

    def _reached(self, group: Group) -> bool:
        """Whether all ranks can connect to rank 0 at its address."""
        with contextlib.ExitStack() as stack:
            listening = _listen(self.root) if group.rank == 0 else None
            if listening is not None:
                stack.enter_context(listening)
            port = listening.getsockname()[1] if listening is not None else 0
            port = int(group.broadcast(np.array([port], np.int64), 0).result()[0])
            connects = port > 0 and _connects(self.root, port)
            return bool(group.all_reduce(np.array([connects]), "min").result()[0])

    def gloo(self, store: Store, rank: int, size: int, timeout: timedelta, *, lazy: bool) -> Any:
        """A group of Gloo; `lazy` connects two ranks when they first talk to each other.

        Raises:
            UsageProblem: there is no TCP between the hosts.
        """
        if self.own is None:
            raise UsageProblem(self.refusal)
        group: Any = _distributed_c10d.ProcessGroupGloo
        options = group._Options()
        device = group.create_device(hostname=str(self.own.at.ip), lazy_init=lazy)
        options._devices, options._timeout = [device], timeout
        return group(store, rank, size, options)


def addresses() -> list[Address]:
    """This host's, but for those of the host itself and of one link."""
    found = []
    with IPRoute() as route:
        names = {link["index"]: link.get_attr("IFLA_IFNAME") for link in route.get_links()}
        for each in route.get_addr():
            text = each.get_attr("IFA_LOCAL") or each.get_attr("IFA_ADDRESS")
            at = ipaddress.ip_interface(f"{text}/{each['prefixlen']}")
            if not (at.ip.is_loopback or at.ip.is_link_local):
                found.append(Address(names[each["index"]], at))
    return found


def shared_network(told: Sequence[Sequence[Interface]]) -> Any:
    """The first IP network of rank 0 in which all ranks have an address; None if there is none."""
    for candidate in told[0]:
        if all(any(each.network == candidate.network for each in one) for one in told):
            return candidate.network
    return None


def _refusal(group: Group, told: Sequence[Sequence[Interface]]) -> str:
    without = [group.names[rank] for rank, one in enumerate(told) if not one]
    if without:
        return f"{', '.join(without)}: no IP address, or {SWITCH}=0"
    return "the hosts have no IP network in common"


def _connects(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port), _CONNECT_S).close()
    except OSError:
        return False
    return True


def _listen(address: str) -> socket.socket | None:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        return socket.create_server((address, 0), family=family, backlog=64)
    except OSError as error:
        if error.errno in (errno.EADDRNOTAVAIL, errno.EACCES, errno.EPERM):
            return None
        raise
