# SPDX-License-Identifier: Apache-2.0
"""A host that has come while a job is under way that admits nobody: it asks, and is told of the job."""

from __future__ import annotations

import math

from nicps.protocol.actions import NotAdmitted, Send
from nicps.protocol.local_host import LocalHost, NodeState
from nicps.protocol.phase import Timings
from nicps.protocol.signals import Steps

_MOST_UNANSWERED = 4  # questions: then no such job is under way, or none is any more
_PERIODS = 6  # of the lead's calls, between two questions


class Bystander:
    """What this host knows of a job that it has no part in.

    It asks only after it has begun, and as long as it hears of such a job: a host that idles sends nothing.
    """

    def __init__(self, host: LocalHost, timings: Timings) -> None:
        self._host = host
        self._timings = timings
        self._job = ""
        self._begun = False
        self._unanswered = 0
        self._ask_at = 0.0

    @property
    def _asks(self) -> bool:
        """It has been in no view yet."""
        stranger = self._host.state is NodeState.STANDBY and not self._host.view.number
        return stranger and self._begun

    def begin(self, now: float) -> None:
        """This host's agent has begun."""
        self._begun, self._unanswered, self._ask_at = True, 0, now

    def hear(self, job: str) -> Steps:
        """The lead of a job says that it admits nobody."""
        if not self._asks:
            return []
        self._unanswered = 0
        if job == self._job:
            return []
        self._job = job
        return [NotAdmitted(job)]

    def question_due(self, now: float) -> bool:
        """Whether to ask now."""
        return self._asks and now >= self._ask_at

    def ask(self, now: float, question: Send) -> Steps:
        """A question is due: send it; after questions without an answer the job is over."""
        if self._unanswered < _MOST_UNANSWERED:
            self._ask_at = now + _PERIODS * self._timings.call_back_s
            self._unanswered += 1
            return [question]
        self._begun = False
        job, self._job = self._job, ""
        return [NotAdmitted("")] if job else []

    def deadline(self) -> float:
        """When to ask next."""
        return self._ask_at if self._asks else math.inf
