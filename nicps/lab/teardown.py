# SPDX-License-Identifier: Apache-2.0
"""The labs that are up, and taking one down, also one that a crash left half made."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass, replace

from pyroute2 import NetlinkError

from nicps.errors import NotRoot
from nicps.lab import enter, links, namespaces, processes, state
from nicps.lab.errors import LabNotFound, LabProblem
from nicps.lab.processes import Running
from nicps.programs import require_programs


@dataclass(frozen=True)
class Removed:
    """The result of `down`: `strangers` were not started by the lab, and go on running."""

    namespaces: tuple[str, ...]
    ended: tuple[Running, ...]
    strangers: tuple[Running, ...]


def standing() -> list[str]:
    """The names of all labs that are up, or of which a part is left."""
    return sorted({*state.names(), *namespaces.find()})


def the_only() -> str:
    """The name of the lab to use if none is named.

    Raises:
        LabNotFound: none is up, or several are.
    """
    names = standing()
    if not names:
        raise LabNotFound("no lab stands: run `nicps lab up`")
    if len(names) > 1:
        raise LabNotFound(f"the labs {', '.join(names)} stand: say which one with --lab NAME")
    return names[0]


def down(name: str = "lab") -> Removed:
    """Take a lab down, also one that a crash left half made. Does nothing if there is none."""
    require_root()
    try:
        # Ending processes can take seconds, so it is not done under the lock. Under it, none can be added.
        found = state.read(name)
        ended = processes.end(name, found.processes if found else ())
        with state.lock():
            removed = remove(name)
        if found and found.scratch:  # a tree may be deeper than Python recurses
            (rm,) = require_programs("rm", purpose="taking a lab down")
            subprocess.run([rm, "-rf", "--", found.scratch], stderr=subprocess.DEVNULL)
        return replace(removed, ended=(*ended, *removed.ended))
    except (OSError, NetlinkError) as error:
        raise LabProblem(f"lab {name} cannot be taken down: {describe_error(error)}") from error


def require_root() -> None:
    """Raise NotRoot unless we may make namespaces."""
    if os.geteuid() != 0:
        raise NotRoot("the lab makes network namespaces, which needs root: run it with sudo")


def remove(name: str) -> Removed:
    """The same, for a caller that holds the lock."""
    found = state.read(name)
    recorded = found.processes if found else ()
    ended = processes.end(name, recorded)
    names = namespaces.find().get(name, [])
    left = processes.strangers(names, ())
    # The switch first: its bridge and all its cables are removed at once.
    shared = (namespaces.switch_name(name), namespaces.cables_name(name))
    for netns in sorted(names, key=lambda netns: netns not in shared):
        if _mounted(netns):
            links.clear(netns)
    namespaces.remove(names)
    state.remove(name)
    return Removed(tuple(names), tuple(ended), tuple(left))


def _mounted(netns: str) -> bool:
    """Whether a namespace is behind the name: an `up` that was killed may have left a bare file."""
    path = enter.path_of(netns)
    return os.stat(path).st_dev != os.stat(enter.NETNS_DIR).st_dev


def describe_error(error: BaseException) -> str:
    """The message of netlink or the system."""
    if isinstance(error, NetlinkError):
        return f"netlink: {error.args[1] if len(error.args) > 1 else error}"
    if isinstance(error, OSError):
        return error.strerror or str(error)
    return str(error)
