# SPDX-License-Identifier: Apache-2.0
"""The time that this host's contribution to a channel has been on its way, and whether its sums come."""

from __future__ import annotations


class Contribution:
    """The contributions of one round after the other.

    Attributes: `offered_at`, when the last one was ready.
    """

    def __init__(self) -> None:
        self.offered_at = self._sending_s = 0.0
        self._listed_at: float | None = None
        self._lacked = -1  # the last round in which sums of the switch had not come

    def begin(self, now: float) -> None:
        """The contribution is ready."""
        self.offered_at, self._sending_s, self._listed_at = now, 0.0, None

    def note_sent(self, started: float, ended: float) -> None:
        """Some of its fragments have been sent between these times; the first ones as soon as the list is closed."""
        self._sending_s += ended - started
        if self._listed_at is None:
            self._listed_at = started

    def seconds_listed(self, now: float) -> float:
        """The time from when it was ready until all others were."""
        return max(0.0, (now if self._listed_at is None else self._listed_at) - self.offered_at)

    def seconds_waited(self, now: float) -> float:
        """The time since it was ready, without that of its own sending."""
        return max(0.0, now - self.offered_at - self._sending_s)

    def lacks_sums_anew(self, round_: int) -> bool:
        """Sums of a switch have not come in that round; return whether that is the first round in a row."""
        before, self._lacked = self._lacked, round_
        return round_ > before + 1
