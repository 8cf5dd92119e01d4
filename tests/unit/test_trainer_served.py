# SPDX-License-Identifier: Apache-2.0
"""System S from the trainer's side (S1 to S5), on servers in this process."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest

from tests.served_job import (
    ADAM,
    FALLING,
    MOMENTUM,
    NORM,
    Case,
    bits,
    enumerate_rounds,
    replayed,
    rows,
    run,
)
from tests.served_session import ServedNetwork
from tests.trainer_lab import run_job
from trainer import JobError
from trainer.partnered import Ahead

pytestmark = pytest.mark.usefixtures("one_thread")


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
