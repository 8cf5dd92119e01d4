# SPDX-License-Identifier: Apache-2.0
"""One host's part in a job: its training program, and what each phase and view asks of the two (R6, R8, R20)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from nicps import wire
from nicps.exchange import Exchange
from nicps.job.accumulators import Accumulators
from nicps.job.actions import (
    CountFragments,
    DropFragments,
    NoteEvent,
    Settled,
    ShowClosed,
    ShowNeed,
)
from nicps.job.checkpoints import Checkpoints, rounds_before
from nicps.job.contribution import Contribution
from nicps.job.dialogue import Dialogue
from nicps.job.entry import Entry
from nicps.job.finish import Finish
from nicps.job.handed_job import HandedJob
from nicps.job.handout import HandOut
from nicps.job.node_info import NodeInfo
from nicps.job.orders import Depart, HandOutEnded, MarkRead, Order, Orders, Warn
from nicps.job.program import Program
from nicps.job.programs import Programs
from nicps.job.served import ServedMemory
from nicps.job.slow_work import Settle, Stored
from nicps.job.steps import Steps
from nicps.job.tasks import Tasks
from nicps.protocol import NO_REST, Committed, Installed, Phase, SendFragments
from nicps.protocol.plan import ChannelPlan
from nicps.session.shared_form import has_steps


class Part:
    """The job at this host, from the first hand-out decision to the stop.

    Args:
        programs, streams: numbers for training programs and streams.
        window: fragments in a hand-out's round.
        checkpoints: the folder of the checkpoints, for the user.

    Attributes: `job`, what was handed out of it. `dialogue` with the training program. `steps` of training. `unit`, the
    next training round's, once one has counted; `unit_of`: the exchange of the phase in which it has. `exchange`, of
    the last training phase, None before the first; `switch_failed`: a Linux switch was given up before that;
    `channels`, its plan of a step; `left_in`: the first round of the last phase that a member has left before a round
    of it was committed. `rest`: the committed round whose remainders such a switch adds next. `finishing`: the end has
    been decided. `cancelled`: the user of this host has cancelled the job.
    """

    def __init__(
        self,
        job_id: str,
        node: NodeInfo,
        tasks: Tasks,
        programs: Iterator[int],
        streams: Iterator[int],
        window: int,
        checkpoints: str,
        now: float,
    ) -> None:
        self.id = job_id
        self.job = HandedJob()
        self._node, self._tasks = node, tasks
        self.programs = Programs(node, programs, now)
        self.hand_out = HandOut(node, window)
        self.checkpoints = Checkpoints(node, tasks, self, checkpoints)
        self.finish = Finish(node, tasks, self, self.hand_out, streams)
        self.accumulators = Accumulators(node, tasks, self)
        self.served = ServedMemory(node, tasks, self)
        memory = self.accumulators, self.served
        self._entry = Entry(node, self.job, self.programs, self.hand_out, *memory)
        self.contributions = [Contribution() for _ in range(wire.MAX_CHANNELS)]
        self.steps = Steps()
        rounds = self.contributions, self.steps, self.served
        heard = self.job, self.programs, self._entry, *rounds, self.checkpoints
        self.dialogue = Dialogue(node, *heard)
        self.unit: int | None = None
        self.unit_of = Exchange.BROADCAST
        self.finishing = self.cancelled = self.switch_failed = False
        self.exchange: Exchange | None = None
        self.left_in = 0
        self._among: frozenset[int] = frozenset()  # the live members as that phase was decided on
        self.channels: tuple[ChannelPlan, ...] = ()
        self.rest = NO_REST

    @property
    def phase(self) -> Phase | None:
        """The phase that this host is in or prepares for."""
        return self._entry.phase

    @property
    def program(self) -> Program | None:
        """The training program."""
        return self.programs.current

    @property
    def stage(self) -> wire.Stage | None:
        """How much of the job is here (R20); None: a training program can no longer be started."""
        if not self.job.digest:
            return wire.Stage.NOTHING
        if self.programs.lacking:
            return wire.Stage.FILES if self.programs.can_start else None
        ready = self.program is not None and self.program.ready
        return wire.Stage.WAITING if ready else wire.Stage.FILES

    # ---- what the report shows

    def note_event(self, kind: str, **values: Any) -> NoteEvent:
        """Note an event at this host for the time line."""
        return NoteEvent(kind, self._node.open_round, values)

    def note_view(self) -> NoteEvent:
        """Note the view in force, by the hosts' names."""
        view = self._node.view
        live = [view.members[k - 1].name for k in view.order]
        lead = view.members[view.lead - 1].name
        return self.note_event("view", view=view.number, lead=lead, live=live)

    # ---- phases and views

    def prepare(self, now: float, phase: Phase) -> Orders:
        """A decision's turn has come; `Acknowledge` follows once this host is prepared for it.

        Raises:
            JobFailed, LookupError, TypeError: this host cannot prepare for it, or the decision is not valid.
        """
        entry = self._entry
        entry.waiting = None  # an earlier decision's, which does not come
        if phase.kind is wire.PhaseKind.TRAIN:
            self.exchange, self.rest, self.channels = phase.exchange, phase.rest, phase.channels
            self.served.phase = phase
            self._among = self._node.view.live
            self.switch_failed = bool(phase.settings.get("switch_failed"))
        if phase.kind in (wire.PhaseKind.TRAIN, wire.PhaseKind.TEST):
            self.finishing = False
        if phase.kind is wire.PhaseKind.HANDOUT:
            entry.phase = phase
            orders = self.hand_out.prepare(phase, bool(self.job.digest))
            # Windows of a hand-out before this one are on disk then: their banks are free.
            return [*orders, self._begin_settling(partial(entry.make_room, phase, None))]
        if phase.kind is wire.PhaseKind.FINISH:
            self.finishing = True
            entry.phase = phase
            if phase.settings.get("script"):  # its files are here once the hand-out is on disk
                return [self._begin_settling(lambda now: self.finish.acknowledge_nothing(phase))]
            return self.finish.begin(now, phase, self.programs, *self._facts)
        if not entry.has_share(phase):
            entry.phase = phase  # this host only passes on what others train
            return entry.make_room(phase, None, now)
        entry.waiting = phase
        return [self._begin_settling(entry.enter_training)]  # the hand-out is on disk then

    @property
    def _facts(self) -> tuple[int, int, str]:
        """Rounds of training, those of the run that this one goes on from, and the job's system."""
        before, system = rounds_before(self.job.prepared), self.job.settings.get("system")
        return self.steps.trained, before, str(system)

    def _begin_settling(self, then: Callable[[float], Orders]) -> Order:
        return self._tasks.begin(self, Settle(), lambda now, _: then(now))

    def enter_view(self, now: float, action: Installed) -> Orders:
        """Another view is in force, and the phase goes on in it; or no phase does."""
        self.checkpoints.note_majority()
        phase, program = action.phase, self.program
        noted = self.note_view()
        if self._node.number in self._node.learners:
            self.rest = NO_REST  # this host has missed rounds
        self._entry.phase, self._entry.waiting = phase, None
        if phase is not None and phase.kind is wire.PhaseKind.TRAIN:
            self.channels = phase.channels  # not those of a decision that has come to nothing
            if self._among - self._node.view.live and self._node.open_round == phase.first_round:
                self.left_in = phase.first_round
        if phase is None:
            memory = self.accumulators.memory
            shown = program.show_view(now, self._node, None, memory) if program is not None else []
            return [noted, *shown]
        return [noted, *self._entry.go_on(now, phase, again=action.again and not self.finishing)]

    def stand_by(self, reason: str) -> Orders:
        """R19: this host is in no view; number, model and data stay."""
        self.checkpoints.note_majority()
        self._entry.phase = self._entry.waiting = None
        noted = self.note_event("stands by", why=reason)
        return [noted, DropFragments(), *self.hand_out.withdraw()]

    # ---- rounds

    def commit(self, now: float, commit: Committed) -> Orders:
        """A round counts."""
        phase, program, number = commit.phase, self.program, self._node.number
        if phase.kind is wire.PhaseKind.HANDOUT:
            return self._store(phase, commit)
        self.finish.note_commit(commit)
        self.rest = commit.rest_after(self.rest)
        mine = self._entry.has_share(phase) and program is not None and program.holds_state
        noted = self.steps.commit(
            commit, mine=mine, several=has_steps(self.job.settings) or phase.planned
        )
        listed = len(commit.counted) if phase.exchange.served else None
        if phase.exchange.served:
            self.served.note_commit(phase)
        orders: Orders = [*noted, CountFragments(commit.round, listed, commit.channel)]
        if listed:
            orders.append(Settled(commit.round))
        if phase.kind is wire.PhaseKind.TRAIN and not phase.exchange.absolute:
            self.unit, self.unit_of = commit.next_unit, phase.exchange
        if not mine or program is None:
            return [*orders, MarkRead(commit.round, 0, commit.channel)]
        if phase.kind is wire.PhaseKind.TRAIN and number in commit.counted:
            self.programs.note_training()
        mine_there, moment = self.contributions[commit.channel], (now, commit.round)
        waited, listed_s = mine_there.seconds_waited(*moment), mine_there.seconds_listed(*moment)
        return [*orders, *program.show_commit(now, commit, waited, listed_s)]

    def _store(self, phase: Phase, commit: Committed) -> Orders:
        """A window of a hand-out: its bank is free once it is on disk."""
        hand_out = self.hand_out
        task = hand_out.store(phase, commit, bool(self.job.digest))
        stored = partial(self._stored, phase, commit.round, task.stream, hand_out.keeps)
        return [self._tasks.begin(self, task, stored), *hand_out.offer_next(phase, commit)]

    def _stored(
        self, phase: Phase, round_: int, stream: int, kept: bool, now: float, all_: Stored | None
    ) -> Orders:
        orders: Orders = [MarkRead(round_)]
        if all_ is None:
            return orders
        orders += self.hand_out.end(phase, stream, kept)
        if phase.settings["purpose"] in ("job", "files") and not self.job.digest:
            self.job.digest, self.job.prepared = all_.digest, all_.prepared
            if not self.job.script:
                orders += self.programs.start(now, self.job.entry, self.job.settings)
        if phase.settings["purpose"] == "state" and kept:
            self.job.has_state = True
        return [*orders, HandOutEnded(phase)]

    def show_need(self, round_: int, samples: int) -> Orders:
        """Tell the training program how many samples still make the quorum (R13)."""
        program = self.program
        if program is None or not program.ready:
            return []
        return [ShowNeed(program.number, round_, samples)]

    def show_closed(self, round_: int) -> Orders:
        """Tell the training program that the round closes without it."""
        program = self.program
        if program is None or not program.ready:
            return []
        program.close_round(round_)
        return [ShowClosed(program.number, round_)]

    def note_sent(self, action: SendFragments, started: float, ended: float) -> Orders:
        """Fragments of this host's contribution are with the kernel."""
        contribution = self.contributions[action.channel]
        contribution.note_sent(action.round, started, ended)
        if not (action.repair and action.exchange.lost):
            return []
        self.finish.asked_again += sum(count for _, count in action.ranges)
        if not contribution.lacks_sums_anew(action.round):
            return []
        text = f"{action.exchange.lost} have not come: sending their fragments again"
        return [Warn(f"round {action.round}: {text}")]

    # ---- the training program

    def start_missing_program(self, now: float) -> Orders:
        """This host is called, and would come back: it needs a training program (R20)."""
        if not self.job.digest or not self.programs.lacking or self.job.script:
            return []
        return self.programs.start_again(now, self.job.entry, self.job.settings)

    def note_ended(self, now: float, number: int, code: int, last: str) -> Orders:
        """A program's process is gone: after the end, because the job is broken, or because it was killed.

        Args:
            last: its last line, or the signal or status that has ended it.
        """
        program = self.programs.find(number)
        if program is None:
            return []
        program.ended = True
        return self._lose_program(now, code, last)

    def note_gateway_ended(self, now: float, number: int, code: int, last: str) -> Orders:
        """The process between the agent and a program that speaks JSON is gone; `last` as in `note_ended`."""
        program = self.programs.find(number)
        if program is None:
            return []
        program.gateway = False
        if code >= 0:
            return self.programs.fail(f"the gateway ended: {last}") if code else []
        ended = program.end("its gateway is gone")  # without the gateway it reaches no agent
        return [*ended, *self._lose_program(now, code, f"its gateway: {last}")]

    def _lose_program(self, now: float, code: int, last: str) -> Orders:
        if self.job.group:
            return [] if self.dialogue.left else self.programs.lose_of_group(last)
        if self.finishing and not code:  # in whatever phase after a change of the view
            return self.finish.keep(*self._facts)
        reason = f"the training program ended: {last}"
        self.programs.crash = f"{self._node.name}: {reason}"
        dropped: Orders = [DropFragments()]  # the rest of its gradient will not come
        if code >= 0:
            return [*dropped, *self.programs.fail(reason)]
        self._entry.waiting = None
        departs = Depart(self.programs.crash)  # the others go on; this host comes back
        again = self.programs.start_again(now, self.job.entry, self.job.settings, last)
        return [*dropped, departs, *again]

    # ---- time

    def deadline(self, awaited: bool) -> float:
        """When `tick` wants to be called next."""
        awaited = awaited and not self.accumulators.lacks_places
        return min(self.programs.deadline(awaited), self.checkpoints.deadline())

    def tick(self, now: float, awaited: bool) -> Orders:
        """A training program that does not do what it owes must not hold up the others.

        Args:
            awaited: all members wait for the rest of its gradient.
        """
        orders = self.checkpoints.tick(now)
        awaited = awaited and not self.accumulators.lacks_places
        stalled, ended = self.programs.find_stall(now, awaited)
        orders += ended
        return [*orders, *self._lose_program(now, -9, stalled)] if stalled else orders

    def close(self, reason: str, *, saved: bool = False) -> Orders:
        """The job is over, however it ended; with `saved` it can be resumed."""
        self._tasks.forget(self)
        return self.programs.end(reason, saved=saved)
