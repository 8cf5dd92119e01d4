# SPDX-License-Identifier: Apache-2.0
"""The holder of the token sends its contribution to a switch, which adds, and broadcasts the sums."""

from __future__ import annotations

from collections.abc import Iterable

from nicps import wire
from nicps.exchange import Exchange
from nicps.protocol.actions import Action, NotAdded
from nicps.protocol.exchange.base import Exchanger
from nicps.protocol.kernel import Receiver
from nicps.protocol.phase import Phase, Timings
from nicps.protocol.token import TokenState
from nicps.protocol.view import View

_STILL_TURNS = 12  # without a new sum; each time everybody has sent again what lacks one


class SwitchExchanger(Exchanger):
    """Contributions go out once the list is closed, in windows that the switch has room for.

    The token's ranges are (who lacks the sums, first, count). While the list is closed an entry's `ready` counts the
    sums that its member has, from the first on, and `settled` is the least of them.
    """

    def __init__(
        self,
        kind: Exchange,
        phase: Phase,
        view: View,
        number: int,
        receiver: Receiver,
        timings: Timings,
        now: float,
    ) -> None:
        super().__init__(kind, phase, view, number, receiver)
        self._timings = timings
        self._sent_to = 0  # fragments, from the first on, that this member has sent
        self._settled = 0  # sums that all had at this member's last turn
        self._still = 0  # turns without another one
        self._moved_at = now  # when there was one
        self._dropped = False

    def open(self, round_: int) -> None:
        """Nothing has been sent to the switch yet."""
        super().open(round_)
        self._sent_to = self._settled = self._still = 0

    def send_listed(self, token: TokenState) -> list[Action]:
        """Nothing: the switch must know the whole list first."""
        return []

    def on_closed(self, now: float, token: TokenState) -> list[Action]:
        """From now on `ready` counts sums."""
        self._moved_at = now
        for line in token.lines:
            line.ready = 0
        return []

    def on_dropped(self) -> None:
        """The switch is fed no more."""
        self._dropped = True

    def serve(self, now: float, token: TokenState) -> tuple[bool, list[Action]]:
        """Send the switch what it has room for, and again what somebody lacks the sum of.

        Since this member sent them everybody has had its turn and sent the same: a sum that has not come is lost, or
        a contribution to it is, or the switch has forgotten all. So everybody sends it again. The switch takes what it
        has not, and answers who has sent what it has added already with the sum. Who has contributed nothing sends
        empty fragments, which only ask.
        """
        if self._dropped or not self.owns_ready(token):
            return False, []
        line = token.lines[self._number - 1]
        before, total, settled = self._sent_to, self._sums_of(token), token.settled
        room = wire.max_ranges(len(token.lines))
        missing = self._receiver.missing(token.round, self._view.number, 0, total, room)
        here = missing[0][0] if missing else total
        lacks = [(f, min(c, before - f)) for f, c in missing if f < before]
        others = [(k, f, c) for k, f, c in token.ranges if k != self._number]
        token.ranges = (others + [(self._number, f, min(c, 0xFFFF)) for f, c in lacks])[:room]
        self._sent_to = max(before, min(total, settled + 2 * wire.QUANTUM, before + wire.QUANTUM))
        if line.contributed:
            lacks += [(max(f, settled), min(f + c, before) - max(f, settled)) for _, f, c in others]
        again, actions = _joined(lacks), list[Action]()
        if again:
            actions += self._send(token.round, line.samples, again, repair=True)
        if line.contributed and self._sent_to > before:
            window = ((before, self._sent_to - before),)
            actions += self._send(token.round, line.samples, window, repair=False)
        changed = bool(again) or self._sent_to > before or line.ready != here
        line.ready = here
        token.settled = min(token.lines[k - 1].ready for k in self._view.order)
        return changed, actions + self._watch(now, token.round, token.settled, total)

    def is_complete(self, token: TokenState) -> bool:
        """This member has all sums. The lead waits until all members have: until then it may decide otherwise."""
        leads = self._number == self._view.lead
        have = token.settled if leads else token.lines[self._number - 1].ready
        return have >= self._sums_of(token)

    def ask(self, now: float, token: TokenState) -> bool:
        """`serve` has done so, before it sent the same fragments again."""
        return False

    def owns_ready(self, token: TokenState) -> bool:
        """As soon as the list is closed."""
        return token.state == wire.TokenState.CLOSING

    def _sums_of(self, token: TokenState) -> int:
        """How many sums the closed list comes to."""
        contributed = any(line.contributed for line in token.lines)
        return self._phase.fragments_in(token.round) if contributed else 0

    def _watch(self, now: float, round_: int, settled: int, total: int) -> list[Action]:
        """The lead finds out a switch that makes no sums."""
        self._still += 1
        if settled > self._settled or settled == total:
            self._still, self._moved_at = 0, now
        self._settled = settled
        late = self._still >= _STILL_TURNS and now >= self._moved_at + self._timings.sums_s
        if not late or self._number != self._view.lead:
            return []
        self._still = 0
        return [NotAdded(round_)]


def _joined(ranges: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """(first, count) ranges in order, without overlaps and empty ones."""
    out: list[tuple[int, int]] = []
    for first, count in sorted(ranges):
        if count > 0 and out and first <= sum(out[-1]):
            out[-1] = (out[-1][0], max(sum(out[-1]), first + count) - out[-1][0])
        elif count > 0:
            out.append((first, count))
    return tuple(out)
