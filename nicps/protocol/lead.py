# SPDX-License-Identifier: Apache-2.0
"""Signs of life between phases, when no token goes round: the lead gives them, the others expect them (R17)."""

from __future__ import annotations

import math

from nicps import wire
from nicps.protocol.actions import Send
from nicps.protocol.local_host import LocalHost
from nicps.protocol.phase import AdaptiveTimeout, Timings


class LeadWatch:
    """Attributes: `heard`, when the lead was heard last."""

    def __init__(self, host: LocalHost, timings: Timings, timeout: AdaptiveTimeout) -> None:
        self.heard = 0.0
        self._host = host
        self._timings = timings
        self._timeout = timeout
        self._beacon_at = 0.0

    def enter_view(self, now: float) -> None:
        """Another view is in force."""
        self.heard = self._beacon_at = now

    def hear(self, now: float) -> None:
        """The lead has sent something."""
        self.heard = now

    def deadline(self) -> float:
        """When the lead must be heard, or is silent for too long; never while this host is no member."""
        if self._host.leads:
            return self._beacon_at
        return self.silent_at() if self._host.follows else math.inf

    def silent_at(self) -> float:
        """When the lead has been silent for too long, for this member."""
        view = self._host.view
        rank = view.rank_after(view.lead, self._host.number)
        return self.heard + 2 * rank * self._timeout.seconds

    def beacon_due(self) -> float:
        """When the lead must be heard next."""
        return self._beacon_at

    def beacon(self, now: float, round_: int) -> Send:
        """The lead's beacon. It does not say which rounds the lead has read: the ring's own frames do."""
        self._beacon_at = now + self._timings.beacon_s
        return Send(wire.Frame(self._host.header(round_), wire.Want(0, 0)))
