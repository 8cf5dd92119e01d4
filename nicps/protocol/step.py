# SPDX-License-Identifier: Apache-2.0
"""The training step that a member is in, over all channels of a planned phase (docs/channels.md, "Steps")."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nicps import wire
from nicps.protocol.phase import Phase
from nicps.protocol.token import TokenState
from nicps.protocol.view import View


@dataclass(slots=True)
class Word:
    """The word of the lead's training program, at the lead.

    Attributes:
        undecided: it has not said that training goes on (R14): the lead marks nothing more complete.
        saves: the lead writes a checkpoint of the state after the open round, or step (R22).
    """

    undecided: bool = False
    saves: bool = False


class Step(Word):
    """What the open rounds of all channels have in common at one member, in one view.

    A member is in the lowest step of its open rounds. It offers, closes and marks nothing of a later one.

    Args:
        rounds: the open round of each channel.
        listed: of the view before, if a round of the step was committed there.

    Attributes:
        rounds: the open round of each channel.
        current: the step that this member is in, from 0 in the phase.
        listed: the members that contribute to the step, with their samples; None: this is not known yet.
    """

    def __init__(
        self,
        phase: Phase,
        view: View,
        number: int,
        rounds: Sequence[int],
        listed: Mapping[int, int] | None,
    ) -> None:
        super().__init__()
        self.rounds = list(rounds)
        self._phase = phase
        self._leads = view.lead == number
        self._enter(self._lowest())
        self.listed: dict[int, int] | None = None
        if listed is not None and self.under_way:
            self.listed = {k: samples for k, samples in listed.items() if k in view.live}
        self._stands = self.current if self.listed is not None else -1  # that step's list does

    def _enter(self, step: int) -> None:
        self.current = step
        channels = range(len(self.rounds))
        self._ends = [self._phase.first_of(step + 1, channel) for channel in channels]

    def _lowest(self) -> int:
        of = self._phase.step_of
        return min(of(round_, channel) for channel, round_ in enumerate(self.rounds))

    @property
    def under_way(self) -> bool:
        """A round of it is committed, on any channel: its list stands, and it goes on to its end."""
        first, current = self._phase.first_of, self.current
        return any(round_ > first(current, c) for c, round_ in enumerate(self.rounds))

    def has_begun(self, channel: int, round_: int) -> bool:
        """All rounds of the steps before that of this round are committed here, on all channels."""
        return round_ < self._ends[channel]

    def inherits(self, channel: int, round_: int) -> bool:
        """That round has the list of the step's first one, which is place 0 of channel 0.

        So has the first one itself, if the list stands since the view before.
        """
        if channel > 0 or self._phase.place_of(round_) > 0:
            return True
        return self._phase.step_of(round_) == self._stands

    def excludes(self, number: int) -> bool:
        """The list is known, and that member has no part in the step."""
        return self.listed is not None and number not in self.listed

    def ends_with(self, channel: int, round_: int) -> bool:
        """That round is the last one of its channel in its step."""
        place = self._phase.place_of(round_, channel)
        return place == self._phase.rounds_per_step(channel) - 1

    # ---- what happens

    def note_list(self, channel: int, token: TokenState) -> None:
        """The list of that round is closed here, or known to be: the first round's is the step's."""
        round_ = self.rounds[channel]
        if (token.round, token.state) != (round_, wire.TokenState.CLOSING):
            return
        if not self.inherits(channel, round_) and self.has_begun(channel, round_):
            lines = enumerate(token.lines, 1)
            self.listed = {k: line.samples for k, line in lines if line.contributed}

    def note_committed(self, channel: int, counted: Mapping[int, int]) -> None:
        """The open round of that channel is committed. After the last one of a step the next step begins."""
        if not self.inherits(channel, self.rounds[channel]):
            self.listed = dict(counted)
        self.rounds[channel] += 1
        before = self.current
        self._enter(self._lowest())
        if self.current > before:
            self.listed, self.saves = None, False
            self.undecided = self._leads and self._phase.kind is wire.PhaseKind.TRAIN
