# SPDX-License-Identifier: Apache-2.0
"""What members broadcast of a round instead of writing it into the token: offers and marks (docs/stripes.md)."""

from __future__ import annotations

from dataclasses import replace

from nicps import wire
from nicps.protocol.phase import Phase
from nicps.protocol.token import TokenState
from nicps.protocol.view import View


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
        self._heard: dict[int, dict[int, tuple[int, int]]] = {}
        self.marks: dict[int, int] = {}
        self.listed = self.unheard = False

    def takes(self, member: int) -> bool:
        """Whether that member must be in every list, so that its offer is broadcast."""
        return member in self._needed

    def awaits(self, token: TokenState) -> bool:
        """Whether the token's list must not be closed yet: what members have broadcast closes it with all of them.

        Samples are what training programs say: a quorum that they come to without all shows nothing.
        """
        return not all(token.lines[k - 1].settled for k in self._needed)

    def hear(self, round_: int, member: int, samples: int, unit: int) -> None:
        """A member, perhaps this one, offers so many samples; `unit`: the largest exponent of its lanes."""
        if member in self._needed:
            self._heard.setdefault(round_, {})[member] = samples, unit

    def said(self, round_: int, member: int) -> tuple[int, int] | None:
        """The samples and the unit that the member has offered to that round, if it has."""
        return self._heard.get(round_, {}).get(member)

    def members(self, round_: int) -> frozenset[int]:
        """The members that have offered to that round."""
        return frozenset(self._heard.get(round_, ()))

    def closes(self, round_: int) -> bool:
        """Whether the round's list is known."""
        return bool(self._needed) and self._heard.get(round_, {}).keys() == self._needed

    def close(self, token: TokenState) -> TokenState:
        """A copy of the token, with the list of its round, closed."""
        lines = [replace(line) for line in token.lines]
        for member, (samples, unit) in self._heard[token.round].items():
            line = lines[member - 1]
            line.samples, line.unit, line.ready = samples, unit, 0
            line.marks |= wire.Mark.CONTRIBUTED
        return replace(token, lines=lines, state=wire.TokenState.CLOSING)

    def open(self, round_: int) -> None:
        """That round is open: what was offered to earlier ones is forgotten."""
        self._heard = {r: of for r, of in self._heard.items() if r >= round_}
        self.marks = {}
        self.listed = self.unheard = False
