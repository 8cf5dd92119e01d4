# SPDX-License-Identifier: Apache-2.0
"""The training steps at one host: each is one round, or in a phase of sized rounds as many as its program makes of it.

A step of several rounds is whole when the program has applied it: with the last round's sum it tells the digest of the
state after it. Users hear of steps only.
"""

from __future__ import annotations

from collections.abc import Mapping

from nicps import wire
from nicps.job.actions import NoteCommit
from nicps.protocol import Committed


class Steps:
    """What is counted of them.

    Attributes: `trained`, how many this host has trained in this run.
    """

    def __init__(self) -> None:
        self.trained = 0
        self._rounds = 0  # of the step that is under way
        self._last = 0  # its last one
        self._counted: Mapping[int, int] = {}  # in that: samples by member

    def commit(self, commit: Committed, *, mine: bool, several: bool) -> list[NoteCommit]:
        """A round is committed.

        Args:
            mine: this host's program takes part in it.
            several: a step takes several rounds. Every member has given all of its share then (R13).
        """
        phase = commit.phase
        trains = phase.kind is wire.PhaseKind.TRAIN
        if not (trains and several):
            self.trained += trains and mine
            return [NoteCommit(commit.round, not trains, {} if phase.sized else commit.counted)]
        if mine:
            self._counted = {number: phase.shares[number - 1] for number in commit.counted}
            self._rounds, self._last = self._rounds + 1, commit.round
        return []

    def read(self, round_: int, digest: str) -> list[NoteCommit]:
        """The program has read a round's sum; `digest`: of the state after it, if that makes a step whole."""
        if not digest or not self._rounds or round_ != self._last:
            return []
        self.trained += 1
        rounds, self._rounds = self._rounds, 0
        return [NoteCommit(round_, False, self._counted, rounds)]

    def forget_part(self) -> None:
        """Another member's state is loaded: the step that was under way is not this program's."""
        self._rounds = 0
