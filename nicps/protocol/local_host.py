# SPDX-License-Identifier: Apache-2.0
"""This host in the network: what every part of its node must know."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from nicps import wire
from nicps.protocol.view import View


class NodeState(Enum):
    """What `nicps status` says of this host."""

    STANDBY = "standby"
    FORMING = "forming"
    MEMBER = "member"


@dataclass(slots=True)
class LocalHost:
    """Written as views come into force and end (`nicps.protocol.membership`), read by all parts.

    `view` and `number` stay what they were while this host stands by. `ending` is what became of the view's job.
    """

    mac: bytes
    name: str
    state: NodeState = NodeState.STANDBY
    view: View = field(default_factory=View)
    number: int = 0
    ending: wire.Ending = wire.Ending.NONE

    @property
    def is_member(self) -> bool:
        """This host is in the view."""
        return self.state is NodeState.MEMBER

    @property
    def leads(self) -> bool:
        """This host acts as node 1 (R22)."""
        return self.state is NodeState.MEMBER and self.view.lead == self.number

    @property
    def follows(self) -> bool:
        """This host is a member that another one leads."""
        return self.state is NodeState.MEMBER and self.view.lead != self.number

    @property
    def ended(self) -> bool:
        """This host stands by because the job has ended."""
        return self.ending is not wire.Ending.NONE

    def header(self, round_: int) -> wire.Header:
        """Of a frame of this member."""
        return self.view.header(self.number, round_)
