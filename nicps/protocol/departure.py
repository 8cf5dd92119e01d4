# SPDX-License-Identifier: Apache-2.0
"""A host that departs, or cannot go on, says so until that has had its effect (R17)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from nicps import wire
from nicps.protocol.actions import Cancelled, Declined, Failed, Send
from nicps.protocol.local_host import LocalHost
from nicps.protocol.phase import Timings
from nicps.protocol.rings import Rings
from nicps.protocol.signals import AskForLaterView, Steps, WithoutSelf

_HEARD_BY_NOW = 5  # repeats


@dataclass(slots=True)
class _Farewell:
    """A FAIL or LEAVE that is repeated. `declines`: this host will not come back."""

    body: wire.Fail | wire.Leave
    reason: str
    next_send: float
    declines: bool = False
    sent: int = 0  # times

    @property
    def cancels(self) -> bool:
        """The user cancels the job."""
        return isinstance(self.body, wire.Fail) and bool(self.body.cancels)


class Departure:
    """What this host says of its going. `declined`: why it has no part in the job any more, or an empty text."""

    def __init__(self, host: LocalHost, rings: Rings, timings: Timings) -> None:
        self.declined = ""
        self._host = host
        self._rings = rings
        self._timings = timings
        self._farewell: _Farewell | None = None

    @property
    def leaving(self) -> bool:
        """This host has said that it departs; the others have not agreed on it yet."""
        return self._farewell is not None and isinstance(self._farewell.body, wire.Leave)

    @property
    def reason(self) -> str:
        """Why this host departs; an empty text where it does not."""
        return self._farewell.reason if self._farewell is not None and self.leaving else ""

    @property
    def under_way(self) -> bool:
        """This host says that it departs, or that it cannot go on."""
        return self._farewell is not None

    def leave(self, now: float, reason: str) -> None:
        """R17: the others go on without this host."""
        if not self.leaving:
            self._farewell = _Farewell(wire.Leave(), reason, now)

    def leave_for_good(self, now: float, reason: str) -> None:
        """The same, and this host does not come back to the job."""
        self._farewell = _Farewell(wire.Leave(), reason, now, declines=True)

    def fail(self, now: float, reason: str) -> None:
        """The job cannot go on here, and so nowhere."""
        if self._farewell is None or self._farewell.cancels:
            self._farewell = _Farewell(wire.Fail(), reason, now)

    def cancel(self, now: float) -> None:
        """The user cancels the job: the lead saves it, and stops it everywhere."""
        if self._farewell is None:
            self._farewell = _Farewell(wire.Fail(cancels=1), "", now)

    def decline(self, reason: str) -> Steps:
        """Nothing more of this job for this host; if it is taken in, as it has answered before, it leaves again."""
        self.declined = reason
        return [Declined(reason)]

    def close(self) -> str:
        """It has had its effect; the reason, if this host will not come back."""
        farewell, self._farewell = self._farewell, None
        return farewell.reason if farewell is not None and farewell.declines else ""

    def lead_fails(self) -> Steps:
        """Whom a FAIL was told has left, and this host leads now: it stops the job itself."""
        farewell = self._farewell
        if farewell is None or not isinstance(farewell.body, wire.Fail):
            return []
        return self._act_alone(farewell)

    def _act_alone(self, farewell: _Farewell) -> Steps:
        """There is no other lead to be told."""
        self._farewell = None
        return [Cancelled(self._host.name) if farewell.cancels else Failed(farewell.reason)]

    def tick(self, now: float) -> Steps:
        """Say it again; where nobody else is left, the job fails."""
        farewell = self._farewell
        if farewell is None:
            return []
        if len(self._host.view.live) == 1:
            return self._act_alone(farewell)
        if now < farewell.next_send:
            return []
        farewell.next_send = now + 3 * self._timings.decision_s
        tail = farewell.reason.encode()[:1000]
        header = self._host.header(self._rings.open_round)
        steps: Steps = [Send(wire.Frame(header, farewell.body, tail=tail))]
        farewell.sent += 1
        if farewell.sent > _HEARD_BY_NOW:  # perhaps the others are in a later view
            steps.append(AskForLaterView())
            if self.leaving and self._host.leads:
                steps.append(WithoutSelf())  # it decides nothing more, so it would never miss them
        return steps

    def deadline(self) -> float:
        """When `tick` wants to be called next."""
        return self._farewell.next_send if self._farewell is not None else math.inf
