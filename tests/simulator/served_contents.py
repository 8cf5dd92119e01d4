# SPDX-License-Identifier: Apache-2.0
"""What servers hold together, as a real one pulls it for each test; and what a new program begins with."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.simulator.served_host import ServedHost
    from tests.simulator.served_program import State
    from tests.simulator.servers import ServersKernel


def contents_of(servers: Iterable[ServersKernel]) -> dict[int, list[Any]]:
    """Of all their homes, by push fragment, with averages that are committed."""
    found: dict[int, list[Any]] = {}
    for each in servers:
        for index, home in each.part.homes.items() if each.part is not None else ():
            due = home.due and home.tag & 0xFFFFFFFF <= each.settled
            found[index] = sorted(({**home.content, **home.sums} if due else home.content).items())
    return found


def handed_out(host: ServedHost) -> State:
    """The parameters of the last commit, out of a program that has been in it; none before the first."""
    for other in host.lan.hosts:
        process, node = other.process, other.node
        if other.dead or process is None or node.view.number != host.node.view.number:
            continue
        if node.number not in node.learners and process.kept and not process.behind:
            return process.kept
    return ()
