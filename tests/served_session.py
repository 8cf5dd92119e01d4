# SPDX-License-Identifier: Apache-2.0
"""Sessions of a job with parameter servers, without a network: workers in threads, whose turns a seed decides.

Every look of a worker at a server is a turn: a pull of its part, or a push to it. The next one is chosen when all
threads wait, so a seed fixes what comes after what. `ServedNetwork.log` has that order, without any numbers.
"""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from nicps.client import Commit, Phase, Stepped
from nicps.errors import NonFinite, TooLarge
from nicps.protocol.phase import equal_shares
from nicps.session.absolute import AbsoluteQuantiser
from nicps.session.lanes import LaneFormat, Residual
from tests.fake_session import FakeNetwork, FakeSession
from tests.servers import UNIT, addend, shown, weight_of
from trainer import weights
from trainer.run import train

PULLED = 360  # parameters in a fragment
MOST_STEP = 2.0**21


class Lost(Exception):
    """This worker's host has gone."""


class Worker:
    """What a worker's agent and kernel have.

    `versions`, by rank, of what was pulled, and `version`, as the last push was told, are with their rounds.
    """

    def __init__(self, format: LaneFormat) -> None:
        self.store = np.zeros(format.fragments * format.per_fragment, np.float32)
        self.quantiser = AbsoluteQuantiser(format, Residual(format))
        self.versions: dict[int, tuple[int, int]] = {}
        self.version = 0, 0


class ServedNetwork(FakeNetwork):
    """Servers that hold the parameters, as whole numbers of units.

    Attributes: `log`, what has happened, in its order: ("step", member) that has computed one, ("push" or "pull",
    member, rank), ("phase", shares), ("lost", member), and ("commit", members) or ("barrier",); `serves`, whether
    agents know of servers; `before`, called before each turn with its number; `speeds`, how often a member's turn
    comes; `all_working`, the workers of the beginning.
    """

    def __init__(
        self,
        members: int,
        batch: int,
        servers: Sequence[int] = (1,),
        seed: int = 1,
        speeds: Sequence[float] = (),
    ) -> None:
        super().__init__(members, batch)
        self.servers = tuple(servers)
        self.speeds = dict(enumerate(speeds or [1.0] * members, 1))
        self.log: list[tuple[Any, ...]] = []
        self.serves = True
        self.before: Callable[[int], None] = lambda turn: None
        self.workers: dict[int, Worker] = {}
        self.parameters = np.zeros(0, np.int64)
        self.versions = [0] * len(self.servers)
        self.reads: dict[int, int] = {}  # the round that a member has read last
        self.caught_up: list[tuple[int, int]] = []  # member and round
        self.go = 0
        self.contributions: dict[int, tuple[list[bytes], list[int], int] | None] = {}
        self._random = random.Random(seed)
        self._member_of: dict[int, int] = {}  # by thread
        self._waiting: dict[int, Callable[[], Any]] = {}
        self._wanting: set[int] = set()
        self._turn = self._turns = 0
        self._running = set(self.live)
        self._held: tuple[int, str, bool] | None = None
        self.all_working = self.working()

    def programs(self) -> dict[int, Callable[[FakeSession, Path], None]]:
        """For `run_job`: a host that has gone is no error."""

        def program(session: FakeSession, workdir: Path) -> None:
            self._member_of[threading.get_ident()] = session.number
            self._fill(workdir)
            try:
                train(session, workdir)  # type: ignore[arg-type]
            except Lost:
                pass
            finally:
                with self.changed:
                    self._running.discard(session.number)
                    self._choose()

        return dict.fromkeys(range(1, self.members + 1), program)

    def _fill(self, workdir: Path) -> None:
        """The servers have what was handed out."""
        with self.changed:
            if self.workers:
                return
            layout = json.loads((workdir / "prepared.json").read_text())["model"]
            arrays = weights.load(workdir / "model.npz")
            kept = [e["name"] for e in layout if e["kind"] in weights.IN_VECTOR]
            vector = np.concatenate([arrays[name].ravel() for name in kept])
            self.format = LaneFormat(len(vector), self.width)
            self.parameters = np.zeros(self.format.fragments * self.format.per_fragment, np.int64)
            self.parameters[: len(vector)] = np.rint(np.ldexp(vector.astype(np.float64), -UNIT))
            self.workers = {k: Worker(self.format) for k in self.live}

    def session(self, number: int, settings: Any, name: str = "") -> FakeSession:
        self.every, self.by_staleness = settings["sync_every"], settings["staleness"]
        self.width = int(settings["lane"].removeprefix("i"))
        made = ServedSession(self, number, dict(settings), name or f"h{number}")
        self.sessions[number] = made
        return made

    # ---- turns

    def wait(self, condition: Callable[[], Any]) -> None:
        number = self._member_of[threading.get_ident()]
        self._waiting[number] = condition
        self._choose()
        try:
            super().wait(lambda: number not in self.live or condition())
        finally:
            del self._waiting[number]
        if number not in self.live:
            raise Lost

    def turn(self, number: int, stop: Callable[[], bool]) -> bool:
        """Until it is this member's; False if `stop` comes first."""
        self._wanting.add(number)
        try:
            self.wait(lambda: self._turn == number or stop())
        finally:
            self._wanting.discard(number)
            mine, self._turn = self._turn == number, self._turn * (self._turn != number)
        return mine and not stop()

    def _choose(self) -> None:
        """If nobody can go on, one of those that wait for their turn has it."""
        if self._turn or self.reason or not self._waiting.keys() >= self._running:
            return
        if any(condition() for condition in self._waiting.values()):
            return
        self._turns += 1
        self.before(self._turns)
        turns = sorted(k for k in self._wanting & self.live if not self._waiting[k]())
        if turns:
            self._turn = self._random.choices(turns, [self.speeds[k] for k in turns])[0]
        self.changed.notify_all()

    # ---- phases and decisions

    def shares(self, kind: str) -> tuple[int, ...]:
        if kind != "train":
            return super().shares(kind)
        return equal_shares(self.batch, self.members, sorted(self.working()))

    def working(self) -> set[int]:
        """The workers that are left."""
        return self.live - {*self.servers}

    def enter(self, kind: str, first_round: int, to: Any = ()) -> None:
        if kind == "train" and not to:
            self.log.append(("phase", self.shares(kind)))
            self.contributions.clear()
            self.versions = [0] * len(self.servers)
            self.go = first_round
        super().enter(kind, first_round, to)

    def drop(self, kind: str = "train") -> None:
        """The open round is left in the middle: another phase begins."""
        self.enter(kind, self.open_round + (self.open_round in self.commits))

    def decided(self, round_: int, what: str, checkpoint: bool) -> None:
        self._held = round_, what, checkpoint
        self.settle_reads()

    def settle_reads(self) -> None:
        """The lead's word counts once all workers have read the round; `continue` is GO."""
        if self._held is None:
            return
        round_, what, checkpoint = self._held
        if self.kind == "train" and any(self.reads.get(k, 0) < round_ for k in self.working()):
            return
        self._held, goes_on = None, what == "continue" and self.kind == "train"
        super().decided(round_, what, checkpoint)
        if goes_on and self.open_round == round_ + 1:
            self.go = round_ + 1
        self.changed.notify_all()

    def settle(self, round_: int) -> None:
        """S4: all workers' steps are here, and their average is added; or all have come to a barrier."""
        if round_ != self.open_round or round_ in self.commits or self.kind != "train":
            return
        if not self.contributions or not self.contributions.keys() >= self.working():
            return
        given = {k: v for k, v in sorted(self.contributions.items()) if k in self.live and v}
        for payloads, exponents, _ in given.values():
            for index, (payload, exponent) in enumerate(zip(payloads, exponents, strict=True)):
                self._add(index, payload, exponent, weight_of(len(given)))
        counted = {k: steps for k, (_, _, steps) in given.items()}
        self.log.append(("commit", tuple(given)) if given else ("barrier",))
        commit = Commit(round_, sum(counted.values()), counted, UNIT, checkpoint=self.saves)
        self.commits[round_], self.saves = commit, False
        self.contributions.clear()
        self.versions = [0] * len(self.servers)
        self.told[round_] = set(self.live)
        self.on_commit.pop(round_, lambda: None)()
        self.changed.notify_all()

    def evict(self, number: int) -> None:
        self.log.append(("lost", number))
        super().evict(number)
        self._running.discard(number)
        if self._turn == number:
            self._turn = 0
        self.contributions.pop(number, None)
        self.settle(self.open_round)
        self.settle_reads()
        self._choose()

    # ---- parameters

    def part_of(self, rank: int) -> range:
        """The push fragments of a server."""
        fragments, n = self.format.fragments, len(self.servers)
        return range(fragments * rank // n, fragments * (rank + 1) // n)

    def held(self, rank: int) -> tuple[slice, np.ndarray]:
        """What pulls of a server's part give, and where that is."""
        per, part = self.format.per_fragment, self.part_of(rank)
        where = slice(part.start * per, part.stop * per)
        found = [shown(each) for each in self.parameters[where].reshape(-1, PULLED)]
        values = [np.frombuffer(lanes, ">i4").astype(np.float32) for lanes, _ in found]
        scales = [np.float32(2.0**exponent) for _, exponent in found]
        return where, np.concatenate([v * s for v, s in zip(values, scales, strict=True)])

    def push(self, number: int, rank: int, payloads: list[bytes], exponents: list[int]) -> int:
        """S2, S3: what it counts for."""
        in_round, version = self.workers[number].versions.get(rank, (0, 0))
        pulled = version if in_round == self.open_round else 0
        staleness = max(1, self.versions[rank] + 1 - pulled)
        for index in self.part_of(rank):
            weight = weight_of(staleness) if self.by_staleness else weight_of(1)
            self._add(index, payloads[index], exponents[index], weight)
        self.versions[rank] += 1
        return staleness

    def _add(self, index: int, payload: bytes, exponent: int, weight: int) -> None:
        per = self.format.per_fragment
        self.parameters[index * per : (index + 1) * per] += addend(
            payload, self.width, exponent, weight
        )


class ServedSession(FakeSession):
    """`Session` of one member."""

    network: ServedNetwork
    served: FakeServed | None = None

    def next_phase(self) -> Phase:
        phase = super().next_phase()
        if self.served is None and phase.kind == "train" and self.network.serves:
            self.served = FakeServed(self)
        return phase

    def retrains(self) -> bool:
        """Another phase of training has begun."""
        return self._new_phase and self.network.phases[self.number][-1].kind == "train"

    def is_over(self) -> bool:
        """Another phase has begun."""
        return self._new_phase

    def applied(self, commit: Commit, digest: str = "") -> None:
        network = self.network
        with network.changed:
            network.reads[self.number] = commit.round
            if digest:
                network.digests.setdefault(commit.round, {})[self.number] = digest
            network.settle_reads()


class FakeServed:
    """`nicps.client.Served` of one member of a ServedNetwork."""

    def __init__(self, session: ServedSession) -> None:
        self._session, self._network, self._number = session, session.network, session.number
        self._worker = self._network.workers[self._number]
        self._reads = False
        self._given: tuple[list[bytes], list[int], int] | None = None  # a step, until it is judged
        self._keep: Callable[[], None] = lambda: None
        self._committed = np.zeros(0, np.float32)
        self._pulled: set[int] = set()  # ranks of the pull under way

    @property
    def about(self) -> SimpleNamespace:
        """The set that comes first at this worker: by turns."""
        before = sum(worker < self._number for worker in self._network.working())
        return SimpleNamespace(own_set=1 + before % 2)

    def fill(self, weights: np.ndarray) -> None:
        """Of the handed-out weights, which the network has itself."""

    def keep_commit(self, weights: np.ndarray) -> None:
        self._committed = weights.copy()

    def take_back(self, weights: np.ndarray) -> None:
        weights[:] = self._committed
        if self._network.every == 1:  # as there is no other copy
            self.read(weights)

    # ---- parameters

    def pull(self, round_: int) -> None:
        self._pulls = round_
        self._pulled.clear()

    def wait_pulled(self, round_: int) -> bool:
        network, session = self._network, self._session
        assert self._pulls == round_
        stop = session.retrains if self._reads else session.is_over
        with network.changed:
            for rank in range(len(network.servers)):
                if rank not in self._pulled and not self._pull_part(rank, stop):
                    return False
        self._reads = False
        return True

    def _pull_part(self, rank: int, stop: Callable[[], bool]) -> bool:
        network = self._network
        if not network.turn(self._number, stop):
            return False
        where, values = network.held(rank)
        self._worker.store[where] = values
        self._worker.versions[rank] = self._pulls, network.versions[rank]
        self._pulled.add(rank)
        network.log.append(("pull", self._number, rank))
        return True

    def caught_up(self, round_: int) -> None:
        network = self._network
        with network.changed:
            network.reads[self._number] = round_
            network.caught_up.append((self._number, round_))
            network.settle_reads()

    @property
    def fragments(self) -> int:
        """Of parameters."""
        format = self._network.format
        return format.fragments * (format.per_fragment // PULLED)

    def here(self, first: int, end: int) -> bool:
        """Whether parts have come; the answers to a push bring none here."""
        return len(self._pulled) == len(self._network.servers)

    def arrive(self, first: int, end: int) -> bool:
        """A part comes as a whole, when it is waited for; until another phase begins."""
        network = self._network
        each = network.format.per_fragment // PULLED
        with network.changed:
            network.log.append(("waits", self._number, first, end))
            for rank in range(len(network.servers)):
                part = network.part_of(rank)
                meets = part.start * each < end and first < part.stop * each
                if meets and rank not in self._pulled:
                    if not self._pull_part(rank, self._session.is_over):
                        return False
        return True

    def read(self, out: np.ndarray, first: int = 0, end: int | None = None) -> None:
        end = len(out) if end is None else min(end * PULLED, len(out))
        out[first * PULLED : end] = self._worker.store[first * PULLED : end]

    # ---- steps

    def step(self, round_: int, weights: np.ndarray, samples: int) -> None:
        difference = weights - self._worker.store[: len(weights)]
        finite = np.isfinite(difference)
        if not finite.all():
            index = int(np.argmin(finite))
            raise NonFinite(index, float(difference[index]))
        if np.abs(difference).max() >= MOST_STEP:
            index = int(np.argmax(np.abs(difference)))
            raise TooLarge(index, float(difference[index]), "the step has")
        lanes, exponents = self._convert(difference)
        self._given = lanes, exponents, samples
        with self._network.changed:
            self._network.log.append(("step", self._number))

    def _convert(self, difference: np.ndarray) -> tuple[list[bytes], list[int]]:
        format, quantiser = self._network.format, self._worker.quantiser
        lanes = np.zeros((format.fragments, format.per_fragment), format.wire)
        exponents = np.zeros(format.fragments, np.int8)
        quantiser.begin()
        for first in range(0, format.fragments, format.batch):
            count = min(format.batch, format.fragments - first)
            quantiser.batch(difference, first, count, lanes, exponents)
        nowhere = np.zeros(format.fragments, bool)
        self._keep = lambda: quantiser.keep(difference, lanes, exponents, nowhere)
        return [row.tobytes() for row in lanes], [int(each) for each in exponents]

    def skip(self, round_: int) -> None:
        with self._network.changed:
            self._offer(round_, None)

    def wait(self, round_: int) -> Stepped | Commit | None:
        network, session, worker = self._network, self._session, self._worker
        given, self._given = self._given, None
        with network.changed:
            if given is None:
                return self._ended(round_)
            network.wait(lambda: network.go >= round_ or session.is_over())
            told_in, told = worker.version
            told = told if told_in == round_ else 0
            every = network.every
            if every == 1 or (every > 1 and (network.contributions or told >= every - 1)):
                self._offer(round_, given)
                commit = self._ended(round_)
                if commit is not None:
                    self._keep()
                return commit
            staleness, largest = [], 0
            for rank in range(len(network.servers)):
                if not network.turn(self._number, session.is_over):
                    return None
                staleness.append(network.push(self._number, rank, *given[:2]))
                largest = max(largest, network.versions[rank])
                network.log.append(("push", self._number, rank))
            self._keep()
            worker.version = round_, largest
            return Stepped(round_, 1, largest, tuple(staleness))

    def _offer(self, round_: int, offer: tuple[list[bytes], list[int], int] | None) -> None:
        network = self._network
        network.wait(lambda: network.go >= round_ or self._session.is_over())
        if self._session.is_over():
            return
        network.contributions[self._number] = offer
        network.settle(round_)
        network.changed.notify_all()

    def _ended(self, round_: int) -> Commit | None:
        commit = self._session.wait_commit(round_)
        self._reads = commit is not None
        return commit
