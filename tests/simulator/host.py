# SPDX-License-Identifier: Apache-2.0
"""One simulated host: the life of a job as it is (`nicps.job.Life`), and a world that carries its actions out.

The kernel, the disk, the training program and the wire are models.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from nicps import protocol, wire
from nicps.errors import NetworkProblem
from nicps.exchange import Exchange
from nicps.job import LifeSettings
from nicps.job import actions as act
from nicps.job.part import Part
from nicps.job.slow_work import ReserveAccumulators
from nicps.session import shared_form as says
from nicps.session.events import Progressed, Warned
from nicps.session.messages import Error, Result
from tests.simulator.base_host import BaseHost
from tests.simulator.disk import WINDOW, Disk, Incoming
from tests.simulator.kernel import Kernel
from tests.simulator.outbox import Outbox
from tests.simulator.places import Places, Records
from tests.simulator.program import Program
from tests.simulator.watch import About, Done, Watch, WatchedLife

if TYPE_CHECKING:
    from tests.simulator.lan import Lan


class Host(BaseHost):
    """A host with its agent, its kernel, its disk and its training program."""

    def __init__(self, lan: Lan, index: int, rate: float) -> None:
        self.published: list[act.Publish] = []  # ends, progress and warnings
        self.hooks: list[str] = []
        self.handed_out: dict[int, Any] = {}  # by the first round of the phase; frames outlive it
        super().__init__(lan, index, rate)

    def _boot(self) -> None:
        lan = self.lan
        settings = LifeSettings(
            f"h{self.index + 1}",
            "sim",
            exchange=self._own_exchange,
            believes_switch=self.believes and lan.plan.exchange.central,
            runs="runs",
            window=WINDOW,
            timings=lan.timings,
        )
        self.kernel = Kernel(self)
        self.disk = Disk(self)
        self.machine = WatchedLife(self.mac, settings, self)
        self.watch = Watch(self)
        self.outbox = self._outbox()
        self.node = self.machine.node  # the protocol's part of it
        self.process: Program | None = None
        self.memory: Program | None = None  # the one whose gradient is in the shared memory
        self.submitted = False  # a job, by the user, here
        self.started = False  # a training program of the job that is here
        self.losses = 0  # of training programs
        self.committed = 0  # the last training round, at this host
        self.last_commit = 0, 0, 0, False  # view, phase and round; it led
        self.judged = 0  # the last round that its training program, the lead's, has judged
        self.keys: dict[int, bytes] = {}  # view -> its seed: this one's and the one's before
        self._blocks = 0  # in a bank of the accumulators
        self._timer: float | None = None

    @property
    def _own_exchange(self) -> Exchange:
        """What its agent was told."""
        exchange = self.lan.plan.exchange
        return exchange if self.believes and not exchange.central else Exchange.BROADCAST

    def _outbox(self) -> Outbox:
        return Outbox(self)

    @property
    def part(self) -> Part | None:
        """In the job that is here."""
        return self.machine.part

    @property
    def leaves(self) -> bool:
        """It wants no part in the job any more."""
        return self.declined or self.node.leaving

    @property
    def declined(self) -> bool:
        """It has left the job to the others."""
        return bool(self.machine.roles.declined)

    @property
    def has_state(self) -> bool:
        """Its training program holds the job's state, not only its files."""
        process, part = self.process, self.part
        if process is None or part is None or part.program is None or not part.program.ready:
            return False
        return not process.blank

    # ---- its user, and the training program's fate

    def submit(self) -> None:
        """The user starts a job here; unless another one has come before."""
        try:
            number = self.machine.submit()
        except NetworkProblem as refused:
            self.note(f"REFUSES {refused}")
            return
        self.submitted = True
        self.lan.starter = self, self.life
        exchange = self.lan.plan.exchange if self.believes else Exchange.BROADCAST
        exchange = Exchange.SWITCH if exchange.central else exchange
        job, prepared = self.lan.next_job_id(), self.lan.prepared
        prepared = {**prepared, "settings": {**prepared["settings"], "exchange": exchange.name}}
        machine = self.machine
        self.do(machine.submission_prepared(self.clock(), number, job, prepared))

    def cancel(self) -> None:
        """`nicps cancel`"""
        self.note("CANCELS")
        self.cancelled_at = self.lan.now
        try:
            self.do(self.machine.cancel(self.clock()))
        except NetworkProblem as refusal:
            self.note(f"REFUSED {refusal}")

    def leave(self) -> None:
        """`nicps leave`: the agent stays until the others go on without it, but not for long."""
        self.note("LEAVES")

        def gone() -> None:
            if self.machine.has_left(self.clock()):
                self.do(self.machine.end(self.clock(), "it has left the network"))
                self.kill()
            else:
                self.later(0.01, gone)

        self.do(self.machine.leave(self.clock()))
        gone()

    def kill_program(self) -> None:
        """kill -9 of the training program: the agent leaves, and starts another."""
        self.note("PROGRAM KILLED")
        self._lose_program(-9, "it was killed")

    def break_program(self) -> None:
        """The training program ends with an error, as any other would here: the job cannot go on."""
        self.note("PROGRAM BREAKS")
        self.sick = True
        self.program_ends(1)

    def program_ends(self, code: int) -> None:
        """The training program has ended by itself."""
        self._lose_program(code, "it ended with an error" if code else "")

    def _lose_program(self, code: int, last: str) -> None:
        process, self.process = self.process, None
        if process is not None:
            self.losses += code != 0
            machine = self.machine
            self.do(machine.program_ended(self.clock(), process.number, code, last))

    def hang(self) -> None:
        """SIGSTOP of the training program: after a while the agent ends it, and starts another."""
        self.note("PROGRAM HANGS")
        if self.process is not None:
            self.process.hung = True

    def tamper(self) -> None:
        """Somebody changes the weights in the training program's memory."""
        process = self.process
        if process is not None and not process.blank:
            self.note("TAMPERED WITH")
            self.lan.checks.tampered.add(self.index)
            process.state = replace(process.state, weights="T" + process.state.weights)

    # ---- the training program

    def attach(self, process: Program) -> None:
        """It connects."""
        process.attached = True
        self.do(self.machine.attach(self.clock()))

    def hear(self, process: Program, message: says.FromProgram) -> None:
        """It says something."""
        if isinstance(message, says.Decide) and self.node.leads:
            self.note(f"JUDGES {message.what} after {message.round}")
            self.judged = max(self.judged, message.round)
        self.do(self.machine.program_message(self.clock(), message))

    def pump(self) -> None:
        """More of a gradient is converted: send what can be sent."""
        self.do(self.machine.note_converted(self.clock()))
        self.outbox.go_on()

    # ---- the agent: what the life of the job asks for

    def task_done(self, ticket: int, outcome: Any) -> None:
        """The disk is done with a task."""
        self.do(self.machine.task_done(self.clock(), ticket, outcome))

    def _do(self, action: Any) -> None:
        lan = self.lan
        match action:
            case About():
                self.watch.check(action)
            case Done():
                if lan.moments:
                    lan.moment(self, action.action)
            case protocol.Send():
                self.outbox.send(action)
            case act.Transmit():
                self.outbox.transmit(action)
            case act.DropFragments():
                self.outbox.drop()
            case act.EnterView(view):
                self.keep_key(view)
                self.kernel.clear()
                self.kernel.alive = self.clock()
            case act.UseAccumulators(number):
                self._use(self.disk.take_accumulators(number))
                if lan.plan.exchange.absolute:
                    self.later(0.0, lambda: self.do(self.machine.room_made(self.clock())))
            case act.RenewAccumulators(blocks, room):
                self._renew(blocks, room)
            case act.RetirePlaces():
                self.kernel.stripes.retire_places()
            case act.StartProgram(number):
                assert self.part is not None
                self.process = self.memory = self._start(number, self.part.job.settings)
                self.process.blank = self.watch.restores or self.started
                self.started = True
            case act.EndProgram(number, reason):
                self.note(f"PROGRAM ENDED {reason}")
                self.memory = None
                if self.process is not None and self.process.number == number:
                    self.process = None
            case act.ShareArena(number):
                self._deliver(number, says.Arena(0))
            case act.ShowNeed(number, round_, samples):
                if self.process is not None:
                    self.process.need = round_, samples
            case act.ShowClosed(number, round_):
                if self.process is not None:
                    self.process.closed = round_
            case act.Welcome(number, message) | act.Post(number, message):
                self._deliver(number, message)
            case act.EnterPhase(number, phase):
                if self.process is not None:
                    self.process.newest_phase = phase.number
                    self.process.closed = min(self.process.closed, phase.first_round - 1)
                self._deliver(number, phase)
            case act.OpenJob():
                self.disk.files = {}
                self.started = False
            case act.CloseJob():
                self.disk.clear()
            case act.Receive(keep=keep, collected_from=collected):
                self.disk.incoming = Incoming(keep, bool(collected))
            case act.CloseStream(stream):
                self.disk.close(stream)
            case act.RemoveState():
                self.disk.files.pop("state.npz", None)
            case act.BeginTask():
                self.disk.begin(action, self.watch.source)
            case act.Log(text):
                self.note(f"log: {text}")
            case act.Publish(message):
                self.note(f"{message.op} {getattr(message, 'event', '')}")
                if isinstance(message, Result | Error | Progressed | Warned):
                    self.published.append(action)
            case act.RunHook(reason):
                self.note(f"HOOK {reason}")
                self.hooks.append(reason)

    def _start(self, number: int, settings: Mapping[str, Any]) -> Program:
        """A training program."""
        return Program(self, number, settings)

    def _use(self, made: ReserveAccumulators) -> None:
        self._renew(made.blocks, made.room, made.places)

    def _renew(self, blocks: int, room: int, places: int = 0) -> None:
        """New memory of the kernel's; 0: what there is does."""
        self._blocks = blocks or self._blocks
        stripes = self.kernel.stripes
        if room:
            stripes.records = Records(room)
            stripes.retire_places()
        if places:
            stripes.places = Places(places, wire.fragments_per_block(self.lan.plan.width))

    def _deliver(self, number: int, message: Any) -> None:
        process = self.process
        if process is not None and process.number == number and process.attached:
            process.show(message, self.kernel.stripes)
            process.deliver(message)
