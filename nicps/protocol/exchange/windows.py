# SPDX-License-Identifier: Apache-2.0
"""Windows of fragments to one host: how many may be under way, how far they have come, and which are lost."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

#: Frames that a switch port's queue is sure to hold: 256 KB.
QUEUE = 170
LEAST_WINDOW = 8
#: So many that come, or half a window, may overtake one before that counts as lost, where the agent sends all.
OVERTAKE = 16
#: Fragments that are asked for where none of a window comes, and ranges in one go where some are lost.
PROBES = 4
RANGES = 64
#: Least and most waiting times until what does not come is asked for, as parts of `Timings.repeat_s`.
_FIRST, _MOST = 1, 25

Ranges = list[tuple[int, int]]


def share_of(frames: int) -> int:
    """Fragments that a member has under way to one host, where `frames` of them meet in one queue for each."""
    return max(LEAST_WINDOW, QUEUE // frames)


def overtaken(window: int) -> int:
    """How many of a window must have come after one until that counts as lost."""
    return min(OVERTAKE, window // 2)


class RoundTrip:
    """How long an answer takes, as TCP measures it (RFC 6298), and when it has not come for too long.

    Attributes: `shortest_s`, the shortest of the open round; infinity if none was measured. `stretch`, how much longer
    an answer may take because something else goes first.
    """

    def __init__(self, least_s: float) -> None:
        self._least_s = least_s
        self._mean = self._deviation = 0.0
        self.stretch = 1.0
        self.open()

    def open(self) -> None:
        """Another round is open."""
        self.shortest_s = math.inf

    def add(self, seconds: float) -> None:
        """An answer came so long after its fragment was sent."""
        self.shortest_s = min(self.shortest_s, seconds)
        if not self._mean:
            self._mean, self._deviation = seconds, seconds / 2
        self._deviation += (abs(seconds - self._mean) - self._deviation) / 4
        self._mean += (seconds - self._mean) / 8

    def timeout_s(self, asks: int) -> float:
        """Until an answer is asked for (again): longer each time.

        A sum waits for all its contributions, and so for whoever must send one again. So what was measured has an upper
        limit: otherwise each member would wait longer because the others do.
        """
        first = max(self._least_s * _FIRST, self._mean + 4 * self._deviation) * self.stretch
        return min(first * (1 << min(asks, 8)), self._least_s * _MOST)


@dataclass(slots=True)
class Window:
    """Fragments `first` to `end`, and how far they have come: those before `here` have, those at `sent` are next.

    `owner` answers them. `beyond`: one past the last that has come; the holes before `asked` have been asked for.
    `asks` is how often, since one came; `unanswered`, since `owner` has answered. `held_until`: `owner` is asked for no
    more before, as it does not have them yet. `lost`: so many were asked for since later ones had come. `took_s`: from
    `begun_at` until all had come. `channel`: of their frames. `down`: they are sent from the last to the first. Then
    all these are positions in that order, the first of them `first`, and `in_order` says which fragments lie there.
    """

    owner: int
    first: int
    end: int
    here: int
    sent: int
    beyond: int
    asked: int
    due: float = 0.0
    asks: int = 0
    unanswered: int = 0
    timed: int = -1  # the fragment whose way there and back is measured, and since when
    timed_at: float = 0.0
    held_until: float = 0.0
    lost: int = 0
    begun_at: float = 0.0
    took_s: float = 0.0
    channel: int = 0
    down: bool = False

    @classmethod
    def begin(cls, owner: int, first: int, end: int) -> Window:
        """Nothing has been sent, and nothing has come."""
        return cls(owner, first, end, first, first, first, first)

    def in_order(self, ranges: Ranges) -> Ranges:
        """Which fragments lie at ranges of positions; or the other way round."""
        if not self.down:
            return ranges
        return [(self.first + self.end - at - count, count) for at, count in ranges]

    def note_come(self, now: float, here: int, beyond: int, round_trip: RoundTrip) -> None:
        """So far they have come."""
        if self.timed >= 0 and here > self.timed:
            round_trip.add(now - self.timed_at)
            self.timed = -1
        if here > self.here:
            self.here, self.asks, self.unanswered = here, 0, 0
            self.due = now + round_trip.timeout_s(0)
            if here == self.end:
                self.took_s = now - self.begun_at
        self.beyond = max(self.beyond, beyond, here)

    def take(self, now: float, count: int) -> tuple[int, int]:
        """The next so many are sent now."""
        first, self.sent = self.sent, self.sent + count
        if self.timed < 0 and not self.asks:
            self.timed, self.timed_at = self.sent - 1, now
        return first, count

    def hold(self, now: float, seconds: float) -> None:
        """`owner` does not have the next ones yet: after that time they are asked for again, as if never before."""
        if now >= self.held_until:
            self.unanswered += 1
            self.held_until = now + seconds
        self.sent, self.timed = max(self.here, self.beyond), -1

    def find_lost(
        self,
        now: float,
        round_trip: RoundTrip,
        overtake: int,
        missing: Callable[[int, int, int], Ranges],
        probes: int,
    ) -> Ranges:
        """What to ask for: where later ones have come, or where none comes.

        Args:
            overtake: so many that come after one do not show yet that it is lost.
            missing: at most so many ranges between two fragments that have not come.
            probes: so many are asked for where none comes.
        """
        if self.here == self.end:
            return []
        if now >= self.due:
            self.asks += 1
            self.unanswered += 1
            self.timed = -1
            self.due = now + round_trip.timeout_s(self.asks)
            holes = missing(self.here, self.beyond, RANGES)
            self._note_lost(holes)
            self.asked = self.beyond
            if holes:
                return holes
            return [(self.here, min(probes, self.end - self.here))]
        lost = self.beyond - overtake
        if lost <= max(self.asked, self.here):
            return []
        holes = missing(max(self.asked, self.here), lost, RANGES)
        self._note_lost(holes)
        self.asked = lost
        return holes

    def _note_lost(self, holes: Ranges) -> None:
        """Count those that have not been asked for before."""
        ends = [(max(first, self.asked), first + count) for first, count in holes]
        self.lost += sum(end - first for first, end in ends if end > first)
