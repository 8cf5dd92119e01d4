# SPDX-License-Identifier: Apache-2.0
"""What the holder of the token does with it: repair, contribute, close, ask, mark, commit, hand on (R9 to R13)."""

from __future__ import annotations

from collections.abc import Iterable

from nicps import wire
from nicps.protocol.actions import Action, Send
from nicps.protocol.round import Round
from nicps.protocol.token import Line, TokenState


class Holder(Round):
    """The duties of whoever has the token."""

    def create(self, now: float) -> None:
        """R9: the lead makes the token, once everybody has acknowledged the phase or the view.

        Each member tells in its first turn what it has read out; until then all that is known is what the round's
        being open says.
        """
        known = self.round - 3 if self.round > self.phase.first_round else self.round - 1
        lines = [Line(read=known) for _ in self._view.members]
        self.token = TokenState.create(
            self.phase.generation, self.number, self.round, self.unit, lines
        )
        if self._others:  # whose it is, before anything is sent under it: switches follow the token
            self.token.hop += 1
            self._key = self.token.key
            self._emit(Send(self.token.pack(self._header(wire.Flag(0), self.round))))
        self._hold(now)

    def _hold(self, now: float) -> None:
        """Everything that the holder does, until there is nothing left; then hand on or park."""
        token = self.token
        assert token is not None
        self.holding, self.parked = True, False
        self._want_at = None
        while self._duties(now, token):
            token.idle = 0
            if self._others:
                self._hand_to(now, self._view.next_after(self.number))
                return
        token.idle = min(token.idle + 1, len(self._view.live))
        if token.idle >= len(self._view.live):
            self._hand_to(now, self.number)
        else:
            self._hand_to(now, self._view.next_after(self.number))

    def _duties(self, now: float, token: TokenState) -> bool:
        """One pass over what this member can do with the token; whether anything changed."""
        line = token.lines[self.number - 1]
        changed, actions = self.exchange.serve(now, token)
        self._emit_all(actions)
        if token.state == wire.TokenState.OPEN and not self._frozen:
            changed |= self._contribute(token, line)
            if token.quorum_reached(self.phase):
                self._close(now, token)
                changed = True
                if not line.settled:
                    self._close_without_us()
        counts = not self.exchange.owns_ready(token)
        if counts and not line.settled:
            line.ready = self._ready
        if line.read != self._read:
            line.read, line.digest = self._read, self._digest
            changed = True
            self._compare()
        for number, ready in self._ready_of.items():
            other = token.lines[number - 1]
            if counts and not other.settled:
                other.ready = max(other.ready, ready)
        complete = False
        if not self._frozen:  # the open round of a frozen ring is dropped
            complete = self.exchange.is_complete(token)
            changed |= not complete and self.exchange.ask(token)
        if token.state == wire.TokenState.CLOSING and complete and not self._held_back():
            if not line.complete:
                line.marks |= wire.Mark.COMPLETE
                self._complete = True
                changed = True
            if all(token.lines[k - 1].complete for k in self._view.order):
                token.commit(self.phase.exchange)
                self._committed(token)
                changed = True
        self._publish_need()
        return changed

    def _held_back(self) -> bool:
        return self._undecided or self._frozen

    def _contribute(self, token: TokenState, line: Line) -> bool:
        """Broadcast the gradient (R10), unless somebody has yet to read the bank that it goes to."""
        offer = self._offer
        if self._passes and not line.settled:
            line.marks |= wire.Mark.SKIPPED
            line.ready = 0
            return True
        if offer is None or line.settled or not self._bank_free(token):
            return False
        self._offer = None
        line.ready = 0
        if offer.unit is not None:
            line.unit = offer.unit
        if offer.skip:
            line.marks |= wire.Mark.SKIPPED
            return True
        line.samples = offer.samples
        line.marks |= wire.Mark.CONTRIBUTED
        self._emit_all(self.exchange.send_listed(token))
        return True

    def _emit_all(self, actions: Iterable[Action]) -> None:
        for action in actions:
            self._emit(action)

    def _close(self, now: float, token: TokenState) -> None:
        """No gradient may join any more."""
        token.state = wire.TokenState.CLOSING
        self.exchange.on_closed(now, token)

    def _bank_free(self, token: TokenState) -> bool:
        return all(token.lines[k - 1].read >= self.round - 2 for k in self._view.order)

    # ---- handing on

    def _hand_to(self, now: float, owner: int) -> None:
        """Broadcast the token for its next owner; for ourselves, that is parking it."""
        token = self.token
        assert token is not None
        token.owner = owner
        token.hop += 1
        self._key = token.key
        self.holding = self.parked = owner == self.number
        self._repeat_s = self._timings.repeat_s
        self._sent_token(now, token)
        if self._others:
            flags = wire.Flag.PARKED if self.parked else wire.Flag(0)
            self._emit(Send(token.pack(self._header(flags, token.round))))

    def _sent_token(self, now: float, token: TokenState) -> None:
        self.token = token
        self._last_sent = token if self._others else None
        self._last_sent_at = self._handed_at = now
