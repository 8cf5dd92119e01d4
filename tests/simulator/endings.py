# SPDX-License-Identifier: Apache-2.0
"""How a job may end other than well: what a lead says is held against what is so when it says it."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.simulator.host import Host
    from tests.simulator.lan import Lan


def why_not(lead: Host, reason: str) -> str:
    """What is wrong with a lead that stops the job for that reason; an empty text if nothing is."""
    lan = lead.lan
    if "members remain" in reason:
        return _remaining(lan, reason)
    if "agrees on the weights" in reason:
        return ""  # `Checks.differs` has counted them
    named = [h for h in lan.hosts if reason.startswith(f"{h.node.name}: ") or h is lead]
    if "told to believe the switch" in reason:
        return "" if any(not h.believes for h in named) else "all who it may be about believe it"
    if "ended with an error" in reason:
        return "" if any(h.sick for h in named) else "nobody whom it may be about is sick"
    if "the training program was killed" in reason or "has left the network" in reason:
        return "" if len(lead.node.view.live) == 1 else "others can go on"
    if "nobody is left who" in reason:
        holders = [h.node.name for h in lan.hosts if heard(lead, h) and holds(h, lead)]
        return f"{holders} have the job" if holders else ""
    return "no rule knows that reason"


def _remaining(lan: Lan, reason: str) -> str:
    """R22: there was such a view, and it was small enough."""
    left, of = map(int, re.findall(r"(\d+) of (\d+) members remain", reason)[0])
    views = {(len(live), len(members)) for members, live, *_ in lan.checks.views.values()}
    return "" if (left, of) in views and left < lan.plan.alarm_below * of else "enough remain"


def heard(lead: Host, host: Host) -> bool:
    """Whether the lead can hear that host now; itself too. Who is leaving has nothing more to say."""
    there = not host.dead and not host.paused and not host.job.declined
    return there and lead.lan.connected(lead.index, host.index)


def holds(host: Host, lead: Host) -> bool:
    """Whether the job can go on from what is there: all that was committed, or its files where nothing was.

    Who has been struck off, the starter too, is not asked for what it has: it takes the others' (R19, R20). Who has got
    the state has it once it is counted. Whose training program has died leaves, before the first round too.
    """
    job, trained, view = host.job, host.lan.checks.trained, lead.node.view
    if job.leaving or view.number_of(host.mac) not in view.live:
        return False
    if not trained:
        return job.submitted or job.program is not None or job.starting or job.storing
    if job.program is None or host.node.number in host.node.learners:
        return False
    return not job.program.blank and job.program.trained >= trained
