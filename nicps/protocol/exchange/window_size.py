# SPDX-License-Identifier: Apache-2.0
"""The size of the windows to aggregators: smaller where that loses fewer fragments (docs/stripes.md)."""

from __future__ import annotations

from dataclasses import dataclass

#: The smallest size.
LEAST = 2
#: Fragments that are judged together, of as many rounds as they take.
ENOUGH = 4096
#: Part of them that is lost where other sizes are tried.
LOSSY = 1 / 256
#: A size is better than a larger one if it has at most that part of the loss, and at least that part of the rate.
LOSES, KEEPS = 2 / 3, 3 / 4
#: Judgements from a trial that has failed to the next one; each time twice as many.
PATIENCE, MOST_PATIENCE = 8, 64


@dataclass(frozen=True, slots=True)
class _Judged:
    """Of fragments in a window of that size: the part that was lost, and how many came a second."""

    size: int
    loss: float
    rate: float

    def is_better(self, larger: _Judged) -> bool:
        """Than that one, which needs no place in a queue that is too short."""
        if larger.loss < LOSSY:
            return False
        return self.loss <= larger.loss * LOSES and self.rate >= larger.rate * KEEPS


class WindowSize:
    """How many fragments a member may have on their way to each aggregator. It changes only between rounds.

    A port's queue that is too short for the windows of all members loses fragments. So does a bad line, whatever the
    windows are. Trials tell them apart: after losses of a window half as large, after a while without of one twice as
    large.

    A host that is slow loses nothing, so its windows stay as they are.

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

    def note_round(self, fragments: int, lost: int, took_s: float) -> None:
        """All sums of a round are here.

        Args:
            fragments: in the stripes of others.
            lost: the fragments whose sums were asked for although later ones had come.
            took_s: from the closed list on.
        """
        self._came, self._lost = self._came + fragments, self._lost + min(lost, fragments)
        self._took_s += took_s
        if self._came < ENOUGH or not self._took_s:
            return
        judged = _Judged(self.size, self._lost / self._came, self._came / self._took_s)
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
        self._shrinks |= self.size == self._most
        lossy = now.loss >= LOSSY
        if self._shrinks and not lossy and self.size == self._most:
            return
        if self._shrinks and (not lossy or self.size <= LEAST):
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
