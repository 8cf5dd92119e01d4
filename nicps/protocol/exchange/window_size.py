# SPDX-License-Identifier: Apache-2.0
"""The size of the windows to aggregators: smaller on slow lines, and where that loses less (docs/stripes.md)."""

from __future__ import annotations

from dataclasses import dataclass

#: The smallest size.
LEAST = 2
#: Fragments that are judged together, of as many rounds as they take.
ENOUGH = 4096
#: Part of them that is lost where other sizes are tried.
LOSSY = 1 / 256
#: How long a window may take where a smaller one is as fast: in a port's queue control frames wait behind it.
LONGEST_S = 0.05
#: Seconds of rounds that show how long it takes.
ENOUGH_S = 1.0
#: A size is better than a larger one that loses fragments if it has at most that part of the loss, and at least that
#: part of the rate.
LOSES, KEEPS = 2 / 3, 3 / 4
#: Judgements from a trial that has failed to the next one; each time twice as many.
PATIENCE, MOST_PATIENCE = 8, 64


@dataclass(frozen=True, slots=True)
class _Judged:
    """Of fragments in a window of that size: the part that was lost, and how many came a second.

    `took_s`: how long a window took; 0 if no round was long enough to show it.
    """

    size: int
    loss: float
    rate: float
    took_s: float

    @property
    def is_slow(self) -> bool:
        """Other frames wait too long behind it, if it is in a queue."""
        return self.took_s > LONGEST_S

    def is_better(self, larger: _Judged) -> bool:
        """Than that one, which needs no place in a queue: it is too short, or of a slow line."""
        if self.rate < larger.rate * KEEPS:
            return False
        return larger.is_slow or (larger.loss >= LOSSY and self.loss <= larger.loss * LOSES)


class WindowSize:
    """How many fragments a member may have on their way to each aggregator. It changes only between rounds.

    A port's queue that is too short for the windows of all members loses fragments. So does a bad line, whatever the
    windows are. A window takes long in a queue of a slow line, and if something else is slow, or another program fills
    the queue. Trials tell them apart: of a window half as large, and after a while of one twice as large.

    Args:
        most: the size without losses.
    """

    def __init__(self, most: int) -> None:
        self.size = self._most = most
        self._before: _Judged | None = None  # in the size before, during a trial
        self._shrinks = True  # the next trial is of a smaller size
        self._patience = PATIENCE
        self._rest = 0  # judgements until the next trial
        self._clear()

    def _clear(self) -> None:
        self._came = self._lost = 0
        self._took_s = 0.0
        #: Of rounds with at least one window of a stripe: how many windows, and how long these took.
        self._windows = self._windows_s = 0.0

    def note_round(self, fragments: int, lost: int, took_s: float, stripes: int = 1) -> None:
        """All sums of a round are here.

        Args:
            fragments: in the stripes of others.
            lost: the fragments whose sums were asked for although later ones had come.
            took_s: from the closed list on.
            stripes: of others.
        """
        self._came, self._lost = self._came + fragments, self._lost + min(lost, fragments)
        self._took_s += took_s
        if (windows := fragments / stripes / self.size) >= 1:
            self._windows, self._windows_s = self._windows + windows, self._windows_s + took_s
        window_s = self._windows_s / self._windows if self._windows else 0.0
        slow = window_s > LONGEST_S or (self._before is not None and self._before.is_slow)
        if not self._took_s or (self._came < ENOUGH and not (slow and self._windows_s >= ENOUGH_S)):
            return
        judged = _Judged(self.size, self._lost / self._came, self._came / self._took_s, window_s)
        self._clear()
        self._judge(judged)

    def _judge(self, now: _Judged) -> None:
        before, self._before = self._before, None
        if before is not None and not self._is_kept(now, before):
            self.size = before.size
            self._turn()
            self._patience = min(2 * self._patience, MOST_PATIENCE)
        elif self._rest:
            self._rest -= 1
        else:
            self._go_on(now)

    def _go_on(self, now: _Judged) -> None:
        largest = self.size == self._most or 2 * now.took_s > LONGEST_S
        self._shrinks |= largest
        poor = now.loss >= LOSSY or now.is_slow
        if self._shrinks and not poor and largest:
            return
        if self._shrinks and (not poor or self.size <= LEAST):
            self._turn()
            return
        self._before = now
        half, double = max(LEAST, self.size // 2), min(self._most, 2 * self.size)
        self.size = half if self._shrinks else double

    def _is_kept(self, now: _Judged, before: _Judged) -> bool:
        """The size of a trial."""
        if now.size < before.size:
            return now.is_better(before)
        return not before.is_better(now)

    def _turn(self) -> None:
        """The next trial is in the other direction, after a rest."""
        self._shrinks = not self._shrinks
        self._rest = self._patience
