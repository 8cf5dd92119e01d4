# SPDX-License-Identifier: Apache-2.0
"""How long this host's contribution has been on its way, and whether sums of it come."""

from __future__ import annotations


class Contribution:
    """Of one round after the other."""

    def __init__(self) -> None:
        self._offered_at = self._sending_s = 0.0
        self._lacked = -1  # the last round in which sums of the switch had not come

    def begin(self, now: float) -> None:
        """It is ready."""
        self._offered_at, self._sending_s = now, 0.0

    def note_sent(self, seconds: float) -> None:
        """Some of its fragments have been sent in so many seconds."""
        self._sending_s += seconds

    def seconds_waited(self, now: float) -> float:
        """What has passed since it was ready, its own sending left out."""
        return max(0.0, now - self._offered_at - self._sending_s)

    def lacks_sums_anew(self, round_: int) -> bool:
        """Sums of a switch have not come in that round; whether that is the first round in a row."""
        before, self._lacked = self._lacked, round_
        return round_ > before + 1
