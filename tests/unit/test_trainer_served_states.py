# SPDX-License-Identifier: Apache-2.0
"""System S: what is tested, saved and counted, at tests, alarms and the loss of a server; servers in this process."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nicps.client import Phase
from nicps.job.checkpoints import rounds_before
from tests.served_job import ADAM, MOMENTUM, NORM, Case, bits, rows, run
from tests.served_session import FakeServed, ServedNetwork, ServedSession
from tests.served_training import vector_of
from trainer.decisions import Decisions
from trainer.job import load
from trainer.prepare import RESUME, prepare
from trainer.state import Saved
from trainer.training import Training

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(("every", "servers"), [(5, 1), (1, 2)])
def test_what_is_tested_in_the_middle_of_a_round_is_the_last_commit(
    tmp_path: Path, every: int, servers: int
) -> None:
    """A new lead may judge so when workers have pushed already."""
    tested = []

    def script(network: ServedNetwork) -> None:
        def before(turn: int) -> None:
            pushed = network.versions[0] > 1 or every == 1
            if len(network.commits) == 2 and pushed and network.kind == "train" and not tested:
                network.drop("test")
                tested.append(network.open_round)

        network.before = before

    settings = {"sync_every": every, "rounds": 12, "test_every": 12}
    network, outcome = run(tmp_path, Case([MOMENTUM, NORM], servers, settings=settings), script)
    bits(network, outcome, tmp_path)
    last = rows(outcome, network.members, "train")[1]
    for number in range(1, network.members + 1):
        (row,) = (row for row in rows(outcome, number, "test") if row["round"] == tested[0])
        for key in ("weights_sha256", "trained_rounds"):
            assert row[key] == last[key]


def test_a_server_pulls_for_a_test_before_that_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not lead, and has expected none: once a test begins no server answers."""
    next_phase = ServedSession.next_phase

    def enters(self: ServedSession) -> Phase:
        phase = next_phase(self)
        self.network.log.append(("enters", self.number, phase.kind))
        return phase

    def script(network: ServedNetwork) -> None:
        def before(turn: int) -> None:
            if len(network.commits) == 2 and network.kind == "train" and not tested:
                tested.append(turn)
                network.drop("test")

        network.before = before

    tested: list[int] = []
    monkeypatch.setattr(ServedSession, "next_phase", enters)
    settings = {"sync_every": 2, "rounds": 12, "test_every": 12}
    network, _ = run(tmp_path, Case([], 2, (1, 1), settings), script)
    of_server = [event[::2] for event in network.log if event[:2] in (("pull", 2), ("enters", 2))]
    assert of_server[:4] == [("enters", "train"), ("pull", 0), ("pull", 1), ("enters", "test")]


def test_what_is_kept_in_the_middle_of_a_round_is_the_last_commit(tmp_path: Path) -> None:
    """R18: and the worker goes on as if nothing had been."""
    kept = []

    def script(network: ServedNetwork) -> None:
        def before(turn: int) -> None:
            if len(network.commits) == 1 and ("step", 3) in network.log[-3:] and not kept:
                kept.append(len(network.log))
                network.sessions[3].on_keep()

        network.before = before

    network, outcome = run(tmp_path, Case([ADAM], settings={"sync_every": 5}), script)
    reference = bits(network, outcome, tmp_path)
    saved = Saved(outcome.folders[2] / "checkpoint.npz")
    vector = np.concatenate([array.ravel() for array in saved.model.values()])
    assert hashlib.sha256(vector.tobytes()).hexdigest() == reference.commits[0]
    assert saved.head["progress"]["round"] == reference.rounds[0]


def test_a_checkpoint_has_the_number_of_synchronisations(tmp_path: Path) -> None:
    """A round is as many steps as there are workers, so there are more of these. A result counts synchronisations."""
    settings = {"sync_every": 6, "rounds": 12, "test_every": 6, "checkpoint_s": 30.0}
    network, outcome = run(tmp_path, Case(settings=settings))
    checkpoint, again = outcome.folders[0] / "checkpoint.npz", tmp_path / "again"
    prepared = prepare(tmp_path / "job", again, None, {"rounds": 20}, checkpoint)
    assert 2 <= rounds_before(prepared) == len(network.commits) < 12
    assert Saved(again / RESUME).head["commits"] == len(network.commits)


def test_what_has_not_been_pulled_is_not_saved(tmp_path: Path) -> None:
    """The second server does not lead. Its agent is told why at once, and does not wait for a file."""
    told: list[tuple[int, str]] = []

    def script(network: ServedNetwork) -> None:
        def before(turn: int) -> None:
            if len(network.commits) == 2 and network.versions[0] and not told:
                session = network.sessions[2]
                session.checkpoint = lambda round_, error="": told.append((round_, error))  # type: ignore[method-assign]
                session.on_keep()

        network.before = before

    settings = {"sync_every": 4, "rounds": 12, "test_every": 12}
    run(tmp_path, Case([], 2, (1, 1), settings), script)
    ((_, why),) = told
    assert why == "the state after round 2 has not been pulled here"


@pytest.mark.parametrize("comes", [False, True])
def test_where_the_last_commit_cannot_be_pulled_the_one_before_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, comes: bool
) -> None:
    """R22: its server has gone. A step of this worker's own is no state of the job's. In the next phase it pulls what
    that commit came to, and tells it: nobody pushes before that.
    """
    saved: list[np.ndarray] = []
    wait_pulled = FakeServed.wait_pulled

    def save(self: Training, path: Path) -> None:
        saved.append(self.model.weights.copy())

    def script(network: ServedNetwork) -> None:
        def gone(self: FakeServed, round_: int) -> bool:
            saves = network.phases[1][-1].kind == "save"
            late = network.sessions[1].served is self and round_ == 2 and not saved
            if not late or (saves and comes):
                return wait_pulled(self, round_)
            if not saves:
                with network.changed:
                    network.enter("save", 2, to=[1])
            return False

        network.servers, network.all_working = (3,), {1, 2}
        network.saved = lambda source, digest: network.drop()  # type: ignore[method-assign]
        monkeypatch.setattr(FakeServed, "wait_pulled", gone)

    monkeypatch.setattr(Training, "save", save)
    network, _ = run(tmp_path, Case(speeds=(1, 1), settings={"sync_every": 5}), script)
    (again,) = (p for p in network.phases[1][1:] if p.kind == "train")
    assert (1, again.first_round - 1) in network.caught_up
    initial = vector_of(load(tmp_path / "job", {}).model())
    assert [(weights == initial).all() for weights in saved] == [not comes]


@pytest.mark.parametrize(("every", "servers"), [(4, 1), (1, 2), (0, 1)])
def test_tests_come_at_the_first_synchronisation_at_which_they_are_due(
    tmp_path: Path, every: int, servers: int
) -> None:
    """R15, and all members have the same weights in them, servers too."""
    settings = {"sync_every": every, "rounds": 14, "test_every": 5}
    network, outcome = run(tmp_path, Case([], servers, settings=settings))
    reference = bits(network, outcome, tmp_path)
    crossing = [
        after
        for before, after in zip([0, *reference.rounds], reference.rounds, strict=False)
        if after // 5 > before // 5 or after >= 14
    ]
    assert len(crossing) >= 3
    assert (crossing == [5, 10, 14]) == (every < 2)
    tests = [rows(outcome, number, "test") for number in range(1, network.members + 1)]
    for of_all in zip(*tests, strict=True):
        assert len({row["weights_sha256"] for row in of_all}) == 1
    assert [row["trained_rounds"] for row in tests[0]] == crossing
    assert sum(row["samples"] for row in tests[0]) == 42 * len(crossing)


@pytest.mark.parametrize("servers", [1, 2])
def test_a_test_that_was_due_as_a_server_was_lost_comes_at_the_next_synchronisation(
    tmp_path: Path, servers: int
) -> None:
    """Training with another server is what the lead decides in place of it. The tests after it come as ever."""
    lost: list[int] = []

    def script(network: ServedNetwork) -> None:
        enter = network.enter

        def enters(kind: str, first_round: int, to: Any = ()) -> None:
            if kind == "test" and not lost:
                lost.append(first_round)
                kind = "train"
            enter(kind, first_round, to)

        network.enter = enters  # type: ignore[method-assign]

    settings = {"sync_every": 4, "rounds": 24, "test_every": 9}
    network, outcome = run(tmp_path, Case([], servers, settings=settings), script)
    reference = bits(network, outcome, tmp_path)
    counts = [0, *reference.rounds]
    due = [at for at in range(1, len(counts)) if counts[at] // 9 > counts[at - 1] // 9]
    assert len(lost) == 1 and counts[due[0] + 1] // 9 == counts[due[0]] // 9
    tested = [row["trained_rounds"] for row in rows(outcome, network.members, "test")]
    assert tested == [counts[due[0] + 1], *(counts[at] for at in due[1:]), counts[-1]]


@pytest.mark.parametrize("often", [False, True])
def test_a_server_that_does_not_lead_pulls_as_a_test_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, often: bool
) -> None:
    """It may expect one more `often`. The lead goes on then, and what it pulled meanwhile would have later pushes."""
    is_test_due = Decisions.is_test_due

    def expects(self: Decisions, before: int) -> bool:
        return is_test_due(self, before) or (often and self._session.number == 2)

    monkeypatch.setattr(Decisions, "is_test_due", expects)
    settings = {"sync_every": 2, "rounds": 8, "test_every": 4}
    network, outcome = run(tmp_path, Case([], 2, settings=settings))
    bits(network, outcome, tmp_path)
    tests = [rows(outcome, number, "test") for number in range(1, network.members + 1)]
    pulls = [event for event in network.log if event[:2] == ("pull", 2)]
    assert len(pulls) == 2 * len(tests[1]) == 4 < 2 * len(network.commits)
    assert not rows(outcome, 2, "train")
    for of_all in zip(*tests, strict=True):
        assert len({row["weights_sha256"] for row in of_all}) == 1
    digests = [set(of.values()) for of in network.digests.values()]
    assert all(len(of) == 1 for of in digests[:-1])
