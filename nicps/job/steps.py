# SPDX-License-Identifier: Apache-2.0
"""The training steps at one host: a step is one round, or in a phase of sized rounds as many as its program makes of
it.

A step of several rounds is complete when the program has applied it: with the last round's sum it reports the digest of
the state after it. Users see steps only.
"""

from __future__ import annotations

from collections.abc import Mapping

from nicps import wire
from nicps.job.actions import NoteCommit, NoteRound
from nicps.protocol import Committed


class Steps:
    """Counts the steps.

    Attributes: `trained`, the number of steps that this host has trained in this run.
    """

    def __init__(self) -> None:
        self.trained = 0
        self._rounds = 0  # of the step that is under way
        self._last = 0  # the last round of that step
        self._counted: Mapping[int, int] = {}  # samples in that round, by member
        # Of a plan, by the last round of channel 0: committed, and not applied yet.
        self._planned: dict[int, NoteCommit] = {}

    def commit(
        self, commit: Committed, *, mine: bool, several: bool
    ) -> list[NoteCommit | NoteRound]:
        """A round is committed.

        Args:
            mine: this host's program takes part in it.
            several: a step takes several rounds. Every member has given all of its share then (R13), unless they are
                those of a plan.
        """
        phase = commit.phase
        trains = phase.kind is wire.PhaseKind.TRAIN
        if phase.planned:
            if mine:
                self._note_planned(commit)
            return [NoteRound(commit)]
        of_channel: list[NoteCommit | NoteRound] = [NoteRound(commit)] if phase.channels else []
        if commit.channel:
            # The rounds of a group that users are shown are those of its first channel.
            return of_channel
        if not (trains and several):
            self.trained += trains and mine
            return [*of_channel, NoteCommit(commit.round, not trains, _samples_of(commit))]
        if mine:
            self._counted = {number: phase.shares[number - 1] for number in commit.counted}
            self._rounds, self._last = self._rounds + 1, commit.round
        return []

    def _note_planned(self, commit: Committed) -> None:
        """The program may be in the step before: with a quorum below 1 the others go on without it."""
        rounds = commit.phase.rounds_per_step()
        if not commit.channel and commit.phase.place_of(commit.round) == rounds - 1:
            noted = NoteCommit(commit.round, False, commit.counted, rounds)
            self._planned[commit.round] = noted

    def read(self, round_: int, digest: str) -> list[NoteCommit]:
        """The program has read a round's sum; `digest`: of the state after it, if that completes a step."""
        if not digest:
            return []
        found = self._planned.pop(round_, None)
        if found is None and self._rounds and round_ == self._last:
            found = NoteCommit(round_, False, self._counted, self._rounds)
            self._rounds = 0
        if found is None:
            return []
        self.trained += 1
        return [found]

    def forget_part(self) -> None:
        """Another member's state is loaded: the steps that were under way are not this program's."""
        self._rounds = 0
        self._planned.clear()


def _samples_of(commit: Committed) -> Mapping[int, int]:
    """Counted in a round, by member; with parameter servers steps are counted, of a share each."""
    phase = commit.phase
    if phase.serving is not None:
        return {number: n * phase.shares[number - 1] for number, n in commit.counted.items()}
    return {} if phase.sized else commit.counted
