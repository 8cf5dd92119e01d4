# SPDX-License-Identifier: Apache-2.0
"""One simulated host. The node and the course are the production ones; what is around them is modelled here."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from nicps import wire
from nicps.exchange import Exchange
from nicps.protocol import (
    Action,
    Answered,
    Committed,
    Cut,
    Declined,
    Differs,
    Failed,
    Installed,
    Joiner,
    Node,
    NodeState,
    NoProgress,
    NotAdded,
    Phase,
    PhaseAgreed,
    Prepare,
    Ready,
    Send,
    SendFragments,
    Struck,
    View,
)
from nicps.protocol.course import Course

if TYPE_CHECKING:
    from tests.simulator.lan import Lan

from tests.simulator.job import WINDOW, Job
from tests.simulator.kernel import Kernel
from tests.simulator.lan import FRAGMENT_S

GOODBYE_S = 2.0
STALL_S = 1.0
_VIEW_AT = wire.Layout.of(wire.Header).offsets[wire.Layout.of(wire.Header).names.index("view")]


class Host:
    """A host with its agent (the glue around node and course) and its training program."""

    def __init__(self, lan: Lan, index: int, rate: float) -> None:
        self.lan, self.index, self.rate = lan, index, rate
        self.mac = bytes([2, 0, 0, 0, 0, index + 1])
        self.life = 0  # raised by every restart
        self.dead = self.paused = False
        self.believes = True  # a switch that adds
        self.slowness = 1.0  # how much longer its training program takes than the others'
        self.differs = False  # whatever is applied here comes to other weights
        self.sick = False  # training programs that are started here end with an error
        self.job_over = ""
        self.killed_at = 0.0
        self.on_disk: tuple[int, str] | None = None  # saved before the host was killed
        self.stepped = True  # the agent has run since the kernel's view of it was made
        self._held: list[Callable[[], None]] = []  # what waits while the agent is stopped
        self._boot()

    def _boot(self) -> None:
        lan = self.lan
        self.kernel = Kernel(self)
        self.node = Node(
            self.mac,
            f"h{self.index + 1}",
            "sim",
            self,
            lambda: lan.random.getrandbits(63) + 1,
            lan.timings,
            lambda job: self.job.stage,
        )
        self.course: Course | None = None
        self.job = Job(self)
        self.keys: dict[int, bytes] = {}  # view -> its seed: this one's and the one's before
        self._streams: dict[str, int] = {}
        self._tx_free = 0.0
        self._timer: float | None = None
        self._stop: Phase | None = None  # decided here

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
        self.on_disk = self.job.result or self.on_disk
        self.believes = not self.lan.plan.exchange.needs_trust or self.lan.more.random() < 0.9
        self._boot()

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
        self._tick_now()

    def kill_program(self) -> None:
        """kill -9 of the training program: the agent leaves, and starts another."""
        self.note("PROGRAM KILLED")
        if len(self.node.view.live) > 1:
            self.course = None
        self.job.lose_program()
        self.do(self.node.leave(self.clock(), "the training program was killed"))

    def break_program(self) -> None:
        """The training program ends with an error, as any other would here: the job cannot go on."""
        self.note("PROGRAM BREAKS")
        self.sick = True
        self.job.end()
        self.job.fail("the training program ended with an error")

    def hang(self) -> None:
        """SIGSTOP of the training program: after a while the agent ends it, and starts another."""
        self.note("PROGRAM HANGS")
        program = self.job.hang()

        def look() -> None:
            if self.job.program is program and self.job.hung:
                self.kill_program()

        self.later(STALL_S, look)

    def leave(self) -> None:
        """`nicps leave`: the agent stays until the others go on without it, but not for long."""
        self.note("LEAVES")
        self.job.declined = True
        until = self.lan.now + GOODBYE_S

        def gone() -> None:
            if self.node.state is NodeState.MEMBER and self.lan.now < until:
                self.later(0.01, gone)
            else:
                self.kill()

        self.do(self.node.leave(self.clock(), "it has left the network"))
        gone()

    def renew(self) -> None:
        """The view's key has served its time."""
        self.later(1e-5, lambda: self.do(self.node.rebuild(self.clock(), ())))

    def tamper(self) -> None:
        """Somebody changes the weights in the training program's memory."""
        program = self.job.program
        if program is not None and not program.blank:
            self.note("TAMPERED WITH")
            self.lan.checks.tampered = True
            program.weights = "T" + program.weights

    def submit(self) -> None:
        """The user starts a job here."""
        self.course = Course(self.lan.plan, self)
        self.job.submitted = True
        self.lan.starter = self, self.life
        self.do(self.node.start(self.clock(), 99))

    def if_alive(self, life: int, what: Callable[[Host], None]) -> None:
        if self.life == life and not self.dead:
            what(self)

    def wake(self, event: Callable[[], None]) -> None:
        """For the agent: at once, or when it goes on."""
        if self.paused:
            self._held.append(event)
        else:
            event()

    def later(self, delay_s: float, event: Callable[[], None]) -> None:
        """In this life."""
        life = self.life
        self.lan.at(self.lan.now + delay_s, lambda: self.if_alive(life, lambda _: self.wake(event)))

    # ---- Receiver

    def count(self, round_: int, view: int, sender: int) -> int:
        return len(self.kernel.taken.get((view, round_, sender), ()))

    def missing(
        self, round_: int, view: int, sender: int, fragments: int, limit: int
    ) -> list[tuple[int, int]]:
        have = self.kernel.taken.get((view, round_, sender), set())
        ranges: list[tuple[int, int]] = []
        for i in (i for i in range(fragments) if i not in have):
            if ranges and sum(ranges[-1]) == i:
                ranges[-1] = (ranges[-1][0], ranges[-1][1] + 1)
            elif len(ranges) < limit:
                ranges.append((i, 1))
            else:
                break
        return ranges

    def completion(self, round_: int, sender: int) -> bytes:
        """The fragment that went up since it completed a contribution."""
        header = wire.Header(
            network=self.node.network,
            view=self.node.view.number,
            round=round_,
            sender=sender,
        )
        return wire.pack(header, wire.Fragment(0, 1, 1, 16, 0), tail=bytes(wire.PAYLOAD_BYTES))

    # ---- frames and time

    def keep_key(self, view: View) -> None:
        """A view is in force: its key, and the one before it."""
        before = max((number for number in self.keys if number < view.number), default=0)
        self.keys = {number: seed for number, seed in self.keys.items() if number == before}
        self.keys[view.number] = view.seed

    def key_of(self, frame: bytes) -> bytes | None:
        """What this host would sign or check such a frame with; None: it does not know that view."""
        view = int.from_bytes(frame[_VIEW_AT : _VIEW_AT + 4], "big")
        return self.keys.get(view) if view else b""

    def take_frame(self, source: bytes, data: bytes, key: bytes | None) -> None:
        if key is None or self.key_of(data) != key:
            return
        if data[1] == wire.FrameType.TOKEN and not self.kernel.take_token(wire.unpack(data)):
            return
        self.wake(lambda: self.frame_up(source, data))

    def frame_up(self, source: bytes, data: bytes) -> None:
        self._sync()
        self.lan.checks.told(self, data)
        self.do(self.node.on_frame(self.clock(), source, data))

    def _arm(self) -> None:
        deadline = self.node.deadline()
        if deadline is not None and deadline != self._timer:
            self._timer = deadline
            time = (deadline - self.index * 1000.0) / self.rate
            life = self.life
            self.lan.at(
                max(time, self.lan.now + 1e-5),
                lambda: self.if_alive(life, lambda _: self._due(deadline)),
            )

    def _due(self, deadline: float) -> None:
        if self._timer == deadline and not self.paused:
            self._tick_now()

    def _tick_now(self) -> None:
        self._timer = None
        self._sync()
        self.do(self.node.tick(self.clock()))

    def _sync(self) -> None:
        kernel = self.kernel
        times = kernel.token_at, kernel.heard
        self.node.kernel_saw(self.clock(), kernel.seen, *times, kernel.bounced)
        kernel.bounced = None
        kernel.alive = self.clock()
        if renewal := self.node.renew(self.clock(), key_is_spent=False):
            self.do(renewal)

    # ---- the agent: what the node asks for

    def do(self, actions: list[Action]) -> None:
        if self.dead:
            return
        self.stepped = self.lan.checks.moved = True
        for at, action in enumerate(actions, 1):
            self._do(action)
            if self.lan.moments:
                self.lan.moment(self, action)
            if self.dead:
                return
            if self.paused:
                self.wake(functools.partial(self.do, actions[at:]))
                return
        self.kernel.alive = self.clock()
        self._arm()

    def _do(self, action: Action) -> None:
        lan, now = self.lan, self.lan.now
        if isinstance(action, Send):
            lan.checks.sent(self, action.frame)
            self._tx_free = max(now, self._tx_free)
            frame, token = action.frame.pack(), action.frame.body
            lan.broadcast(self, frame, self.key_of(frame), self._tx_free)
            if isinstance(token, wire.Token):
                self.kernel.seen = max(self.kernel.seen, (token.generation, token.hop))
        elif isinstance(action, SendFragments):
            self._tx_free = max(now, self._tx_free)
            lan.digest.add_contribution(self.index, self._tx_free, action)
            number = self.node.number
            for first, count in action.ranges:
                for index in range(first, first + count):
                    self._tx_free += FRAGMENT_S
                    key = self.keys.get(action.view)
                    send = lan.feed if action.flags & wire.Flag.ADD else lan.fragment
                    send(self, (action.view, key, number, action.round, index), self._tx_free)
            self.later(
                self._tx_free - now, lambda a=action: self.do(self.node.sent(self.clock(), a))
            )
        elif isinstance(action, Installed):
            self._installed(action)
        elif isinstance(action, Ready):
            self.note(f"READY view {action.view.number}")
            phase = self.node.ring.phase if self.node.ring is not None else None
            if self.course is not None:
                self.course.ready(action.view, phase)
        elif isinstance(action, Prepare):
            self.job.prepare(action.phase)
        elif isinstance(action, PhaseAgreed):
            answers = {k: json.loads(v) if v else {} for k, v in action.answers.items()}
            self.note(f"AGREED {action.phase.kind.name} {action.phase.number}")
            if action.phase.kind is wire.PhaseKind.STOP:
                self.stopped(action.phase)
            elif self.course is not None:
                self.course.agreed(action.phase, answers)
        elif isinstance(action, Committed):
            self.job.committed(action)
        elif isinstance(action, Answered):
            if self.course is not None:
                self.course.answered(action)
        elif isinstance(action, Struck):
            self.note(f"STRUCK {action.reason}")
            self.course = None
            self.job.leaving = False
            self.job.interrupt()
            if action.ending:
                self._over(action.reason, ok=action.ending is wire.Ending.DONE)
        elif isinstance(action, Differs):
            self.note(f"DIFFERS {action}")
            lan.checks.differs(self, action)
            rest = [k for k in self.node.view.order if k not in action.numbers]
            if action.numbers and rest[0] == self.node.number:
                self.do(self.node.strike(self.clock(), action.numbers))
            elif not action.numbers and self.course is not None:
                self.course.alarm(f"no half of the members agrees on the weights: {action.round}")
        elif isinstance(action, NoProgress):
            self.note(f"NO PROGRESS {action}")
        elif isinstance(action, Cut):
            self.note(f"NO MAJORITY, {sorted(action.missing)} are silent")
        elif isinstance(action, NotAdded):
            self.note(f"NOT ADDED, round {action.round}")
            if self.course is not None:
                self.course.not_added()
        elif isinstance(action, Declined):
            self.note(f"DECLINES {action.reason}")
            self.job.decline()
        elif isinstance(action, Failed):
            self.note(f"FAILED {action.reason}")
            lan.checks.failed(self, action)
            if self.node.leads and self.course is not None:
                self.course.stop(action.reason)

    def _over(self, why: str, *, ok: bool) -> None:
        self.note(f"JOB OVER {why}")
        self.job_over = why or "well"
        self.lan.over(self, why, ok)
        self.course = None
        self.job.end()
        self.job.leaving = False

    def stopped(self, phase: Phase) -> None:
        self._over(str(phase.settings["message"]), ok=bool(phase.settings["ok"]))

    def _installed(self, action: Installed) -> None:
        view, node = action.view, self.node
        self.note(
            f"VIEW {view.number} live {sorted(view.live)} lead {view.lead}, round {node.open_round}, "
            f"{'goes on: ' + action.phase.kind.name if action.phase else 'no phase'}"
        )
        self.keep_key(view)
        self.kernel.clear()
        self.kernel.alive = self.clock()
        self.lan.checks.installed(self, action)
        if action.phase is not None:
            self.job.phase = action.phase
        if view.lead == node.number and not (node.leaving and len(view.live) > 1):
            if self.course is None:
                self._take_over()
        else:
            self.course = None
        if action.again and action.phase is not None and self.job.program is not None:
            self.job.begin(action.phase, node.open_round)

    def _take_over(self) -> Course:
        program = self.job.program
        trusts = self.lan.plan.exchange.needs_trust
        exchange = self.job.exchange if trusts else Exchange.BROADCAST
        plan = replace(self.lan.plan, exchange=exchange)
        self.course = course = Course(plan, self, self.job.found)
        course.fragments = self.lan.fragments if program is not None else 0
        if program is not None and program.last:
            self.job.decide_later()
        return course

    def lead_with_the_job(self) -> None:
        """`Views.lead_with_the_job`"""
        course = self.course
        if course is not None and not course.able:
            able = self._take_over()
            if course.waits:
                able.ready(self.view, self.phase)

    # ---- Steered

    @property
    def view(self) -> View:
        return self.node.view

    @property
    def learners(self) -> frozenset[int]:
        return self.node.learners

    @property
    def open_round(self) -> int:
        return self.node.open_round

    @property
    def phase(self) -> Phase | None:
        return self.node.ring.phase if self.node.ring is not None else None

    def decide(self, phase: Phase) -> None:
        if self.node.leads:
            if phase.kind is wire.PhaseKind.STOP and phase is not self._stop:  # not a repeat
                self._stop = phase
                self.lan.checks.stops(self, phase)
            self.do(self.node.decide(self.clock(), phase))

    def go_on(self) -> None:
        self.do(self.node.go_on(self.clock()))

    def rebuild(self, joiners: tuple[Joiner, ...]) -> None:
        self.note(f"TAKES BACK {[j.name for j in joiners]}")
        self.do(self.node.rebuild(self.clock(), joiners))

    def call_back(self, job: str) -> None:
        self.node.calls = job

    def stream(self, purpose: str) -> None:
        size = {"job": 3, "files": 2, "state": 1}[purpose] * WINDOW
        course, counted = self.course, self.job.rounds

        def ready() -> None:
            if course is None or course is not self.course or self.job.hung:
                return
            if purpose == "state":
                self.lan.checks.saved(self, self.job.rounds - counted)
                if self.job.lags:
                    self.later(
                        1e-3, ready
                    )  # the program saves when it has applied what came before
                    return
            course.streamed(purpose, self.node.number, size, 7)

        self.later(self.lan.saving_s, ready)

    def windows(self, size: int) -> tuple[int, int, int]:
        rounds = -(-size // WINDOW)
        return rounds, WINDOW, size - (rounds - 1) * WINDOW

    def check(self) -> Mapping[str, str]:
        program = self.job.program
        assert program is not None
        return {
            "model": program.weights,
            "trained": program.trained,
            "last": program.last,
            "kind": program.kind,
        }

    def save(self) -> None:
        def saved() -> None:
            if self.course is not None and not self.job.hung:
                self.course.saved()

        self.later(0.001, saved)

    def tell(self, event: str, **values: Any) -> None:
        self.note(f"event {event}")
