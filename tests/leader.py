# SPDX-License-Identifier: Apache-2.0
"""A host that leads a job, for tests of its decisions."""

from __future__ import annotations

import itertools
from typing import Any

from nicps.exchange import Exchange
from nicps.job.actions import Log
from nicps.job.lead import Lead
from nicps.job.orders import Decide, PublishEvent
from nicps.job.plan import Found, Plan
from tests.parts import Host, training

SETTINGS = {"batch": 8, "lane": "i16"}
LINUX, STRIPES, P4 = Exchange.LINUX_SWITCH, Exchange.STRIPES, Exchange.SWITCH


class Leader:
    """A host that leads a job whose model is built, and what it decides."""

    def __init__(
        self,
        asked: str = "auto",
        believes: bool = True,
        own: Exchange = Exchange.BROADCAST,
        **found: Any,
    ) -> None:
        self.host = Host()
        self.host.builds()
        self.spot = self.host.spot
        self.spot.leads = True
        settings = {**SETTINGS, "exchange": asked}
        exchange = Plan.choose(settings, own, believes_switch=believes)
        plan = Plan.of("job", settings, exchange, believes_switch=believes)
        known = Found(able=True, trained=True, finishing=False, **found)
        self.lead = Lead(plan, self.spot, self.host.tasks, itertools.count(1), known, 0.0)
        self.course = self.lead.course
        self.course.fragments = 600

    def comes(self, lack: str = "") -> None:
        self.spot.switch.heard, self.spot.switch.lack = True, lack
        self.host.do(self.course.switch_changed())

    def installed(self) -> None:
        self.host.do(self.course.view_installed(self.spot.view))

    def tick(self, now: float) -> None:
        if now >= self.lead.deadline():
            self.host.do(self.lead.tick(now))

    @property
    def decided(self) -> list[Exchange]:
        return [order.phase.exchange for order in self.host.found(Decide)]

    @property
    def told(self) -> list[str]:
        logged = [log.text for log in self.host.found(Log)]
        events = self.host.found(PublishEvent)
        return logged + [str(e.values["message"]) for e in events if e.event == "warning"]


def adding() -> Leader:
    """One with a Linux switch, which adds in the phase in force."""
    leader = Leader()
    leader.comes()
    leader.installed()
    leader.spot.phase_in_force = training(exchange=LINUX)
    leader.host.forget()
    return leader
