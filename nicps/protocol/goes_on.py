# SPDX-License-Identifier: Apache-2.0
"""GO (docs/servers.md): before all workers have read a round, nobody pushes or offers in the next one.

The lead gives it, once its training program has decided that training goes on (R14). A phase's first round needs it,
too: a worker may not have pulled what was committed in the phase before. Every member tells it on: a new lead must know
that workers have pushed before it decides anything else.
"""

from __future__ import annotations

from nicps import wire
from nicps.protocol.phase import Phase
from nicps.protocol.token import TokenState
from nicps.protocol.view import View


class GoesOn:
    """What a member knows of it, in one phase and view.

    Attributes: `known`, the newest round whose GO was given or heard. It goes along into the next view.
    """

    def __init__(self, phase: Phase, view: View, known: int) -> None:
        self.known = known
        self._members = view.order
        # By worker, what it has told; each will tell of a later round than this one.
        self._read = dict.fromkeys(phase.sharing(view.live), phase.first_round - 3)

    def may_begin(self, round_: int) -> bool:
        """Whether that round's steps may be pushed and offered."""
        return round_ <= self.known

    def hear(self, round_: int) -> None:
        """The lead has given it, or a member has heard it: so a worker that offers to that round has."""
        self.known = max(self.known, round_)

    def hear_read(self, member: int, round_: int) -> None:
        """A member has read that round."""
        if member in self._read:
            self._read[member] = max(self._read[member], round_)

    def hear_token(self, token: TokenState) -> None:
        """What its entries tell."""
        for member in self._read:
            line = token.lines[member - 1]
            self.hear_read(member, line.read)
            if line.settled:
                self.hear(token.round)
        if any(token.lines[k - 1].marks & wire.Mark.GOES_ON for k in self._members):
            self.hear(token.round)

    def enter(self, token: TokenState, number: int) -> None:
        """That member, this one, marks its entry in the token, for members that have missed the broadcast."""
        if token.round <= self.known:
            token.lines[number - 1].marks |= wire.Mark.GOES_ON

    @property
    def reads(self) -> dict[int, int]:
        """By live worker, the last round that it is known to have read."""
        return dict(self._read)

    def is_read(self, round_: int) -> bool:
        """All workers have read that round."""
        return all(read >= round_ for read in self._read.values())
