# SPDX-License-Identifier: Apache-2.0
"""Windows of a round while rounds of a higher urgency are open (docs/channels.md, "Order on the wire").

XDP_TX, and whatever else is first in, first out, knows no urgency: there a small window of bulk is all there is.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Protocol

from nicps.protocol.exchange.window_size import WindowSize
from nicps.protocol.exchange.windows import Window

#: Rounds of each channel of which the line's figures are kept.
_ROUNDS = 10


class LineFigures:
    """What keeps the line to one aggregator busy without a queue, as the last rounds of all channels have shown it."""

    def __init__(self) -> None:
        self._rounds: dict[int, deque[tuple[float, float]]] = {}

    def note_round(self, channel: int, rate: float, round_trip_s: float) -> None:
        """All sums of a round are here.

        Args:
            rate: contributions to one aggregator that have left a second, from the closed list on.
            round_trip_s: the least that was measured.
        """
        self._rounds.setdefault(channel, deque(maxlen=_ROUNDS)).append((rate, round_trip_s))

    @property
    def frames(self) -> float:
        """So many on their way to one aggregator keep the line busy; infinity before anything is known.

        It is the highest rate times the least round trip. A round that has waited for more urgent ones has a low rate.
        """
        rounds = [each for of in self._rounds.values() for each in of]
        if not rounds:
            return math.inf
        least = min(round_trip_s for _, round_trip_s in rounds)
        return max(rate for rate, _ in rounds) * least


class Urgent(Protocol):
    """A round of a higher urgency, as those behind it know it."""

    @property
    def under_way(self) -> bool:
        """Its list is closed, and sums of it lack here."""

    def on_the_way(self, owner: int) -> int:
        """Contributions that it has on their way to that aggregator, at most."""


class GivingWay:
    """How many fragments one channel may have on their way to each aggregator.

    Args:
        most: its window, where nothing more urgent is open and few fragments are lost.
        ahead: the exchanges of the channels of higher urgency.
        line: shared by all channels; None: there is one.
    """

    def __init__(
        self, most: int, ahead: Sequence[Urgent] = (), line: LineFigures | None = None
    ) -> None:
        self._ahead, self._line = ahead, line
        self._urgent: list[Urgent] = []
        self._windows: dict[int, int] = {}
        self._swallowing: set[int] = set()
        self._best = WindowSize(most)
        #: Fragments that may be on their way to an aggregator where nothing more urgent is open.
        self.size = self._most = most
        self._has_waited = False  # the open round, for a more urgent one
        self._has_begun = False  # its list is closed
        self._began_at = math.inf  # until all sums are here
        #: How long the last round took, from its closed list to its sums, and when that was.
        self.took_s, self.whole_at = 0.0, -math.inf

    def open(self) -> None:
        """Another round is open: of it the kernel swallows nothing."""
        self._windows.clear()
        self._swallowing.clear()
        self._has_waited = self._has_begun = False
        self._began_at = math.inf

    def agree_on(self, window: int) -> None:
        """The least that a member has proposed is the size now; 0: none has proposed any."""
        if not self._has_begun:  # else the round has begun with another
            self.size = min(self._most, window or self.size)

    def begin(self, now: float) -> None:
        """The list of the open round is closed."""
        self._has_begun, self._began_at = True, now

    def find_urgent(self) -> None:
        """Find out which rounds go first now."""
        self._urgent = [each for each in self._ahead if each.under_way]
        self._has_waited |= bool(self._urgent)

    def note_losses(self, stripes: Sequence[Window]) -> None:
        """The round of these stripes is over: judge it, if it had the size that this member has proposed, and has not
        waited for a more urgent one.
        """
        if self._has_waited or self.size != self.proposed:
            return
        if not stripes or not all(stripe.took_s for stripe in stripes):
            return
        fragments = sum(stripe.end - stripe.first for stripe in stripes)
        lost, took_s = sum(stripe.lost for stripe in stripes), max(s.took_s for s in stripes)
        self._best.note_round(fragments, lost, took_s, len(stripes))

    @property
    def proposed(self) -> int:
        """The size that this member would have."""
        return self._best.size

    def window(self, owner: int) -> int:
        """Fragments that may be on their way to that aggregator, as `find_urgent` has found."""
        most = self.size
        if not self._urgent:
            return most
        busy = self._line.frames if self._line is not None else math.inf
        room = most if busy == math.inf else int(busy)
        return min(most, max(1, room - sum(each.on_the_way(owner) for each in self._urgent)))

    def room(self, stripe: Window) -> int:
        """Up to which fragment of that stripe may be sent now.

        What is lost, and not asked for yet, does not stop a small window.
        """
        here, most = stripe.here, self.size
        window = self.window(stripe.owner)
        beyond = min(stripe.beyond + window, here + most)
        return min(stripe.end, max(here + window, beyond))

    @property
    def measures(self) -> bool:
        """There are several channels: figures of the line are kept."""
        return self._line is not None and self._began_at < math.inf

    @property
    def waits(self) -> bool:
        """A more urgent round is open, as `find_urgent` has found."""
        return bool(self._urgent)

    def swallow(self, stripe: Window) -> int | None:
        """How many sums of that stripe must send no contribution, so that its window is kept; None: nothing is new."""
        owner, window = stripe.owner, self.window(stripe.owner)
        if self._windows.get(owner, self.size) == window:
            return None
        self._windows[owner] = window
        sums = max(0, stripe.sent - stripe.beyond - window)
        if not sums and owner not in self._swallowing:
            return None
        self._swallowing.add(owner)
        return sums

    def note_whole(self, now: float, channel: int, frames: float, round_trip_s: float) -> None:
        """All sums of the open round are here.

        Args:
            frames: contributions of this member to one aggregator, on the average.
        """
        if self._began_at == math.inf:
            return
        self.took_s, self.whole_at, self._began_at = now - self._began_at, now, math.inf
        if self._line is not None and frames and self.took_s > 0 and round_trip_s < math.inf:
            self._line.note_round(channel, frames / self.took_s, round_trip_s)
