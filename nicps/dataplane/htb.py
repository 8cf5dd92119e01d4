# SPDX-License-Identifier: Apache-2.0
"""The host's queue: classes of an HTB put urgent frames before bulk (P3; docs/channels.md, "Order on the wire").

    6e63:        root, at the rate that the user has given
    +- 6e63:7    control frames and tokens       prio 0
    +- 6e63:86   urgency 7                       prio 1
    +- ...
    +- 6e63:10   urgency 0, bulk                 prio 7
    +- 6e63:f0   all other programs              prio 7, with a floor of a tenth
    +- 6e63:f1   empty: a sign that the interface receives in threads for our sake (`napi`)

A socket names its class with SO_PRIORITY. The four low bits of it are a priority as queues without classes know them,
so there, too, control and urgent frames leave before others.

An HTB outlives the process that has made it. It has a handle of its own, so the next run knows it and takes it away.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from functools import partial
from typing import Any

from nicps.dataplane.interface import Interface
from nicps.dataplane.napi import has_threads, switch_threads
from nicps.errors import EnvironmentProblem, InterfaceUnfit

_MAJOR = 0x6E63 << 16
_ROOT, _OTHERS, _THREADED = 0x1, 0xF0, 0xF1
_TC_PRIO_BESTEFFORT, _TC_PRIO_INTERACTIVE, _TC_PRIO_CONTROL = 0, 6, 7  # linux/pkt_sched.h
_LAST_PRIO = 7  # of HTB
_URGENT = 4  # from this urgency on frames are urgent where only the four low bits count
URGENCIES = 8
_FLOOR, _OTHERS_FLOOR = 0.01, 0.1  # parts of the rate
_LEAST_FLOOR = 1_000  # bytes a second: HTB has no rate of 0
_QUANTUM = 3_028  # bytes that a class sends in its turn: two full frames

#: SO_PRIORITY of control frames and tokens.
CONTROL = _MAJOR | _TC_PRIO_CONTROL


def of_urgency(urgency: int) -> int:
    """SO_PRIORITY of frames of that urgency, 0 to 7."""
    low = _TC_PRIO_INTERACTIVE if urgency >= _URGENT else _TC_PRIO_BESTEFFORT
    return _MAJOR | (urgency + 1) << 4 | low


def shape(interface: Interface, rate_bps: int) -> Callable[[], object]:
    """Put the classes there, with that rate for all together; return the function that takes them away.

    The interface receives in threads meanwhile, if it can (`napi`).

    Raises:
        InterfaceUnfit: somebody has set up a queueing discipline there.
        EnvironmentProblem: the kernel has no HTB.
    """
    from pyroute2 import IPRoute
    from pyroute2.netlink.exceptions import NetlinkError

    index, rate = (
        interface.index,
        rate_bps // 8,
    )  # pyroute2 takes a plain number as bytes per second
    with IPRoute() as route:
        if (there := _root(route, index)) is not None:
            raise InterfaceUnfit(
                f"interface {interface.name} has a queueing discipline already ({_described(there)}): take it away"
                f" (`tc qdisc del dev {interface.name} root`), or leave out --shape"
            )
        try:
            route.tc("add", "htb", index, handle=_MAJOR, default=_OTHERS)
            add = partial(route.tc, "add-class", "htb", index, ceil=rate, quantum=_QUANTUM)
            add(handle=_MAJOR | _ROOT, parent=_MAJOR, rate=rate)
            floor = max(_LEAST_FLOOR, int(rate * _FLOOR))
            classes = [(CONTROL, 0, floor)]
            for urgency in range(URGENCIES):
                prio = max(1, _LAST_PRIO - urgency)
                classes.append((of_urgency(urgency), prio, floor))
            classes.append((_MAJOR | _OTHERS, _LAST_PRIO, int(rate * _OTHERS_FLOOR)))
            if has_threads(interface) is False:
                classes.append((_MAJOR | _THREADED, _LAST_PRIO, floor))
            for handle, prio, least in classes:
                add(handle=handle, parent=_MAJOR | _ROOT, rate=least, prio=prio)
            switch_threads(interface, on=True)  # the sign is there before the effect
        except NetlinkError as error:
            _remove(route, interface)
            raise EnvironmentProblem(
                f"cannot shape interface {interface.name}: {os.strerror(error.code)}; --shape needs the kernel's HTB"
                " (`modprobe sch_htb`)"
            ) from None
    return partial(clear, interface)


def clear(interface: Interface) -> bool:
    """Take the classes away that an earlier run has left (or this one has made); return whether there were any."""
    from pyroute2 import IPRoute
    from pyroute2.netlink.exceptions import NetlinkError

    try:
        with IPRoute() as route:
            return _remove(route, interface)
    except NetlinkError as error:
        if error.code != errno.ENODEV:  # the interface is gone, and its queue with it
            raise
        return False


def rate_of(interface: Interface) -> int | None:
    """Bits per second of our classes there; None if there are none."""
    from pyroute2 import IPRoute

    with IPRoute() as route:
        there = _root(route, interface.index)
        if there is None or there["handle"] != _MAJOR:
            return None
        for each in route.get_classes(index=interface.index):
            if each["handle"] == _MAJOR | _ROOT:
                options = each.get_attr("TCA_OPTIONS")
                wide = options.get_attr("TCA_HTB_RATE64")
                return 8 * int(wide or options.get_attr("TCA_HTB_PARMS")["rate"])
    return None


def described(interface: Interface) -> str | None:
    """The queueing discipline that somebody has set up there, ours included; None if it is the kernel's own choice."""
    from pyroute2 import IPRoute

    with IPRoute() as route:
        there = _root(route, interface.index)
    return None if there is None else _described(there)


def _remove(route: Any, interface: Interface) -> bool:
    there = _root(route, interface.index)
    if there is None or there["handle"] != _MAJOR:
        return False
    classes = route.get_classes(index=interface.index)
    if any(each["handle"] == _MAJOR | _THREADED for each in classes):
        switch_threads(interface, on=False)
    route.tc("del", "htb", interface.index, handle=_MAJOR)
    return True


def _root(route: Any, index: int) -> Any | None:
    """The root discipline, unless the kernel has chosen it: that one has no handle."""
    root = 0xFFFFFFFF
    found = [q for q in route.get_qdiscs(index=index) if q["parent"] == root and q["handle"]]
    return found[0] if found else None


def _described(qdisc: Any) -> str:
    return f"{qdisc.get_attr('TCA_KIND')} {qdisc['handle'] >> 16:x}:"
