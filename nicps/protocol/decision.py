# SPDX-License-Identifier: Apache-2.0
"""The lead's side of a decision: repeated until every member has acknowledged that it is prepared (R5 to R7, R14)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from nicps import wire
from nicps.protocol.actions import Action, Send
from nicps.protocol.phase import Timings


@dataclass(slots=True)
class Ballot:
    """One decision under way. `frame` makes it anew for each repeat (every frame has its own sequence number)."""

    number: int
    frame: Callable[[], bytes]
    members: tuple[int, ...]
    timings: Timings
    emit: Callable[[Action], None]
    answers: dict[int, bytes] = field(default_factory=dict)
    heard: dict[int, float] = field(default_factory=dict)
    next_send: float = 0.0
    interval: float = 0.0

    def start(self, now: float) -> None:
        """Send it for the first time."""
        self.heard = dict.fromkeys(self.members, now)
        self.interval = self.timings.decision_s
        self.next_send = now
        self.tick(now)

    def acknowledge(self, now: float, number: int, prepared: bool, answer: bytes) -> None:
        """A member has heard the decision, or is prepared for it."""
        self.heard[number] = now
        if prepared:
            self.answers.setdefault(number, answer)

    @property
    def agreed(self) -> bool:
        """Everybody is prepared."""
        return len(self.answers) == len(self.members)

    def silent(self, now: float, patience_s: float) -> int:
        """A member that has answered nothing for too long; 0 if there is none."""
        late = (
            number
            for number in self.members
            if number not in self.answers and now > self.heard[number] + patience_s
        )
        return next(late, 0)

    def tick(self, now: float) -> None:
        """Repeat to those who have not answered."""
        if now >= self.next_send and not self.agreed:
            self.emit(Send(self.frame()))
            self.next_send = now + self.interval
            self.interval = min(self.interval * 1.5, self.timings.silence_s / 3)

    def deadline(self) -> float:
        """When `tick` wants to be called next."""
        return self.next_send


def acknowledgement(header: wire.Header, number: int, prepared: bool, answer: bytes) -> bytes:
    """A member's frame for the lead."""
    return wire.pack(header, wire.Ack(number, int(prepared)), tail=answer)
