# SPDX-License-Identifier: Apache-2.0
"""One host's part in a job: its training program, and what each phase and view asks of the two (R6, R8, R20)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from nicps import wire
from nicps.errors import JobFailed
from nicps.exchange import Exchange
from nicps.job.accumulators import Accumulators
from nicps.job.actions import (
    CountFragments,
    DropFragments,
    NoteEvent,
    RemoveState,
    Settled,
    ShareArena,
    ShowClosed,
    ShowNeed,
)
from nicps.job.checkpoints import Checkpoints, resumed_from, rounds_before
from nicps.job.contribution import Contribution
from nicps.job.entry import Entry
from nicps.job.finish import Finish
from nicps.job.handout import HandOut
from nicps.job.node_info import NodeInfo
from nicps.job.orders import (
    Depart,
    Fail,
    HandOutEnded,
    MarkRead,
    MarkReady,
    ModelBuilt,
    NeedRoom,
    Order,
    Orders,
    Reported,
    RoundJudged,
    Saving,
    StateSaved,
    Warn,
)
from nicps.job.plan import is_group, read_plan
from nicps.job.program import Program
from nicps.job.programs import Programs
from nicps.job.script import is_script
from nicps.job.served import ServedMemory
from nicps.job.slow_work import Settle, Stored
from nicps.job.steps import Steps
from nicps.job.tasks import Tasks
from nicps.job.text import one_line, shorten
from nicps.protocol import NO_REST, Committed, Installed, Offer, Phase, SendFragments
from nicps.protocol.plan import ChannelPlan
from nicps.session import shared_form as says
from nicps.session.served_form import Pull, Step
from nicps.session.shared_form import has_steps, is_planned, is_served


class Part:
    """The job at this host, from the first hand-out decision to the stop.

    Args:
        programs, streams: numbers for training programs and streams.
        window: fragments in a hand-out's round.
        checkpoints: the folder of the checkpoints, for the user.

    Attributes: `steps` of training. `digest` of the hand-out, once all of it is here; `prepared`, the job's settings
    from it. `unit`, the next training round's, once one has counted; `unit_of`: the exchange of the phase in which it
    has. `exchange`, of the last training phase, None before the first; `switch_failed`: a Linux switch was given up
    before that; `channels`, its plan of a step; `rest`: the committed round whose remainders such a switch adds next.
    `finishing`: the end has been decided. `cancelled`: the user of this host has cancelled the job.
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
        self._node, self._tasks = node, tasks
        self.programs = Programs(node, programs, now)
        self.hand_out = HandOut(node, window)
        self.checkpoints = Checkpoints(node, tasks, self, checkpoints)
        self.finish = Finish(node, tasks, self, self.hand_out, streams)
        self.accumulators = Accumulators(node, tasks, self)
        self.served = ServedMemory(node, tasks, self)
        memory = self.accumulators, self.served
        self._entry = Entry(node, self.programs, self.hand_out, *memory)
        self.contributions = [Contribution() for _ in range(wire.MAX_CHANNELS)]
        self.steps = Steps()
        self.unit: int | None = None
        self.unit_of = Exchange.BROADCAST
        self.digest = ""
        self.prepared: Mapping[str, Any] = {}
        self.finishing = self.cancelled = self.switch_failed = False
        self.exchange: Exchange | None = None
        self.channels: tuple[ChannelPlan, ...] = ()
        self.rest = NO_REST
        self._saving: Saving | None = None
        # Another member's state is here, which the program has not loaded yet; a group's program has reported its end.
        self._has_state = self._left = False

    @property
    def phase(self) -> Phase | None:
        """The phase that this host is in or prepares for."""
        return self._entry.phase

    @property
    def program(self) -> Program | None:
        """The training program."""
        return self.programs.current

    @property
    def settings(self) -> dict[str, Any]:
        """The job's settings, as they were handed out; a training program cannot change them."""
        settings = self.prepared.get("settings", {})
        return settings if isinstance(settings, dict) else {}

    @property
    def group(self) -> bool:
        """Whether it is no job but a group of programs (`nicps.collective`)."""
        return is_group(self.settings)

    @property
    def script(self) -> bool:
        """Whether it is no job but a script (`nicps run`)."""
        return is_script(self.settings)

    @property
    def entry(self) -> str:
        """The training program's module, as the prepared job names it."""
        return str(self.prepared.get("entry", "trainer"))

    @property
    def stage(self) -> wire.Stage | None:
        """How much of the job is here (R20); None: a training program can no longer be started."""
        if not self.digest:
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
            self.switch_failed = bool(phase.settings.get("switch_failed"))
        if phase.kind in (wire.PhaseKind.TRAIN, wire.PhaseKind.TEST):
            self.finishing = False
        if phase.kind is wire.PhaseKind.HANDOUT:
            entry.phase = phase
            orders = self.hand_out.prepare(phase, bool(self.digest))
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
        return [self._begin_settling(self._enter_training)]  # the hand-out is on disk then

    @property
    def _facts(self) -> tuple[int, int, str]:
        """Rounds of training, those of the run that this one goes on from, and the job's system."""
        return self.steps.trained, rounds_before(self.prepared), str(self.settings.get("system"))

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

    def _enter_training(self, now: float) -> Orders:
        return self._entry.enter_training(now, self.digest, has_state=self._has_state)

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
            commit, mine=mine, several=has_steps(self.settings) or phase.planned
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
        task = hand_out.store(phase, commit, bool(self.digest))
        stored = partial(self._stored, phase, commit.round, task.stream, hand_out.keeps)
        return [self._tasks.begin(self, task, stored), *hand_out.offer_next(phase, commit)]

    def _stored(
        self, phase: Phase, round_: int, stream: int, kept: bool, now: float, all_: Stored | None
    ) -> Orders:
        orders: Orders = [MarkRead(round_)]
        if all_ is None:
            return orders
        orders += self.hand_out.end(phase, stream, kept)
        if phase.settings["purpose"] in ("job", "files") and not self.digest:
            self.digest, self.prepared = all_.digest, all_.prepared
            if not self.script:
                orders += self.programs.start(now, self.entry, self.settings)
        if phase.settings["purpose"] == "state" and kept:
            self._has_state = True
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

    # ---- the training program: its messages (R8)

    def handle_message(self, now: float, message: says.FromProgram) -> Orders:
        """Handle a message of the program.

        Raises:
            JobFailed: the message is not valid.
        """
        program = self.program
        if program is None or program.ended:
            return []
        program.note_movement(now)
        match message:
            case says.Progress(round_, samples):
                return [] if program.lags else [MarkReady(round_, samples)]
            case says.Offer(round_, samples, unit, skip, conversion, channel):
                if program.lags:
                    return []  # the program will offer the round again
                program.note_offered(channel, round_)
                self.contributions[channel].begin(now, round_)
                return [Offer(round_, samples, unit, skip, conversion, channel)]
            case Step(round_, samples, skip) if not program.lags:
                self.contributions[0].begin(now, round_)
                return self.served.step(program, Offer(round_, samples, skip=skip))
            case Pull(round_):
                return self.served.pull(now, program, round_, self.phase)
            case says.Read(round_, digest, channel):
                return self._read(now, program, round_, digest, channel)
            case says.Prepared(number):
                return self._program_prepared(program, number)
            case says.Ready(lanes, digest, channels) if not program.ready:
                plan = () if self.group else read_plan(self.settings, channels)
                return self._build(now, program, lanes, digest, plan)
            case says.Saved(number, round_, digest, error):
                if not program.note_state(number, digest):
                    return []
                program.saved = round_
                saving, self._saving = self._saving, None
                return [StateSaved(saving, one_line(error))] if saving is not None else []
            case says.Loaded(number, digest):
                if not program.note_state(number, digest):
                    return []
                self._has_state = False
                self.steps.forget_part()
                return [RemoveState(), *self._enter_training(now)]
            case says.Checkpoint(round_, error):
                return self.checkpoints.write(round_, one_line(error))
            case says.Residual(error):
                return self.checkpoints.keep_residual(one_line(error))
            case says.Decide(round_, what, saves, channels, channel) if program.ready:
                plan = read_plan(self.settings, channels) if what == "plan" else ()
                if not channel:
                    program.note_judged(round_, what)
                self._left |= self.group and what == "end"
                return [RoundJudged(round_, what, saves, plan, channel)]
            case says.Report(values) if program.ready:
                return [Reported(values)]
            case says.Fail(reason):
                return [Fail(reason)]
            case _:
                return []

    def _read(self, now: float, program: Program, round_: int, digest: str, channel: int) -> Orders:
        program.note_read(round_, digest, channel)
        read: Orders = [*self.steps.read(round_, digest)]
        rounds = self._node.rounds
        if channel < len(rounds) and round_ < rounds[channel]:
            read.append(MarkRead(round_, shorten(digest), channel))
        # The program may have reached the state that the next phase begins with.
        return [*read, *self._enter_training(now)]

    def _program_prepared(self, program: Program, number: int) -> Orders:
        program.note_prepared()
        phase = self.phase
        if phase is None or phase.number != number or phase.kind is wire.PhaseKind.FINISH:
            return []
        return self._entry.acknowledge(phase)

    def _build(
        self,
        now: float,
        program: Program,
        lanes: int,
        digest: str,
        channels: tuple[ChannelPlan, ...],
    ) -> Orders:
        width = self.settings.get("lane", "i16")
        try:
            bits = int(str(width).removeprefix("i"))
            per_fragment = wire.lanes_per_fragment(bits)
        except (ValueError, KeyError):
            raise JobFailed(f"the job's lane is {width!r}, not i8, i16 or i32") from None
        program.note_ready(max(1, -(-lanes // per_fragment)), digest, channels)
        # The hosts add.
        self.served.lanes = lanes
        several = has_steps(self.settings) or is_planned(self.settings)
        alone = self.group or several or is_served(self.settings)
        room = [NeedRoom(program.fragments, bits)] if not alone else []
        arena = ShareArena(program.number, program.fragments, *resumed_from(self.prepared))
        return [arena, *room, *self._enter_training(now), ModelBuilt()]

    # ---- the training program: its process

    def save(self, now: float, saving: Saving) -> Orders:
        """Let the program write its state; `StateSaved` follows."""
        program = self.program
        if program is None or not program.ready or program.ended:
            return [StateSaved(saving, "there is no training program that could save")]
        self._saving = saving
        return program.change_state(now, "save", self._node)

    def forget_saving(self) -> None:
        """This host leads no more: the state is not waited for."""
        self._saving = None

    def start_missing_program(self, now: float) -> Orders:
        """This host is called, and would come back: it needs a training program (R20)."""
        if not self.digest or not self.programs.lacking or self.script:
            return []
        return self.programs.start_again(now, self.entry, self.settings)

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
        if self.group:
            return [] if self._left else self.programs.lose_of_group(last)
        if self.finishing and not code:  # in whatever phase after a change of the view
            return self.finish.keep(*self._facts)
        reason = f"the training program ended: {last}"
        self.programs.crash = f"{self._node.name}: {reason}"
        dropped: Orders = [DropFragments()]  # the rest of its gradient will not come
        if code >= 0:
            return [*dropped, *self.programs.fail(reason)]
        self._entry.waiting = None
        departs = Depart(self.programs.crash)  # the others go on; this host comes back
        again = self.programs.start_again(now, self.entry, self.settings, last)
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
