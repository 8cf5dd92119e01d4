# SPDX-License-Identifier: Apache-2.0
"""The holder of the token broadcasts its contribution, and every kernel adds it (R10, R11)."""

from __future__ import annotations

from nicps import wire
from nicps.protocol.actions import Action
from nicps.protocol.exchange.base import Exchanger
from nicps.protocol.progress import Progress
from nicps.protocol.signals import Lacks
from nicps.protocol.token import TokenState


class BroadcastExchanger(Exchanger):
    """A member broadcasts its contribution when it enters the list; only that member retransmits it.

    The token's ranges are (sender, first, count).
    """

    def _begin(self, now: float) -> None:
        self._progress = Progress(self._timings)

    def open(self, round_: int) -> None:
        """Nothing is lacking yet."""
        super().open(round_)
        self._progress.open()

    def send_listed(self, token: TokenState) -> list[Action]:
        """The whole contribution."""
        fragments = self._phase.fragments_in(token.round)
        token.sent += fragments
        self.own_sent = fragments
        samples = token.lines[self._number - 1].samples
        return self._send(token.round, samples, ((0, fragments),), repair=False)

    def serve(self, now: float, token: TokenState) -> tuple[bool, list[Action]]:
        """Retransmit the fragments of this member that others lack, before anything new."""
        end = self._phase.fragments_in(token.round)
        mine = tuple(
            (f, min(c, end - f)) for s, f, c in token.ranges if s == self._number and f < end
        )
        if not mine:
            return False, []
        token.ranges = [r for r in token.ranges if r[0] != self._number]
        samples = token.lines[self._number - 1].samples
        return True, self._send(token.round, samples, mine, repair=True)

    def is_complete(self, token: TokenState) -> bool:
        """Every fragment of every listed member has come."""
        return not self._lacking(token)

    def ask(self, now: float, token: TokenState) -> bool:
        """Name as many missing ranges as fit; the rest next turn."""
        room = wire.max_ranges(len(token.lines)) - len(token.ranges)
        fragments = self._phase.fragments_in(token.round)
        before, asked = len(token.ranges), set(token.ranges)
        lacking, asks = self._lacking(token), 0
        for number in lacking:
            for first, count in self._receiver.missing(
                token.round, self._view.number, number, fragments, max(room, 0)
            ):
                wanted = (number, first, min(count, 0xFFFF))
                if room > 0 and wanted not in asked:
                    token.ranges.append(wanted)
                    room -= 1
                    asks += wanted[2]
                elif wanted in asked:  # by another member
                    asks += wanted[2]
        if asks:  # ranges that did not fit the token are not retransmitted
            listed = sum(line.contributed for line in token.lines)
            self._progress.note(now, listed * fragments - sum(lacking.values()), asks)
        return len(token.ranges) > before

    def take_report(self, now: float, token: TokenState) -> Lacks:
        """By sender, the number of fragments that do not come in spite of retransmissions."""
        return self._lacking(token) if self._progress.take_report(now) else {}

    def owns_ready(self, token: TokenState) -> bool:
        """`ready` counts samples throughout."""
        return False

    def _lacking(self, token: TokenState) -> dict[int, int]:
        """By listed member, how many of its fragments have not come; members that lack none are left out."""
        fragments = self._phase.fragments_in(token.round)
        count, round_, view = self._receiver.count, token.round, self._view.number
        return {
            number: lacking
            for number, line in enumerate(token.lines, 1)
            if number != self._number
            and line.contributed
            and (lacking := fragments - count(round_, view, number)) > 0
        }
