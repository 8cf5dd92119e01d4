# SPDX-License-Identifier: Apache-2.0
r"""The life of a job at one host: the events of this host, and the actions that follow from them (R1 to R22).

`Life` owns the node of the protocol and this host's roles in a job. Every method that takes `now` is an event, and
returns the actions to carry out, in order.

    frames, time, the kernel's state -----> Node --actions--> Dispatcher ---> actions for the host
    commands ---------------------------\                    |  ^
    what the training program says ------+--> roles <-events-+  |
    tasks that are done ----------------/       \-----orders----/
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nicps import protocol, wire
from nicps.errors import Cancelled, JobFailed, NetworkProblem
from nicps.job.actions import Action, Log, Post
from nicps.job.dispatcher import Dispatcher
from nicps.job.orders import Cancel, Fail, Orders, Warn
from nicps.job.part import Part
from nicps.job.roles import LifeSettings, Roles
from nicps.job.tasks import Tasks
from nicps.job.under_way import UnderWay, name_run
from nicps.protocol import Group, Node, NodeState
from nicps.session.served_form import NearLimit
from nicps.session.shared_form import FromProgram

_GOODBYE_S = 2.0  # how long an agent that leaves waits for the others


class Life:
    """One host in the network, and its part in one job after the other.

    Args:
        receiver: the fragments that have arrived (the kernel's maps).
        nonce: fresh random 64-bit numbers, never 0.

    Attributes: `comes_late`, name and size of the group under way that a program here wants to join.
    """

    def __init__(
        self,
        mac: bytes,
        settings: LifeSettings,
        receiver: protocol.Receiver,
        nonce: Callable[[], int],
    ) -> None:
        self.settings = settings
        name, network, timings = settings.name, settings.network, settings.timings
        self.node = Node(
            mac,
            name,
            network,
            receiver,
            nonce,
            timings,
            self._stage,
            believes_switch=settings.believes_switch,
        )
        self._tasks = Tasks()
        self.roles = Roles(settings, self.node, self._tasks)
        self._dispatcher = Dispatcher(settings, self.node, self.roles)
        self._nonce = nonce
        self._leaves_by = math.inf  # this host leaves then, if a user wants it
        self._in_run = False  # a script of `nicps run` is under way here
        self._awaited = False  # all members wait for the rest of this host's gradient
        self.comes_late: tuple[str, int] | None = None

    # ---- read by others

    @property
    def turns(self) -> int:
        """How often this host had the token."""
        return self._dispatcher.turns

    @property
    def busy_with(self) -> str:
        """Why no job can be submitted here, and no measurement made; an empty text if nothing is under way."""
        standing_by = self.node.state is NodeState.STANDBY
        if standing_by and self.part is None and self.roles.submission is None:
            return ""
        if trouble := self.roles.publisher.trouble:
            return f"{trouble}. `nicps leave`, and `nicps join` again, give it up here"
        return "wait for its end (`nicps status --watch`), or end it (`nicps cancel`)"

    @property
    def part(self) -> Part | None:
        """This host's part in the job that is here."""
        return self.roles.part

    def _stage(self, job_id: str) -> wire.Stage | None:
        """How much of a job is here, for the lead that calls (R20); None: the job is not for this host."""
        if self._leaves_by < math.inf or job_id == self.roles.declined:
            return None
        if (group := UnderWay.read(job_id)) is not None:
            return self._stage_in_group(group)
        if self._in_run:
            return None
        if self.part is None or self.part.id != job_id:
            return wire.Stage.NOTHING
        return self.part.stage

    def _stage_in_group(self, group: UnderWay) -> wire.Stage | None:
        if self.part is not None and self.part.job.group and self.node.state is NodeState.MEMBER:
            return self.part.stage
        if self.comes_late is None or not group.is_for(*self.comes_late):
            return None
        return wire.Stage.NOTHING

    # ---- events: frames, the kernel, time

    def on_frame(self, now: float, source: bytes, data: bytes) -> list[Action]:
        """A frame of ours came up (`Node.on_frame`).

        Raises:
            WireError: it is malformed; nothing has changed.
        """
        node, rings = self.node, self.node.rings
        turns = rings.current.turns if rings.current is not None else 0
        out = self._dispatcher.process(now, node.on_frame(now, source, data))
        if rings.current is not None and rings.current.turns > turns:
            self._dispatcher.turns += 1
        return out

    def kernel_saw(
        self,
        now: float,
        seen: tuple[int, int],
        token_at: float,
        frame_at: float,
        bounced: bytes | None,
    ) -> None:
        """State of the XDP program, read before `on_frame` of the frames that it passed up (`Node.kernel_saw`)."""
        self.node.kernel_saw(now, seen, token_at, frame_at, bounced)

    def sums_came(self, now: float) -> list[Action]:
        """The kernel has some of the sums of a round of stripes."""
        return self._dispatcher.process(now, self.node.advance(now))

    def servers_refused(self, now: float, member: int, number: int) -> list[Action]:
        """That member has answered that it cannot do yet what this one asks of it with that number."""
        self.node.refused(now, member, number)
        return []

    def near_limit(self, now: float, what: NearLimit) -> list[Action]:
        """A parameter of the own part takes no more steps: the training program is told which."""
        program = self.part.program if self.part is not None else None
        orders: Orders = [Post(program.number, what)] if program is not None else []
        return self._dispatcher.process(now, (), orders)

    def list_came(
        self, now: float, view: int, round_: int, members: int, unit: int, channel: int = 0
    ) -> list[Action]:
        """The kernel has the first contribution to a round of stripes (`Node.on_list`)."""
        listed = members, unit, channel
        return self._dispatcher.process(now, self.node.on_list(now, view, round_, *listed))

    def fragments_sent(
        self, now: float, fragments: protocol.SendFragments, started: float | None = None
    ) -> list[Action]:
        """A `Transmit` is with the kernel, which has taken fragments since `started`; or it was dropped (None)."""
        orders: Orders = []
        phase, part = self.node.phase, self.part
        if started is not None and part is not None and phase is not None:
            if phase.kind is wire.PhaseKind.TRAIN:
                orders = part.note_sent(fragments, started, now)
        return self._dispatcher.process(now, self.node.sent(now, fragments), orders)

    def tick(self, now: float, awaited: bool = False) -> list[Action]:
        """Time has passed; call at `deadline` at the latest.

        Args:
            awaited: all members wait for the rest of the gradient of this host's training program.
        """
        node = self.node
        # While another phase is prepared nobody waits for the open rounds: the memory of their lanes may be gone.
        lanes = node.awaits_lanes and node.phase is node.phase_in_force
        self._awaited = awaited = awaited or lanes
        orders = self.part.tick(now, awaited) if self.part is not None else []
        orders += self.roles.lead.tick(now) if self.roles.lead is not None else []
        actions: Sequence[protocol.Action] = ()
        if self.node.deadline() <= now:
            actions = self.node.tick(now)
        return self._dispatcher.process(now, actions, orders)

    def deadline(self) -> float:
        """The time of the next `tick` at the latest; infinity if nothing is waited for."""
        due, part, lead = self.node.deadline(), self.roles.part, self.roles.lead
        if part is not None:
            due = min(due, part.deadline(self._awaited))
        return min(due, lead.deadline()) if lead is not None else due

    def renew_view(self, now: float, key_is_spent: bool) -> list[Action]:
        """Another view of the same members, if this one's key or its token has served its time (`Node.renew`)."""
        actions = self.node.renew(now, key_is_spent=key_is_spent)
        return self._dispatcher.process(now, actions) if actions else []

    # ---- events: tasks, and actions that failed

    def task_done(self, now: float, ticket: int, outcome: Any = None) -> list[Action]:
        """A task has been done."""
        return self._dispatcher.process(now, (), self._tasks.finish(now, ticket, outcome))

    def task_failed(self, now: float, ticket: int, reason: str) -> list[Action]:
        """A task cannot be done: a full disk, a broken file."""
        return self._dispatcher.process(now, (), self._tasks.fail(now, ticket, reason))

    def action_failed(self, now: float, reason: str) -> list[Action]:
        """An action could not be carried out: the job, if there is one, cannot go on here."""
        return self._dispatcher.process(
            now, (), [Log(reason) if self.part is None else Fail(reason)]
        )

    def warn(self, now: float, text: str) -> list[Action]:
        """Warn of something at this host that ends nothing."""
        return self._dispatcher.process(now, (), [Warn(text)])

    # ---- events: the training program

    def attach(self, now: float) -> list[Action]:
        """The training program has connected.

        Raises:
            NetworkProblem, JobFailed: none is expected, or one is attached.
        """
        part = self._expecting()
        return self._dispatcher.process(now, (), part.programs.attach(part.job.settings))

    def attach_gateway(self) -> int:
        """The training program speaks JSON: a gateway is started for the program of this number.

        Raises:
            NetworkProblem, JobFailed: as `attach`.
        """
        return self._expecting().programs.attach_gateway()

    def _expecting(self) -> Part:
        if self.part is None:
            raise NetworkProblem("no job is under way that a training program could join")
        return self.part

    def detach(self, number: int) -> None:
        """The training program of that number has closed its connection."""
        if self.part is not None:
            self.part.programs.detach(number)

    def program_message(self, now: float, message: FromProgram) -> list[Action]:
        """The training program has sent a message."""
        if self.part is None:
            return []
        try:
            orders = self.part.dialogue.handle_message(now, message)
        except JobFailed as error:
            orders = [Fail(str(error))]
        return self._dispatcher.process(now, (), orders)

    def note_converted(self, now: float) -> list[Action]:
        """The training program has converted more of its gradient."""
        if self.part is not None and self.part.program is not None:
            self.part.program.note_movement(now)
        return self._dispatcher.process(now, self.node.advance(now))

    def room_made(self, now: float) -> list[Action]:
        """Kernel memory has come into use (`UseAccumulators`)."""
        return self._dispatcher.process(now, self.node.advance(now))

    def program_unstarted(self, now: float, number: int, reason: str) -> list[Action]:
        """A training program could not be started."""
        part = self.part
        return self._dispatcher.process(
            now, (), part.programs.note_unstarted(number, reason) if part else []
        )

    def program_ended(self, now: float, number: int, code: int, last: str) -> list[Action]:
        """The process of a training program is gone, with that exit code (negative for a signal) and last line."""
        part = self.part
        return self._dispatcher.process(
            now, (), part.note_ended(now, number, code, last) if part else []
        )

    def gateway_ended(self, now: float, number: int, code: int, last: str) -> list[Action]:
        """The gateway of a training program is gone."""
        part = self.part
        return self._dispatcher.process(
            now, (), part.note_gateway_ended(now, number, code, last) if part else []
        )

    # ---- events: commands

    def join(self, now: float) -> list[Action]:
        """The agent has begun; perhaps a job is under way without this host."""
        self.node.join(now)
        return self._dispatcher.process(now, ())

    def check_free(self) -> None:
        """A job can be submitted here.

        Raises:
            NetworkProblem: another one is under way.
        """
        if why := self.busy_with:
            raise NetworkProblem(f"a job is under way: {why}")

    def submit(self) -> int:
        """A job is submitted here, and is prepared now; return the submission's number. No other host hears of it yet.

        Raises:
            NetworkProblem: another one is under way.
        """
        self.check_free()
        return self.roles.submit().number

    def form_group(self, group: Group) -> int:
        """A program here waits for a group, which this host begins to form; return the submission's number.

        Raises:
            NetworkProblem: a job is under way.
        """
        self.check_free()
        self.node.wait_for(group)
        return self.roles.submit(group).number

    def note_run(self, job: str) -> None:
        """A script of that run of `nicps run` is under way here, or (an empty name) none any more."""
        self._in_run = bool(job)
        self.node.note_run(name_run(job) if job else "")

    def withdraw_group(self, now: float, reason: str) -> tuple[list[Action], tuple[str, ...]]:
        """The program's group is not begun here; return the actions, and the hosts that were found, this one included.

        Args:
            reason: for the log.
        """
        self.node.wait_for(None)
        submission = self.roles.submission
        if submission is None or submission.group is None or self.node.state is NodeState.MEMBER:
            return [], ()
        found = self.node.abandon()
        orders = self.roles.fail_submission(reason)
        return self._dispatcher.process(now, (), orders), found

    def withdraw_submission(self) -> None:
        """The submission cannot even be prepared."""
        self.roles.withdraw_submission()

    def submission_prepared(
        self, now: float, number: int, job_id: str, prepared: Mapping[str, Any]
    ) -> list[Action]:
        """The job is prepared: put it into the network (R1)."""
        roles, submission = self.roles, self.roles.submission
        if submission is None or submission.number != number:
            return []
        try:
            settings = self.settings
            plan = submission.plan(
                job_id, prepared, settings.exchange, believes_switch=settings.believes_switch
            )
        except JobFailed as error:
            return self._dispatcher.process(now, (), roles.fail_submission(str(error)))
        roles.begin_lead(now, plan)
        if submission.group is not None:
            return self._dispatcher.process(
                now, self.node.start(now, self._nonce(), submission.group)
            )
        forming = roles.publish_event("forming", job_id, {"data": prepared.get("data")})
        return self._dispatcher.process(now, self.node.start(now, self._nonce()), forming)

    def submission_failed(
        self, now: float, number: int, reason: str, code: int = JobFailed.exit_code
    ) -> list[Action]:
        """The job could not be prepared. `code`: for the submitter to end with."""
        submission = self.roles.submission
        if submission is None or submission.number != number:
            return []
        return self._dispatcher.process(now, (), self.roles.fail_submission(reason, code))

    def cancel(self, now: float) -> list[Action]:
        """The job that is here is to end on all hosts.

        Raises:
            NetworkProblem: there is none, this host is not in it now, or it cannot end it as the others are not heard.
        """
        roles, node = self.roles, self.node
        if node.state is NodeState.MEMBER:
            if roles.publisher.trouble:
                raise NetworkProblem(f"the job cannot be cancelled here: {self.busy_with}")
            if self.part is not None:
                self.part.cancelled = True
            return self._dispatcher.process(now, (), [Cancel()])
        reason = f"cancelled on {self.settings.name}"
        if node.state is NodeState.FORMING and roles.lead is not None:
            return self._dispatcher.process(now, (), roles.lead.cancel(now, self.settings.name))
        if self.part is not None:
            raise NetworkProblem(
                f"this host is not in the job's network now ({roles.publisher.trouble or 'it stands by'}): run"
                " `nicps cancel` on a host that is"
            )
        if roles.submission is None:
            other = roles.publisher.other_job
            there = f"; job {other} is: run `nicps cancel` on one of its hosts" if other else ""
            raise NetworkProblem(f"no job is under way here{there}")
        return self._dispatcher.process(now, (), roles.fail_submission(reason, Cancelled.exit_code))

    def leave(self, now: float) -> list[Action]:
        """This agent ends: the others go on without it, or the job stops for all if they cannot."""
        self._leaves_by = now + _GOODBYE_S
        reason = f"{self.settings.name} has left the network"
        if self.node.state is not NodeState.MEMBER:
            return []
        part, lead = self.part, self.roles.lead
        noted: Orders = [part.note_event("departs", why=reason)] if part is not None else []
        if part is not None and part.job.digest:
            return self._dispatcher.process(now, self.node.leave(now, reason), noted)
        if lead is not None:
            return self._dispatcher.process(now, (), [*noted, *lead.fail(reason)])
        return self._dispatcher.process(now, self.node.fail(now, reason), noted)

    def has_left(self, now: float) -> bool:
        """Whether an agent that leaves may end: the others go on without it, or have not answered for too long."""
        return self.node.state is not NodeState.MEMBER or now >= self._leaves_by

    def end(self, now: float, reason: str) -> list[Action]:
        """This agent has left, or must go at once."""
        roles = self.roles
        ended = roles.fail_submission(reason) if roles.submission is not None else []
        return self._dispatcher.process(
            now, (), [*ended, *roles.end_part(reason, keep_records=True)]
        )
