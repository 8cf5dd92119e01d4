# SPDX-License-Identifier: Apache-2.0
"""R8, R11 to R15 from the trainer's side, on a session that sums float vectors in this process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.fake_session import FakeNetwork
from tests.trainer_lab import LINEAR, Outcome, run_job
from trainer import JobError, weights
from trainer.metrics import Metrics
from trainer.pace import Pace

DIGITS = Path(__file__).resolve().parents[2] / "trainer" / "jobs" / "digits"

JOB = (
    """\
import torch
import numpy as np
from torch import nn
from trainer import Settings

settings = Settings(batch=40, epochs=2, quorum=1.0)
calls = 0
"""
    + LINEAR
    + """
def model():
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.1), nn.Linear(4, 1))

def loss(model, batch):
    global calls
    calls += 1
    return (model(batch["x"].repeat(2, 1)) - batch["y"].repeat(2, 1)).square().mean()

def success(model, batch):
    return (model(batch["x"]) - batch["y"]).abs().squeeze(1) < 0.5

def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
"""
)


def make(folder: Path, text: str = JOB) -> Path:
    folder.mkdir()
    (folder / "job.py").write_text(text)
    return folder


def checked(outcome: Outcome) -> list[list[dict[str, Any]]]:
    """All members' metrics, after the invariant: the same weights after every committed round."""
    for error in outcome.errors:
        if error is not None:
            raise error
    metrics = [outcome.metrics(number) for number in range(1, len(outcome.folders) + 1)]
    for lines in zip(*metrics, strict=True):
        for key in ("round", "phase", "samples", "weights_sha256"):
            assert len({line[key] for line in lines}) == 1, (key, lines)
    return metrics


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    folder = tmp_path_factory.mktemp("digits")
    return run_job(DIGITS, folder, rounds=90, test_every=40, quorum=1.0, save_gradients=True)


def test_digits_on_four_members(digits: Outcome) -> None:
    first = checked(digits)[0]
    tests = [line for line in first if line["phase"] == "test"]
    assert [line["trained_rounds"] for line in tests] == [40, 80, 90]
    assert [line["samples"] for line in tests] == [359] * 3  # all of the test set, every time
    assert tests[-1]["accuracy"] > 0.93
    assert [what for _, what in digits.network.decisions if what != "continue"] == [
        "test",
        "test",
        "test",
        "end",
    ]
    final = json.loads((digits.folders[2] / "out" / "final.json").read_text())
    assert final["rounds"] == 90
    assert final["accuracy"] == tests[-1]["accuracy"]
    assert final["weights_sha256"] == first[-1]["weights_sha256"]


def test_the_metrics_say_where_the_time_went(digits: Outcome) -> None:
    for number in range(1, 5):
        for line in digits.metrics(number):
            assert line["t_start"] <= line["t_offer"] <= line["t_commit"] <= line["t_end"]
            parts = (line[f"seconds_{what}"] for what in ("compute", "wait", "network"))
            assert abs(sum(parts) - (line["t_end"] - line["t_start"])) < 1e-9
    train = [line for line in digits.metrics(2) if line["phase"] == "train"]
    assert len(train) == 90
    assert all(line["samples"] == 120 and line["own_samples"] == 30 for line in train)
    assert train[0]["loss"] > 2 > 0.5 > train[-1]["loss"]


def test_progress_is_reported(digits: Outcome) -> None:
    last = digits.sessions[0].reports[-1]
    assert last["rounds_total"] == last["trained_rounds"] == 90
    assert last["accuracy"] > 0.93
    shares = sum(last[f"share_{what}"] for what in ("compute", "wait", "network"))
    assert shares == pytest.approx(1)


def test_a_test_gives_signs_of_life(digits: Outcome) -> None:
    """Or a long one would be taken for a program that has stopped (the job's `stall_s`)."""
    assert all(session.signs_of_life > 2 for session in digits.sessions)


def test_the_saved_model_is_a_state_dict_with_the_last_weights(digits: Outcome) -> None:
    folder = digits.folders[3]
    state = torch.load(folder / "out" / "model.pt", weights_only=True)
    layout = json.loads((folder / "prepared.json").read_text())["model"]
    arrays = {name: tensor.numpy() for name, tensor in state.items()}
    assert weights.weights_sha256(layout, arrays) == digits.metrics(1)[-1]["weights_sha256"]
    assert not list((folder / "out").glob("*.part"))


def test_gradients_can_be_kept(digits: Outcome) -> None:
    saved = [np.load(folder / "out" / "gradients" / "7.npz") for folder in digits.folders]
    assert [int(each["samples"]) for each in saved] == [30] * 4
    due = sum(each["vector"].astype(np.float64) for each in saved)
    for each in saved:
        assert np.array_equal(each["total"], due.astype(np.float32))
        assert int(each["n"]) == 120
        assert each["counted"].tolist() == [[number, 30] for number in range(1, 5)]


def test_four_members_compute_what_one_does(tmp_path: Path) -> None:
    """R12: the sum over four shares is the gradient of the whole batch (first round, whole data)."""
    text = (DIGITS / "job.py").read_text().replace("test = np.arange(len(labels)) % 5 == 4", "")
    text = text.replace("~test", "slice(0, 120)").replace("[test]", "[:10]")
    job = make(tmp_path / "job", text)
    totals = []
    for members in (1, 4):
        settings = {"rounds": 1, "quorum": 1.0, "save_gradients": True}
        outcome = run_job(job, tmp_path / str(members), members, **settings)
        checked(outcome)
        totals.append(np.load(outcome.folders[0] / "out" / "gradients" / "1.npz")["total"])
    assert np.allclose(totals[0], totals[1], rtol=1e-4, atol=1e-4)


def test_uneven_shares_batchnorm_and_dropout(tmp_path: Path) -> None:
    outcome = run_job(make(tmp_path / "job"), tmp_path / "run", members=3)
    metrics = checked(outcome)
    train = [line for line in metrics[0] if line["phase"] == "train"]
    assert len(train) == 8
    assert train[0]["counted"] == {"1": 13, "2": 13, "3": 14}
    assert metrics[0][-1]["samples"] == 42
    # BatchNorm's statistics moved, averaged over the members; its count of batches did not.
    state = torch.load(outcome.folders[1] / "out" / "model.pt", weights_only=True)
    assert state["1.running_var"].ne(1).all()
    assert state["1.num_batches_tracked"] == 0


def test_a_run_can_be_repeated_bit_for_bit(tmp_path: Path) -> None:
    job = make(tmp_path / "job")
    hashes = [
        # one member: in threads, the others' dropout would share PyTorch's generator
        checked(run_job(job, tmp_path / name, members=1, seed=4))[0][-1]["weights_sha256"]
        for name in ("a", "b")
    ]
    assert hashes[0] == hashes[1]


def test_rounds_close_at_the_quorum(tmp_path: Path) -> None:
    """R13: three fast members at 90 % need 60 % of the slow one's share, and it stops there."""
    settings = {"quorum": 0.9, "microbatch_seconds": 0.004, "slow.h4": 4, "rounds": 12}
    outcome = run_job(DIGITS, tmp_path, batch=400, **settings)
    train = [line for line in checked(outcome)[3] if line["phase"] == "train"]
    assert all(line["samples"] >= 360 for line in train)
    own = sorted(line["own_samples"] for line in train)
    assert own[len(own) // 2] < 100  # a share is 100
    assert all(each % 10 == 0 for each in own)


def test_a_round_that_closed_is_dropped(tmp_path: Path) -> None:
    settings = {"quorum": 0.75, "microbatch_seconds": 0.003, "slow.h4": 120, "rounds": 10}
    outcome = run_job(DIGITS, tmp_path, batch=400, **settings)
    train = [line for line in checked(outcome)[3] if line["phase"] == "train"]
    assert sum("4" not in line["counted"] for line in train) >= 5
    assert all(line["samples"] >= 300 for line in train)
    assert any(line["loss"] is None for line in train), "it works on none that has closed already"


def test_the_jobs_own_end_and_scheduler(tmp_path: Path) -> None:
    text = JOB.replace("epochs=2", "test_every=3") + (
        "\ndef done(state):\n    return state.accuracy is not None and state.round >= 5\n"
        "def scheduler(optimizer, rounds):\n    assert rounds is None\n"
        "    return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)\n"
    )
    outcome = run_job(make(tmp_path / "job", text), tmp_path / "run", members=2)
    checked(outcome)
    assert outcome.network.decisions == [
        (1, "continue"),
        (2, "continue"),
        (3, "test"),
        (4, "continue"),
        (5, "continue"),
        (6, "test"),
        (7, "end"),
    ]


FAILS = {
    "forward": (
        JOB.replace("calls += 1", "calls += 1\n    if calls > 15: raise ValueError('too many')"),
        r"^ValueError: too many \(job.py:21, in loss\(\)\)$",
    ),
    "success": (
        JOB.replace("return (model(batch", "assert len(batch['x']) < 3\n    return (model(batch"),
        r"^AssertionError\(\) \(job.py:25, in success\(\)\)$",
    ),
    "nan": (
        JOB.replace(
            "calls += 1", "calls += 1\n    if calls > 15: model[3].weight.data[0] = np.nan"
        ),
        r"^round \d+: the gradient of parameter '0.weight' is not finite \(nan\)",
    ),
}


@pytest.mark.parametrize("case", FAILS)
def test_a_member_that_cannot_go_on_stops_all(tmp_path: Path, case: str) -> None:
    text, message = FAILS[case]
    outcome = run_job(make(tmp_path / "job", text), tmp_path / "run", members=2)
    assert all(error is not None for error in outcome.errors)
    with pytest.raises(JobError, match=message):
        raise next(error for error in outcome.errors if isinstance(error, JobError))


def test_a_model_that_differs_between_hosts(tmp_path: Path) -> None:
    def tamper(number: int, folder: Path) -> None:
        if number == 2:
            arrays = weights.load(folder / "model.npz")
            arrays["0.weight"] = arrays["0.weight"][:, :2]
            weights.save(folder / "model.npz", arrays)

    job = make(tmp_path / "job")
    outcome = run_job(job, tmp_path / "run", members=2, tamper=tamper)
    with pytest.raises(JobError, match=r"'0.weight' is float32 \(4, 3\) here, .*\(4, 2\) there"):
        raise outcome.errors[1] or AssertionError


def test_fewer_samples_than_members(tmp_path: Path) -> None:
    job = make(tmp_path / "job", JOB.replace("[:161]", "[:2]"))
    outcome = run_job(job, tmp_path / "run", members=3)
    with pytest.raises(JobError, match=r"member 1 has no training samples: the 2 .* the 3 members"):
        raise outcome.errors[0] or AssertionError


def test_a_full_disk_is_one_line() -> None:
    with (
        pytest.raises(JobError, match=r"cannot write /dev/full: No space left on device"),
        Metrics(Path("/dev/full")) as metrics,
    ):
        metrics.round({"phase": "train", "seconds_compute": 0.0, "seconds_wait": 0.0}
                      | {"seconds_network": 0.0})  # fmt: skip


def test_metrics_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "out").touch()
    with pytest.raises(JobError, match=r"cannot write .*metrics.jsonl: "):
        Metrics(tmp_path / "out" / "metrics.jsonl").__enter__()


def test_pace() -> None:
    slept: list[float] = []
    warned: list[str] = []
    now = [0.0]

    def work(pace: Pace, seconds: float) -> None:
        begun = now[0]
        now[0] += seconds
        pace.keep(begun)

    paced = Pace(0.01, 4.0, lambda: now[0], slept.append, warned.append)
    work(paced, 0.1)  # the first may be late
    work(paced, 0.03)
    assert slept == [pytest.approx(0.01)]
    assert not warned
    work(paced, 0.05)
    work(paced, 0.05)
    assert len(slept) == 1
    assert warned == [
        "a micro-batch took 50.0 ms to compute, more than the 40.0 ms that it is set to last"
    ]
    unpaced = Pace(0.0, 3.0, lambda: now[0], slept.append, warned.append)
    work(unpaced, 0.01)
    assert slept[1] == pytest.approx(0.02)


def test_the_fake_needs_everybody() -> None:
    network = FakeNetwork(2, 10)
    session = network.session(1, {})
    with network.changed:
        network.enter("train", 1)
    session.next_phase()
    session.contribute(1, np.ones(2, np.float32), 5)
    assert not session.closed(1)
