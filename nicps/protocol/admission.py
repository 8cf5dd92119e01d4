# SPDX-License-Identifier: Apache-2.0
"""Calls and answers: a host takes part in a network that forms, or comes back to one in force (R2, R19, R20)."""

from __future__ import annotations

import math
from collections.abc import Callable

from nicps import wire
from nicps.protocol.actions import Answered, Called, Joiner, NotAdmitted, Send
from nicps.protocol.bystander import Bystander
from nicps.protocol.departure import Departure
from nicps.protocol.formation import Formation
from nicps.protocol.lead import LeadWatch
from nicps.protocol.local_host import LocalHost, NodeState
from nicps.protocol.membership import Membership
from nicps.protocol.phase import Timings
from nicps.protocol.readmission import Readmission
from nicps.protocol.signals import Steps
from nicps.protocol.view import safe_name

_UNCALLED = 6  # calls that a host on standby misses before it asks


class Admission:
    """What this host answers to calls, hears as answers to its own, and asks unasked.

    Args:
        stage: how much this host has of a job, by the job's name; None if it wants no part in it.
    """

    def __init__(
        self,
        host: LocalHost,
        membership: Membership,
        formation: Formation,
        readmission: Readmission,
        departure: Departure,
        lead: LeadWatch,
        timings: Timings,
        stage: Callable[[str], wire.Stage | None],
        bystander: Bystander,
    ) -> None:
        self._host = host
        self._membership = membership
        self._formation = formation
        self._readmission = readmission
        self._departure = departure
        self._lead = lead
        self._timings = timings
        self._stage = stage
        self._bystander = bystander
        self._asked = 0.0  # when this host, on standby, last asked or was called

    def on_call(self, now: float, source: bytes, frame: wire.Frame) -> Steps:
        """A starter calls, or the lead of a network in force."""
        call = frame.body
        assert isinstance(call, wire.Call)
        host, membership = self._host, self._membership
        if not call.nonce:
            job = frame.tail.decode(errors="replace")
            if job and job == self._readmission.run:
                return []  # another host of that run has told a stranger
            if self._formation.starting is not None:
                return [NotAdmitted(job)]
            return self._bystander.hear(job)
        if not call.view:
            if host.leads and call.ballot:  # a group cannot form beside a job
                return [*self._readmission.announce_job(now)]
            if host.is_member or (membership.busy and self._formation.starting is None):
                return []
            if self._readmission.run and not call.ballot:
                return [*self._readmission.announce_run(now)]
            if not self._formation.on_call(now, source, call.ballot):
                return []
            stage = wire.Stage.NOTHING
        elif (host.state is NodeState.STANDBY and not membership.busy) or (
            call.view == host.view.number
            and source == host.view.members[host.view.lead - 1].mac
            and host.number in membership.learners
            and not self._departure.leaving
        ):
            return self._on_call_back(now, call.nonce, frame.tail.decode(errors="replace"))
        elif host.is_member and membership.precedes(call.view, call.ballot, source):
            # If this host has been evicted it is told so (R19), and answers the next call. Otherwise the call is of
            # another network, which has no claim to it.
            stage = wire.Stage.ASKS
        else:
            return []
        return [self._answer(call.nonce, stage)]

    def _on_call_back(self, now: float, nonce: int, job: str) -> Steps:
        stage = self._stage(job)
        if stage is None:
            return [Called(job)]
        self._departure.declined = ""  # it is another job
        if stage is not wire.Stage.NOTHING:  # it is the job that this host has a part of
            self._asked = now
        return [Called(job), self._answer(nonce, stage)]

    def on_answer(self, now: float, source: bytes, frame: wire.Frame) -> Steps:
        """A host takes part, comes back, or does not know yet that it is out."""
        answer, host, membership = frame.body, self._host, self._membership
        assert isinstance(answer, wire.Answer)
        self._formation.on_answer(now, source, frame)
        number = host.view.number_of(source)
        here = answer.view == host.view.number and number in host.view.live
        tells = host.leads or host.ended or membership.changing  # perhaps no lead is left
        steps: Steps = []
        if 0 < answer.view <= host.view.number and not here and tells:
            steps += membership.send_view(number, answer.fresh)  # perhaps it does not know yet
            if not number:
                steps += membership.send_last_view(source, answer)
        leads = host.leads and membership.ready
        if answer.stage >= wire.Stage.ASKS:
            return steps if number or not leads else [*steps, *self._readmission.announce_job(now)]
        if not (leads and self._readmission.calls):
            return steps
        listed = number in host.view.live
        if listed and number not in membership.learners:
            return steps
        if self._readmission.admits(now, source, answer.nonce, listed=listed):
            name = safe_name(frame.tail.decode(errors="replace"), source)
            joiner = Joiner(source, name, answer.fresh)
            steps.append(Answered(joiner, number, wire.Stage(answer.stage)))
        return steps

    # ---- calling, and asking

    @property
    def calls(self) -> bool:
        """The lead calls hosts on standby."""
        membership = self._membership
        wants = self._readmission.calls and membership.ready
        return wants and self._host.leads and not membership.changing

    @property
    def asks(self) -> bool:
        """Evicted, and not called: perhaps the job has ended meanwhile."""
        host = self._host
        standing_by = host.state is NodeState.STANDBY and bool(host.view.number)
        return standing_by and not (host.ended or self._membership.busy)

    def ask(self) -> Send:
        """Whoever knows of a later view, or of the end, answers with it (R19)."""
        return self._answer(0, self._stage_as_member)

    def tick(self, now: float) -> Steps:
        """Ask for a later view, or whether a job is under way, if it is time to."""
        if self._bystander.question_due(now):
            return self._bystander.ask(now, self._answer(0, wire.Stage.ASKS))
        if not self.asks or now < self._ask_at():
            return []
        self._asked = now
        return [self.ask()]

    def deadline(self) -> float:
        """When `tick` wants to be called next."""
        if self._host.state is not NodeState.STANDBY:
            return math.inf
        return self._ask_at() if self.asks else self._bystander.deadline()

    def _ask_at(self) -> float:
        return max(self._asked, self._lead.heard) + _UNCALLED * self._timings.call_back_s

    def _answer(self, nonce: int, stage: wire.Stage) -> Send:
        membership = self._membership
        return self._formation.answer(nonce, membership.fresh, self._host.view.number, stage)

    @property
    def _stage_as_member(self) -> wire.Stage:
        """What a member answers that may have been evicted: who has departed does not want to come in again."""
        return wire.Stage.ASKS if self._departure.leaving else wire.Stage.NOTHING
