# SPDX-License-Identifier: Apache-2.0
"""What a training program owes the others in the phase that it is in (R8): a round at a time, or a step of a plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nicps.protocol import Phase


class PlannedStep:
    """The step that a program is in, in a phase whose steps have a plan (docs/channels.md).

    Args:
        rounds: the open round of each channel.

    Attributes: `current`, that step, from 0 in the phase.
    """

    def __init__(self, phase: Phase, rounds: Sequence[int]) -> None:
        self._phase, self._open = phase, list(rounds)
        self._offered: set[tuple[int, int]] = set()  # channel and round
        self._unread: set[tuple[int, int]] = set()
        self._closed = -1  # the last step whose list was closed without the program
        self.current = self._lowest()

    def _lowest(self) -> int:
        return min(self._phase.step_of(round_, c) for c, round_ in enumerate(self._open))

    @property
    def under_way(self) -> bool:
        """A round of it is committed."""
        first, current = self._phase.first_of, self.current
        return any(round_ > first(current, c) for c, round_ in enumerate(self._open))

    @property
    def judges(self) -> bool:
        """The lead's program has to say what follows the step before."""
        return self.current > 0 and not self.under_way

    @property
    def closed(self) -> bool:
        """The program has nothing to give to the step: it has no part in it, or the others have gone on to the next."""
        return self._closed >= self.current

    @property
    def trained(self) -> int:
        """The last round of channel 0 in the step before."""
        return self._phase.first_of(self.current) - 1

    def close(self, round_: int) -> None:
        """The list of the step of that round, of channel 0, is closed without the program; or of a hand-out's round.

        The token of channel 0 may tell so while rounds of other channels of the step before are not committed here.
        """
        self._closed = max(self._closed, self._phase.step_of(round_))

    def note_offered(self, channel: int, round_: int) -> None:
        """The program has offered to it."""
        self._offered.add((channel, round_))

    def note_committed(self, channel: int, round_: int) -> bool:
        """A round is committed; whether its step is whole with it."""
        self._offered.discard((channel, round_))
        self._unread.add((channel, round_))
        self._open[channel] = round_ + 1
        before, self.current = self.current, self._lowest()
        return self.current > before

    def note_read(self, channel: int, round_: int) -> None:
        """The program has read its sum."""
        self._unread.discard((channel, round_))

    def owes(self, *, closed: bool) -> bool:
        """Whether the program has something to do now.

        Rounds of different channels may wait for one another in the program: it is let alone as long as a round that it
        has offered is not committed. But until a round of the step is committed, all of them wait for the first one of
        channel 0, whose list is the step's. So before it has offered to that one, it waits for nobody else.

        Args:
            closed: it has no part in the step.
        """
        if self._unread:
            return True
        heads = [(c, r) for c, r in enumerate(self._open) if self._is_of_step(c, r)]
        if not self.under_way:
            heads = heads[:1]
        return not closed and not any(head in self._offered for head in heads)

    def _is_of_step(self, channel: int, round_: int) -> bool:
        return self._phase.step_of(round_, channel) == self.current


@dataclass
class Owed:
    """Attributes:
    trains: the phase is one of training, with a share for it.
    closed: the open round is closed without it: it computes no more for that. Of a step, `step` has that.
    unread: it has not read the last sum that it was told of.
    unjudged: it has not judged that round, or step, as the lead's program.
    step: in a phase whose steps have a plan.
    """

    trains: bool = False
    closed: bool = False
    unread: bool = False
    unjudged: bool = False
    step: PlannedStep | None = None
