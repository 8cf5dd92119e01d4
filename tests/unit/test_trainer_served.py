# SPDX-License-Identifier: Apache-2.0
"""System S from the trainer's side (S1 to S5), on servers in this process."""

from __future__ import annotations

import hashlib
import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nicps.client import Phase
from nicps.job.checkpoints import rounds_before
from tests.served_session import FakeServed, ServedNetwork, ServedSession
from tests.served_training import Reference, vector_of
from tests.trainer_lab import Outcome, run_job
from trainer import JobError, weights
from trainer.decisions import Decisions
from trainer.job import load
from trainer.partnered import Ahead
from trainer.prepare import RESUME, prepare
from trainer.records import Records
from trainer.state import Saved
from trainer.training import Training

JOB = """\
import torch
import numpy as np
from torch import nn
from trainer import Settings

settings = Settings(batch=40, rounds=6, test_every=6, quorum=1.0, micro_batches=1, checkpoint_s=0.0)

def data(path):
    rng = np.random.default_rng(7)
    x = rng.standard_normal((203, 3)).astype(np.float32)
    y = x @ np.float32([[1], [2], [-1]])
    return {"x": x[:161], "y": y[:161]}, {"x": x[161:], "y": y[161:]}

def model():
    return nn.Sequential(nn.Linear(3, 300), nn.Tanh(), nn.Linear(300, 1))

def loss(model, batch):
    return (model(batch["x"]) - batch["y"]).square().mean()

def success(model, batch):
    return (model(batch["x"]) - batch["y"]).abs().squeeze(1) < 0.5

def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.01)
"""
MOMENTUM = ("SGD(parameters, lr=0.01)", "SGD(parameters, lr=0.01, momentum=0.9, weight_decay=1e-3)")
ADAM = ("SGD(parameters, lr=0.01)", "Adam(parameters, lr=0.01)")
NORM = ("nn.Tanh()", "nn.BatchNorm1d(300), nn.Tanh()")
FALLING = (
    "\ndef optimizer",
    "\ndef scheduler(optimizer, rounds):\n"
    "    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, rounds)\n\ndef optimizer",
)


pytestmark = pytest.mark.usefixtures("one_thread")


@dataclass
class Case:
    """A run: `changes` to the job, servers, and workers' speeds."""

    changes: Sequence[tuple[str, str]] = ()
    servers: int = 1
    speeds: Sequence[float] = (1, 1, 0.3)
    settings: dict[str, Any] = field(default_factory=dict)


def run(folder: Path, case: Case, prepare: Any = None) -> tuple[ServedNetwork, Outcome]:
    """Servers are the first members."""
    text = JOB
    for old, new in case.changes:
        assert old in text
        text = text.replace(old, new)
    (folder / "job").mkdir(parents=True)
    (folder / "job" / "job.py").write_text(text)
    servers = range(1, case.servers + 1)
    speeds = [1.0] * case.servers + [*case.speeds]
    network = ServedNetwork(len(speeds), 40, servers, speeds=speeds)
    if prepare is not None:
        prepare(network)
    settings = {"system": "S", "lane": "i32", **case.settings}
    outcome = run_job(
        folder / "job",
        folder / "run",
        network.members,
        network=network,
        programs=network.programs(),
        **settings,
    )
    errors = [error for error in outcome.errors if error is not None]
    for error in sorted(errors, key=lambda error: type(error).__name__ == "JobAborted"):
        raise error
    return network, outcome


def replayed(network: ServedNetwork, outcome: Outcome, folder: Path) -> Reference:
    """The same run by the reference."""
    prepared = json.loads((folder / "run" / "prepared" / "prepared.json").read_text())
    job = load(folder / "job", prepared["settings"])
    records = Records(outcome.folders[0] / "train.bin", prepared["train"]["fields"])
    order = weights.order(prepared["model"])
    initial = vector_of(job.model(), order)
    workers = network.all_working
    reference = Reference(job, initial, records, workers, len(network.servers), order)
    reference.replay(network.log)
    return reference


def rows(outcome: Outcome, number: int, phase: str) -> list[dict[str, Any]]:
    return [row for row in outcome.metrics(number) if row["phase"] == phase]


CASES = {
    "SGD, T=1": Case(settings={"sync_every": 1}),
    "SGD, T=2, two servers": Case(servers=2, settings={"sync_every": 2}),
    "momentum, T=5, two servers": Case([MOMENTUM], 2, settings={"sync_every": 5, "lane": "i16"}),
    "Adam, T=6, narrow": Case([ADAM], settings={"sync_every": 6, "lane": "i8"}),
    "momentum, T=64": Case(
        [MOMENTUM], speeds=(1, 0.4), settings={"sync_every": 64, "rounds": 70, "test_every": 64}
    ),
    "Adam, T=0": Case([ADAM], settings={"sync_every": 0, "test_every": 4}),
    "no staleness, T=5": Case(settings={"sync_every": 5, "staleness": False}),
    "buffers, a falling rate, T=4": Case([NORM, FALLING, MOMENTUM], settings={"sync_every": 4}),
    "buffers, a falling rate, T=0": Case([NORM, FALLING], 2, settings={"sync_every": 0}),
}


@pytest.mark.parametrize("name", CASES)
def test_weights_are_those_of_a_reference_in_whole_numbers(tmp_path: Path, name: str) -> None:
    """S1 to S4: bit for bit, after each synchronisation, at all members."""
    case = CASES[name]
    network, outcome = run(tmp_path, case)
    reference = replayed(network, outcome, tmp_path)
    assert reference.commits
    for number in range(case.servers + 1, network.members + 1):
        found = rows(outcome, number, "train")
        assert [row["weights_sha256"] for row in found] == reference.commits
        assert [row["trained_rounds"] for row in found] == reference.rounds
        told = [s for row in rows(outcome, number, "push") for s in row["staleness"]]
        assert told == [s for worker, _, s in reference.staleness if worker == number]
    for number in range(1, case.servers + 1):
        found = {row["round"]: row["weights_sha256"] for row in rows(outcome, number, "train")}
        assert found.items() <= dict(enumerate_rounds(outcome, reference)).items()


def enumerate_rounds(outcome: Outcome, reference: Reference) -> list[tuple[int, str]]:
    """Rounds, and the weights after them."""
    numbers = [row["round"] for row in rows(outcome, outcome.network.members, "train")]
    return list(zip(numbers, reference.commits, strict=True))


def bits(
    network: ServedNetwork, outcome: Outcome, folder: Path, *, interrupted: bool = False
) -> Reference:
    """After the assertion that all workers that are left have the weights of the reference.

    Args:
        interrupted: a worker may have been called away before it had pulled what a commit came to.
    """
    reference = replayed(network, outcome, folder)
    due = list(zip(reference.commits, reference.rounds, strict=True))
    for number in network.working():
        lines = rows(outcome, number, "train")
        found = [(row["weights_sha256"], row["trained_rounds"]) for row in lines]
        assert found == [each for each in due if each in found or not interrupted]
        assert found[-1] == due[-1]
    return reference


@pytest.mark.parametrize("every", [0, 6])
def test_a_worker_is_lost_in_its_push(tmp_path: Path, every: int) -> None:
    """What one server has of its step stays, and the other server never gets it."""

    def script(network: ServedNetwork) -> None:
        def before(turn: int) -> None:
            if network.log[-1] == ("push", 4, 0) and 4 in network.live:
                network.evict(4)

        network.before = before

    settings = {"sync_every": every, "rounds": 12, "test_every": 6}
    case = Case([MOMENTUM], 2, (1, 1, 1), settings)
    network, outcome = run(tmp_path, case, script)
    assert ("lost", 4) in network.log and network.live == {1, 2, 3, 5}
    assert [event for event in network.log if event == ("push", 4, 1)] == []
    reference = bits(network, outcome, tmp_path)
    assert len(reference.commits) > 1
    if not every:  # six rounds of the two that are left
        before = network.log[: network.log.index(("barrier",))]
        assert 12 <= sum(event[0] == "push" and event[2] == 0 for event in before) <= 14


def test_a_worker_is_lost_in_a_synchronisation(tmp_path: Path) -> None:
    """Those that have offered are averaged without it."""

    def script(network: ServedNetwork) -> None:
        def before(turn: int) -> None:
            if len(network.contributions) == 2 and 4 in network.live:
                assert network.contributions.keys() == {2, 3}
                network.evict(4)

        network.before = before

    case = Case(speeds=(1, 1, 0.05), settings={"sync_every": 4, "rounds": 8, "test_every": 8})
    network, outcome = run(tmp_path, case, script)
    lost = network.log.index(("lost", 4))
    assert network.log[lost + 1] == ("commit", (2, 3))
    bits(network, outcome, tmp_path)


@pytest.mark.parametrize("every", [0, 1, 5])
def test_a_round_is_dropped_in_the_middle(tmp_path: Path, every: int) -> None:
    """The next phase goes on from what the servers have; a step that was on its way is nobody's."""
    dropped = []

    def script(network: ServedNetwork) -> None:
        def before(turn: int) -> None:
            if turn in (7, 19, 31) and network.kind == "train":
                dropped.append(network.open_round)
                network.drop()

        network.before = before

    settings = {"sync_every": every, "lane": "i8", "rounds": 9, "test_every": 5}
    network, outcome = run(tmp_path, Case([ADAM], 1, (1, 0.6, 1), settings), script)
    assert len(dropped) == 3
    bits(network, outcome, tmp_path, interrupted=True)


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


def test_rows_say_what_a_push_counted_for(tmp_path: Path) -> None:
    """S2, S3; and the times of a row make up its time."""
    settings = {"sync_every": 6, "rounds": 12, "test_every": 12}
    _, outcome = run(tmp_path, Case([], 2, (1, 1, 0.1), settings=settings))
    slow, fast = rows(outcome, 5, "push"), rows(outcome, 3, "push")
    assert max(s for row in slow for s in row["staleness"]) > 2
    assert min(s for row in fast for s in row["staleness"]) == 1
    for row in slow + fast:
        assert len(row["staleness"]) == 2 and row["version"] >= 1
        assert row["t_start"] <= row["t_offer"] <= row["t_commit"] <= row["t_end"]
        parts = (row[f"seconds_{what}"] for what in ("compute", "wait", "network"))
        assert sum(parts) == pytest.approx(row["seconds"])
    for row in rows(outcome, 3, "train"):
        assert row["samples"] == sum(row["counted"].values()) > 40
    final = json.loads((outcome.folders[2] / "out" / "final.json").read_text())
    took = [row["t_end"] - row["t_start"] for row in fast + rows(outcome, 3, "train")]
    assert final["step_seconds"] == pytest.approx(statistics.median(took))


def in_turn(self: Ahead, round_: int, step: int) -> None:
    """Nothing is computed before all parameters are there."""


def test_a_step_is_computed_while_its_parameters_arrive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a push. After a synchronisation all others wait until it has been read. No bit depends on it."""
    settings = {"sync_every": 5, "rounds": 20, "test_every": 10}
    network, outcome = run(tmp_path / "ahead", Case([ADAM, NORM], 2, (1,), settings))
    bits(network, outcome, tmp_path / "ahead")
    log, worker = network.log, network.members
    kinds = [event[0] for event in log if event[1:2] == (worker,) or event[0] == "commit"]
    after_pushes = "step push push waits pull waits pull waits"  # layer by layer, from two servers
    assert " ".join(kinds).count(after_pushes) >= 10
    assert "commit waits" not in " ".join(kinds)
    with monkeypatch.context() as patch:
        patch.setattr(Ahead, "compute", in_turn)
        network, plain = run(tmp_path / "plain", Case([ADAM, NORM], 2, (1,), settings))
    assert not [event for event in network.log if event[0] == "waits"]
    hashes = [
        [row["weights_sha256"] for row in rows(of, worker, "train")] for of in (outcome, plain)
    ]
    assert hashes[0] == hashes[1] and len({*hashes[0]}) == len(hashes[0]) >= 4


def test_a_model_that_reads_parameters_early_waits_for_all_of_them(tmp_path: Path) -> None:
    early = "nn.functional.linear(torch.tanh(model[0](batch['x'])), model[2].weight, model[2].bias)"
    change = ('(model(batch["x"]) - batch["y"]).square()', f"({early} - batch['y']).square()")
    settings = {"sync_every": 6, "rounds": 12, "test_every": 12}
    network, outcome = run(tmp_path, Case([change], settings=settings))
    prepared = json.loads((outcome.folders[0] / "prepared.json").read_text())
    assert prepared["ahead"] is False
    (note,) = (text for text in prepared["notes"] if "sync_every" not in text)
    assert note.startswith("a worker computes a step once all parameters have come")
    bits(network, outcome, tmp_path)
    assert not [event for event in network.log if event[0] == "waits"]


def test_a_step_that_is_not_finite_names_the_parameter(tmp_path: Path) -> None:
    changes = [("return (model(batch", "return 1e30 * (model(batch"), ("lr=0.01", "lr=1e30")]
    with pytest.raises(JobError, match=r"round 1: the step of parameter '0.weight' is not finite"):
        run(tmp_path, Case(changes, settings={"sync_every": 2}))


def test_a_step_that_is_too_large_names_the_parameter(tmp_path: Path) -> None:
    message = (  # the index is one of its 300 numbers; 1,200 others lie before it in the vector
        r"^parameter '2.weight': the step has .* at index [12]?\d?\d: servers take steps below 2\*\*21.* smaller"
    )
    with pytest.raises(JobError, match=message):
        run(tmp_path, Case([("lr=0.01", "lr=1e8")], settings={"sync_every": 2}))


def test_an_agent_without_servers(tmp_path: Path) -> None:
    """It has sent a phase of training, and not what the servers are."""

    def script(network: ServedNetwork) -> None:
        network.serves = False

    with pytest.raises(JobError, match=r"^system=S: this host's agent has no parameter servers"):
        run(tmp_path, Case(settings={"sync_every": 2}), script)


DIGITS = Path(__file__).resolve().parents[2] / "trainer" / "jobs" / "digits"


def test_digits_is_learned(tmp_path: Path) -> None:
    """A job that ships, as it is: a slow worker, lanes of 16 bits, and ten micro-batches."""
    network = ServedNetwork(4, 120, speeds=(1, 1, 1, 0.25))
    settings = {"system": "S", "sync_every": 16, "rounds": 90, "test_every": 30}
    outcome = run_job(DIGITS, tmp_path, 4, network=network, programs=network.programs(), **settings)
    assert outcome.errors == [None] * 4
    tests = [rows(outcome, number, "test") for number in range(1, 5)]
    for of_all in zip(*tests, strict=True):
        assert len({row["weights_sha256"] for row in of_all}) == 1
    assert tests[0][-1]["accuracy"] > 0.9
    pushes = {number: len(rows(outcome, number, "push")) for number in (2, 3, 4)}
    assert pushes[4] < 0.7 * pushes[3]  # nobody has waited for it but in synchronisations
