# SPDX-License-Identifier: Apache-2.0
"""Every contributor sends its contribution to a switch, which adds, and broadcasts the sums."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from nicps import wire
from nicps.protocol.actions import Action, NotAdded
from nicps.protocol.exchange.base import Exchanger
from nicps.protocol.token import TokenState
from nicps.protocol.view import mask

_STILL_TURNS = 12  # without a new sum; each time everybody has sent again what lacks one
_LEAST_WINDOW = 8


@dataclass(slots=True)
class _Progress:
    """Of the sums that all have: how many at this member's last turn, its turns without another, when there was one."""

    moved_at: float
    settled: int = 0
    still: int = 0


class SwitchExchanger(Exchanger):
    """Contributions go out as soon as the list is closed, at most a window of them ahead of the sums.

    Sums that come open the window. A member sends fragment j + W only if it has the sums to j. So all contributors have
    sent j, and all of them have the sums to j - W. In a switch with room for 2 W sums the slot of j + W is free.
    A member that is not in the list sends nothing. If there is one, `settled` limits the window too.

    W is so small that all members together have one quantum on the way: no frame waits long behind them.

    The token's ranges are (who lacks the sums, first, count). While the list is closed an entry's `ready` counts the
    sums that its member has, from the first on, and `settled` is the least of them.
    """

    def _begin(self, now: float) -> None:
        share = max(_LEAST_WINDOW, wire.QUANTUM // len(self._view.live))
        self._window = min(wire.QUANTUM, share)
        self.clock = max(1, self._window // 2)
        self._progress = _Progress(now)
        self.open(0)

    def open(self, round_: int) -> None:
        """Nothing has been sent to the switch yet, and the list is not known."""
        super().open(round_)
        self._round = round_
        self._listed = self._total = 0  # the closed list, a bit a member; the sums that it comes to
        self._samples = 0
        self._here = 0  # sums that are here, from the first on
        self._sent = 0  # fragments, from the first on, that this member has sent
        self._sent_before = 0  # those that it had sent at its last turn
        self._settled = 0  # sums that all have, as far as this member knows
        self._progress.settled = self._progress.still = 0

    def send_listed(self, token: TokenState) -> list[Action]:
        """Nothing: the switch must know the whole list first."""
        return []

    def on_closed(self, now: float, token: TokenState) -> list[Action]:
        """From now on `ready` counts sums. The switch learns the list from the token: fragments go out behind it."""
        for line in token.lines:
            line.ready = 0
        self._learn(now, token)
        return []

    def on_token(self, now: float, token: TokenState) -> list[Action]:
        """Begin, if it says that the list is closed; `settled` may have opened the window."""
        if self._dropped or token.round != self._round or not self.owns_ready(token):
            return []
        self._learn(now, token)
        return self.advance(now)

    def on_forwarded(self, now: float) -> list[Action]:
        """The switch knows the list; what is queued behind the token does not delay it."""
        return self.advance(now)

    def advance(self, now: float) -> list[Action]:
        """Send what the sums that have come make room for. A member that is not in the list only counts them."""
        if self._dropped or self._here == self._total:
            return []
        self._count()
        room, first = self._here + self._window, self._sent
        if self._listed != self._everybody:
            room = min(room, self._settled + 2 * wire.QUANTUM)
        self._sent = max(first, min(self._total, room))
        if self._sent == first or not self._contributes:
            return []
        return self._send(self._round, self._samples, ((first, self._sent - first),), repair=False)

    def serve(self, now: float, token: TokenState) -> tuple[bool, list[Action]]:
        """Send again what somebody lacks the sum of.

        A token leaves a host behind the fragments that were queued there before it. So since this member's last turn
        everybody has sent what this one had sent by then, unless it lacks an earlier sum. A sum that has not come is
        lost, or a contribution to it is, or the switch has forgotten all. So everybody sends it again. The switch takes
        what it has not, and answers who has sent what it has added already with the sum. Who has contributed nothing
        sends empty fragments, which only ask.
        """
        if self._dropped or not self.owns_ready(token):
            return False, []
        self._learn(now, token)
        line, before, total = token.lines[self._number - 1], self._sent_before, self._total
        of, room = (token.round, self._view.number), wire.max_ranges(len(token.lines))
        self._count()
        lacks = self._receiver.missing_sums(*of, min(self._here, before), before, room)
        others = [(k, f, c) for k, f, c in token.ranges if k != self._number]
        token.ranges = (others + [(self._number, f, min(c, 0xFFFF)) for f, c in lacks])[:room]
        if self._contributes:
            settled = token.settled
            lacks += [(max(f, settled), min(f + c, before) - max(f, settled)) for _, f, c in others]
        again, actions = _joined(lacks), list[Action]()
        if again:
            actions += self._send(token.round, line.samples, again, repair=True)
        changed = bool(again) or self._sent > before or line.ready != self._here
        self._sent_before, line.ready = self._sent, self._here
        token.settled = self._settled = min(token.lines[k - 1].ready for k in self._view.order)
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

    @property
    def _everybody(self) -> int:
        return mask(self._view.live)

    @property
    def _contributes(self) -> bool:
        return bool(self._listed >> (self._number - 1) & 1)

    def _count(self) -> None:
        """How far the sums have come. No member can have sent more than 2 windows' room after the first that lacks."""
        end = self._sent if self._contributes else self._here + 2 * wire.QUANTUM
        of = self._round, self._view.number
        self._here, _ = self._receiver.reached(*of, self._here, min(end, self._total))

    def _learn(self, now: float, token: TokenState) -> None:
        """What the token of a closed list says."""
        if not self._listed:
            self._progress.moved_at = now
        self._listed = token.listed
        self._total = self._phase.fragments_in(token.round) if self._listed else 0
        self._samples = token.lines[self._number - 1].samples
        self._settled = max(self._settled, token.settled)

    def _sums_of(self, token: TokenState) -> int:
        """How many sums the closed list comes to."""
        contributed = any(line.contributed for line in token.lines)
        return self._phase.fragments_in(token.round) if contributed else 0

    def _watch(self, now: float, round_: int, settled: int, total: int) -> list[Action]:
        """The lead finds out a switch that makes no sums."""
        progress = self._progress
        progress.still += 1
        if settled > progress.settled or settled == total:
            progress.still, progress.moved_at = 0, now
        progress.settled = settled
        late = progress.still >= _STILL_TURNS and now >= progress.moved_at + self._timings.sums_s
        if not late or self._number != self._view.lead:
            return []
        progress.still = 0
        return [NotAdded(round_, self.kind)]


def _joined(ranges: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """(first, count) ranges in order, without overlaps and empty ones."""
    out: list[tuple[int, int]] = []
    for first, count in sorted(ranges):
        if count > 0 and out and first <= sum(out[-1]):
            out[-1] = (out[-1][0], max(sum(out[-1]), first + count) - out[-1][0])
        elif count > 0:
            out.append((first, count))
    return tuple(out)
