# SPDX-License-Identifier: Apache-2.0
"""Sessions without a network: loops in threads of one process, whose float vectors are summed up."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from nicps.client import Commit, JobAborted, NonFinite, Phase

NEVER = 1 << 40
DEADLINE_S = 60.0


class FakeNetwork:
    """What the members' sessions share. Round r opens when node 1 has decided after r - 1."""

    def __init__(self, members: int, batch: int, quorum: float = 1.0) -> None:
        self.members = members
        self.quorum = -(-batch * quorum // 1)
        self.changed = threading.Condition()
        self.phases: list[Phase] = []
        self.open_round = 0
        self.ready: dict[int, tuple[int, str]] = {}
        self.offers: dict[int, dict[int, tuple[np.ndarray, int]]] = {}
        self.done: dict[int, dict[int, int]] = {}
        self.tallies: dict[int, dict[int, tuple[int, int]]] = {}
        self.commits: dict[int, Commit] = {}
        self.reason: str | None = None
        self.decisions: list[tuple[int, str]] = []

    def wait(self, condition: Callable[[], Any]) -> None:
        """Until `condition` holds; the caller has the lock."""
        met = self.changed.wait_for(lambda: self.reason or condition(), DEADLINE_S)
        assert met, "the members wait for each other"
        if self.reason:
            raise JobAborted(self.reason)

    def enter(self, kind: str, first_round: int) -> None:
        """A new phase; open offers of the old one are void."""
        self.phases.append(Phase(kind, first_round, len(self.phases) + 1))
        self.open_round = first_round
        self.offers.pop(first_round, None)
        self.done.pop(first_round, None)

    def settle(self, round_: int) -> None:
        """Commit the round if its quorum is there."""
        offers = self.offers.get(round_, {})
        counted = {number: samples for number, (_, samples) in offers.items()}
        enough = sum(counted.values()) >= self.quorum or len(counted) == self.members
        if round_ == self.open_round and enough and round_ not in self.commits:
            self.commits[round_] = Commit(round_, sum(counted.values()), counted, -30)

    def session(self, number: int, settings: Mapping[str, Any], name: str = "") -> FakeSession:
        """The session of one member."""
        return FakeSession(self, number, dict(settings), name or f"h{number}")


class FakeSession:
    """`nicps.client.Session`'s interface for one member of a FakeNetwork."""

    def __init__(self, network: FakeNetwork, number: int, settings: dict[str, Any], name: str):
        self.network = network
        self.number = number
        self.members = network.members
        self.name = name
        self.settings = settings
        self.workdir = ""
        self.view = 1
        self.reports: list[dict[str, Any]] = []
        self.failure: str | None = None
        self._phase = 0  # how many phases this member has taken

    def ready(self, lanes: int, digest: str) -> None:
        with self.network.changed:
            self.network.ready[self.number] = lanes, digest
            if len(self.network.ready) == self.members:
                if len(set(self.network.ready.values())) > 1:
                    self.network.reason = "the model differs between members"
                else:
                    self.network.enter("train", 1)
            self.network.changed.notify_all()
            self.network.wait(lambda: self.network.phases)

    def next_phase(self) -> Phase:
        with self.network.changed:
            self.network.wait(lambda: len(self.network.phases) > self._phase)
            self._phase += 1
            return self.network.phases[self._phase - 1]

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
            return round_ in self.network.commits or len(self.network.phases) > self._phase

    def progress(self, round_: int, samples: int) -> None:
        with self.network.changed:
            self.network.done.setdefault(round_, {})[self.number] = samples

    def contribute(self, round_: int, vector: np.ndarray, samples: int) -> None:
        finite = np.isfinite(vector)
        if not finite.all():
            index = int(np.argmin(finite))
            raise NonFinite(index, float(vector[index]))
        with self.network.changed:
            if round_ in self.network.commits or len(self.network.phases) > self._phase:
                return
            self.network.offers.setdefault(round_, {})[self.number] = vector.copy(), samples
            self.network.settle(round_)
            self.network.changed.notify_all()

    def wait_commit(self, round_: int, out: np.ndarray | None = None) -> Commit | None:
        with self.network.changed:
            phases = self.network.phases
            self.network.wait(lambda: round_ in self.network.commits or len(phases) > self._phase)
            return self.network.commits.get(round_)

    def sum(self, commit: Commit, out: np.ndarray) -> np.ndarray:
        total = np.zeros(len(out))
        for number in sorted(commit.counted):
            total += self.network.offers[commit.round][number][0]
        out[:] = total
        return out

    def tally(self, round_: int, succeeded: int, failed: int) -> tuple[int, int]:
        with self.network.changed:
            tallies = self.network.tallies.setdefault(round_, {})
            tallies[self.number] = succeeded, failed
            self.network.changed.notify_all()
            self.network.wait(lambda: len(tallies) == self.members)
            totals = np.sum(list(tallies.values()), axis=0)
            return int(totals[0]), int(totals[1])

    def decide(self, round_: int, what: str) -> None:
        with self.network.changed:
            self.network.decisions.append((round_, what))
            if what == "continue" and self.network.phases[-1].kind == "train":
                self.network.open_round = round_ + 1
                self.network.settle(round_ + 1)
            else:
                self.network.enter("train" if what == "continue" else what, round_ + 1)
            self.network.changed.notify_all()

    def report(self, values: Mapping[str, Any]) -> None:
        self.reports.append(dict(values))

    def fail(self, message: str) -> None:
        self.failure = message
        with self.network.changed:
            self.network.reason = self.network.reason or message
            self.network.changed.notify_all()

    def close(self) -> None:
        pass
