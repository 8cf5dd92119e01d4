# SPDX-License-Identifier: Apache-2.0
"""A job's training step in several rounds, as `nicps.collective` has them: vectors of any length, one after the other.

    step = Step(session, phase, round_, room)
    total = step.add(vector, "P")            # as often as it takes, at all members alike
    step.average(vector, residual)           # or so, in narrow lanes
    ...
    session.applied(step.commit, digest)     # the step is whole

A member that is lost in the middle is missing from the sums that come after; all that are left have the same sums.
Whatever else happens (a test, hosts that come, the end) happens between two steps.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from nicps.client import Commit, Phase, Session
from nicps.collective.feedback import Compressed
from nicps.collective.lanes import PER_FRAGMENT, fragments_of
from nicps.collective.rounds import Attempt, Changed, Differs, Ranks
from nicps.errors import JobFailed
from nicps.session.lanes import F32, LaneFormat
from nicps.session.sized import Round, Vector
from nicps.wire import MOST_SIZED

__all__ = ["Step", "StepEnded", "room_of"]

_NOBODY = Ranks((), ())  # the members of a job have numbers only


class StepEnded(Exception):
    """The phase has ended before the step's first round was committed: nothing of the step counts."""


def room_of(*numbers: int, width: int = 32) -> int:
    """Numbers that a round needs room for, with vectors of these lengths; long ones take several rounds.

    Args:
        width: of the job's lanes, in bits.
    """
    most = max(fragments_of(each, width) for each in numbers)
    return min(most, MOST_SIZED) * LaneFormat(1, width).per_fragment


class Step:
    """One step.

    Args:
        phase: the one under way.
        round_: the open round.
        room: as `room_of`, the same at all members.
        width: of the job's lanes, in bits.

    Attributes: `number` of this member; `room`, fragments of a round; `width`; `commit`, of the round that was
    committed last. All members that it counts have given the whole of their share.
    """

    def __init__(
        self, session: Session, phase: Phase, round_: int, room: int, width: int = 32
    ) -> None:
        self.number, self.width = session.number, width
        self.room = room // LaneFormat(1, width).per_fragment
        self.commit: Commit | None = None
        self._session, self._phase, self._round = session, phase, round_

    def add(self, vector: F32, what: str) -> F32:
        """The sum of all members' vectors, float32 (n,), exact but for the rounding to 32 bits.

        Where a sum is not finite, its whole fragment is NaN.

        Raises:
            StepEnded: the phase has ended.
            JobFailed: the members' programs differ.
        """
        while True:
            attempt = Attempt(self, f"{what} of {len(vector)}", _NOBODY, math.inf)
            try:
                total, marred = attempt.add_floats(vector)
            except Changed:
                continue
            except Differs:
                raise self._differs() from None
            for fragment in np.flatnonzero(marred):
                total[fragment * PER_FRAGMENT : (fragment + 1) * PER_FRAGMENT] = np.nan
            return total

    def average(self, vector: F32, residual: F32) -> None:
        """The sum of all members' vectors by the samples of those counted, in place, in the job's lanes.

        Each part of a vector that takes several rounds is over those counted in its round, as in `Group.average`.

        Args:
            residual: float32 (n,), what rounding has left over. The kept file does not have it before the step's end.

        Raises:
            StepEnded, JobFailed: as `add`.
        """
        size = self.room * LaneFormat(1, self.width).per_fragment
        for at in range(0, len(vector), size):
            here = vector[at : at + size]
            part = Compressed(here, residual[at : at + size], self.width, mean=False)
            if (
                not self.exchange(part, len(vector) & 0xFFFF, math.inf).agrees
                or self.commit is None
            ):
                raise self._differs()
            here /= np.float32(self.commit.samples)

    def _differs(self) -> JobFailed:
        return JobFailed(
            f"round {self._round - 1}: the members' training programs exchange different things: all need the same"
            " version of nicps"
        )

    def exchange(self, vector: Vector, call: int, deadline: float) -> Round:
        """As `nicps.collective.rounds.Exchange`. The lead decides on a round before it can commit the next one."""
        session, former = self._session, self.commit
        if former is not None:
            session.decide(former.round, "more")
            session.applied(replace(former, checkpoint=False))
        committed = session.exchange(self._round, vector, call)
        if committed is None:
            raise StepEnded
        counted = {number: self._phase.share_of(number) for number in committed.counted}
        self.commit = Commit(
            committed.round,
            sum(counted.values()),
            counted,
            committed.unit,
            committed.seconds_waited + (former.seconds_waited if former is not None else 0.0),
            exchange=committed.exchange,
            view=committed.view,
            aggregators=committed.aggregators,
            checkpoint=committed.checkpoint or (former is not None and former.checkpoint),
        )
        self._round += 1
        return Round(committed.round, dict(committed.counted))
