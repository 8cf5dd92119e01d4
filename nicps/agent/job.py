# SPDX-License-Identifier: Apache-2.0
"""One host's part in a job: its files, its training program, and what each phase and view asks of them."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nicps import wire
from nicps.agent.checkpoints import STATE, Checkpoints
from nicps.agent.finish import Finish
from nicps.agent.folders import remove, working_folder
from nicps.agent.handout import HandOut
from nicps.agent.lives import keep_life, put_by
from nicps.agent.prepared import read_prepared
from nicps.agent.process import python
from nicps.agent.program import STALL_S, Program
from nicps.agent.records import Records
from nicps.agent.sources import ArenaSource, StreamSource
from nicps.dataplane.maps import Accumulators
from nicps.errors import JobFailed, NicpsError, explain
from nicps.exchange import Exchange
from nicps.protocol import Committed, Installed, Phase, SendFragments
from nicps.session import shared_form
from nicps.session.channel import Channel

if TYPE_CHECKING:
    from nicps.agent.agent import Agent

_MOST_STARTS = (
    4  # of a training program that is killed again and again before it has trained a round
)
_AWAY_S = 2.0  # between two looks: this agent has stood still itself


class LocalJob:
    """The job at this host, from the first hand-out decision to the stop."""

    def __init__(self, agent: Agent, job_id: str) -> None:
        self.agent = agent
        self.id = job_id
        self.base = working_folder(agent.settings.work)  # ours; what the trainer owns is inside
        self.folder = self.base / "work"
        for folder in (self.folder, self.folder / "out"):
            folder.mkdir()
            os.chown(folder, agent.user.uid, agent.user.gid)
        self.handout = HandOut(self)
        self.finish = Finish(self)
        self.checkpoints = Checkpoints(self)
        self.program: Program | None = None
        self.train_rounds = 0
        self.unit: int | None = None  # of the next training round, once one has counted
        self.unit_of = Exchange.BROADCAST  # the exchange of the phase in which it has
        self.digest = ""  # of what was handed out, once it is all here
        self.prepared: dict[str, Any] = {}  # what that said of the job
        self.finishing = False  # the end has been decided
        self.exchange = agent.settings.exchange  # of the last training phase
        self._phase: Phase | None = None
        self._source: ArenaSource | StreamSource | None = None
        self._room = (0, False)  # that the accumulators in use make (`_room_for`)
        self._reserved: deque[Accumulators] = deque()  # made in the background, not in use yet
        self._starts = 0
        self._waiting: Phase | None = (
            None  # for the training program to be ready, or to have the state
        )
        self._looked = agent.now
        self._then: Callable[[str], None] | None = None  # once the program has saved
        self.records = Records(self.base, job_id, agent.node.name, agent.now)
        self._ended = False
        self.crash = ""  # what ended the last training program that did not end well, and where
        self._offered_at = self._sending_s = 0.0  # of the round's contribution
        self._lacked = -1  # the last round in which sums of the switch had not come

    # ---- phases and views

    def prepare(self, phase: Phase) -> None:
        """A decision's turn has come; `agent.prepared` is called once this host is ready for it."""
        if phase.kind is wire.PhaseKind.TRAIN:
            self.exchange = phase.exchange
        if phase.kind in (wire.PhaseKind.TRAIN, wire.PhaseKind.TEST):
            self.finishing = False
        if phase.kind is wire.PhaseKind.HANDOUT:
            self._phase = phase
            self.handout.prepare(phase)
        elif phase.kind is wire.PhaseKind.FINISH:
            self.finishing = True
            self._waiting, self._phase = None, phase
            self.finish.prepare(phase)
        elif not phase.shares[self.agent.node.number - 1]:
            self._phase = phase  # it only passes on what others train
            self.allocate(phase, lambda: self.agent.prepared(phase.number))
        else:
            self._waiting = phase
            self.later(lambda: None, self._prepare_training)  # what was handed out is on disk then

    def installed(self, action: Installed) -> None:
        """Another view is in force, and the phase goes on in it, or none does."""
        self.checkpoints.called_off()
        phase = action.phase
        if phase is None:
            if self.program is not None:
                self.program.view()
            return
        self._phase = phase
        self._waiting = None
        if not self._has_room(phase):  # it was getting ready for another one
            self._use(self.agent.dataplane.reserve(phase.blocks), phase)
        counted = bool(phase.shares[self.agent.node.number - 1])
        if phase.kind is wire.PhaseKind.HANDOUT or not counted or self.program is None:
            return
        self.program.view()
        if self.program.arena is not None:  # and not from what was to be handed out
            self._source = ArenaSource(self.program.arena, self.program.hurry)
        if action.again and not self.finishing:  # it was told of the phase that now does not come
            self.program.enter(phase, self.agent.node.open_round, self._room[0])

    def struck(self) -> None:
        """R19: this host stands by; number, model and data stay."""
        self.agent.frames.sender.drop_fragments()
        self.checkpoints.called_off()
        self._phase = self._waiting = None
        self.handout.withdraw()

    @property
    def stage(self) -> wire.Stage | None:
        """How much of the job is here, for who takes hosts back (R20)."""
        program = self.program
        if not self.digest:
            return wire.Stage.NOTHING
        if program is None or program.has_ended:
            return None if self._start_again() else wire.Stage.FILES
        return wire.Stage.WAITING if program.ready else wire.Stage.FILES

    def sends(self, source: ArenaSource | StreamSource) -> None:
        """Contributions come from there from now on."""
        self._source = source

    def source(self) -> ArenaSource | StreamSource:
        """Where the payload of this host's contribution is."""
        assert self._source is not None
        return self._source

    @property
    def settings(self) -> dict[str, Any]:
        """The job's settings, as they were handed out; a training program cannot change them."""
        settings = self.prepared.get("settings", {})
        return settings if isinstance(settings, dict) else {}

    def handed_out(self, digest: str) -> None:
        """All the job's files are here: the training program can start.

        Raises:
            JobFailed, OSError: they are not what a job needs; it cannot be started.
        """
        self.digest = digest
        self.prepared = read_prepared(self.folder)
        self.start_program()

    def committed(self, commit: Committed) -> None:
        """A round counts."""
        phase, agent = commit.phase, self.agent
        if phase.kind is wire.PhaseKind.HANDOUT:
            self.handout.committed(phase, commit)
            return
        kind = "test" if phase.kind is wire.PhaseKind.TEST else "commit"
        self.records.note(kind, agent.now, agent.now, commit.round)
        streams = commit.exchange.streams(commit.counted, agent.node.number)
        self.finish.expected += streams * phase.fragments_in(commit.round)
        # A change of the view may have settled the round: the kernel has counted it in the view before.
        view = int(agent.dataplane.config["view"])
        self.finish.added += agent.dataplane.count(commit.round, view, 0)
        if phase.kind is wire.PhaseKind.TRAIN:
            self.unit, self.unit_of = commit.next_unit, phase.exchange
        if not phase.shares[agent.node.number - 1] or self.program is None:
            agent.act(agent.node.read(agent.now, commit.round))
            return
        if phase.kind is wire.PhaseKind.TRAIN:
            self.train_rounds += 1
            if agent.node.number in commit.counted:
                self._starts = 1  # this program can train
        self.program.trained = commit.round
        self.program.owes("work")
        self.program.post(
            shared_form.Committed(
                commit.round,
                commit.counted,
                commit.unit,
                commit.next_unit,
                commit.exchange,
                max(0.0, agent.now - self._offered_at - self._sending_s),
            )
        )

    def later(self, work: Callable[[], None], then: Callable[[], None]) -> None:
        """Work in the background, unless the job is over before it is done."""

        def unless_over() -> None:
            try:
                work()
            except Exception:
                if not self._ended:
                    raise

        self.agent.loop.background(unless_over, lambda: None if self._ended else then())

    # ---- what the report shows

    def note(self, event: str, **more: Any) -> None:
        """An event at this host, with the round and the time."""
        self.records.event(event, self.agent.now, self.agent.node.open_round, **more)

    def note_view(self) -> None:
        """The view in force, by the hosts' names."""
        view = self.agent.node.view
        live = [view.members[k - 1].name for k in view.order]
        self.note("view", view=view.number, lead=view.members[view.lead - 1].name, live=live)

    # ---- the training program (R8)

    @property
    def entry(self) -> str:
        """The training program's module, as the prepared job names it."""
        return str(self.prepared.get("entry", "trainer"))

    def start_program(self) -> bool:
        """Start the training program, unless it is killed again and again."""
        agent = self.agent
        if self._starts >= _MOST_STARTS:
            return False
        if self.program is not None:
            self.program.close("another one is started")
            put_by(self.folder / "out", self.base)
        self._starts += 1
        argv = list(agent.settings.trainer) or python(
            self.entry, "run", "--workdir", str(self.folder)
        )
        settings = self.settings
        network_access = settings.get("network_access") is True
        stall_s = settings.get("stall_s")
        if not isinstance(stall_s, int | float) or stall_s < 1:
            stall_s = STALL_S
        self.program = Program(self, float(stall_s))
        self.program.start(argv, self.folder, self.base / "trainer.log", network_access)
        return True

    def _start_again(self) -> str:
        """The training program has been lost: start another; why not, if it cannot be."""
        try:
            if self.start_program():
                return ""
        except (OSError, NicpsError) as error:  # its files, or no memory for a process
            return f"the training program cannot be started again: {error}"
        times = f"{_MOST_STARTS} times in a row, without a round in between"
        return f"the training program was killed, or stood still, {times}"

    def start_gateway(self, connection: int) -> None:
        """A program that speaks JSON has connected (`Program.start_gateway`)."""
        if self.program is None:
            raise JobFailed("no training program is expected yet")
        self.program.start_gateway(connection, self.folder, self.base / "gateway.log")

    def attach(self, channel: Channel) -> None:
        """The training program has connected (`Program.attach`)."""
        if self.program is None:
            raise JobFailed("no training program is expected yet")
        self.program.attach(channel)

    def program_ready(self) -> None:
        """It has built the model."""
        self._prepare_training()
        self.agent.program_ready()

    def program_has_applied(self) -> None:
        """It holds the state after a round: that which the next phase begins with, perhaps."""
        self._prepare_training()

    def program_prepared(self, number: int) -> None:
        """It is in the phase."""
        phase = self._phase
        if phase is not None and phase.number == number:
            if phase.kind is not wire.PhaseKind.FINISH:
                self.agent.prepared(number)

    def program_has_state(self, op: str, error: str) -> None:
        """It has saved its state, or loaded another's."""
        if op == "saved":
            then, self._then = self._then, None
            if then is not None:
                then(error)
        else:
            (self.folder / STATE).unlink(missing_ok=True)  # the next one may be another
            self._prepare_training()

    def save(self, then: Callable[[str], None]) -> None:
        """Let the program write its state; `then` gets an error, or an empty text."""
        program = self.program
        if program is None or not program.ready:
            then("there is no training program that could save")
            return
        self._then = then
        program.state("save")

    def offered(self, round_: int, samples: int, unit: int | None, skip: bool) -> None:
        """The program has a gradient."""
        agent = self.agent
        self._offered_at, self._sending_s = agent.now, 0.0
        agent.act(agent.node.offer(agent.now, round_, samples, unit, skip))

    def sent(self, action: SendFragments, started: float, ended: float) -> None:
        """Fragments of this host's contribution are with the kernel."""
        self._sending_s += ended - started
        self.records.note("repair" if action.repair else "send", started, ended, action.round)
        if action.repair and action.exchange.lost:
            self._warn_of_lost(action)

    def _warn_of_lost(self, action: SendFragments) -> None:
        """Sums have not come; one line, as long as no round comes through without that."""
        self.finish.asked_again += sum(count for _, count in action.ranges)
        if action.round > self._lacked + 1:
            lost = f"{action.exchange.lost} have not come: sending their fragments again"
            self.agent.warn(f"round {action.round}: {lost}")
        self._lacked = action.round

    def need(self, round_: int, samples: int) -> None:
        """Tell the training program what still makes the quorum (R13)."""
        if self.program is not None and self.program.arena is not None:
            self.program.arena.need = (round_, samples)

    def closed(self, round_: int) -> None:
        """Tell the training program that the round closed without it."""
        if self.program is not None and self.program.arena is not None:
            self.program.arena.closed = round_
            self.program.excused()

    def _prepare_training(self) -> None:
        """Bring the training program into the phase that waits for it, if both are there."""
        phase, program, agent = self._waiting, self.program, self.agent
        if phase is None or program is None or not program.ready or program.arena is None:
            return
        if program.has_ended:  # the end was decided, and whoever leads now has not heard of it
            self.program_failed("the training program has saved and ended, and cannot train on")
            return
        same_files = phase.settings.get("handout") == self.digest
        same_size = (
            phase.kind is not wire.PhaseKind.TRAIN or phase.fragments == program.arena.fragments
        )
        same_state = program.digest == str(phase.settings.get("model", ""))
        learns = agent.node.number in agent.node.learners
        if not same_files:
            agent.act(agent.node.fail(agent.now, "what was handed out has arrived damaged"))
        elif learns and not same_state and os.path.lexists(self.folder / STATE):
            if program.duty != "load":  # what the hand-out brought (R20)
                program.state("load")
            return
        elif learns and not same_state and same_size:
            agent.views.depart("the state that was handed out is not that of the others: once more")
        elif not same_size or not (same_state or program.trained):
            reason = (
                "the model built here differs from the lead's: the same job.py and the same "
                "versions of Python and PyTorch are needed on every host"
            )
            agent.act(agent.node.fail(agent.now, reason))
        else:  # a state that differs after rounds of training is judged by all, after the next one
            self._waiting, self._phase = None, phase
            self._source = ArenaSource(program.arena, program.hurry)
            self.allocate(phase, lambda: self._enter(program, phase))
            return
        self._waiting = None

    def _enter(self, program: Program, phase: Phase) -> None:
        if program is self.program:
            program.holds_state = True
            program.enter(phase, phase.first_round, self._room[0])

    def allocate(self, phase: Phase, then: Callable[[], None]) -> None:
        """The accumulators that the phase needs, and `then`, unless there is another phase by that time.

        A hand-out has its own, also where those of training have the size: a training program may still be reading the
        last sum there, or the disk the last window, when the next phase writes to that bank.
        """
        if phase is not self._phase:
            return
        if self._has_room(phase):
            then()
            return
        dataplane, reserved = self.agent.dataplane, self._reserved

        def use() -> None:
            accumulators = reserved.popleft()
            if phase is self._phase:
                self._use(accumulators, phase)
                then()
            else:
                accumulators.close()

        self.later(lambda: reserved.append(dataplane.reserve(phase.blocks)), use)

    def _has_room(self, phase: Phase) -> bool:
        return not phase.blocks or self._room == _room_for(phase)

    def _use(self, accumulators: Accumulators, phase: Phase) -> None:
        """The old ones go, once nobody reads them any more."""
        self.agent.dataplane.use(accumulators)
        self._room = _room_for(phase)
        if self.program is not None:
            self.program.forget_blocks()

    def program_failed(self, reason: str) -> None:
        """It cannot go on, and no other could. The lead names the host, as it does with a FAIL frame's."""
        node = self.agent.node
        if not self._ended:
            named = f"{node.name}: {reason}" if node.leads else reason
            self.agent.act(node.fail(self.agent.now, named))

    def program_ended(self, program: Program, code: int, said: str) -> None:
        """Its process is gone: after the end, because the job is broken, or because somebody killed it."""
        if self._ended or program is not self.program:
            return
        agent = self.agent
        if self.finishing and not code:  # whatever phase a change of the view has gone back to
            self.finish.keep()
            return
        agent.frames.drop_fragments()  # the rest of its gradient will not come
        reason = f"the training program ended: {said}"
        self.crash = f"{agent.node.name}: {reason}"
        if code < 0:
            self._waiting = None
            agent.views.depart(self.crash)  # the others go on; this host comes back with a new one
            problem = self._start_again()
            if problem:
                self.program_failed(f"{problem}; the last time: {said}")
        else:
            self.program_failed(reason)

    def look(self, now: float) -> None:
        """A training program that does not do what it is to do must not hold up the others."""
        away, self._looked = now > self._looked + _AWAY_S, now
        self.checkpoints.look(now)
        program, agent = self.program, self.agent
        if program is None or program.has_ended:
            return
        if away or agent.node.changing:  # then it waits for the network, perhaps for long (R18)
            program.move(now)
        silent = program.stalled(now, agent.frames.sender.waits)
        if not silent:
            return
        reason = f"it has not moved for {silent:g} s (the job's stall_s is {program.stall_s:g})"
        if program.duty in ("", "work") and len(agent.node.view.live) == 1:  # nobody waits
            agent.warn(f"the training program: {reason}")
            program.move(now)
        else:
            program.close(reason)
            self.program_ended(program, -9, reason)

    def close(self, message: str, kept: Path | None = None) -> None:
        """The job is over here: stop the training program, remove its files.

        Args:
            kept: where to keep the records, if the others go on.
        """
        self._ended = True
        if self.program is not None:
            self.program.close(message)
        handout, records, base = self.handout, self.records, self.base
        reserved, agent = self._reserved, self.agent

        def clear() -> None:  # in the thread, which may be using them
            handout.close()
            for accumulators in reserved:
                accumulators.close()
            records.close()
            if kept is not None:
                try:
                    keep_life(base, kept)
                except OSError as error:
                    agent.log(explain("keep the job's records", error))
            remove(base)

        agent.children.once_gone(lambda: agent.loop.background(clear, lambda: None))


def _room_for(phase: Phase) -> tuple[int, bool]:
    """Blocks in a bank, and whether they are a hand-out's."""
    return phase.blocks, phase.kind is wire.PhaseKind.HANDOUT
