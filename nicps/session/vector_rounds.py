# SPDX-License-Identifier: Apache-2.0
"""The rounds of a job whose step is one round of its whole vector: what a member offers, and the sum."""

from __future__ import annotations

import numpy as np

from nicps.errors import JobFailed
from nicps.session import shared_form
from nicps.session.conversation import Conversation
from nicps.session.lanes import F32
from nicps.session.memory import Memory
from nicps.session.phases import Commit

_GLANCE_S = 0.002  # how often a waiting program looks whether more of the sum is there


class VectorRounds:
    """One member's.

    Args:
        lanes: of the vector.
    """

    def __init__(self, memory: Memory, talk: Conversation, lanes: int) -> None:
        self._memory, self._talk, self._lanes = memory, talk, lanes
        self._offered = 0  # round of the last contribution
        self._vector: F32 | None = None  # the same

    def begin(self) -> None:
        """Another phase begins: nothing has been offered to its rounds."""
        self._offered = 0

    def contribute(self, round_: int, vector: F32, samples: int, *, finite: bool) -> None:
        """As `Session.contribute`."""
        if samples < 1:
            raise JobFailed(f"round {round_}: a gradient of {samples} samples cannot be counted")
        reducer = self._memory.reducer
        offer = reducer.offer(round_, vector, samples, finite=finite)
        self._offered, self._vector = round_, vector
        if reducer.is_short:
            reducer.convert(round_, vector)
        self._talk.send(offer)
        if not (offer.skip or reducer.is_short):
            reducer.convert(round_, vector)

    def wait_commit(self, round_: int, out: F32 | None) -> Commit | None:
        """As `Session.wait_commit`."""
        self._check_out(round_, out)
        if self._talk.next is not None:
            return None
        if out is not None and self._offered == round_:
            self._sum_early(round_, out)
        message = self._talk.await_round(round_, shared_form.Committed)
        if message is None:
            return None
        reducer, offered = self._memory.reducer, self._offered == round_
        left_out = reducer.settle(message)
        return Commit.of(message, offered=offered, members=reducer.members, left_out=left_out)

    def sum(self, commit: Commit, out: F32 | None) -> F32:
        """As `Session.sum`."""
        if out is None:
            out = np.empty(self._lanes, np.float32)
        self._check_out(commit.round, out)
        self._memory.reducer.sum(commit, out)
        return out

    def _check_out(self, round_: int, out: F32 | None) -> None:
        check_out(round_, self._vector if self._offered == round_ else None, out)

    def _sum_early(self, round_: int, out: F32) -> None:
        """Sum what has come, until there is a message."""
        reducer = self._memory.reducer
        if reducer.expect(round_, out):
            while not self._talk.comes_within(_GLANCE_S):
                reducer.ahead(lambda: self._talk.comes_within(0.0))


def check_out(round_: int, vector: F32 | None, out: F32 | None) -> None:
    """Refuse to read a sum over the vector: it may be offered again, or its residual is yet to be computed.

    Raises:
        JobFailed: `out` is memory of `vector`.
    """
    if out is not None and vector is not None and np.may_share_memory(out, vector):
        raise JobFailed(
            f"round {round_}: the sum cannot be read over the vector that was offered; give it memory of its own"
        )
