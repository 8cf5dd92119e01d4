# SPDX-License-Identifier: Apache-2.0
"""Sessions without a network: loops in threads of one process, whose float vectors are summed up."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from nicps.client import Commit, JobAborted, Phase
from nicps.collective.lanes import fragments_of
from nicps.errors import NonFinite
from nicps.exchange import Exchange
from nicps.protocol.phase import equal_shares
from nicps.session import shared_form
from nicps.session.sized import Vector
from tests.collectives import Made, make

NEVER = 1 << 40
DEADLINE_S = 20.0


class FakeNetwork:
    """What the members' sessions share. Round r opens when the lead has decided after r - 1.

    Attributes: `after`, what happens when the lead has decided after a round, in place of going on: by round;
    `on_commit`, what happens when a round is committed, before anybody knows.
    """

    def __init__(self, members: int, batch: int, quorum: float = 1.0) -> None:
        self.members = members
        self.batch = batch
        self.part = quorum
        self.view = 1
        self.live = set(range(1, members + 1))
        self.changed = threading.Condition()
        self.sessions: dict[int, FakeSession] = {}
        self.phases: dict[int, list[Phase]] = {number: [] for number in self.live}
        self.kind = "none"
        self.open_round = 0
        self.ready: dict[int, tuple[int, str]] = {}
        self.offers: dict[int, dict[int, tuple[np.ndarray, int]]] = {}
        self.done: dict[int, dict[int, int]] = {}
        self.tallies: dict[int, dict[int, tuple[int, int]]] = {}
        self.vectors: dict[int, dict[int, Vector]] = {}  # of rounds of any size
        self.sized: dict[int, tuple[shared_form.Committed, Made]] = {}
        self.commits: dict[int, Commit] = {}
        self.told: dict[int, set[int]] = {}  # who learns of a commit
        self.digests: dict[int, dict[int, str]] = {}  # after a round, by member
        self.checkpoints: list[tuple[int, int]] = []  # (member, trained rounds)
        self.saves = False  # the lead wants to write one after the next training round
        self.reason: str | None = None
        self.decisions: list[tuple[int, str]] = []
        self.after: dict[int, Callable[[], None]] = {}
        self.on_commit: dict[int, Callable[[], None]] = {}
        self._returning: dict[
            int, str
        ] = {}  # members that load, and the digest that they must have
        self._numbers = 0

    @property
    def lead(self) -> int:
        """Who acts as node 1 (R22)."""
        return min(self.live)

    @property
    def quorum(self) -> float:
        """In samples."""
        return -(-self.batch * self.part // 1)

    def wait(self, condition: Callable[[], Any]) -> None:
        """Until `condition` holds; the caller has the lock."""
        met = self.changed.wait_for(lambda: self.reason or condition(), DEADLINE_S)
        assert met, "the members wait for each other"
        if self.reason:
            raise JobAborted(self.reason)

    def enter(self, kind: str, first_round: int, to: Iterable[int] = ()) -> None:
        """A new phase, for all live members or only for `to`; open offers of the old one are void.

        Who has been evicted hears of the end, too.
        """
        live = sorted(self.live)
        whole = self.shares(kind)
        self._numbers += 1
        for number in to or (self.phases if kind == "end" else live):
            self.phases[number].append(Phase(kind, first_round, self._numbers, whole))
        if not to:
            self.kind, self.open_round = kind, first_round
            self.offers.pop(first_round, None)
            self.done.pop(first_round, None)
        self.changed.notify_all()

    def shares(self, kind: str) -> tuple[int, ...]:
        """The members' parts of a round of such a phase."""
        counted = {"train": self.batch, "test": len(self.live)}.get(kind, 0)
        return equal_shares(counted, self.members, sorted(self.live))

    def settle(self, round_: int) -> None:
        """Commit the round if its quorum is there."""
        offers = self.offers.get(round_, {})
        counted = {number: samples for number, (_, samples) in offers.items()}
        enough = sum(counted.values()) >= self.quorum or len(counted) == len(self.live)
        if round_ == self.open_round and enough and round_ not in self.commits:
            commit = Commit(round_, sum(counted.values()), counted, -30, checkpoint=self.saves)
            self.commits[round_], self.saves = commit, False
            self.told[round_] = set(self.live)
            self.on_commit.pop(round_, lambda: None)()

    def settle_sized(self, round_: int) -> None:
        """Commit the round if all live members have given their vectors."""
        vectors = self.vectors.get(round_, {})
        if round_ != self.open_round or not self.live or not vectors.keys() >= self.live:
            return
        if round_ in self.sized:
            return
        listed = sorted(self.live)
        samples = {k: fragments_of(vectors[k].numbers, vectors[k].width) for k in listed}
        message = shared_form.Committed(
            round_, samples, -30, -30, Exchange.STRIPES, 0.0, self.view, tuple(listed), self.saves
        )
        self.sized[round_], self.saves = (message, make([vectors[k] for k in listed])), False
        self.told[round_] = set(self.live)
        self.on_commit.pop(round_, lambda: None)()
        self.changed.notify_all()

    def decided(self, round_: int, what: str, checkpoint: bool) -> None:
        """The lead's decision."""
        if round_ != self.open_round:
            return  # an old one, repeated by a new lead
        self.saves = checkpoint
        self.decisions.append((round_, what))
        action = self.after.pop(round_, None)
        if action is not None:
            action()
        elif what in ("continue", "more") and self.kind == "train":
            self.open_round = round_ + 1
            self.settle(round_ + 1)
            self.settle_sized(round_ + 1)
        else:
            self.enter("train" if what == "continue" else what, round_ + 1)
        self.changed.notify_all()

    # ---- hosts come and go

    def evict(self, number: int) -> None:
        """A member has left (R18): the view changes; the new lead, if there is one, decides again."""
        led = self.lead
        self._change(number)
        if self.lead != led and self.sessions[self.lead].decision is not None:
            self.decided(*self.sessions[self.lead].decision)
        self.settle_sized(self.open_round)
        self.changed.notify_all()

    def leave(self, number: int) -> None:
        """A member is evicted after the open round, and training goes on without it."""
        self._change(number)
        self.enter("train", self.open_round + 1)

    def _change(self, number: int) -> None:
        self.live ^= {number}
        self.view += 1

    def give_state(self, number: int) -> None:
        """R20, after the open round: the lead saves, the evicted member loads, and all train on."""
        self._returning[number] = ""
        self.enter("save", self.open_round + 1, to=[self.lead])

    def saved(self, source: int, digest: str) -> None:
        """The lead's state file is there: it goes to who returns."""
        for number in self._returning:
            self._returning[number] = digest
            folder = Path(self.sessions[number].workdir)
            shutil.copy(Path(self.sessions[source].workdir) / "state.npz", folder)
            self.enter("load", self.open_round + 1, to=[number])

    def loaded(self, number: int, digest: str) -> None:
        """Who has loaded is a member again, if its digest is right."""
        if self._returning.pop(number) != digest:
            self.reason = f"member {number} has loaded another state"
        self._change(number)
        self.enter("train", self.open_round + 1)

    def session(self, number: int, settings: Mapping[str, Any], name: str = "") -> FakeSession:
        """The session of one member."""
        self.sessions[number] = FakeSession(self, number, dict(settings), name or f"h{number}")
        return self.sessions[number]


class FakeSession:
    """`nicps.client.Session`'s interface for one member of a FakeNetwork."""

    def __init__(self, network: FakeNetwork, number: int, settings: dict[str, Any], name: str):
        self.network = network
        self.number = number
        self.members = network.members
        self.name = name
        self.settings = settings
        self.workdir = ""
        self.reports: list[dict[str, Any]] = []
        self.signs_of_life = 0
        self.failure: str | None = None
        self.on_keep: Callable[[], None] = lambda: None
        self.on_phase: Callable[[str], None] = lambda kind: None
        self.decision: tuple[int, str, bool] | None = None
        self._phase = 0  # how many phases this member has taken

    @property
    def view(self) -> int:
        return self.network.view

    @property
    def live(self) -> frozenset[int]:
        return frozenset(self.network.live)

    @property
    def lead(self) -> bool:
        return self.network.lead == self.number

    def ready(
        self,
        lanes: int,
        digest: str,
        *,
        residual: np.ndarray | None = None,
        settle: Callable[[], object] | None = None,
    ) -> None:
        self.residual = residual
        with self.network.changed:
            self.network.ready[self.number] = lanes, digest
            if len(self.network.ready) == self.members:
                if len(set(self.network.ready.values())) > 1:
                    self.network.reason = "the model differs between members"
                else:
                    self.network.enter("train", 1)
            self.network.changed.notify_all()
            self.network.wait(lambda: self._new_phase)

    @property
    def _new_phase(self) -> bool:
        return len(self.network.phases[self.number]) > self._phase

    def next_phase(self) -> Phase:
        with self.network.changed:
            self.network.wait(lambda: self._new_phase)
            self._phase = len(self.network.phases[self.number])  # older ones are over
            phase = self.network.phases[self.number][-1]
        self.on_phase(phase.kind)
        return phase

    def saved(self, number: int, round_: int, digest: str, error: str = "") -> None:
        with self.network.changed:
            assert number == self.network.phases[self.number][-1].number
            self.network.reason = self.network.reason or error or None
            self.network.saved(self.number, digest)

    def loaded(self, number: int, digest: str) -> None:
        with self.network.changed:
            assert number == self.network.phases[self.number][-1].number
            self.decision = None
            self.network.loaded(self.number, digest)

    def checkpoint(self, round_: int, error: str = "") -> None:
        if not error:
            self.network.checkpoints.append((self.number, round_))

    def need(self, round_: int) -> int:
        with self.network.changed:
            offers, done = self.network.offers.get(round_, {}), self.network.done.get(round_, {})
            others = {**done, **{number: samples for number, (_, samples) in offers.items()}}
            others.pop(self.number, None)
            return int(self.network.quorum - sum(others.values())) if others else NEVER

    def closed(self, round_: int) -> bool:
        with self.network.changed:
            if self.network.reason:
                raise JobAborted(self.network.reason)
            return round_ in self.network.commits or self._new_phase

    def progress(self, round_: int, samples: int) -> None:
        with self.network.changed:
            self.network.done.setdefault(round_, {})[self.number] = samples

    def contribute(self, round_: int, vector: np.ndarray, samples: int) -> None:
        finite = np.isfinite(vector)
        if not finite.all():
            index = int(np.argmin(finite))
            raise NonFinite(index, float(vector[index]))
        with self.network.changed:
            out = self.number not in self.network.live
            if out or round_ in self.network.commits or self._new_phase:
                return
            self.network.offers.setdefault(round_, {})[self.number] = vector.copy(), samples
            self.network.settle(round_)
            self.network.changed.notify_all()

    def exchange(self, round_: int, vector: Vector, call: int) -> shared_form.Committed | None:
        network = self.network
        with network.changed:
            if self.number in network.live and not self._new_phase:
                network.vectors.setdefault(round_, {})[self.number] = vector
                network.settle_sized(round_)
            told = network.told
            network.wait(lambda: self.number in told.get(round_, ()) or self._new_phase)
            if self.number not in told.get(round_, ()):
                return None
            message, made = network.sized[round_]
            vector.settle(made.outcome(sorted(message.counted).index(self.number)))
            return message

    def wait_commit(self, round_: int, out: np.ndarray | None = None) -> Commit | None:
        with self.network.changed:
            told = self.network.told
            self.network.wait(lambda: self.number in told.get(round_, ()) or self._new_phase)
            return self.network.commits[round_] if self.number in told.get(round_, ()) else None

    def sum(self, commit: Commit, out: np.ndarray) -> np.ndarray:
        total = np.zeros(len(out))
        for number in sorted(commit.counted):
            total += self.network.offers[commit.round][number][0]
        out[:] = total
        return out

    def applied(self, commit: Commit, digest: str = "") -> None:
        with self.network.changed:
            if not digest and commit.round in self.network.sized:
                return  # a part of a step
            self.network.digests.setdefault(commit.round, {})[self.number] = digest

    def tally(self, round_: int, succeeded: int, failed: int) -> tuple[int, int] | None:
        with self.network.changed:
            tallies = self.network.tallies.setdefault(round_, {})
            tallies[self.number] = succeeded, failed
            if tallies.keys() >= self.network.live:
                self.network.on_commit.pop(round_, lambda: None)()
            self.network.changed.notify_all()
            self.network.wait(lambda: tallies.keys() >= self.network.live or self._new_phase)
            if not tallies.keys() >= self.network.live:
                return None
            totals = np.sum(list(tallies.values()), axis=0)
            return int(totals[0]), int(totals[1])

    def decide(self, round_: int, what: str, *, checkpoint: bool = False) -> bool:
        with self.network.changed:
            self.decision = round_, what, checkpoint
            if self.lead:
                self.network.decided(*self.decision)
            return self.lead

    saturated = 0  # nothing is rounded here

    def alive(self) -> None:
        self.signs_of_life += 1

    def report(self, values: Mapping[str, Any]) -> None:
        self.reports.append(dict(values))

    def fail(self, message: str) -> None:
        self.failure = message
        with self.network.changed:
            self.network.reason = self.network.reason or message
            self.network.changed.notify_all()

    def close(self) -> None:
        pass
