# SPDX-License-Identifier: Apache-2.0
"""Where this host is in the network: what the parts of a job read of its node."""

from __future__ import annotations

from typing import Protocol

from nicps.protocol import Node, Phase, View


class Place(Protocol):
    """Read only: a part that wants something of the node returns an order for it (`nicps.job.orders`)."""

    @property
    def number(self) -> int:
        """This host's number in the list."""

    @property
    def name(self) -> str:
        """This host's name in the list."""

    @property
    def view(self) -> View:
        """The view in force."""

    @property
    def learners(self) -> frozenset[int]:
        """Members that have no state yet."""

    @property
    def leads(self) -> bool:
        """This host acts as node 1."""

    @property
    def changing(self) -> bool:
        """The view is about to end."""

    @property
    def open_round(self) -> int:
        """The round that is open; 0 before any."""

    @property
    def phase(self) -> Phase | None:
        """The phase in force: its first token has been seen."""

    @property
    def decided(self) -> Phase | None:
        """The phase in force, or the one that is being prepared."""


class NodePlace:
    """The place of a node."""

    def __init__(self, node: Node) -> None:
        self._node = node

    @property
    def number(self) -> int:
        """`Place.number`"""
        return self._node.number

    @property
    def name(self) -> str:
        """`Place.name`"""
        return self._node.name

    @property
    def view(self) -> View:
        """`Place.view`"""
        return self._node.view

    @property
    def learners(self) -> frozenset[int]:
        """`Place.learners`"""
        return self._node.learners

    @property
    def leads(self) -> bool:
        """`Place.leads`"""
        return self._node.leads

    @property
    def changing(self) -> bool:
        """`Place.changing`"""
        return self._node.changing

    @property
    def open_round(self) -> int:
        """`Place.open_round`"""
        return self._node.open_round

    @property
    def phase(self) -> Phase | None:
        """`Place.phase`"""
        return self._node.ring.phase if self._node.ring is not None else None

    @property
    def decided(self) -> Phase | None:
        """`Place.decided`"""
        return self._node.phase
