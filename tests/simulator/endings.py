# SPDX-License-Identifier: Apache-2.0
"""How a job may end other than well: what a lead says is held against what is so when it says it."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from nicps.job.lead import CANCEL_S

if TYPE_CHECKING:
    from tests.simulator.host import Host
    from tests.simulator.lan import Lan


def why_not(lead: Host, reason: str) -> str:
    """What is wrong with a lead that stops the job for that reason; an empty text if nothing is."""
    lan = lead.lan
    if "members remain" in reason:
        return _remaining(lan, reason)
    if "the sums of stripes do not come" in reason:  # where no other exchange can take their place
        works = lan.unicast and not lan.answers_lost
        several = lan.plan.steps or lan.plan.planned
        return "it has worked on this network" if works or not several else ""
    if "no half agrees" in reason:
        return ""  # `Checks.differs` has counted them
    if found := re.fullmatch(
        r"cancelled on (\w+)(, and the model could not be saved: .*)?", reason
    ):
        return _cancelled(lead, found[1], found[2] or "")
    if "has stopped it" in reason:
        over = any(h.job_over for h in lan.hosts if h is not lead)
        return "" if over else "it goes on at all others"
    named = [h for h in lan.hosts if reason.startswith(f"{h.node.name}: ") or h is lead]
    if "told to believe" in reason:
        return "" if any(not h.believes for h in named) else "all who it may be about believe it"
    if "in a row, without a round in between" in reason:
        return "" if any(h.losses >= 4 for h in named) else "its programs were not lost so often"
    if "the model built here differs" in reason:  # before its first round, from that of a lead
        return "" if any(map(_tampered, [*named, *_leads(lan)])) else "nobody has tampered with it"
    if "ended with an error" in reason:
        return "" if any(h.sick for h in named) else "nobody whom it may be about is sick"
    departs = ("it was killed", "it has not moved", "has left the network")
    if any(why in reason for why in departs) and "nobody is left who" not in reason:
        return "" if len(lead.node.view.live) == 1 else "others can go on"
    if "nobody is left who" in reason:
        holders = [h.node.name for h in lan.hosts if heard(lead, h) and holds(h, lead)]
        return f"{holders} have the job" if holders else ""
    return "no rule knows that reason"


def _leads(lan: Lan) -> list[Host]:
    """Who leads, and who has led before: what members compare theirs with may be of one who was killed since."""
    names = {
        member.name
        for members, _, lead, *_ in lan.checks.views.values()
        for member in members
        if member.number == lead
    }
    return [host for host in lan.hosts if host.node.name in names]


def _tampered(host: Host) -> bool:
    """Its weights, or those of its last program: the others may have heard of the end before a lead that pauses."""
    if host.process is None:
        return host.index in host.lan.checks.tampered
    return host.process.state.weights.startswith("T")


def _remaining(lan: Lan, reason: str) -> str:
    """R22: there was such a view, and it was small enough."""
    left, of = map(int, re.findall(r"(\d+) of (\d+) members remain", reason)[0])
    views = {(len(live), len(members)) for members, live, *_ in lan.checks.views.values()}
    return "" if (left, of) in views and left < lan.plan.alarm_below * of else "enough remain"


def _cancelled(lead: Host, name: str, unsaved: str) -> str:
    """A user has, and the model is on the lead's disk if there is one, unless the batch did not end in time."""
    lan = lead.lan
    at = next(h.cancelled_at for h in lan.hosts if h.node.name == name)
    if at is None:
        return "nobody has cancelled it there"
    if unsaved:
        early = "has not ended" in unsaved and lan.now < at + CANCEL_S * 0.9
        return "there was time left" if early else ""
    if lead.part is None or not lead.part.steps.trained:
        return ""
    last = lead.checkpoint.last if lead.checkpoint is not None else 0
    return "" if last == lead.committed else f"round {lead.committed} is not saved, {last} is"


def heard(lead: Host, host: Host) -> bool:
    """Whether the lead can hear that host now; itself too. Who is leaving has nothing more to say."""
    there = not host.dead and not host.paused and not host.leaves
    return there and host.index in lead.lan.near(lead.index)


def holds(host: Host, lead: Host) -> bool:
    """Whether the job can go on from what is there: all that was committed, or its files where nothing was.

    Who has been evicted, the starter too, is not asked for what it has: it takes the others' (R19, R20). Who has got
    the state has it once it is counted. Whose training program has died leaves, before the first round too.
    """
    part, trained, view = host.part, host.lan.checks.trained, lead.node.view
    if host.node.leaving or view.number_of(host.mac) not in view.live:
        return False
    if not trained:
        return (
            host.submitted or host.disk.stores_job or (part is not None and bool(part.job.digest))
        )
    process = host.process
    if process is None or host.node.number in host.node.learners:
        return False
    return host.has_state and process.state.trained >= trained
