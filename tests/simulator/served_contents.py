# SPDX-License-Identifier: Apache-2.0
"""What servers hold together, as a real one pulls it for each test."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.simulator.servers import ServersKernel


def contents_of(servers: Iterable[ServersKernel]) -> dict[int, list[Any]]:
    """Of all their homes, by push fragment, with averages that are committed."""
    found: dict[int, list[Any]] = {}
    for each in servers:
        for index, home in each.part.homes.items() if each.part is not None else ():
            due = home.due and home.tag & 0xFFFFFFFF <= each.settled
            found[index] = sorted(({**home.content, **home.sums} if due else home.content).items())
    return found
