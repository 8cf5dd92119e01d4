# SPDX-License-Identifier: Apache-2.0
"""What a part of the node reports to the part above it; none of this leaves the node.

A part returns signals among its actions, and its caller carries them out at their place in the order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from nicps.protocol.actions import Action
from nicps.protocol.phase import Member
from nicps.protocol.view import Successor

#: Fragments that a member lacks, by the number of their sender.
Lacks: TypeAlias = Mapping[int, int]


class Late(StrEnum):
    """What of a member an open round waits for, or of a switch that adds."""

    GRADIENT = "gradient"  # its offer, or its contributions
    SUMS = "sums"  # those of an aggregator
    MARK = "mark"  # it lacks something that others have


@dataclass(frozen=True, slots=True)
class Silent:
    """That member should be heard, and is not (R17)."""

    number: int


@dataclass(frozen=True, slots=True)
class WithoutSelf:
    """This member leads and departs, and the others have not gone on without it: it proposes that they do (R17)."""


@dataclass(frozen=True, slots=True)
class Freeze:
    """The view is about to end: nothing may be completed or committed in it any more."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """This member's proposal for the next view has been agreed on."""

    successor: Successor
    ballot: int


@dataclass(frozen=True, slots=True)
class AskForLaterView:
    """Nobody answers within the view: perhaps the others are in a later one, and tell this host so."""


@dataclass(frozen=True, slots=True)
class Formed:
    """The starter's list is closed: the number of its view, and the members' fresh nonces by number (R3)."""

    view: int
    members: tuple[Member, ...]
    fresh: dict[int, int]


@dataclass(frozen=True, slots=True)
class Lacking:
    """A member reports fragments of the open round that it does not get, however often they are sent again (R16)."""

    round: int
    member: int
    lacks: Lacks
    channel: int = 0


@dataclass(frozen=True, slots=True)
class Renew:
    """A Linux switch was started again: it must have a view of its own, of the same members."""


Signal: TypeAlias = (
    Silent | WithoutSelf | Lacking | Freeze | Chosen | AskForLaterView | Formed | Renew
)
#: What an event leads to, in order.
Steps: TypeAlias = list[Action | Signal]
