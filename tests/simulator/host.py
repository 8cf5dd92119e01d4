# SPDX-License-Identifier: Apache-2.0
"""One simulated host: the life of a job as it is (`nicps.job.Life`), and a world that carries its actions out.

The kernel, the disk, the training program and the wire are models.
"""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from nicps import protocol, wire
from nicps.errors import NetworkProblem
from nicps.exchange import Exchange
from nicps.job import LifeSettings
from nicps.job import actions as act
from nicps.job.part import Part
from nicps.job.slow_work import ReserveAccumulators
from nicps.protocol import View
from nicps.session import shared_form as says
from nicps.session.events import Progressed, Warned
from nicps.session.messages import Error, Result
from tests.simulator.disk import WINDOW, Disk, Incoming
from tests.simulator.kernel import Kernel, Receiver
from tests.simulator.outbox import Outbox
from tests.simulator.places import Places, Records
from tests.simulator.program import Program
from tests.simulator.watch import About, Done, Watch, WatchedLife

if TYPE_CHECKING:
    from tests.simulator.lan import Lan
    from tests.simulator.sums import SumChecks

_VIEW = struct.Struct(">I")
_VIEW_AT = wire.Layout.of(wire.Header).offsets[wire.Layout.of(wire.Header).names.index("view")]


class Host:
    """A host with its agent, its kernel, its disk and its training program."""

    def __init__(self, lan: Lan, index: int, rate: float) -> None:
        self.lan, self.index, self.rate = lan, index, rate
        self.mac = bytes([2, 0, 0, 0, 0, index + 1])
        self.life = 0  # raised by every restart
        self.dead = self.paused = False
        self.believes = True  # a switch that adds
        self.slowness = 1.0  # how much longer its training program takes than the others'
        self.differs = False  # whatever is applied here comes to other weights
        self.refuses_stripes = False  # its kernel does not load the program that takes them
        self.sick = False  # training programs that are started here end with an error
        self.job_over = ""
        self.killed_at = 0.0
        self.result: tuple[int, str] | None = None  # trained rounds and weights that it has saved
        self.on_disk: tuple[int, str] | None = None  # saved before the host was killed
        self.checkpoint: Any = None  # the state from which `nicps resume` would go on
        self.cancelled_at: float | None = None  # by its user
        self.published: list[act.Publish] = []  # ends, progress and warnings
        self.hooks: list[str] = []
        self.handed_out: dict[int, Any] = {}  # by the first round of the phase; frames outlive it
        self.stepped = True  # the agent has run since the kernel's view of it was made
        self._held: list[Callable[[], None]] = []  # what waits while the agent is stopped
        self._boot()

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

    def receiver(self) -> Receiver:
        """What has arrived."""
        return Receiver(self.kernel)

    @property
    def sum_checks(self) -> SumChecks:
        """What was offered to its rounds, and what that came to."""
        return self.lan.checks.sums

    def at(self, channel: int) -> Any:
        """The host as the kernel's area of that channel has it."""
        return self

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

    def clock(self) -> float:
        """This host's own steady clock."""
        return self.lan.now * self.rate + self.index * 1000.0

    def note(self, text: str) -> None:
        """A line of the trace."""
        self.lan.note(f"h{self.index + 1}  {text}")

    # ---- the outside world

    def kill(self) -> None:
        """kill -9 of agent and training program."""
        self.note("KILLED")
        self.killed_at = self.lan.now
        self.dead, self.paused = True, False
        self.life += 1
        self._held = []

    def restart(self) -> None:
        """`nicps join` again; nothing of before is known."""
        self.note("RESTARTED")
        self.dead = False
        self.on_disk, self.result = self.result or self.on_disk, None
        self.believes = not self.lan.plan.exchange.needs_trust or self.lan.more.random() < 0.9
        self._boot()
        self.do(self.machine.join(self.clock()))

    def pause(self) -> None:
        """SIGSTOP of agent and training program; the kernel goes on."""
        self.note("PAUSED")
        self.paused = True

    def resume(self) -> None:
        """SIGCONT."""
        self.note("RESUMED")
        self.paused = False
        held, self._held = self._held, []
        for event in held:
            event()
        self._tick()

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

    def cancel(self) -> None:
        """`nicps cancel`"""
        self.note("CANCELS")
        self.cancelled_at = self.lan.now
        try:
            self.do(self.machine.cancel(self.clock()))
        except NetworkProblem as refusal:
            self.note(f"REFUSED {refusal}")

    def renew(self) -> None:
        """The view's key has served its time."""
        self.later(1e-5, lambda: self.do(self.machine.renew_view(self.clock(), key_is_spent=True)))

    def tamper(self) -> None:
        """Somebody changes the weights in the training program's memory."""
        process = self.process
        if process is not None and not process.blank:
            self.note("TAMPERED WITH")
            self.lan.checks.tampered.add(self.index)
            process.state = replace(process.state, weights="T" + process.state.weights)

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

    def wake(self, event: Callable[..., None], *told: Any) -> None:
        """For the agent: at once, or when it goes on."""
        if self.paused:
            self._held.append(functools.partial(event, *told))
        else:
            event(*told)

    def later(self, delay_s: float, event: Callable[[], None]) -> None:
        """In this life."""
        self.lan.at_host(self, self.lan.now + delay_s, self.wake, event)

    # ---- frames and time

    def completion(self, round_: int, sender: int) -> bytes:
        """The fragment that went up since it completed a contribution."""
        header = wire.Header(
            network=self.node.network,
            view=self.node.view.number,
            round=round_,
            sender=sender,
        )
        return wire.pack(header, wire.Fragment(0, 1, 1, 16, 0), tail=bytes(wire.PAYLOAD_BYTES))

    def keep_key(self, view: View) -> None:
        """A view is in force: its key, and the one before it."""
        before = max((number for number in self.keys if number < view.number), default=0)
        self.keys = {number: seed for number, seed in self.keys.items() if number == before}
        self.keys[view.number] = view.seed

    def key_of(self, frame: bytes) -> bytes | None:
        """What this host would sign or check such a frame with; None: it does not know that view."""
        (view,) = _VIEW.unpack_from(frame, _VIEW_AT)
        return self.keys.get(view) if view else b""

    def take_frame(self, source: bytes, data: bytes, key: bytes | None) -> None:
        if key is None or self.key_of(data) != key:
            return
        if data[1] == wire.FrameType.TOKEN and not self.kernel.take_token(wire.unpack(data)):
            return
        if self.paused:
            self.wake(self.frame_up, source, data)
        else:
            self.frame_up(source, data)

    def take_of_switch(self, data: bytes) -> None:
        """A Linux switch says something; it needs no view's key for that."""
        self.wake(self.frame_up, wire.SWITCH, data)

    def frame_up(self, source: bytes, data: bytes) -> None:
        now = self._sync()
        if data[1] == wire.FrameType.VIEW:
            self.lan.checks.told(self, data)
        self.do(self.machine.on_frame(now, source, data))

    def list_up(self, view: int, round_: int, members: int, unit: int) -> None:
        """The doorbell: the first contribution of a round has come."""
        self.do(self.machine.list_came(self._sync(), view, round_, members, unit))

    def sums_up(self) -> None:
        """The doorbell: some sums have come, or the last."""
        self.do(self.machine.sums_came(self._sync()))

    def arm(self) -> None:
        """The node or the job may have another deadline now."""
        deadline = self.machine.deadline()
        if deadline != self._timer and deadline != math.inf:
            self._timer = deadline
            time = max((deadline - self.index * 1000.0) / self.rate, self.lan.now + 1e-5)
            self.lan.at_host(self, time, self._due, deadline)

    def _due(self, deadline: float) -> None:
        if self._timer == deadline and not self.paused:
            self._tick()

    def _tick(self) -> None:
        self._timer = None
        now = self._sync()
        self.do(self.machine.tick(now, self.outbox.waits))

    def _sync(self) -> float:
        kernel, now = self.kernel, self.clock()
        machine, bounced = self.machine, kernel.bounced
        machine.kernel_saw(now, kernel.seen, kernel.token_at, kernel.heard, bounced)
        kernel.bounced = None
        kernel.alive = now
        if renewal := machine.renew_view(now, key_is_spent=False):
            self.do(renewal)
        return now

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

    def do(self, actions: Sequence[Any]) -> None:
        if self.dead:
            return
        self.stepped = True
        self.lan.checks.moved.append(self)
        awaited = self.outbox.waits
        for at, action in enumerate(actions, 1):
            self._do(action)
            if self.dead:
                return
            if self.paused:
                self.wake(self.do, actions[at:])
                return
        self.kernel.alive = self.clock()
        self.lan.checks.has_room(self, self._blocks)
        if self.outbox.waits and not awaited:
            self.later(1e-5, self._tick)
        self.arm()

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
