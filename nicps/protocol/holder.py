# SPDX-License-Identifier: Apache-2.0
"""What the holder of the token does with it: repair, contribute, close, ask, mark, commit, hand on (R9 to R13)."""

from __future__ import annotations

from collections.abc import Iterable

from nicps import wire
from nicps.protocol.actions import NotAdded, Send, SendFragments
from nicps.protocol.round import Round
from nicps.protocol.token import Line, TokenState

_STILL_TURNS = 12  # without a new sum; each time everybody has sent again what lacks one


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
        changed = self._feed(now, token, line) if self.adding else self._repair(token)
        if token.state == wire.TokenState.OPEN and not self._frozen:
            changed |= self._contribute(token, line)
            if token.quorum_reached(self.phase):
                self._close(now, token)
                changed = True
                if not line.settled:
                    self._close_without_us()
        counts = not self._sums_are_due(token)
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
        asked = len(token.ranges)
        # The open round of a frozen ring is dropped.
        lacking = self._frozen or (self._awaits(token) if self.adding else self._ask(token))
        changed |= len(token.ranges) > asked
        if token.state == wire.TokenState.CLOSING and not lacking and not self._held_back():
            if not line.complete:
                line.marks |= wire.Mark.COMPLETE
                self._complete = True
                changed = True
            if all(token.lines[k - 1].complete for k in self._view.order):
                token.commit(self.phase.adding)
                self._committed(token)
                changed = True
        self._publish_need()
        return changed

    def _held_back(self) -> bool:
        return self._undecided or self._frozen

    def _repair(self, token: TokenState) -> bool:
        """Send again what others lack, before anything new; only the sender repairs."""
        end = self.phase.fragments_in(self.round)
        mine = tuple(
            (f, min(c, end - f)) for s, f, c in token.ranges if s == self.number and f < end
        )
        if not mine:
            return False
        token.ranges = [r for r in token.ranges if r[0] != self.number]
        self._send_fragments(self._line().samples, mine, repair=True)
        return True

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
        if self.adding:
            return True  # it goes out once the list is closed (`_feed`)
        fragments = self.phase.fragments_in(self.round)
        token.sent += fragments
        self._own_sent = fragments
        self._send_fragments(offer.samples, ((0, fragments),), repair=False)
        return True

    # ---- where a switch adds

    def _close(self, now: float, token: TokenState) -> None:
        """No gradient may join any more; from now on `ready` counts sums."""
        token.state = wire.TokenState.CLOSING
        self._moved_at = now
        if self.adding:
            for line in token.lines:
                line.ready = 0

    def _sums_of(self, token: TokenState) -> int:
        """How many sums the closed list comes to."""
        contributed = any(line.contributed for line in token.lines)
        return self.phase.fragments_in(self.round) if contributed else 0

    def _awaits(self, token: TokenState) -> bool:
        """Whether this member lacks sums; or the lead, as long as anybody does: until then it may decide otherwise."""
        have = (
            token.settled if self.number == self._view.lead else token.lines[self.number - 1].ready
        )
        return have < self._sums_of(token)

    def _feed(self, now: float, token: TokenState, line: Line) -> bool:
        """Send the switch what it has room for, and again what somebody lacks the sum of; whether anything changed.

        Since this member sent them everybody has had its turn and sent the same: a sum that has not come is lost, or
        a contribution to it is, or the switch has forgotten all. So everybody sends it again. The switch takes what it
        has not, and answers who has sent what it has added already with the sum. Who has contributed nothing sends
        empty fragments, which only ask.
        """
        if not self._sums_are_due(token) or self._frozen:
            return False
        before, total, settled = self._sent_to, self._sums_of(token), token.settled
        room = wire.max_ranges(len(token.lines))
        missing = self._receiver.missing(self.round, self._view.number, 0, total, room)
        here = missing[0][0] if missing else total
        lacks = [(f, min(c, before - f)) for f, c in missing if f < before]
        others = [(k, f, c) for k, f, c in token.ranges if k != self.number]
        token.ranges = (others + [(self.number, f, min(c, 0xFFFF)) for f, c in lacks])[:room]
        self._sent_to = max(before, min(total, settled + 2 * wire.QUANTUM, before + wire.QUANTUM))
        if line.contributed:
            lacks += [(max(f, settled), min(f + c, before) - max(f, settled)) for _, f, c in others]
        again = joined(lacks)
        if again:
            self._send_fragments(line.samples, again, repair=True)
        if line.contributed and self._sent_to > before:
            self._send_fragments(line.samples, ((before, self._sent_to - before),), repair=False)
        changed = bool(again) or self._sent_to > before or line.ready != here
        line.ready = here
        token.settled = min(token.lines[k - 1].ready for k in self._view.order)
        self._watch_switch(now, token.settled, total)
        return changed

    def _watch_switch(self, now: float, settled: int, total: int) -> None:
        """The lead: a switch that makes no sums is found out."""
        self._still += 1
        if settled > self._settled or settled == total:
            self._still, self._moved_at = 0, now
        self._settled = settled
        late = self._still >= _STILL_TURNS and now >= self._moved_at + self._timings.sums_s
        if late and self.number == self._view.lead:
            self._still = 0
            self._emit(NotAdded(self.round))

    def _bank_free(self, token: TokenState) -> bool:
        return all(token.lines[k - 1].read >= self.round - 2 for k in self._view.order)

    def _send_fragments(
        self, samples: int, ranges: tuple[tuple[int, int], ...], *, repair: bool
    ) -> None:
        if self._others:
            self._sending += 1
            view, generation = self._view.number, self.phase.generation
            self._emit(
                SendFragments(view, generation, self.round, samples, ranges, repair, self.adding)
            )

    def _ask(self, token: TokenState) -> bool:
        """Write what this member lacks into the token; whether it lacks anything."""
        room = wire.max_ranges(len(token.lines)) - len(token.ranges)
        fragments = self.phase.fragments_in(self.round)
        asked = set(token.ranges)
        lacking = False
        for number, line in enumerate(token.lines, 1):
            if number == self.number or not line.contributed:
                continue
            if self._receiver.count(self.round, self._view.number, number) >= fragments:
                continue
            lacking = True
            for first, count in self._receiver.missing(
                self.round, self._view.number, number, fragments, max(room, 0)
            ):
                wanted = (number, first, min(count, 0xFFFF))
                if room > 0 and wanted not in asked:
                    token.ranges.append(wanted)
                    room -= 1
        return lacking

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


def joined(ranges: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """(first, count) ranges in order, without overlaps and empty ones."""
    out: list[tuple[int, int]] = []
    for first, count in sorted(ranges):
        if count > 0 and out and first <= sum(out[-1]):
            out[-1] = (out[-1][0], max(sum(out[-1]), first + count) - out[-1][0])
        elif count > 0:
            out.append((first, count))
    return tuple(out)
