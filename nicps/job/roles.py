# SPDX-License-Identifier: Apache-2.0
"""A host's roles in a job: submitter, lead and member. How each of them begins and ends."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from nicps import wire
from nicps.errors import JobFailed, NicpsError
from nicps.exchange import Exchange
from nicps.job import plan as phases
from nicps.job.actions import (
    CloseJob,
    CloseSubmission,
    DropFragments,
    LeaveView,
    Log,
    OpenJob,
    Publish,
)
from nicps.job.lead import Lead
from nicps.job.orders import Order, Orders, ShowTrouble, Warn
from nicps.job.part import Part
from nicps.job.plan import WINDOW_FRAGMENTS, Found, Plan
from nicps.job.publisher import Publisher, exit_code, run_hook
from nicps.job.script import LaunchScript
from nicps.job.slow_work import DrawReport, MakeResult
from nicps.job.submission import Submission
from nicps.job.tasks import Tasks
from nicps.job.text import is_run_name, one_line
from nicps.protocol import Evicted, Group, Node, Phase, Timings
from nicps.session.events import Warned
from nicps.session.shared_form import is_served


@dataclass(frozen=True, slots=True)
class LifeSettings:
    """The settings of `nicps join` that the life of a job needs.

    `exchange`: that of the jobs that this host leads, and the one whose sums it believes; `believes_switch`: it
    believes those of a Linux switch, too. `keyed`: the network has a key. `runs`: the folder of jobs' results, for the
    user. `window`: fragments in a hand-out's round.
    """

    name: str
    network: str
    exchange: Exchange = Exchange.BROADCAST
    believes_switch: bool = False
    keyed: bool = False
    runs: str = ""
    window: int = WINDOW_FRAGMENTS
    timings: Timings = field(default_factory=Timings)

    def believes(self, exchange: Exchange) -> bool:
        """Whether this host takes part in it: if others' sums must be believed, its user has allowed that."""
        if exchange.central:
            return self.believes_switch
        return not exchange.needs_trust or self.exchange.needs_trust


class Roles:
    """This host's roles in the job that is here.

    Attributes: `part`, `lead` and `submission`, the roles. `declined`, the job that this host has left to the others.
    `stopped`, the STOP with which the last job has ended here, as far as this host knows it, until it comes to a job
    again.
    """

    def __init__(self, settings: LifeSettings, node: Node, tasks: Tasks) -> None:
        self._settings, self._node, self._tasks = settings, node, tasks
        self.publisher = Publisher(settings.name)
        self.part: Part | None = None
        self.lead: Lead | None = None
        self.submission: Submission | None = None
        self.declined = ""
        self.stopped: Phase | None = None
        self._left_group = False  # the last part was in a group that goes on without this host
        self._programs, self._streams = itertools.count(1), itertools.count(1)
        self._submissions = itertools.count(1)

    @property
    def job_id(self) -> str:
        """The job in which this host takes part; empty if there is none."""
        return self.part.id if self.part is not None else ""

    def publish_event(self, event: str, job_id: str, values: Mapping[str, Any]) -> Orders:
        """Publish an event to the submitter and the watchers of a job."""
        return self.publisher.make_event(event, job_id, values, self.submission)

    # ---- the submitter

    def submit(self, group: Group | None = None) -> Submission:
        """A job is submitted here, or a program waits for a group."""
        self.submission = Submission(next(self._submissions), group=group)
        self._node.busy = True  # about to start a network of its own
        return self.submission

    def withdraw_submission(self) -> None:
        """The submission cannot even be prepared."""
        self.submission = None
        self._node.busy = False

    def fail_submission(self, reason: str, code: int = JobFailed.exit_code) -> Orders:
        """The job that was submitted here has not come into the network. `code`: the submitter's exit code."""
        submission, self.submission = self.submission, None
        self._drop_lead()
        self._node.busy = False
        if submission is None:
            return []
        if submission.group is not None:  # its program goes on waiting
            return [CloseSubmission(submission.number), Log(f"this host begins no group: {reason}")]
        told = self.publisher.make_end(submission.job_id, submission.number, {}, reason, code)
        return [CloseSubmission(submission.number), Log(f"job stopped: {reason}"), *told]

    # ---- the member

    def begin_part(self, now: float, job_id: str) -> Orders:
        """A job reaches this host.

        Raises:
            JobFailed: its name cannot name a folder.
        """
        if not is_run_name(job_id):
            raise JobFailed(f"{job_id!r} is not a valid run name")
        orders: Orders = []
        self._left_group, self.stopped = False, None
        if self.part is not None:
            orders += self.end_part("another job has begun")
        if self.submission is not None and self.submission.job_id != job_id:
            said = "another job has begun; the end of this one was not heard"
            orders += self._end_job_of_another_lead({}, said, "")
        folder = f"{self._settings.runs}/{job_id}/checkpoint"
        self.part = Part(
            job_id,
            self._node,
            self._tasks,
            self._programs,
            self._streams,
            self._settings.window,
            folder,
            now,
        )
        return [*orders, OpenJob(job_id), self.part.note_view(), Log(f"job {job_id}")]

    def end_part(self, reason: str, keep_records: bool = False, saved: bool = False) -> Orders:
        """The job is over at this host. If others go on, its records are kept, and this host may come back.

        Args:
            saved: the job's state is saved, and so is this host's residual.
        """
        part, self.part = self.part, None
        self.publisher.progress = {}
        if part is None:
            return [DropFragments()]
        return [DropFragments(), *part.close(reason, saved=saved), CloseJob(keep_records, saved)]

    def decline(self, reason: str) -> Orders:
        """This host has only come to the others' job, and cannot take part: it leaves the job to them."""
        if self._left_group and self.part is None:
            return [Log(f"this host has left the group: {reason}")]
        trouble = ShowTrouble(f"out of the job until `nicps join` is run again: {reason}")
        if self.part is None:
            return [trouble]
        self.declined = self.part.id
        noted = self.part.note_event("departs", why=reason)
        return [trouble, noted, *self.end_part(reason, keep_records=True)]

    # ---- the lead

    def begin_lead(self, now: float, plan: Plan, found: Found | None = None) -> Lead:
        """This host leads the job from now on."""
        self.lead = Lead(plan, self._node, self._tasks, self._streams, found, now)
        return self.lead

    def follow_lead(self, now: float, leaving: bool) -> Orders:
        """A view is in force: begin or end this host's lead in it."""
        others_stay = leaving and len(self._node.view.live) > 1
        if not self._node.leads or others_stay:
            self._drop_lead()
            return []
        return self._take_over(now) if self.lead is None else []

    def lead_with_the_job(self, now: float) -> Orders:
        """All of a hand-out is on the disk: a host that took over before it had the job can lead from now on."""
        if self.lead is None or self.lead.course.able:
            return []
        waits = self.lead.course.waits
        orders = self._take_over(now)
        if waits:
            orders += self.lead.view_installed(self._node.view, self._settings.keyed)
        return orders

    def depart(self, reason: str) -> Orders:
        """This host departs: it leads no more, unless no other host is left."""
        if len(self._node.view.live) > 1:
            self._drop_lead()
        noted: Orders = [self.part.note_event("departs", why=reason)] if self.part else []
        return [Log(reason), *noted]

    def _take_over(self, now: float) -> Orders:
        """R22: the former lead has left; this host acts as node 1 from now on."""
        part, node = self.part, self._node
        orders: Orders = []
        able = part is not None and bool(part.job.digest) and node.number not in node.learners
        plan, anew = Plan("", 1, 8), self._tries_again()
        if part is not None and able:
            try:
                exchange = self._exchange_of(part, anew)
                believes = self._settings.believes_switch
                sets = part.job.prepared.get("sets", ())
                of = part.id, part.job.settings, exchange
                plan = Plan.of(*of, believes_switch=believes, sets=sets)
            except (NicpsError, ValueError, KeyError, TypeError) as error:
                able = False
                orders.append(Warn(f"the job cannot be led from here: {error}"))
        found = Found(
            able=able,
            trained=part is not None and part.steps.trained > 0,
            finishing=part is not None and part.finishing,
            unit=part.unit if part is not None else None,
            exchange=part.unit_of if part is not None else Exchange.BROADCAST,
            failed=self._failed_in(part, anew) if part is not None else frozenset(),
            anew=anew,
            crash=one_line(part.programs.crash) if part is not None else "",
            servers=part.served.servers if part is not None else (),
            channels=part.channels if part is not None else (),
            stop=self.stopped,
        )
        orders.append(Log("this host leads the job from now on"))
        self._drop_lead()
        return [*orders, *self.begin_lead(now, plan, found).model_built(now, part)]

    def _tries_again(self) -> bool:
        """Whether exchanges were given up, and a member left before the next one had made a sum, perhaps the lead: it
        may have been the reason (`Choice.reconsider`), and no phase has tried them again.
        """
        part, phase = self.part, self._node.phase_in_force
        if part is None or phase is None or not phase.settings.get("doubted"):
            return False
        return part.left_in == phase.first_round

    def _exchange_of(self, part: Part, anew: bool) -> Exchange:
        """The exchange with which a job goes on that this host takes over, without a Linux switch.

        It is the one with which the job was trained. Before the first training phase, and with `anew`, it is the one in
        the job's settings.
        """
        settings = self._settings
        if part.accumulators.refused and not is_served(part.job.settings):
            return Exchange.BROADCAST
        if part.exchange is None or anew or is_served(part.job.settings):
            own, believes = settings.exchange, settings.believes_switch
            try:
                return Plan.choose(part.job.settings, own, believes_switch=believes)
            except JobFailed:  # the host that has started the job believes a switch
                return Exchange.BROADCAST
        if part.exchange.central:
            return part.exchange.fallback or Exchange.BROADCAST
        return part.exchange if settings.believes(part.exchange) else Exchange.BROADCAST

    def _failed_in(self, part: Part, anew: bool) -> frozenset[Exchange]:
        """The exchanges that a job does not use while this host leads it."""
        switches = Exchange.LINUX_SWITCH, Exchange.SWITCH
        failed = {exchange for exchange in switches if not self._settings.believes(exchange)}
        if part.accumulators.refused:
            failed |= {Exchange.STRIPES, Exchange.LINUX_SWITCH}
        given_up = {Exchange.LINUX_SWITCH} if part.switch_failed and not anew else set()
        return frozenset(failed | given_up)

    def _drop_lead(self) -> None:
        """Drop messages that are still on their way to the lead."""
        if self.lead is not None:
            self.lead.over = True
            self.lead = None
        if self.part is not None:
            self.part.dialogue.forget_saving()

    # ---- the end of a job (R14, R22)

    def note_eviction(self, action: Evicted) -> Orders:
        """R19: the others have gone on without this host, or there is no job to go on with."""
        self._drop_lead()
        part = self.part
        if action.ending:
            crash = one_line(part.programs.crash) if part is not None else ""
            return [
                LeaveView(),
                *self.end_part("the job has ended"),
                *self._end_unheard(action.ending, action.lead, crash),
            ]
        # A group's program is told, and comes back if it wants to.
        if part is not None and part.job.group:
            reason = f"this host is out of the group: {action.reason}"
            self._left_group = True
            return [LeaveView(), *self.end_part(reason), *self.fail_submission(reason)]
        stands_by = part.stand_by(action.reason) if part is not None else []
        return [LeaveView(), *stands_by, ShowTrouble(f"standing by: {action.reason}")]

    def _end_unheard(self, ending: wire.Ending, lead: str, crash: str) -> Orders:
        """The job ended while this host was not heard."""
        done = ending is wire.Ending.DONE
        how = "is done" if done else "was stopped"
        said = f"the job {how} while this host was not heard; {lead} led it"
        said = f"{crash}; {said}" if crash and not done else said
        self.stopped = phases.stop(None if done else f"{lead} has stopped it")
        return self._end_job_of_another_lead({"ok": done}, said, lead)

    def end_others_job(self, stop: Phase) -> Orders:
        """The job has ended, and is not led from here."""
        self.stopped, settings = stop, stop.settings
        ok, message = settings.get("ok"), str(settings.get("message", ""))
        saved = bool(settings.get("saved"))
        launched = self._launch_script() if ok else []
        orders = [
            *launched,
            *self.end_part("the job is done" if ok else message, saved=saved),
        ]
        said = "job done, standing by" if ok else f"job stopped: {message}"
        view = self._node.view
        lead = view.members[view.lead - 1].name
        if saved:
            said += "; it was saved where it was led: `nicps resume` goes on from there"
        return [*orders, *self._end_job_of_another_lead(settings, said, lead)]

    def _end_job_of_another_lead(self, settings: Mapping[str, Any], said: str, lead: str) -> Orders:
        """`settings` are those of the STOP, as far as they are known."""
        self.publisher.trouble = ""
        submission, self.submission = self.submission, None
        orders: Orders = [Log(said), *run_hook(settings, said)]
        if submission is None:
            return orders
        self._node.busy = False
        job_id, number = submission.job_id, submission.number
        orders.append(CloseSubmission(number))
        if settings.get("ok"):  # the lead has collected the result
            result = {"job_id": job_id, "lead": lead}
            return [*orders, *self.publisher.make_end(job_id, number, result, None)]
        told = self.publisher.make_end(job_id, number, {}, said, exit_code(settings))
        return [*orders, *told]

    def end_own_job(self, stop: Phase) -> Orders:
        """The lead: all members stand by. Make the result, draw the run, and report the end."""
        lead, part, submission = self.lead, self.part, self.submission
        assert lead is not None
        self.submission = None
        ok, message = bool(stop.settings.get("ok")), str(stop.settings.get("message", ""))
        about = submission.about if submission is not None else {}
        number = submission.number if submission is not None else 0
        launched = self._launch_script(number) if ok else []
        self._drop_lead()
        alarmed, cancelled = stop.settings.get("alarm"), stop.settings.get("cancelled")
        kept = part if alarmed or cancelled else None
        kind = "alarm" if alarmed else "cancelled"
        noted = [kept.note_event(kind, why=message)] if kept is not None else []
        saved = bool(stop.settings.get("saved"))
        ended = self.end_part("the job is done" if ok else message, bool(kept), saved)
        orders: Orders = [*noted, *launched, *ended]
        self._node.busy = False
        if submission is not None:
            orders.append(CloseSubmission(number))
        if launched:
            return orders
        if lead.plan.group:
            return [
                *orders,
                Log(f"group {lead.plan.job} is over: {message or 'its programs are done'}"),
            ]
        if ok and part is not None:
            names = [self._node.name, *part.hand_out.collected]
            about = lead.figures | about
            return [*orders, *self._make_result(lead, part.job.entry, names, about, number)]
        if ok:
            return [*orders, *self._publish_end(lead, number, {}, None, stop.settings)]
        if kept is not None:
            orders.append(self._draw_report(lead.plan.job, kept.job.entry, number, list))
        if stop.settings.get("saved") and lead.saved:  # saved by this host, not by a former lead
            message += f"; {lead.saved}: `nicps resume` goes on from there"
        return [*orders, *self._publish_end(lead, number, {}, message, stop.settings)]

    def _launch_script(self, submission: int = 0) -> Orders:
        """The files of a script are at all hosts: the script begins once the network stands by."""
        part, node = self.part, self._node
        if part is None or not part.job.script or not part.job.digest:
            return []
        return [
            LaunchScript.of(
                part.id, part.job.entry, part.job.settings, node.view, node.number, submission
            )
        ]

    def _make_result(
        self, lead: Lead, entry: str, names: Sequence[str], about: Mapping[str, Any], number: int
    ) -> Orders:
        """Draw in the background: long runs leave long records, and drawing takes a second or two. The host may
        take another job.
        """
        job_id = lead.plan.job

        def failed(now: float, reason: str) -> Orders:
            return self._publish_end(lead, number, {}, reason, {})

        def made(now: float, result: Mapping[str, Any]) -> Orders:
            tell = partial(self._publish_end, lead, number, result, None, {})
            return [self._draw_report(job_id, entry, number, tell)]

        task = MakeResult(job_id, names, self._node.open_round, about)
        return [self._tasks.begin(None, task, made, failed)]

    def _draw_report(
        self, job_id: str, entry: str, submission: int, then: Callable[[], Orders]
    ) -> Order:
        """`then` follows, with a report or without one."""

        def drawn(now: float, outcome: Any) -> Orders:
            return then()

        def undrawn(now: float, reason: str) -> Orders:
            text = f"no report: {reason}"
            return [Log(text), Publish(Warned(job_id, text), submission), *then()]

        return self._tasks.begin(None, DrawReport(job_id, entry), drawn, undrawn)

    def _publish_end(
        self,
        lead: Lead,
        submission: int,
        result: Mapping[str, Any],
        error: str | None,
        settings: Mapping[str, Any],
    ) -> Orders:
        """`settings` are those of the STOP that has ended the job."""
        job_id = lead.plan.job
        if error is None:
            done: Orders = [Log(f"job {job_id} done: {result.get('report')}")]
            return [*done, *self.publisher.make_end(job_id, submission, result, None)]
        told = self.publisher.make_end(job_id, submission, {}, error, exit_code(settings))
        return [Log(f"job stopped: {error}"), *run_hook(settings, error), *told]
