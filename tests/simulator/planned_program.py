# SPDX-License-Identifier: Apache-2.0
"""A training program whose steps have a plan: `trainer/ring.py` on `nicps.flows`, without the numbers.

Each channel is a thread of its own: it offers a part, waits for its commit, and reads the sum. It may offer the next
part before that, and stalls between. The thread that computes goes on with the next step's forward pass meanwhile,
unless something else than a step comes next.
"""

from __future__ import annotations

import hashlib
import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from nicps import wire
from nicps.job.checkpoints import CHECKPOINT
from nicps.protocol.plan import ChannelPlan
from nicps.session import shared_form as says
from tests.simulator.gradients import quantise
from tests.simulator.places import Records, bounds
from tests.simulator.program import _NOBODY, _PARTS, Ended, Message, Program, Steps
from tests.simulator.stripes import Stripes
from tests.simulator.sums import sum_in

if TYPE_CHECKING:
    from tests.simulator.planned_host import PlannedHost
    from tests.simulator.planned_lan import PlannedLan

READ_S = 1e-4
_SLOW_READ_S = 0.02
_STALL_S = 0.03
_OWN_TESTS = 0.05  # steps after which a member thinks of a test, and others do not
_ENDS = says.Phase, says.Abort, says.Error


class _StepEnded(Exception):
    """The phase has ended before the step was whole."""


class _Part(NamedTuple):
    """A part of a step, which this member has `samples` for."""

    serial: int
    place: int
    round: int
    samples: int
    phase: Message


class _Thread:
    """A channel's: a generator, as the program itself is one. It sleeps, or waits until something happens."""

    def __init__(self, program: PlannedProgram, steps: Steps) -> None:
        self._program, self._steps = program, steps
        self._waits = True

    def look(self) -> None:
        """Something has happened."""
        if self._waits:
            self._go_on()

    def _go_on(self) -> None:
        program = self._program
        if program.hung or program.host.process is not program:
            return
        self._waits = False
        try:
            seconds = next(self._steps)
        except Ended as end:
            if program.host.process is program:
                program.host.program_ends(end.code)
            return
        if seconds is None:
            self._waits = True
        else:
            program.host.later(seconds, self._go_on)


class PlannedProgram(Program):
    """Attributes: `areas`, the kernel's records by channel, as it has mapped them."""

    host: PlannedHost
    lan: PlannedLan

    def __init__(self, host: PlannedHost, number: int, settings: Mapping[str, Any]) -> None:
        self.areas: list[Records] = []
        self._areas_of: dict[int, list[Records]] = {}  # that come with messages on their way
        self._plan: Sequence[says.PhaseChannel] = ()
        self._base: list[int] = []  # the first round of each channel in the step
        self._commits: dict[tuple[int, int], says.Committed] = {}  # channel and round
        self._queues: list[deque[_Part]] = []
        self._threads: list[_Thread] = []
        self._serial = 0  # of the step; what is of an earlier one is dropped
        self._read: dict[tuple[int, int], int] = {}  # channel and place -> what was read
        self._given: set[tuple[int, int]] = set()  # parts of the step that have gone out
        self._done = 0  # parts of the step that are read, or do not come
        self._pending = False  # the step before is not settled
        self._saves = False  # the lead writes a checkpoint after it
        self._due: str = ""  # what comes after that step
        super().__init__(host, number, settings)  # type: ignore[arg-type]
        rng = host.lan.odds.random
        self._ahead = rng.random() < 0.7  # forward passes overlap
        #: When a channel's thread offers the next part; these draws change nothing else.
        self._early = random.Random(f"early {host.lan.seed} {host.index} {host.life} {number}")
        #: What this member alone thinks of: its clock and its loss are its own.
        self._own = random.Random(f"own {host.lan.seed} {host.index} {host.life} {number}")

    # ---- the mailbox

    def show(self, message: Message, stripes: Stripes) -> None:
        super().show(message, stripes)
        if isinstance(message, says.Phase | says.View):
            channels = range(len(self.host.ports) + 1)
            self._areas_of[id(message)] = [
                self.host.at(channel).kernel.stripes.records for channel in channels
            ]

    def _take(self, message: Message) -> None:
        if self.host.process is not self:
            return
        try:
            self._sort(message)
        except Ended:
            return  # the agent has killed it for what it said
        self._look()

    def _sort(self, message: Message) -> None:
        """As `nicps.session.mailbox`: what comes behind a phase that has not begun is of that phase, and waits."""
        at_once = bool(self._plan) and not self._ends
        views = any(isinstance(each, says.View) for each in self._inbox)
        if at_once and isinstance(message, says.Committed):
            self._commits[message.channel, message.round] = message
        elif at_once and isinstance(message, says.View) and not views:
            self._note(message)
        else:
            self._inbox.append(message)

    def _look(self) -> None:
        """All threads look again at what they wait for."""
        for thread in list(self._threads):
            thread.look()
        if self._waits and self.host.process is self:
            self._step()

    def _note(self, message: Message) -> None:
        if isinstance(message, says.Phase | says.View):
            areas = self._areas_of.pop(id(message))
            if isinstance(message, says.Phase) and message.room:
                self.areas = areas
        if isinstance(message, says.Keep) and self._torn:
            self._say(says.Checkpoint(self.state.trained, "the step is under way"))
            return
        super()._note(message)

    @property
    def _torn(self) -> bool:
        """Some parameters are of the step that is under way, and others are not."""
        return self._pending and bool(self._read)

    @property
    def _ends(self) -> bool:
        """The thread that computes will find a message after which no round of this phase is waited for."""
        return any(isinstance(message, _ENDS) for message in self._inbox)

    def _attend(self, done: Callable[[], bool]) -> Steps:
        while not done():
            if self._inbox and not self._ends:
                self._note(self._inbox.popleft())
            else:
                yield None

    def _next_phase(self) -> Steps:
        message = yield from super()._next_phase()
        self._plan = message.channels
        self._commits.clear()
        behind, self._inbox = self._inbox, deque()
        for each in behind:
            self._sort(each)
        return message

    # ---- a channel's thread

    def _flow(self, channel: int) -> Steps:
        queue, following = self._queues[channel], None
        while True:
            if following is None:
                while not queue:
                    yield None
                following = yield from self._let_out(channel, queue.popleft())
                continue
            part, following = following, None
            when = self._early.choice(("ahead", "ahead", "committed", "read"))
            while (channel, part.round) not in self._commits and not self._ends:
                if when == "ahead" and queue and following is None:
                    following = yield from self._let_out(channel, queue.popleft())
                else:
                    yield None
            commit = self._commits.pop((channel, part.round), None)
            if commit is not None:
                if when != "read" and queue and following is None:
                    following = yield from self._let_out(channel, queue.popleft())
                yield from self._read_part(channel, part, commit)
            self._done += part.serial == self._serial
            if self._waits:
                self.host.later(0.0, self._look)

    def _let_out(self, channel: int, part: _Part) -> Steps:
        """A part's turn has come. None: it is of an earlier step."""
        if self._early.random() < 0.1:
            yield _STALL_S * self._early.random()
        if part.serial != self._serial:
            return None
        if part.samples and not self._ends:
            yield from self._offer_part(part.phase, channel, part.round, part.place, part.samples)
        return part

    def _read_part(self, channel: int, part: _Part, commit: says.Committed) -> Steps:
        rng = self.lan.random
        yield READ_S + (_SLOW_READ_S * rng.random() if rng.random() < 0.05 else 0.0)
        fragments = part.phase.channels[channel].rounds[part.place]
        value = self._sum_of(commit, channel, fragments)
        self._say(says.Read(part.round, "", channel))
        if part.serial == self._serial:
            self._read[channel, part.place] = value
            self._saves |= commit.checkpoint

    def _offer_part(
        self, phase: Message, channel: int, round_: int, place: int, samples: int
    ) -> Steps:
        """A part is offered, and converted, the own stripe first."""
        host, rng = self.host, self.lan.odds.random
        fragments = phase.channels[channel].rounds[place]
        offer = quantise(rng, [0] * fragments, self.lan.plan.width)
        largest = min(offer.largest + rng.choice((0, 0, 0, 1, 3)), 126)
        conversion = rng.getrandbits(31) + 1
        self.lan.sums_of(channel).offered(host.at(channel), round_, offer, largest, conversion)
        self._say(says.Offer(round_, samples, largest, False, conversion, channel))
        due = [k for k, share in enumerate(phase.shares, 1) if share and k in self._live]
        first, end = 0, 0
        if host.node.number in due:
            first, end = bounds(fragments, due.index(host.node.number), len(due))
        order = [*range(first, end), *range(end, fragments), *range(first)]
        bank = self.areas[channel].own[round_ & 1]
        while order:
            count = rng.randint(1, len(order))
            for index in order[:count]:
                bank[index].conversion, bank[index].lane = conversion, offer.lanes[index]
            order = order[count:]
            host.pump()
            if order:
                yield self.lan.odds.converting_s * rng.random()

    def _sum_of(self, commit: says.Committed, channel: int, fragments: int) -> int:
        """The sum of a part as this program reads it."""
        found, whose = [], (self.host.node.number, commit.view, commit.round)
        for index in range(fragments if commit.counted else 0):
            lane = sum_in(self.areas[channel], *whose, commit.counted, index)
            if lane is None:
                self.lan.checks.fail(
                    f"{self.host.node.name} reads round {commit.round} of channel {channel}: there is no sum {index}"
                )
            found.append(lane if lane is not None and lane.finite else None)
        text = repr((sorted(commit.counted.items()), found))
        return int(hashlib.sha1(text.encode()).hexdigest()[:8], 16)

    # ---- the thread that computes

    def _ready(self, model: str) -> says.Ready:
        plan = told(self.lan.first_plan)
        lanes = max(plan[0].rounds) * wire.lanes_per_fragment(self.lan.plan.width)
        return says.Ready(lanes, model, plan)

    def _train(self, phase: Message) -> Steps:
        self.lan.checks.same_model(self.host, self, phase.number)
        self.blank = False
        self._base = [channel.open for channel in phase.channels]
        self._queues = [deque() for _ in phase.channels]
        self._threads = [
            _Thread(self, self._flow(channel)) for channel in range(len(phase.channels))
        ]
        self._begin()
        try:
            while (yield from self._train_planned(phase)):
                pass
        except _StepEnded:
            self._drop()
        self._serial += 1

    def _begin(self) -> None:
        """A step begins."""
        self._serial += 1
        self._read, self._done = {}, 0
        self._given, self._saves = set(), False

    def _drop(self) -> None:
        """The phase has ended before the sums of a step were there: it was nobody's."""
        ends = next((each for each in self._inbox if isinstance(each, _ENDS)), None)
        if self._read and isinstance(ends, says.Phase):
            self.lan.checks.left_in_a_step(self.host, ends)
        self._pending = False
        self._read = {}

    def _train_planned(self, phase: Message) -> Steps:
        """A step; whether another one of the phase comes."""
        samples = yield from self._compute_parts(phase)
        if not self._pending:
            yield from self._settle(phase)  # where there was no forward pass
        self._offer_rest(phase, samples)
        trained, lan = self.state.trained + 1, self.lan
        tests = trained >= lan.rounds or trained % lan.test_every == 0
        tests |= self._own.random() < _OWN_TESTS
        replans = self._lead and not tests and lan.random.random() < 0.25
        self._due = "test" if tests else "plan" if replans else "continue"
        self._pending = True
        if self._ahead and self._due == "continue":
            return True
        return (yield from self._settle(phase))

    def _first(self, phase: Message) -> int:
        """Channel 0's first round of the step that is computed: of the one after that on its way."""
        return self._base[0] + (len(phase.channels[0].rounds) if self._pending else 0)

    def _compute_parts(self, phase: Message) -> Steps:
        """The own share, in micro-batches (R13); parts go out in the backward pass of the last one."""
        lan, share = self.lan, phase.shares[self.host.node.number - 1]
        seconds = lan.compute_s * (0.5 + lan.random.random()) * self.host.slowness
        done = 0
        for part in range(1, _PARTS + 1):
            end = share * part // _PARTS
            if end == done:
                continue
            if self._is_closed(phase, self._first(phase)):
                break
            span = seconds * (end - done) / share
            yield span / 3
            yield from self._settle(phase)
            if end == share:
                self._begin()
                yield from self._backward(phase, span * 2 / 3, share)
                return share
            yield span * 2 / 3
            done = end
            self._say(says.Progress(self._base[0], done))
            while self._inbox and isinstance(self._inbox[0], says.View):
                self._note(self._inbox.popleft())
            of_round, samples = self.need
            enough = samples if of_round == self._base[0] else _NOBODY
            if self.quorum < 1 and 0 < enough <= done:
                break
        yield from self._settle(phase)
        self._begin()
        return 0 if self._is_closed(phase, self._base[0]) else done

    def _backward(self, phase: Message, seconds: float, samples: int) -> Steps:
        """Parts become whole, those of a channel in their order."""
        order = [
            (channel, place)
            for channel, plan in enumerate(phase.channels)
            for place in range(len(plan.rounds))
        ]
        rng = self.lan.random
        if rng.random() < 0.5:  # or one behind the other, channel by channel
            order.sort(key=lambda part: part[1])
        for channel, place in order[:-1]:
            yield min(seconds / len(order), rng.random() * self.lan.part_s)
            self._give(phase, channel, place, samples)

    def _give(self, phase: Message, channel: int, place: int, samples: int) -> None:
        round_ = self._base[channel] + place
        self._queues[channel].append(_Part(self._serial, place, round_, samples, phase))
        self._given.add((channel, place))
        self._threads[channel].look()

    def _offer_rest(self, phase: Message, samples: int) -> None:
        """All parts that have not gone out do, in the order of the plan."""
        for channel, plan in enumerate(phase.channels):
            for place in range(len(plan.rounds)):
                if (channel, place) not in self._given:
                    self._give(phase, channel, place, samples)

    def _settle(self, phase: Message) -> Steps:
        """The step before has its sums, and is applied; whether training goes on in this phase."""
        if not self._pending:
            return True
        count = sum(len(plan.rounds) for plan in phase.channels)
        yield from self._attend(lambda: self._done == count)
        if len(self._read) < count:
            raise _StepEnded
        yield READ_S
        last = self._base[0] + len(phase.channels[0].rounds) - 1
        text = repr(sorted(self._read.items()))
        total = int(hashlib.sha1(text.encode()).hexdigest()[:8], 16)
        self._pending = False
        self.state = self.state.step(last, total)
        if self.host.differs:
            self.host.tamper()
        self.lan.checks.applied(self.host, last, self)
        self._base = [
            first + len(plan.rounds) for first, plan in zip(self._base, phase.channels, strict=True)
        ]
        self._say(says.Read(last, self.state.digest))
        rng = self.lan.random
        yield rng.choice((0.0, 0.0, 1e-3, 0.02)) * rng.random()
        self._finishing = self.state.trained >= self.lan.rounds
        plan = told(self.lan.plans()) if self._due == "plan" else ()
        counts = self._decide(last, self._due, plan)
        if self._saves:
            self._say(says.Residual(""))
            if self._lead:
                self.host.disk.files[CHECKPOINT] = self.state
                self._say(says.Checkpoint(self.state.trained, ""))
        return not (counts and self._due in ("test", "plan"))

    def _decide(self, round_: int, what: str, plan: tuple[says.ChannelPlan, ...] = ()) -> bool:
        """As `Session.decide`."""
        saves = self._lead and self.lan.random.random() < 0.2
        self._decision = says.Decide(round_, what, saves, plan)
        counts = self._lead and not self._commits
        if counts:
            self._say(self._decision)
        return counts


def told(plans: Sequence[ChannelPlan]) -> tuple[says.ChannelPlan, ...]:
    """A plan as programs tell it."""
    return tuple(says.ChannelPlan(plan.urgency, plan.rounds) for plan in plans)
