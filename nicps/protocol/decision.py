# SPDX-License-Identifier: Apache-2.0
"""The lead's side of a decision: repeated until every member has acknowledged that it is prepared (R5 to R7, R14)."""

from __future__ import annotations

from dataclasses import dataclass, field

from nicps import wire
from nicps.protocol.actions import Send
from nicps.protocol.phase import Phase, Timings
from nicps.protocol.signals import Steps


@dataclass(slots=True)
class PendingDecision:
    """One decision under way. `frame` is what all members are to acknowledge."""

    phase: Phase
    frame: wire.Frame
    members: tuple[int, ...]
    timings: Timings
    answers: dict[int, bytes] = field(default_factory=dict)
    heard: dict[int, float] = field(default_factory=dict)
    next_send: float = 0.0
    interval: float = 0.0

    def start(self, now: float) -> Steps:
        """Send it for the first time."""
        self.heard = dict.fromkeys(self.members, now)
        self.interval = self.timings.decision_s
        self.next_send = now
        return self.tick(now)

    def acknowledge(self, now: float, number: int, prepared: bool, answer: bytes) -> None:
        """A member has heard the decision, or is prepared for it."""
        self.heard[number] = now
        if prepared:
            self.answers.setdefault(number, answer)

    @property
    def agreed(self) -> bool:
        """Everybody is prepared."""
        return len(self.answers) == len(self.members)

    def silent(self, now: float, timeout_s: float) -> int:
        """A member that has answered nothing for too long; 0 if there is none."""
        late = (
            number
            for number in self.members
            if number not in self.answers and now > self.heard[number] + timeout_s
        )
        return next(late, 0)

    def tick(self, now: float) -> Steps:
        """Repeat to those who have not answered."""
        if now < self.next_send or self.agreed:
            return []
        self.next_send = now + self.interval
        self.interval = min(self.interval * 1.5, self.timings.silence_s / 3)
        return [Send(self.frame)]

    def deadline(self) -> float:
        """When `tick` wants to be called next."""
        return self.next_send
