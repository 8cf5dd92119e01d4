# SPDX-License-Identifier: Apache-2.0
"""One simulated host of a job with parameter servers: the node as it is, and a model of the job around it.

The model hands nothing out: files are there, and a host that comes back is told how far the job is. What it decides on
is in `served_lead.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from nicps import protocol, wire
from nicps.job import actions as act
from nicps.job.plan import stop
from nicps.protocol import Node, Offer, Phase
from nicps.protocol.serving import per_push
from tests.simulator.base_host import BaseHost
from tests.simulator.kernel import Kernel
from tests.simulator.outbox import Outbox
from tests.simulator.served_contents import contents_of, handed_out
from tests.simulator.served_lead import ServedLead
from tests.simulator.served_machine import ServedMachine
from tests.simulator.served_places import NOTHING, Part, Token
from tests.simulator.served_program import ServedProgram, State
from tests.simulator.served_receiver import ServedReceiver
from tests.simulator.servers import ServersKernel

if TYPE_CHECKING:
    from tests.simulator.served_schedules import ServedLan

_FILL_S = 0.02  # a new server takes up to this to be filled
TRAIN = wire.PhaseKind.TRAIN


class ServedHost(BaseHost):
    """A host with its agent, its kernel, and its training program."""

    def __init__(self, lan: ServedLan, index: int, rate: float) -> None:
        self.name = f"h{index + 1}"
        self.lan: ServedLan
        super().__init__(lan, index, rate)

    def _boot(self) -> None:
        self.kernel = Kernel(self)
        self.servers = ServersKernel(self)
        self.kernel.stripes = self.servers  # type: ignore[assignment]
        self.outbox = Outbox(self)
        self.node = Node(
            self.mac,
            self.name,
            "sim",
            ServedReceiver(self.kernel, self.servers),
            lambda: self.lan.random.getrandbits(63) + 1,
            self.lan.timings,
            lambda job: wire.Stage.WAITING,
        )
        self.machine = ServedMachine(self)
        self.process: ServedProgram | None = None
        self.memory = None
        self.phase: Phase | None = None  # that it is in, or getting ready for
        self.trained = 0  # rounds of training that are committed
        self.committed = self.last_read = 0
        self.training: Phase | None = None  # the last such phase that was in force here
        self.whole: frozenset[int] = frozenset()  # workers that have all parameters of some time
        self.serves = 0, 0  # how many servers when the part that is here was made, and its rank
        self.finishing = False
        self._steps = 0
        self.lead = ServedLead(self)
        self.keys = {}
        self._blocks = 0
        self._timer = None

    # ---- the outside world

    @property
    def has_state(self) -> bool:
        """It knows how far the job is, and holds parameters, or can pull them."""
        return self.trained > 0 or self.phase is not None

    @property
    def works(self) -> bool:
        """It is a worker of the last training phase."""
        number, last = self.node.number, self.training
        return last is not None and number <= len(last.shares) and bool(last.shares[number - 1])

    def submit(self) -> None:
        """The user starts a job here."""
        self.lan.starter = self, self.life
        self.do(self.node.start(self.clock(), self.lan.random.getrandbits(63) + 1))

    def refused_up(self, member: int, number: int) -> None:
        """The doorbell: that member refuses what was asked with that number."""
        self.node.refused(self._sync(), member, number)
        self.arm()

    def sums_up(self) -> None:
        """The doorbell: some answers have come, or the last."""
        self.do(self.node.advance(self._sync()))

    # ---- what the agent does

    def do(self, actions: Sequence[Any]) -> None:
        if self.dead:
            return
        self.stepped = True
        self.lan.checks.moved.append(self)
        for at, action in enumerate(actions, 1):
            self._do(action)
            if self.lan.moments:
                self.lan.moment(self, action)
            if self.dead:
                return
            if self.paused:
                self.wake(self.do, actions[at:])
                return
        ring = self.node.rings.current
        if ring is not None and ring.token is not None and ring.phase.serving is not None:
            self._begin(ring.phase)
        self.lan.checks.served.closed(self)
        self.kernel.alive = self.clock()
        self.arm()

    def _begin(self, phase: Phase) -> None:
        """It is in force here."""
        if self.training is None or self.training.first_round != phase.first_round:
            self.whole = frozenset(phase.settings["whole"])
            self.servers.enter_phase(phase)
            self.lan.checks.served.begins(phase)
        self.training = phase

    def _do(self, action: Any) -> None:
        checks = self.lan.checks
        match action:
            case protocol.Send():
                self.outbox.send(action)
            case protocol.SendFragments():
                ring = self.node.ring
                if ring is not None:
                    self.outbox.transmit(act.Transmit(action, ring.phase, act.Source.PROGRAM))
            case protocol.SendServed():
                start = max(self.lan.now, self.outbox.free_at)
                self.outbox.free_at = self.servers.send(action, start)
            case protocol.Installed(view, _, phase, again):
                self._enter_view(action, view, phase, again=again)
            case protocol.Ready():
                self.later(0.0, self.lead.go_on)
            case protocol.Answered(joiner):
                self.lead.note_waiting(joiner)
            case protocol.Prepare(phase):
                self.note(f"PREPARES {phase.kind.name} {phase.number} from {phase.first_round}")
                self.later(0.0, lambda: self._prepare(phase))
            case protocol.PhaseAgreed(phase):
                self.note(f"AGREED {phase.kind.name} {phase.number}")
                if phase.kind is wire.PhaseKind.FINISH:
                    self.later(0.0, lambda: self.lead.decide(stop(None)))
                if phase.kind is wire.PhaseKind.STOP:
                    self._end(phase)
            case protocol.Committed():
                self._commit(action)
            case protocol.Stepped() | protocol.Pulled():
                if self.process is not None:
                    self.process.deliver(action)
            case protocol.ReadByAll(round_):
                self.lead.note_read(round_)
            case protocol.ServerLost(reads):
                self.lead.note_lost(reads)
            case protocol.Evicted(reason, ending):
                self.note(f"STRUCK {reason}")
                self.phase, self.process = None, None
                self.servers.part = self.servers.coming = None
                self.serves = 0, 0
                if ending:
                    self.job_over = reason
                    self.lan.over(self, reason, ending is wire.Ending.DONE)
            case protocol.Differs():
                checks.fail(f"{self.name} finds other weights: {action}")
            case protocol.Failed(reason):
                self.note(f"FAILED {reason}")
            case protocol.NoProgress():
                self.note(f"NO PROGRESS {action}")
            case _:
                pass

    def _enter_view(
        self, action: protocol.Installed, view: protocol.View, phase: Phase | None, *, again: bool
    ) -> None:
        on = phase.kind.name if phase is not None else "no phase"
        self.note(
            f"VIEW {view.number} live {sorted(view.live)} lead {view.lead}, "
            f"round {self.node.open_round}, {on}{' again' * again}"
        )
        self.keep_key(view)
        self.kernel.clear()
        self.kernel.alive = self.clock()
        self.lan.checks.installed(self, action)
        self.lead.enter_view()
        if phase is None:
            self.phase = None
            return
        self.phase = phase
        if again and self.process is not None and phase.kind is TRAIN:
            self.servers.coming = None
            if self.works:
                self.process.deliver(phase)
            else:  # the program of a server pulls nothing, whatever it did as a worker before
                self._prepared(phase)
        if phase.kind is wire.PhaseKind.TEST:
            self.later(0.0, lambda: self._offer_test(phase))

    def _commit(self, commit: protocol.Committed) -> None:
        self.note(f"COMMITS {commit.round} {dict(commit.counted)}")
        phase = commit.phase
        if phase.kind is TRAIN:
            self.lan.checks.served.committed(self, commit, phase)
            self.servers.commit(commit.round, listed=bool(commit.counted))
            self.trained += 1
            self.committed = commit.round
            self.whole = frozenset(
                phase.sharing(self.node.view.live)
            )  # they have pulled, and then offered
            self.lan.checks.trained = max(self.lan.checks.trained, self.trained)
            if phase.shares[self.node.number - 1] and self.process is not None:
                self.process.deliver(commit)
                return
            self.lead.judge(commit.round)
        elif self.node.leads:
            self.later(0.0, self.lead.go_on)
        self.later(0.0, lambda: self.do(self.node.read(self.clock(), commit.round, 0)))

    # ---- every member

    def _prepare(self, phase: Phase) -> None:
        if self.phase is not None and self.phase.number > phase.number:
            return
        self.phase = phase
        if phase.kind is TRAIN:
            self._enter_training(phase)
        elif phase.kind is wire.PhaseKind.TEST:
            self._prepared(phase)
            if self.process is not None and self.works:
                self.process.deliver(phase)
            self._offer_test(phase)
        elif phase.kind is wire.PhaseKind.FINISH:
            self.finishing = True
            self._save()
            self._prepared(phase)
        else:
            self._prepared(phase)
            if not self.node.leads:
                self._end(phase)

    def _prepared(self, phase: Phase) -> None:
        self.do(self.node.prepared(self.clock(), phase.number))

    def _end(self, phase: Phase) -> None:
        ok = phase.settings["ok"]
        self.note(f"JOB OVER {phase.settings['message']}")
        self.result = self._state() if ok else None
        self.job_over = phase.settings["message"] or "well"
        self.lan.over(self, phase.settings["message"], ok)

    def _save(self) -> None:
        """What it has is on its disk from now on. An earlier end that was not agreed on is none: more was trained."""
        for host in self.lan.hosts:
            if host.on_disk is not None and host.on_disk[0] < self.trained:
                host.on_disk = None
        beside = [
            host.servers
            for host in self.lan.hosts
            if not host.dead and host.node.view == self.node.view and host.trained == self.trained
        ]
        pulled = self._served(beside) if self.servers.part is not None else None
        self.on_disk = self._state() or pulled or self.on_disk

    def _state(self) -> tuple[int, str] | None:
        """How many rounds are trained, and all parameters, where it has them."""
        if self.process is not None and self.works:
            return self.trained, repr([sorted(c) for c in self.process.state])
        return self._served([self.servers])

    def _served(self, servers: Sequence[ServersKernel]) -> tuple[int, str] | None:
        """The same of what these servers hold, if they have all parts."""
        found = contents_of(servers)
        if len(found) < self.lan.fragments:
            return None
        each = range(per_push(self.lan.plan.width))
        return self.trained, repr([part for _, part in sorted(found.items()) for _ in each])

    def _enter_training(self, phase: Phase) -> None:
        serving, number = phase.serving, self.node.number
        assert serving is not None
        self.servers.make_store(phase)
        if number in self.node.learners:
            self.trained, self.last_read = phase.settings["trained"], self.committed
        if self.trained != phase.settings["trained"]:
            self.lan.checks.fail(f"{self.name} has {self.trained} rounds, {phase.settings}")
        if self.process is None:
            self.process = ServedProgram(self, handed_out(self))
        if number not in serving.servers:
            self.process.deliver(phase)
            return
        rank = serving.servers.index(number)
        part = serving.part(rank, phase.fragments)
        learns = number in self.node.learners
        if (
            self.servers.part is not None
            and self.serves == (len(serving.servers), rank)
            and not learns
        ):
            self._prepared(phase)
        else:
            self.later(_FILL_S * self.lan.odds.random.random(), lambda: self._fill(phase, part))

    def _fill(self, phase: Phase, part: range) -> None:
        """Its part comes from what the worker has kept of a commit, or from its own program at the job's start."""
        serving, lan, filled_from = phase.serving, self.lan, phase.settings["source"]
        if self.phase is not phase or serving is None:
            return
        contents = dict.fromkeys(part, NOTHING)
        if filled_from:
            mac = self.node.view.members[filled_from - 1].mac
            source = next(host for host in lan.hosts if host.mac == mac)
            if (
                source.dead or source.node.view.number != self.node.view.number
            ):  # perhaps started anew
                self.later(_FILL_S, lambda: self._fill(phase, part))
                return
            lan.checks.served.fills(self, source)
            if kept := source.process.kept if source.process is not None else ():
                each = len(kept) // phase.fragments
                contents = {i: dict(kept[i * each]) for i in part}
        lan.parts += 1
        self.servers.coming = Part(lan.parts, phase.first_round, part, contents)
        rank = serving.servers.index(self.node.number)
        self.serves = len(serving.servers), rank
        self._prepared(phase)

    def _offer_test(self, phase: Phase) -> None:
        self.do(self.node.offer(self.clock(), Offer(phase.first_round, 1)))

    # ---- what the training program says

    def program_prepared(self, phase: Phase) -> None:
        """It is in the phase."""
        self._prepared(phase)

    def program_pulls(self, round_: int) -> None:
        """It needs all parameters."""
        self.do(self.node.pull(self.clock(), round_))

    def next_token(self) -> Token:
        """Another step of this agent's programs."""
        self._steps += 1
        return f"{self.name}.{self.life}", self._steps

    def program_steps(self, offer: Offer, token: Token) -> None:
        """Its next step is converted."""
        self.servers.own = token
        self.lan.checks.served.offers(self, offer.round, token)
        self.do(self.node.step(self.clock(), offer))

    def program_reads(self, round_: int, state: State, digest: bytes) -> None:
        """It has read all parameters after a round."""
        self.lan.checks.served.read(self, round_, state)
        self.last_read = round_
        word = int.from_bytes(digest[:4], "big") | 1
        self.do(self.node.read(self.clock(), round_, word))
        self.lead.judge(round_)

    def program_catches_up(self, round_: int) -> None:
        """It has pulled the last commit in the next phase only."""
        self.lan.checks.served.catches_up(self)
        self.last_read = round_
        self.do(self.node.read(self.clock(), round_))

    def program_tests(self, phase: Phase, state: State) -> None:
        """It tests what it has read last."""
        self.lan.checks.served.has_last(self, state)
