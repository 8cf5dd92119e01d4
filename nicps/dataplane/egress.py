# SPDX-License-Identifier: Apache-2.0
"""The program that signs at an interface's egress: attach it so that it goes with its process, and remove it.

Kernels from 6.6 on have links for that (TCX). On older ones it is a filter of the clsact queueing discipline, which
outlives a kill -9. The filter then has no effect, as no socket carries its mark any more, until the next run removes
it.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Literal

from nicps.dataplane import bpf
from nicps.dataplane.interface import Interface
from nicps.errors import EnvironmentProblem

Mode = Literal["tcx", "clsact"]

#: The kernel keeps 15 characters of a program's name. A program with this name is ours.
PROGRAM = "nicps_egress"

_INGRESS, _EGRESS = 0xFFFFFFF2, 0xFFFFFFF3
#: A priority that no other program uses, and all protocols.
_PLACE = {"parent": _EGRESS, "prio": 0x6E63, "protocol": 3}

_log = logging.getLogger(__name__)


def attach(program_fd: int, interface: Interface) -> tuple[Callable[[], object], Mode]:
    """Attach the program; return the function that removes it, and the way in which it is attached.

    Raises:
        EnvironmentProblem: the kernel takes no program there.
    """
    try:
        return partial(os.close, bpf.tcx_link(program_fd, interface.index)), "tcx"
    except OSError as error:
        if error.errno != errno.EINVAL:  # the error of kernels that do not have TCX
            raise EnvironmentProblem(
                f"interface {interface.name} takes no program at its egress: {os.strerror(error.errno or 0)}"
            ) from None
    add_filter(program_fd, interface)
    return partial(clear, interface), "clsact"


def add_filter(program_fd: int, interface: Interface) -> None:
    """Attach a program the old way: it outlives its process.

    Raises:
        EnvironmentProblem: the kernel cannot do that.
    """
    where = f"the egress of {interface.name}"
    _add(program_fd, interface.index, _EGRESS, where, "a network with a key")


def add_ingress_filter(program_fd: int, name: str, index: int) -> None:
    """Attach a program to the ingress of an interface of ours, the old way: it goes with the interface.

    Raises:
        EnvironmentProblem: the kernel cannot do that.
    """
    _add(program_fd, index, _INGRESS, f"the ingress of {name}", "a direct call")


def _add(program_fd: int, index: int, parent: int, where: str, what: str) -> None:
    from pyroute2 import IPRoute
    from pyroute2.netlink.exceptions import NetlinkError

    rule = {"fd": program_fd, "name": PROGRAM, "classid": 1, "direct_action": True}
    with IPRoute() as route:
        try:
            try:
                route.tc("add", "clsact", index)
            except NetlinkError as error:
                if error.code != errno.EEXIST:  # another program has made it, and we share it
                    raise
            place = {**_PLACE, "parent": parent}
            route.tc("add-filter", "bpf", index, ":1", **place, **rule)
        except NetlinkError as error:
            raise EnvironmentProblem(
                f"the kernel takes no program at {where} ({os.strerror(error.code)}): "
                f"{what} needs Linux 6.6, or the modules sch_ingress and cls_bpf"
            ) from None


def clear(interface: Interface) -> bool:
    """Remove the filter that an earlier run of ours left (or this one attached); return whether there was one.

    The clsact discipline is removed too if nothing else is in it.
    """
    from pyroute2 import IPRoute
    from pyroute2.netlink.exceptions import NetlinkError

    index = interface.index
    try:
        with IPRoute() as route:
            found = [rule for rule in _rules(route, index, _EGRESS) if _name(rule) == PROGRAM]
            for rule in found:
                route.tc("del-filter", "bpf", index, rule["handle"], **_PLACE)
            if found and not [*_rules(route, index, _EGRESS), *_rules(route, index, _INGRESS)]:
                route.tc("del", "clsact", index)
    except NetlinkError as error:
        if error.code != errno.ENODEV:  # the interface is gone, and the filter with it
            raise
        return False
    return bool(found)


def _rules(route: Any, index: int, parent: int) -> Iterator[Any]:
    """The filters at the egress; the kernel also lists a head for each priority, without a handle."""
    return (rule for rule in route.get_filters(index, parent=parent) if rule["handle"])


def _name(rule: Any) -> str | None:
    options = rule.get_attr("TCA_OPTIONS")
    return options.get_attr("TCA_BPF_NAME") if hasattr(options, "get_attr") else None
