# SPDX-License-Identifier: Apache-2.0
"""The time that this host's contribution to a channel has been on its way, and whether its sums come."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class _Way:
    offered_at: float = 0.0
    sending_s: float = 0.0
    listed_at: float | None = None


class Contribution:
    """The contributions of one round after the other. The next one may be ready while one is on its way."""

    def __init__(self) -> None:
        self._ways = [_Way(), _Way()]  # by parity of the round, as the banks are
        self._lacked = -1  # the last round in which sums of the switch had not come

    def begin(self, now: float, round_: int) -> None:
        """The contribution to that round is ready."""
        self._ways[round_ & 1] = _Way(now)

    def note_sent(self, round_: int, started: float, ended: float) -> None:
        """Some of its fragments have been sent between these times; the first ones as soon as the list is closed."""
        way = self._ways[round_ & 1]
        way.sending_s += ended - started
        if way.listed_at is None:
            way.listed_at = started

    def offered_at(self, round_: int) -> float:
        """When it was ready."""
        return self._ways[round_ & 1].offered_at

    def seconds_listed(self, now: float, round_: int) -> float:
        """The time from when it was ready until all others were."""
        way = self._ways[round_ & 1]
        return max(0.0, (now if way.listed_at is None else way.listed_at) - way.offered_at)

    def seconds_waited(self, now: float, round_: int) -> float:
        """The time since it was ready, without that of its own sending."""
        way = self._ways[round_ & 1]
        return max(0.0, now - way.offered_at - way.sending_s)

    def lacks_sums_anew(self, round_: int) -> bool:
        """Sums of a switch have not come in that round; return whether that is the first round in a row."""
        before, self._lacked = self._lacked, round_
        return round_ > before + 1
