# SPDX-License-Identifier: Apache-2.0
"""Where this host is in the network: what the parts of a job read of its node."""

from __future__ import annotations

from typing import Protocol

from nicps.protocol import Node, Phase, View


class Place(Protocol):
    """Read only: a part that wants something of the node returns an order for it (`nicps.job.orders`)."""

    @property
    def view(self) -> View:
        """The view in force."""

    @property
    def learners(self) -> frozenset[int]:
        """Members that have no state yet."""

    @property
    def open_round(self) -> int:
        """The round that is open; 0 before any."""

    @property
    def phase(self) -> Phase | None:
        """The phase in force: its first token has been seen."""


class NodePlace:
    """The place of a node."""

    def __init__(self, node: Node) -> None:
        self._node = node

    @property
    def view(self) -> View:
        """`Place.view`"""
        return self._node.view

    @property
    def learners(self) -> frozenset[int]:
        """`Place.learners`"""
        return self._node.learners

    @property
    def open_round(self) -> int:
        """`Place.open_round`"""
        return self._node.open_round

    @property
    def phase(self) -> Phase | None:
        """`Place.phase`"""
        return self._node.ring.phase if self._node.ring is not None else None
