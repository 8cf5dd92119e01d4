# SPDX-License-Identifier: Apache-2.0
"""What members broadcast of a round instead of writing it into the token: offers and marks (docs/stripes.md)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TypeAlias

from nicps import wire
from nicps.protocol.phase import Phase
from nicps.protocol.token import TokenState
from nicps.protocol.view import View

#: The list of a step, with samples; None while it is not known.
ListOfStep: TypeAlias = Callable[[], Mapping[int, int] | None]


class Offers:
    """What members have offered to the open round and to the next one, in one phase and view.

    The list must have all members that have a share, or it cannot be known without the token: whoever closes it
    decides. So offers are used only where the quorum is not reached without every one of them.

    Args:
        broadcast: whether the exchange has offers broadcast.

    Attributes: of the open round
        marks: the broadcast marks, by member.
        listed: its list was closed with the offers of all. No token opens it again.
        unheard: this member has repeated its offer, as another member has not heard it, or has none yet. So it wants
            the token too.
    """

    def __init__(self, phase: Phase, view: View, *, broadcast: bool) -> None:
        shares = {k: phase.shares[k - 1] for k in view.order if phase.shares[k - 1]}
        enough = sum(shares.values()) - min(shares.values(), default=0)
        self._needed = (
            frozenset(shares) if broadcast and enough < phase.quorum else frozenset[int]()
        )
        # In a planned phase offers to rounds that inherit a list come before the list is known.
        self._heard_of = frozenset(shares) if broadcast and phase.planned else self._needed
        self._of_step: ListOfStep | None = None
        self._heard: dict[int, dict[int, tuple[int, int, int]]] = {}
        self.marks: dict[int, int] = {}
        self.listed = self.unheard = False

    def takes(self, member: int) -> bool:
        """Whether that member must be in every list, or is in the inherited one, so that its offer is broadcast."""
        if self._of_step is None:
            return member in self._needed
        listed = self._of_step()
        return member in (self._heard_of if listed is None else listed)

    def awaits(self, token: TokenState) -> bool:
        """Whether the token's list must not be closed yet: what members have broadcast closes it with all of them.

        Samples are what training programs say: a quorum that they come to without all shows nothing.
        """
        listed = self._of_step() if self._of_step is not None else self._needed
        return listed is None or not all(token.lines[k - 1].settled for k in listed)

    def hear(self, round_: int, member: int, samples: int, unit: int, window: int = 0) -> None:
        """A member, perhaps this one, offers so many samples.

        Args:
            unit: the largest exponent of its lanes.
            window: the largest that it can have; 0: any.
        """
        if member in self._heard_of:
            self._heard.setdefault(round_, {})[member] = samples, unit, window

    def said(self, round_: int, member: int) -> tuple[int, int, int] | None:
        """The samples, the unit and the window that the member has offered to that round, if it has."""
        heard = self._heard.get(round_)
        return heard.get(member) if heard is not None else None

    def window(self, round_: int) -> int:
        """The least that a member in its list has offered to that round; 0: any. Offers of others do not reach all."""
        heard = self._heard.get(round_, {})
        listed = self._of_step() if self._of_step is not None else None
        among = heard if listed is None else heard.keys() & listed.keys()
        return min((heard[member][2] for member in among if heard[member][2]), default=0)

    def members(self, round_: int) -> frozenset[int]:
        """The members that have offered to that round."""
        return frozenset(self._heard.get(round_, ()))

    def closes(self, round_: int) -> bool:
        """Whether the round's list is known. Others than those in a list that is inherited are not counted."""
        heard = self._heard.get(round_, {}).keys()
        if self._of_step is None:
            return bool(self._needed) and heard == self._needed
        listed = self._of_step()
        return listed is not None and heard >= listed.keys()

    def close(self, token: TokenState) -> TokenState:
        """A copy of the token, with the list of its round, closed."""
        lines = [line.copy() for line in token.lines]
        heard = self._heard.get(token.round, {})
        listed = self._of_step() if self._of_step is not None else None
        if listed is not None:  # perhaps nobody: all that were in it have left
            heard = {member: (listed[member], *heard[member][1:]) for member in listed}
        for member, (samples, unit, _) in heard.items():
            line = lines[member - 1]
            line.samples, line.unit, line.ready = samples, unit, 0
            line.marks |= wire.Mark.CONTRIBUTED
        return replace(token, lines=lines, state=wire.TokenState.CLOSING)

    def open(self, round_: int, of_step: ListOfStep | None = None) -> None:
        """That round is open: what was offered to earlier ones is forgotten.

        Args:
            of_step: the list that the round inherits (docs/channels.md). Without it the round makes its own.
        """
        self._of_step = of_step
        self._heard = {r: of for r, of in self._heard.items() if r >= round_}
        self.marks = {}
        self.listed = self.unheard = False
