# SPDX-License-Identifier: Apache-2.0
"""The consequences of an event: actions of the node, orders of the parts, and in the end actions for the host.

Orders of the parts are carried out at once. Actions of the node wait in a queue until those before them are carried
out, since frames must leave in the order in which the node made them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from nicps import protocol, wire
from nicps.errors import JobFailed, NetworkProblem, NicpsError, WireError
from nicps.job import orders as ask
from nicps.job.actions import (
    Action,
    CloseStream,
    DropFragments,
    EnterView,
    GroupCalled,
    Log,
    RunHook,
    Source,
    Transmit,
    TransmitServed,
)
from nicps.job.orders import Fail, Order, Orders
from nicps.job.part import Part
from nicps.job.roles import LifeSettings, Roles
from nicps.job.slow_work import StreamSize
from nicps.job.text import one_line
from nicps.job.under_way import UnderWay, is_run
from nicps.protocol import Node, Phase


class Dispatcher:
    """Between the node and the roles of a host.

    Attributes: `turns`, how often this host had the token.
    """

    def __init__(self, settings: LifeSettings, node: Node, roles: Roles) -> None:
        self.settings, self.node, self.roles = settings, node, roles
        self.turns = 0
        self._turns_before = 0  # before this job
        self._queue: deque[protocol.Action] = deque()
        self._out: list[Action] = []

    @property
    def part(self) -> Part | None:
        """This host's part in the job that is here."""
        return self.roles.part

    # ---- the queue

    def process(
        self, now: float, actions: Sequence[protocol.Action], orders: Sequence[Order] = ()
    ) -> list[Action]:
        """Carry these out; return the actions for the host."""
        if not actions and not orders:  # as after most frames
            return []
        self._queue.extend(actions)
        self._carry_out_orders(now, orders)
        while self._queue:
            self._carry_out_action(now, self._queue.popleft())
        out, self._out = self._out, []
        return out

    # ---- the node's actions

    def _carry_out_action(self, now: float, action: protocol.Action) -> None:
        part, lead, roles = self.part, self.roles.lead, self.roles
        orders: Orders = []
        match action:
            case protocol.Send():
                self._out.append(action)
            case protocol.SendFragments():
                self._transmit(action)
            case protocol.SendServed():
                self._send_served(action)
            case protocol.Narrow(view):
                if self.node.ring is not None and view == self.node.view.number:
                    self._out.append(action)
            case protocol.Stepped():
                orders = self._note_stepped(now, action)
            case protocol.Pulled():
                program = part.program if part is not None else None
                orders = part.served.note_pulled(now, program, action) if part and program else []
            case protocol.ReadByAll(round_):
                orders = lead.course.read_by_all(round_) if lead else []
            case protocol.ServerLost(reads):
                orders = lead.course.server_lost(reads) if lead else []
            case protocol.Need(round_, samples):
                orders = part.show_need(round_, samples) if part else []
            case protocol.Closed(round_):
                orders = part.show_closed(round_) if part else []
            case protocol.Committed():
                if lead is not None and action.phase.kind is wire.PhaseKind.TRAIN:
                    lead.course.round_committed(action.next_unit, action.phase.exchange)
                orders = part.commit(now, action) if part else []
            case protocol.Prepare(phase):
                orders = self._prepare(now, phase)
            case protocol.PhaseAgreed(phase, answers):
                orders = self._agreed(phase, answers)
            case protocol.NotAdded(_, exchange):
                orders = lead.course.exchange_fails(exchange) if lead else []
            case protocol.SwitchChanged(text, warns):
                orders = [ask.Warn(text) if warns else Log(text)] if text else []
                orders += lead.course.switch_changed() if lead else []
            case protocol.Installed():
                orders = self._install(now, action)
            case protocol.Ready(view):
                orders = lead.view_installed(view, self.settings.keyed) if lead else []
            case protocol.Answered():
                orders = lead.course.host_answered(action) if lead else []
            case protocol.Called(job):
                roles.stopped = None
                if (group := UnderWay.read(job)) is not None:
                    self._out.append(GroupCalled(group))
                called = part is not None and part.id == job != roles.declined
                orders = part.start_missing_program(now) if part and called else []
            case protocol.NoProgress():
                orders = [ask.Warn(action.explain(self.node.view))]
            case protocol.NotAdmitted(job):
                orders = self._note_other_job(job)
            case protocol.Differs():
                orders = self._differ(now, action)
            case protocol.Evicted():
                orders = roles.note_eviction(action)
            case protocol.Cut(missing):
                orders = self._cut_off(now, self.node.view.names(missing))
            case protocol.Declined(reason):
                orders = roles.decline(reason)
            case protocol.Cancelled(name):
                orders = lead.cancel(now, name) if lead else []
            case protocol.Failed(reason):
                orders = self._fail_job(reason)
        self._carry_out_orders(now, orders)

    def _note_stepped(self, now: float, action: protocol.Stepped) -> Orders:
        part = self.part
        if part is None or part.program is None:
            return []
        part.programs.note_training()
        part.finish.note_stepped(action.staleness)
        return part.served.note_stepped(now, part.program, action)

    def _send_served(self, action: protocol.SendServed) -> None:
        ring = self.node.ring
        if ring is not None and self.part is not None and action.view == self.node.view.number:
            self._out.append(TransmitServed(action, ring.phase))

    def _transmit(self, action: protocol.SendFragments) -> None:
        ring = self.node.ring
        of_view = ring is not None and action.view == self.node.view.number
        if ring is None or self.part is None or not of_view:
            return
        source, stream = Source.PROGRAM, 0
        if action.only_asks:
            source = Source.NOTHING
        elif ring.phase.kind is wire.PhaseKind.HANDOUT:
            source, stream = Source.STREAM, self.part.hand_out.stream_of(ring.phase)
        self._out.append(Transmit(action, ring.phase, source, stream))

    def _prepare(self, now: float, phase: Phase) -> Orders:
        """A decision's turn has come."""
        roles = self.roles
        if phase.kind is wire.PhaseKind.STOP:
            over = roles.end_others_job(phase) if roles.lead is None else []
            return [*over, ask.Acknowledge(phase.number)]
        if self.part is None and self.node.leaving:
            return []  # taken in although it has declined: the others go on without it
        orders: Orders = []
        try:
            if self.part is not None and phase.settings.get("job", self.part.id) != self.part.id:
                orders = roles.end_part("another job has begun")
            if roles.part is None:
                orders += self._begin_part(now, str(phase.settings["job"]))
            if not self.settings.believes(phase.exchange):
                option = "--trust-switch" if phase.exchange.central else "--mode switch"
                raise JobFailed(
                    "the network's switch is to add, which this host has not been told to believe: "
                    f"run `nicps join` with {option} there too"
                )
            assert roles.part is not None
            return [*orders, *roles.part.prepare(now, phase)]
        except (NicpsError, LookupError, TypeError, ValueError) as error:
            return [*orders, Fail(f"cannot prepare for {phase.kind.name.lower()}: {error}")]

    def _begin_part(self, now: float, job_id: str) -> Orders:
        self._turns_before = self.turns
        return self.roles.begin_part(now, job_id)

    def _agreed(self, phase: Phase, answers: Mapping[int, bytes]) -> Orders:
        """The lead: every member has acknowledged."""
        roles = self.roles
        stops = phase.kind is wire.PhaseKind.STOP
        if roles.lead is not None:
            return roles.end_own_job(phase) if stops else roles.lead.decision_agreed(phase, answers)
        if stops and self.part is not None:
            return roles.end_others_job(phase)  # this host departs, and has decided that before
        return []

    def _note_other_job(self, job: str) -> Orders:
        """A job that admits nobody is under way, or a run of `nicps run`, beside which no job begins."""
        roles, submission = self.roles, self.roles.submission
        if not is_run(job):
            return roles.publisher.note_other_job(job)
        if submission is None or submission.group is not None:
            return []
        self.node.abandon()
        reason = (
            f"{one_line(job)} is under way on this network, without this host: wait for its end"
        )
        return roles.fail_submission(reason, NetworkProblem.exit_code)

    def _fail_job(self, reason: str) -> Orders:
        roles = self.roles
        if roles.lead is not None and self.node.leads:
            return roles.lead.fail(reason)
        return roles.fail_submission(reason) if roles.submission is not None else []

    # ---- views (R17 to R20, R22)

    def _install(self, now: float, action: protocol.Installed) -> Orders:
        """A view is in force: the kernel follows it, and the job goes on in it."""
        view, roles = action.view, self.roles
        roles.publisher.trouble = roles.publisher.other_job = ""
        # The network that this host was about to start is there; if it was evicted, it comes back to it.
        self.node.busy = False
        if not self.node.open_round:  # of another job
            roles.stopped = None
        orders: Orders = [
            DropFragments(),  # those of the view before
            EnterView(view, action.number),
            Log(f"network {self.settings.network}: view {view.number}, {view.names(view.live)}"),
        ]
        left = set(range(1, len(view.members) + 1)) - view.live
        if left:
            orders.append(Log(f"not in it: {view.names(left)}"))
        if self.part is not None and self.part.job.digest and not self.node.open_round:
            # This network has run no round yet: the part is of the job before.
            orders += roles.end_part("another job is being started")
        if self.part is not None:
            orders += self.part.enter_view(now, action)
        orders += roles.follow_lead(now, self.node.leaving)
        if self.part is not None and self.part.cancelled:
            orders.append(ask.Cancel())  # perhaps the lead that was told has gone since
        return orders

    def _cut_off(self, now: float, silent: str) -> Orders:
        """R18: no host may go on here; the state must not be lost if the others never come back."""
        text = f"{silent} cannot be heard, and there is no majority without: standing by"
        trouble, part = ask.ShowTrouble(text), self.part
        if part is None:
            return [trouble, RunHook(text)]
        if part.job.group:  # a group's state cannot be saved
            return [trouble, *part.programs.end(text), ask.Depart(text, agreed=False)]
        noted = part.note_event("alarm", why=text)
        return [trouble, noted, *part.checkpoints.save_without_majority(now, text, part.program)]

    def _differ(self, now: float, action: protocol.Differs) -> Orders:
        """Members whose weights differ from most stand by and take the state again; of a tie the user is told."""
        view, lead = self.node.view, self.roles.lead
        if not action.numbers:
            if lead is not None:
                lead.course.raise_alarm(
                    f"after round {action.round} the members' weights differ, and no half agrees"
                )
            return []
        names = view.names(action.numbers)
        text = f"after round {action.round} the weights of {names} differ from the others'"
        orders: Orders = [ask.Warn(text)]
        if self.part is not None:
            members = [view.members[k - 1].name for k in sorted(action.numbers)]
            self.part.finish.differed += [
                {"name": name, "round": action.round, "view": view.number} for name in members
            ]
            orders.append(self.part.note_event("differs", members=members))
        rest = [k for k in view.order if k not in action.numbers]
        if rest and rest[0] == self.node.number:
            orders.append(ask.Evict(action.numbers))
        return orders

    # ---- the parts' orders

    def _carry_out_orders(self, now: float, orders: Sequence[Order]) -> None:
        for order in orders:
            asked = self._order_node(now, order)
            if asked is not None:
                self._queue.extend(asked)
            elif (follow := self._order_part(now, order)) is not None:
                self._carry_out_orders(now, follow)
            else:
                self._out.append(order)  # type: ignore[arg-type]

    def _order_node(self, now: float, order: Order) -> Sequence[protocol.Action] | None:
        """Carry out an order for the node and return its actions; None if it is not for the node."""
        node = self.node
        match order:
            case ask.Acknowledge(number, answer):
                return node.prepared(now, number, answer)
            case protocol.Offer():
                return node.offer(now, order)
            case ask.NeedRoom(fragments, width):
                return node.need_room(now, fragments, width)
            case ask.MarkReady(round_, samples):
                return node.progress(now, round_, samples)
            case ask.MarkRead(round_, digest, channel):
                return node.read(now, round_, digest, channel)
            case ask.Fail(reason):
                return node.fail(now, reason)
            case ask.Cancel():
                return node.cancel(now)
            case ask.BeginStep(offer):
                return node.step(now, offer)
            case ask.BeginPull(round_, sources):
                return node.pull(now, round_, sources)
            case ask.CommitNext(saves, channel):
                return node.go_on(now, saves=saves, channel=channel)
            case ask.RebuildView(joiners):
                return node.rebuild(now, joiners)
            case ask.Evict(numbers):
                return node.evict(now, numbers)
            case ask.CallHosts(job, calls, closed):
                node.call_hosts(job, calls=calls, closed=closed)
                return ()
            case ask.Decide(phase):
                return self._decide(now, phase)
        return None

    def _decide(self, now: float, phase: Phase) -> Sequence[protocol.Action]:
        lead = self.roles.lead
        if lead is None or not self.node.leads:
            return ()
        try:
            return self.node.decide(now, lead.complete(phase, self.part))
        except WireError as error:  # a decision that no frame can hold
            return self.node.fail(now, str(error))

    def _order_part(self, now: float, order: Order) -> Orders | None:
        """Carry out an order for another part and return what follows; None if it is an action for the host."""
        part, roles, lead = self.part, self.roles, self.roles.lead
        match order:
            case ask.PublishEvent(event, values):
                job = lead.plan.job if lead is not None else ""
                log: Orders = [Log(str(values["message"]))] if event == "warning" else []
                return [*log, *roles.publish_event(event, job, values)]
            case ask.Warn(text):
                return [Log(text), *self._warn(text)]
            case ask.ShowTrouble(text, hook):
                roles.publisher.trouble = text
                return [Log(text), *self._warn(text), *([RunHook(text)] if hook else [])]
            case ask.Depart(reason, agreed):
                departs = roles.depart(reason)
                self._queue.extend(self.node.leave(now, reason, agreed=agreed))
                return departs
            case ask.OpenHandOut(purpose):
                return lead.open_hand_out(now, purpose, part, roles.submission) if lead else []
            case ask.OfferStream(purpose, stream, size):
                return self._offer_stream(now, purpose, stream, size)
            case ask.SaveState(saving):
                if part is None:
                    return [ask.StateSaved(saving, "there is no training program here")]
                return part.dialogue.save(now, saving)
            case ask.StateSaved(saving, error):
                return lead.state_saved(saving, error, part) if lead else []
            case ask.HandOutEnded(phase):
                return self._end_hand_out(now, phase)
            case ask.ModelBuilt():
                return lead.model_built(now, part) if lead else []
            case ask.RoundJudged(round_, what, saves, plan, channel):
                if lead is not None and plan:
                    lead.course.choice.channels = plan
                if lead is not None and channel:
                    return lead.channel_judged(channel, round_)
                return lead.round_judged(now, round_, what, saves=saves) if lead else []
            case ask.Reported(values):
                return self._report(values)
        return None

    def _warn(self, text: str) -> Orders:
        """Warn the watchers of the job that is here."""
        if self.part is None:
            return []
        values = {"message": f"{self.settings.name}: {text}"}
        return self.roles.publish_event("warning", self.part.id, values)

    def _offer_stream(self, now: float, purpose: str, stream: int, size: StreamSize) -> Orders:
        """The stream that the lead hands out is open."""
        lead = self.roles.lead
        if lead is None:
            return [CloseStream(stream)]
        begun: Orders = []
        if self.part is None:
            try:
                begun = self._begin_part(now, lead.plan.job)
            except JobFailed as error:
                return [CloseStream(stream), *lead.fail(f"cannot hand out the {purpose}: {error}")]
        assert self.roles.part is not None
        offered = self.roles.part.hand_out.offer(stream)
        decided = lead.course.stream_opened(purpose, self.node.number, size.size, size.index_bytes)
        return [*begun, *offered, *decided]

    def _end_hand_out(self, now: float, phase: Phase) -> Orders:
        orders = self.roles.lead_with_the_job(now)
        lead = self.roles.lead
        self._carry_out_orders(now, orders)
        return lead.hand_out_ended(now, phase) if lead is not None else []

    def _report(self, values: Mapping[str, Any]) -> Orders:
        """Live progress of the training program here, or a warning."""
        shown = dict(values)
        orders: Orders = []
        if (text := shown.pop("warning", None)) is not None:
            orders += self._warn(one_line(text))
        if not shown:
            return orders
        self.roles.publisher.progress = shown
        lead = self.roles.lead
        if lead is not None:
            turns = self.turns - self._turns_before
            told = {"values": shown, "token_turns": turns}
            orders += self.roles.publish_event("progress", lead.plan.job, told)
        return orders
