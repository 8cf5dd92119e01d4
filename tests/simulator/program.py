# SPDX-License-Identifier: Apache-2.0
"""A training program at a simulated host: `trainer/loop.py` on `nicps.client.Session`, without the numbers.

It looks up from its work between two micro-batches only. What comes meanwhile waits in its inbox, as in a socket.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Generator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from nicps import wire
from nicps.session import shared_form as says
from tests.simulator.gradients import Contribution, quantise
from tests.simulator.places import Places, Records, bounds

if TYPE_CHECKING:
    from tests.simulator.host import Host
    from tests.simulator.stripes import Stripes

START_S = 0.05  # until it attaches
SWITCH_UNITS = 0, 5  # far above those that hosts use where they add
_SOCKET_S = 5e-5  # a message's way
_PARTS = 2  # micro-batches in a share
_ROUNDS = 3  # of a step, where it is several
_NOBODY = 1 << 40  # samples that are enough before anybody has contributed

Steps = Generator[float | None, None, Any]  # seconds to work, or None: until there is a message
Message = Any  # of `says.FromAgent`


class Ended(Exception):
    """The program ends by itself: well (0), or with an error."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


@dataclass(frozen=True)
class State:
    """What is trained: weights, a hash over all sums that were applied, and after how many rounds they are so.

    Weights that begin with "T" have been tampered with. `last`: the training round that was applied last.
    """

    weights: str = "w0"
    trained: int = 0
    last: int = 0

    def step(self, round_: int, total: int) -> State:
        """After a committed sum."""
        text = f"{self.weights} {round_} {total}"
        taint = "T" if self.weights.startswith("T") else ""
        weights = taint + hashlib.sha1(text.encode()).hexdigest()[:12]
        return State(weights, self.trained + 1, round_)

    @property
    def digest(self) -> str:
        """As all members compare it."""
        return hashlib.blake2b(self.weights.encode(), digest_size=8).hexdigest()


class Program:
    """One process.

    `attached`: it has connected, and hears what it is told. `blank`: it has no state yet, and waits for one. `hung`: it
    does nothing any more.
    """

    def __init__(self, host: Host, number: int, settings: Mapping[str, Any]) -> None:
        self.host, self.lan, self.number = host, host.lan, number
        self.name = host.index, host.life, number
        self.quorum = float(settings["quorum"])
        self.state = State()
        self.blank = True
        self.attached = self.hung = False
        self.need = 0, 0  # in the memory that it shares with the agent
        self.closed = self.newest_phase = 0
        self._converted = 0  # the last round whose gradient is
        self._inbox: deque[Message] = deque()
        self._next: Message | None = None
        self._decision: says.Decide | None = None
        self._lead = self._finishing = False
        self._unit = 0
        self.records = Records(0)  # of the kernel's, as it has mapped them
        self.places = Places(0, 1)
        self.residual = [0] * host.lan.fragments
        self._maps: dict[int, tuple[Records, Places]] = {}  # that come with messages on their way
        self._live: tuple[int, ...] = ()
        self._offer: Contribution | None = None
        self._steps = self._run()
        self._waits = False
        self._sleep(START_S)

    # ---- the process

    def deliver(self, message: Message) -> None:
        """The agent says something."""
        self.host.later(_SOCKET_S, lambda: self._take(message))

    def show(self, message: Message, stripes: Stripes) -> None:
        """The memory whose descriptors go with a message."""
        if isinstance(message, says.Phase | says.View):
            self._maps[id(message)] = stripes.records, stripes.places

    def _take(self, message: Message) -> None:
        self._inbox.append(message)
        if self._waits:
            self._step()

    def _sleep(self, seconds: float) -> None:
        self.host.later(seconds, self._step)

    def _step(self) -> None:
        """Go on until it works for a while, or waits."""
        if self.hung or self.host.process is not self:
            return
        self._waits = False
        try:
            seconds = next(self._steps)
        except Ended as end:
            if self.host.process is self:  # or else another one has been started already
                self.host.program_ends(end.code)
            return
        if self.host.process is not self:
            return
        if seconds is None:
            self._waits = True
        else:
            self._sleep(seconds)

    def _say(self, message: says.FromProgram) -> None:
        self.host.hear(self, message)
        if self.host.process is not self:
            raise Ended(-9)  # the agent has killed it for what it said

    def converted(self, round_: int) -> bool:
        """Whether that round's gradient can be sent."""
        return self._converted >= round_

    # ---- the session

    def _receive(self, *kinds: type) -> Steps:
        while True:
            while self._inbox:
                message = self._inbox.popleft()
                self._note(message)
                if isinstance(message, kinds):
                    return message
            yield None

    def _note(self, message: Message) -> None:
        if isinstance(message, says.Phase | says.View):
            records, places = self._maps.pop(id(message))
            if isinstance(message, says.Phase) and message.room:
                self.records = records
            if message.places:
                self.places = places
            self._live = message.live
        if isinstance(message, says.Keep):
            self._say(says.Checkpoint(self.state.trained, ""))
        elif isinstance(message, says.View):
            led, self._lead = self._lead, message.lead == self.host.node.number
            if self._lead and not led and self._decision is not None:
                self._say(self._decision)

    def _next_phase(self) -> Steps:
        message = self._next or (yield from self._receive(says.Phase))
        self._next = None
        self._unit = message.unit
        self._lead = message.lead == self.host.node.number
        decision = self._decision
        if self._lead and message.kind == "train" and decision is not None:
            if decision.what != "continue":
                self._say(decision)
        self._say(says.Prepared(message.number))
        return message

    def _wait_commit(self, round_: int) -> Steps:
        if self._next is not None:
            return None
        while True:
            message = yield from self._receive(says.Committed, says.Phase)
            if isinstance(message, says.Phase):
                self._next = message
                return None
            if message.round == round_:
                self._unit = message.next_unit
                return message

    def _decide(self, round_: int, what: str) -> None:
        self._decision = says.Decide(round_, what)
        if self._lead:
            self._say(self._decision)

    # ---- the loop

    def _run(self) -> Steps:
        self.host.attach(self)
        welcome = yield from self._receive(says.Welcome)
        self._lead = welcome.lead == welcome.number
        if self.host.sick:
            raise Ended(1)
        model = hashlib.blake2b(f"model {self.state.weights}".encode(), digest_size=8).hexdigest()
        self.lan.checks.hold(model, self.state)
        self._say(self._ready(model))
        while (phase := (yield from self._next_phase())).kind != "end":
            if phase.kind == "train":
                yield from self._train(phase)
            elif phase.kind == "test":
                yield from self._test(phase)
            elif phase.kind == "save":
                yield from self._save(phase)
            else:
                yield from self._load(phase)
        yield 2e-3
        self.lan.checks.sums.ended(self)
        self.host.result = self.state.trained, self.state.weights
        raise Ended(0)

    def _ready(self, model: str) -> says.Ready:
        """The model is built."""
        room = self.lan.fragments + self.lan.spare
        return says.Ready(room * wire.lanes_per_fragment(self.lan.plan.width), model)

    def _train(self, phase: Message) -> Steps:
        self.lan.checks.same_model(self.host, self, phase.number)
        self.blank = False
        round_ = phase.first_round
        while round_:
            round_ = yield from self._train_step(phase, round_)

    def _train_step(self, phase: Message, round_: int) -> Steps:
        """A step, of one round or several; the round after it, or 0 when the phase is over."""
        samples, rounds, total = (yield from self._compute(phase, round_)), 1, 0
        if self.lan.plan.steps:
            rounds = _ROUNDS
        for part in range(rounds):
            if part:
                self._decide(round_, "more")
                self._say(says.Read(round_, ""))
                round_ += 1
            if samples and not self._is_closed(phase, round_):
                said = samples
                if self.lan.plan.steps:
                    said = wire.sized_samples(self.lan.fragments, part, self.lan.plan.width)
                yield from self._offer_gradient(phase, round_, said)
            commit = yield from self._wait_commit(round_)
            if commit is None:
                if part:
                    self.lan.checks.left_in_a_step(self.host, self._next)
                return 0
            yield 1e-4
            total = total * 31 + self._apply(commit)
        self.state = self.state.step(round_, total)
        if self.host.differs:
            self.host.tamper()
        self.lan.checks.applied(self.host, round_, self)
        self._say(says.Read(round_, self.state.digest))
        trained, lan = self.state.trained, self.lan
        self._finishing = trained >= lan.rounds
        tests = self._finishing or trained % lan.test_every == 0
        self._decide(round_, "test" if tests else "continue")
        return 0 if tests and self._lead else round_ + 1

    def _offer_gradient(self, phase: Message, round_: int, samples: int) -> Steps:
        if phase.exchange.absolute:
            yield from self._offer_lanes(phase, round_, samples)
            return
        unit, skip = self._wish(phase)
        self.lan.checks.offered(self.host, round_, self._unit)
        self._say(says.Offer(round_, samples, unit, skip))
        yield 1e-4 * self.lan.random.random()
        self._converted = round_
        self.host.pump()

    def _offer_lanes(self, phase: Message, round_: int, samples: int) -> Steps:
        """In stripes, the own one first."""
        rng, sums, number = self.lan.odds.random, self.lan.checks.sums, self.host.node.number
        self._offer = offer = quantise(rng, self.residual, self.lan.plan.width)
        largest = min(offer.largest + rng.choice((0, 0, 0, 1, 3)), 126)
        conversion = rng.getrandbits(31) + 1
        sums.offered(self.host, round_, offer, largest, conversion)
        skip = rng.random() < self.lan.too_large
        self._say(says.Offer(round_, samples, largest, skip, conversion))
        aggregators = [k for k, share in enumerate(phase.shares, 1) if share and k in self._live]
        first, end = 0, 0
        if number in aggregators and not phase.exchange.central:
            rank, n = aggregators.index(number), len(aggregators)
            first, end = bounds(len(offer.lanes), rank, n)
        order = [*range(first, end), *range(end, len(offer.lanes)), *range(first)]
        bank = self.records.own[round_ & 1]
        while order and not self.newest_phase > phase.number:
            count = rng.randint(1, len(order))
            for index in order[:count]:
                bank[index].conversion, bank[index].lane = conversion, offer.lanes[index]
            order = order[count:]
            yield self.lan.odds.converting_s * rng.random()
            self.host.pump()

    def _apply(self, commit: Message) -> int:
        """Read the sum, and keep what is left over."""
        sums = self.lan.checks.sums
        if not commit.exchange.absolute:
            return self.lan.checks.total(commit.round, commit.counted)
        total = sums.total(self, commit)
        if self.host.node.number in commit.counted:
            assert self._offer is not None
            sums.counted(self, commit, self._offer)
        sums.take_rests(self, commit)
        sums.applied(self, commit)
        return total

    def _compute(self, phase: Message, round_: int) -> Steps:
        """The own share, in micro-batches (R13)."""
        share = phase.shares[self.host.node.number - 1]
        seconds = self.lan.compute_s * (0.5 + self.lan.random.random()) * self.host.slowness
        done = 0
        for part in range(1, _PARTS + 1):
            end = share * part // _PARTS
            if end == done:
                continue
            if self._is_closed(phase, round_):
                break
            yield seconds * (end - done) / share
            done = end
            if done < share:
                several = self.lan.plan.steps
                self._say(says.Alive() if several else says.Progress(round_, done))
                while self._inbox and isinstance(self._inbox[0], says.View):
                    self._note(self._inbox.popleft())
                of_round, samples = self.need
                enough = samples if of_round == round_ else _NOBODY
                if self.quorum < 1 and 0 < enough <= done:
                    break
        return done

    def _is_closed(self, phase: Message, round_: int) -> bool:
        return self.closed >= round_ or self.newest_phase > phase.number

    def _wish(self, phase: Message) -> tuple[int | None, bool]:
        """The unit that the next gradient will want, if that is told; whether this one is too large for its own."""
        rng = self.lan.more
        if phase.exchange.shared_step:
            wanted = rng.randrange(*SWITCH_UNITS)
            return wanted, wanted > self._unit + 4 or rng.random() < self.lan.too_large
        return (self._unit + 1, True) if rng.random() < self.lan.too_large else (None, False)

    def _test(self, phase: Message) -> Steps:
        round_ = phase.first_round
        yield self.lan.compute_s * (0.5 + self.lan.random.random()) * self.host.slowness
        self._say(says.Offer(round_, 1, None, False))
        self._converted = round_
        self.host.pump()
        commit = yield from self._wait_commit(round_)
        if commit is None:
            return
        yield 1e-4
        self._say(says.Read(round_, ""))
        self._decide(round_, "end" if self._finishing else "continue")

    def _save(self, phase: Message) -> Steps:
        self.lan.checks.saved(self.host, self)
        yield self.lan.saving_s
        self.lan.checks.saved(self.host, self)
        self.host.disk.files["state.npz"] = self.state
        self.lan.checks.hold(self.state.digest, self.state)  # a test may have tampered with it
        self._say(says.Saved(phase.number, self.state.trained, self.state.digest, ""))

    def _load(self, phase: Message) -> Steps:
        yield 1e-3
        state = self.host.disk.files.get("state.npz")
        if isinstance(state, State):
            self.state = replace(state)
            self.blank = False
        self._decision, self._finishing = None, self.state.trained >= self.lan.rounds
        self._say(says.Loaded(phase.number, self.state.digest))
