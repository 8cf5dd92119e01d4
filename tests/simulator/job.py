# SPDX-License-Identifier: Apache-2.0
"""The job at a simulated host: its training program, and what the agent does about the two."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from nicps import wire
from nicps.exchange import Exchange
from nicps.protocol import Committed, NodeState, Phase
from nicps.protocol.course import Found

if TYPE_CHECKING:
    from tests.simulator.host import Host

WINDOW = 10  # fragments in a hand-out's round
SWITCH_UNITS = 0, 5  # far above those that hosts use where they add


class Program:
    """A training program: its weights are a hash over all sums that it has applied.

    `blank`: it has no state yet, and waits for one. Weights that begin with "T" have been tampered with.
    """

    def __init__(self, *, blank: bool) -> None:
        self.blank = blank
        self.weights = "w0"
        self.trained = 0
        self.last = 0  # round applied last, of any kind
        self.kind = wire.PhaseKind.HANDOUT  # of that round

    @property
    def digest(self) -> int:
        """As it goes into the token."""
        return int(hashlib.blake2b(self.weights.encode(), digest_size=4).hexdigest(), 16) | 1

    def load(self, settings: Mapping[str, Any]) -> None:
        """Take over the lead's state."""
        self.blank = False
        self.weights, self.trained = str(settings["model"]), int(settings["trained"])
        self.last, self.kind = int(settings["last"]), wire.PhaseKind(settings["kind"])

    def apply(self, round_: int, kind: wire.PhaseKind, total: int) -> None:
        """A committed sum."""
        self.last, self.kind = round_, kind
        if kind is wire.PhaseKind.TRAIN:
            self.trained += 1
            text = f"{self.weights} {round_} {total}"
            taint = "T" if self.weights.startswith("T") else ""
            self.weights = taint + hashlib.sha1(text.encode()).hexdigest()[:12]


class Job:
    """What nicps/agent/job.py is at a real host."""

    def __init__(self, host: Host) -> None:
        self.host, self.lan = host, host.lan
        self.program: Program | None = None
        self.starting = False
        self.submitted = False  # by the user, here
        self.storing = False  # the end of what starts one is on its way to the disk
        self.finishing = False
        self.leaving = False  # its training program has died
        self.result: tuple[int, str] | None = None  # trained rounds and weights that it has saved
        self.phase: Phase | None = None  # that the agent has prepared last
        believed = Exchange.SWITCH if host.believes else Exchange.BROADCAST
        self.exchange = believed  # of the last training phase
        self.unit = 0  # log2, of the next gradient
        self.rounds = 0  # of training and of tests that have counted
        #: Unit after the last training round, and the exchange of its phase.
        self.counted: tuple[int, Exchange] | None = None
        self.hung = False  # the training program does nothing any more
        self.declined = False  # this host wants no part in it
        self._working_until = 0.0  # the training program looks up between two micro-batches only
        self._commits: deque[Callable[[], None]] = deque()  # that wait for that, one by one
        self._committed = 0, 0, 0  # view, phase and round of the last one
        self._decided = 0  # the last round that it has decided on, as the lead's
        self._epoch = 0

    def interrupt(self) -> None:
        """What the training program is doing ends: it is given something else."""
        self._epoch += 1

    def end(self) -> None:
        """The job is over here."""
        self.program = None
        self._working_until = 0.0
        self._commits.clear()
        self.hung = False
        self.interrupt()

    def hang(self) -> Program | None:
        """The training program stands still."""
        self.hung = True
        self.interrupt()
        return self.program

    def lose_program(self) -> None:
        """The training program has died: another is started."""
        self.end()
        self.leaving = self.host.node.state is NodeState.MEMBER
        if not self.starting:
            self.starting = True
            self.host.later(0.05, lambda: self._program_started(blank=True))

    @property
    def lags(self) -> bool:
        """The training program has not applied all that was committed."""
        return bool(self._commits)

    @property
    def found(self) -> Found:
        """What a host that takes over as the lead has."""
        program, node = self.program, self.host.node
        return Found(
            able=(program is not None or self.starting) and node.number not in node.learners,
            trained=program is not None and program.last > 0,
            finishing=self.finishing,
            unit=self.counted[0] if self.counted is not None else None,
            exchange=self.counted[1] if self.counted is not None else Exchange.BROADCAST,
        )

    @property
    def stage(self) -> wire.Stage | None:
        """How much of the job is here; None: this host wants no part in it."""
        if self.declined:
            return None
        if self.program is not None:
            return wire.Stage.WAITING
        return wire.Stage.FILES if self.starting else wire.Stage.NOTHING

    def prepare(self, phase: Phase) -> None:
        """A decision: get ready for it (R6)."""
        has_declined = self.declined and self.program is None
        if (self.leaving or has_declined) and phase.kind is not wire.PhaseKind.STOP:
            return
        self.host.note(f"PREPARES {phase.kind.name} {phase.number} from round {phase.first_round}")
        if phase.exchange.needs_trust and not self.host.believes:
            self.fail("this host has not been told to believe the switch")
            return
        self.phase = phase
        self._epoch += 1
        if phase.kind is wire.PhaseKind.TRAIN:
            self.exchange, self.unit = phase.exchange, phase.unit
            self.lan.checks.unit_of(phase)
        epoch, rng = self._epoch, self.lan.random
        node = self.host.node

        def prepared(answer: bytes = b"") -> None:
            if epoch == self._epoch:
                self.host.do(node.prepared(self.host.clock(), phase.number, answer))

        if phase.kind is wire.PhaseKind.HANDOUT:
            mine = phase.settings["source"] == node.number

            def ready() -> None:
                prepared()
                if mine and epoch == self._epoch:
                    self.host.do(node.offer(self.host.clock(), phase.first_round, 1))

            self.host.later(rng.random() * 0.002, ready)
        elif phase.kind is wire.PhaseKind.FINISH:
            self.finishing = True
            if self.program is not None and node.number not in node.learners:
                if self.hung:
                    return
                self.result = self.program.trained, self.program.weights
            self.host.later(0.002, lambda: prepared(self.lan.records))
        elif phase.kind is wire.PhaseKind.STOP:
            self.host.later(0.0, prepared)
            if not node.leads:
                self.host.later(0.0001, lambda: self.host.stopped(phase))
        elif phase.shares[node.number - 1]:
            self._when_program(lambda: self._enter(phase, epoch, prepared))
        else:
            self.host.later(1e-4, prepared)  # it only receives

    def fail(self, reason: str) -> None:
        """The job cannot go on here."""
        self.host.do(self.host.node.fail(self.host.clock(), reason))

    def decline(self) -> None:
        """This host leaves the job to the others."""
        self.declined = True
        self.end()

    def _when_program(self, then: Callable[[], None]) -> None:
        """The training program may still be starting."""
        if self.program is not None and not self.hung:
            then()
        elif self.starting or self.storing or self.hung:
            epoch = self._epoch
            self.host.later(
                0.002, lambda: self._when_program(then) if epoch == self._epoch else None
            )
        else:
            self.fail("no training program here")

    def _enter(self, phase: Phase, epoch: int, prepared: Callable[[], None]) -> None:
        program, node = self.program, self.host.node
        assert program is not None
        if epoch != self._epoch:
            return
        if phase.shares[node.number - 1] and node.number in node.learners:
            program.load(phase.settings)  # what the hand-out brought

        def entered() -> None:  # once it has applied what was committed before
            if self._commits and epoch == self._epoch:
                self.host.later(self._looks_up_in(2e-4), entered)
                return
            if phase.shares[node.number - 1] and epoch == self._epoch:
                self.lan.checks.same_model(self.host, phase)
            if epoch == self._epoch:
                prepared()
                self._compute(phase, phase.first_round)

        self.host.later(self._looks_up_in(2e-4 + self.lan.random.random() * 0.001), entered)

    def begin(self, phase: Phase, round_: int) -> None:
        """Back in this phase, in the middle of it."""
        self._epoch += 1
        self.exchange, self.unit = phase.exchange, phase.unit
        if phase.kind in (wire.PhaseKind.TRAIN, wire.PhaseKind.TEST):
            self._compute(phase, round_)

    def _compute(self, phase: Phase, round_: int) -> None:
        share = phase.shares[self.host.node.number - 1]
        if not share or (phase.rounds and round_ > phase.last_round):
            return
        epoch = self._epoch
        seconds = self.lan.compute_s * (0.5 + self.lan.random.random()) * self.host.slowness
        self._working_until = self.lan.now + seconds

        def offer() -> None:
            if epoch == self._epoch:
                unit, skip = self._unit(phase)
                self.lan.checks.offered(self.host, phase, round_, self.unit)
                self.host.do(self.host.node.offer(self.host.clock(), round_, share, unit, skip))

        self.host.later(seconds, offer)

    def _looks_up_in(self, seconds: float) -> float:
        """At the end of the micro-batch that it works on."""
        return max(self._working_until - self.lan.now, 0.0) + seconds

    def _unit(self, phase: Phase) -> tuple[int | None, bool]:
        """The unit that the next gradient will want, if that is told; whether this one is too large for its own."""
        rng = self.lan.more
        if phase.kind is not wire.PhaseKind.TRAIN:
            return None, False
        if phase.exchange.shared_step:
            wanted = rng.randrange(*SWITCH_UNITS)
            return wanted, wanted > self.unit + 4 or rng.random() < self.lan.too_large
        return (self.unit + 1, True) if rng.random() < self.lan.too_large else (None, False)

    def committed(self, commit: Committed) -> None:
        """A round is complete: its sum is applied, or stored (R12)."""
        node, in_force = self.host.node, commit.phase
        self.host.note(f"COMMITS {commit.round} {dict(commit.counted)}")
        self.lan.checks.in_time(self.host, commit, self.phase)
        self.lan.checks.committed(self.host, commit, in_force)
        self._look_who_decides(in_force, commit.round)
        if in_force.kind is wire.PhaseKind.HANDOUT:
            self._window(in_force, commit.round)
            return
        self.rounds += 1
        if in_force.kind is wire.PhaseKind.TRAIN:
            self.counted = commit.next_unit, in_force.exchange
            if self.host.course is not None:
                self.host.course.committed(*self.counted)
        counted_here = bool(in_force.shares[node.number - 1])
        if not counted_here or self.program is None or self.program.blank:
            self.host.later(1e-5, lambda: self.host.do(node.read(self.host.clock(), commit.round)))
            return
        kind = in_force.kind
        if kind is wire.PhaseKind.TRAIN:
            self.unit = commit.next_unit
        total = self.lan.checks.totals(commit)
        epoch = self._epoch

        def apply() -> None:
            program = self.program
            if program is None or self.hung or program.last >= commit.round:
                return
            program.apply(commit.round, kind, total)
            if self.host.differs and kind is wire.PhaseKind.TRAIN:
                self.host.tamper()
            self.lan.checks.applied(self.host, commit.round, program)
            self.host.do(node.read(self.host.clock(), commit.round, program.digest))
            if node.leads:
                self.decide_later()
            if epoch == self._epoch and kind is wire.PhaseKind.TRAIN:
                self._compute(in_force, commit.round + 1)

        self._commits.append(apply)
        if len(self._commits) == 1:
            self.host.later(self._looks_up_in(1e-4), lambda: self._apply(apply))

    def _apply(self, commit: Callable[[], None]) -> None:
        """A program that lags works on each round before it looks at that round's sum."""
        if not self._commits or self._commits[0] is not commit:
            return  # of a program that has died
        commit()
        if self._commits:  # it has not died of it
            self._commits.popleft()
        if self._commits:
            following = self._commits[0]
            self.host.later(self._looks_up_in(1e-4), lambda: self._apply(following))

    def _look_who_decides(self, phase: Phase, round_: int) -> None:
        """R14: the lead lets no round be committed before its program has looked at the one before."""
        node = self.host.node
        before, now = self._committed, (node.view.number, phase.number, round_)
        self._committed = now
        if node.leads and phase.kind is wire.PhaseKind.TRAIN and before == (*now[:2], round_ - 1):
            if self._decided < round_ - 1:
                self.lan.checks.fail(f"round {round_} is committed, {round_ - 1} not decided on")

    def decide_later(self) -> None:
        """The lead's training program looks at the round that it has applied last (R14)."""
        program = self.program
        assert program is not None
        lan = self.lan
        if program.kind is wire.PhaseKind.TRAIN:
            done = program.trained >= lan.rounds
            what = "test" if done or program.trained % lan.test_every == 0 else "continue"
        else:
            what = "end" if program.trained >= lan.rounds else "continue"
        round_ = program.last

        def say() -> None:
            if self.host.course is not None and self.host.node.leads and self._moves(program):
                self.host.note(f"DECIDES {what} after {round_}")
                self._decided = max(self._decided, round_)
                self.host.course.decided(round_, what)

        self.host.later(2e-4, say)

    def _moves(self, program: Program) -> bool:
        return self.program is program and not self.hung

    def _window(self, phase: Phase, round_: int) -> None:
        node = self.host.node
        last = round_ == phase.last_round
        mine = phase.settings["source"] == node.number
        if mine and not last:
            self.host.later(
                1e-4, lambda: self.host.do(node.offer(self.host.clock(), round_ + 1, 1))
            )
        view = node.view.number
        self.storing = last

        def stored() -> None:
            self.storing = False
            self.host.do(node.read(self.host.clock(), round_))
            if not last:
                return
            purpose = phase.settings["purpose"]
            if purpose in ("job", "files") and self.program is None and not self.starting:
                self.starting = True
                self.host.later(0.05, lambda: self._program_started(blank=purpose == "files"))
            self.host.lead_with_the_job()
            if self.host.course is not None and self.host.node.view.number >= view:
                self.host.course.handed_out(phase)

        self.host.later(3e-4, stored)

    def _program_started(self, *, blank: bool) -> None:
        self.starting = False
        if self.host.job_over or self.declined:
            return
        if self.host.sick:
            self.fail("the training program ended with an error")
            return
        self.program = Program(blank=blank)
        if self.host.course is not None:
            self.host.course.program_ready(self.lan.fragments)
