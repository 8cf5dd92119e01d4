# SPDX-License-Identifier: Apache-2.0
"""A job whose gradients go out in buckets while backward makes those after them, through the trainer's own loop."""

from __future__ import annotations

import re
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nicps.client import JobAborted
from nicps.errors import NonFinite
from nicps.steps import StepEnded
from tests.fake_session import FakeNetwork
from tests.trainer_lab import Outcome, run_job
from trainer.buckets import Buckets, Overlap
from trainer.errors import JobError
from trainer.settings import Settings, merge

LAYOUT: list[dict[str, Any]] = [
    {"name": "a", "kind": "parameter", "shape": [100]},
    {"name": "b", "kind": "parameter", "shape": [50]},
    {"name": "c", "kind": "parameter", "shape": [30]},
    {"name": "d", "kind": "parameter", "shape": [20]},
    {"name": "mean", "kind": "buffer", "shape": [7]},
]
SIZE = 40 * 4 / 2**20  # forty numbers

#: Three layers, a buffer that is averaged, and one of the layers' backward passes that can be watched.
JOB = """
import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from trainer import Settings

settings = Settings(batch=48, rounds=5, micro_batches=2, test_every=3, checkpoint_s=0.0, quorum=1.0)
before_first = lambda: None

class Watched(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return x.clone()

    @staticmethod
    def backward(context, gradient):
        before_first()
        return gradient

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Linear(32, 4)

    def forward(self, x):
        return self.last(torch.relu(Watched.apply(self.norm(self.first(x)))))

def data(path):
    x = np.random.default_rng(5).standard_normal((240, 16), np.float32)
    y = x[:, :4].argmax(1).astype(np.uint8)
    return {"x": x[:192], "y": y[:192]}, {"x": x[192:], "y": y[192:]}

def model():
    return Net()

def loss(model, batch):
    return cross_entropy(model(batch["x"]), batch["y"].long())

def success(model, batch):
    return model(batch["x"]).argmax(1) == batch["y"]

def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.2)
"""


@pytest.fixture
def job(tmp_path: Path) -> Path:
    folder = tmp_path / "watched"
    folder.mkdir()
    (folder / "job.py").write_text(JOB)
    return folder


def train(job: Path, folder: Path, members: int = 3, **more: Any) -> Outcome:
    settings = {"bucket_mb": 0.0005, "lane": "i8", **more}
    return run_job(job, folder, members, **settings)


def same_weights(outcome: Outcome, *numbers: int) -> list[str]:
    """After every round; the same at these members."""
    found = [[row["weights_sha256"] for row in outcome.metrics(number)] for number in numbers]
    assert all(each == found[0] for each in found)
    return found[0]


# ---- the pieces


def test_pieces_go_from_the_end_to_the_beginning_and_buffers_come_last() -> None:
    buckets = Buckets(LAYOUT, SIZE, "i16")
    assert buckets.pieces == [slice(150, 200), slice(100, 150), slice(0, 100), slice(200, 207)]
    assert buckets.piece_of == [2, 1, 0, 0]
    assert (buckets.width, buckets.room, len(buckets.residual)) == (16, 720, 207)
    whole = Buckets(LAYOUT[:4], 1.0, "i8")
    assert whole.pieces == [slice(0, 200)] and whole.piece_of == [0] * 4


class Step:
    """Takes buckets, and says what it has got; it can be held up, and can fail."""

    def __init__(self, fails: BaseException | None = None) -> None:
        self.taken: list[int] = []
        self.fails = fails
        self.came = threading.Condition()

    def average(self, vector: np.ndarray, residual: np.ndarray) -> None:
        if self.fails is not None:
            raise self.fails
        with self.came:
            self.taken.append(len(vector))
            vector[:] = 7.0
            self.came.notify_all()

    def wait(self, count: int) -> None:
        with self.came:
            assert self.came.wait_for(lambda: len(self.taken) == count, 10)


def test_a_bucket_goes_out_as_soon_as_it_is_whole_and_in_its_turn() -> None:
    step, vector = Step(), np.ones(207, np.float32)
    overlap = Overlap(Buckets(LAYOUT, SIZE, "i16"), vector, step)  # type: ignore[arg-type]
    overlap.note_gradient(1)  # out of turn
    overlap.note_gradient(3)
    assert step.taken == []
    overlap.note_gradient(2)
    step.wait(2)
    assert step.taken == [50, 50] and (vector[:100] == 1).all() and (vector[100:200] == 7).all()
    overlap.finish()
    assert step.taken == [50, 50, 100, 7]


@pytest.mark.parametrize("error", [StepEnded(), JobAborted("cancelled")])
def test_what_ends_the_exchange_is_raised_where_the_gradient_is_waited_for(
    error: BaseException,
) -> None:
    step = Step(error)
    overlap = Overlap(Buckets(LAYOUT, SIZE, "i8"), np.ones(207, np.float32), step)  # type: ignore[arg-type]
    with pytest.raises(type(error)):
        overlap.finish()


def test_a_number_that_is_not_finite_is_found_at_its_place() -> None:
    vector = np.ones(207, np.float32)
    vector[160] = np.inf
    overlap = Overlap(Buckets(LAYOUT, SIZE, "i8"), vector, Step())  # type: ignore[arg-type]
    with pytest.raises(NonFinite) as found:
        overlap.finish()
    assert found.value.index == 160


def test_the_state_is_saved_by_the_thread_that_computes() -> None:
    """While the other one waits for it."""
    saved: list[str] = []

    class Keeps(Step):
        def average(self, vector: np.ndarray, residual: np.ndarray) -> None:
            if not self.taken:
                overlap.aside(lambda: saved.append(threading.current_thread().name))
            super().average(vector, residual)

    step = Keeps()
    overlap = Overlap(Buckets(LAYOUT, SIZE, "i8"), np.ones(207, np.float32), step)  # type: ignore[arg-type]
    overlap.finish()
    assert saved == [threading.current_thread().name] and len(step.taken) == 4


# ---- settings


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"bucket_mb": 0}, "setting bucket_mb is 0.0; it must be more than 0"),
        ({"exchange": "switch"}, "it must be auto or stripes, as bucket_mb is set"),
        ({"save_gradients": True}, "it must be false, as bucket_mb is set"),
        ({"clip": 1.0}, "setting clip is 1.0; it must be none, as bucket_mb is set"),
        ({"rank": 1}, "setting rank is 1; it must be none, as bucket_mb is set"),
    ],
)
def test_what_does_not_go_with_buckets(values: dict[str, Any], said: str) -> None:
    with pytest.raises(JobError) as error:
        merge(Settings(epochs=1), {"bucket_mb": 1, **values})
    assert said in str(error.value)


def test_buckets_imply_a_whole_quorum_and_leave_the_lanes() -> None:
    found = merge(Settings(epochs=1), {"bucket_mb": 1, "micro_batches": 1, "lane": "i8"})
    assert (found.quorum, found.lane) == (1.0, "i8")


# ---- the loop


def test_the_last_layers_bucket_is_summed_while_backward_goes_on(job: Path, tmp_path: Path) -> None:
    """Backward of the first layer waits for the sum of the last one's: it would wait for ever otherwise."""
    text = JOB.replace(
        "before_first = lambda: None",
        f"import {__name__} as test\nbefore_first = lambda: test.wait_for_a_sum()",
    )
    (job / "job.py").write_text(text)
    settings = {"micro_batches": 1, "rounds": 3, "test_every": 100}
    _NETWORKS.clear()
    outcome = train(job, tmp_path, script=_NETWORKS.append, **settings)
    assert outcome.errors == [None] * 3
    same_weights(outcome, 1, 2, 3)
    assert sorted(_SEEN) == [1, 1, 1, 4, 4, 4, 7, 7, 7]


_NETWORKS: list[FakeNetwork] = []
_SEEN: list[int] = []
_MEMBER = threading.local()


def wait_for_a_sum() -> None:
    """Called in a backward pass of a member: wait for the first of three rounds of its step."""
    if not _NETWORKS:
        return  # the job is only tried
    network = _NETWORKS[0]
    round_ = _MEMBER.round = getattr(_MEMBER, "round", -2) + 3
    with network.changed:
        over = network.changed.wait_for(
            lambda: round_ in network.sized or network.kind != "train" or network.reason, 15
        )
        assert over, "the bucket of the last layer does not go out before backward has ended"
        if (
            round_ in network.sized
        ):  # otherwise what comes next is the test, and this step is nobody's
            _SEEN.append(round_)


def test_a_gradient_that_comes_in_several_parts_is_refused(job: Path, tmp_path: Path) -> None:
    """What has gone out would lack some of it, and nobody would know."""
    text = JOB.replace(
        "self.last(torch.relu(Watched.apply(self.norm(self.first(x)))))",
        "self.last(torch.relu(self.twice(self.twice(self.norm(self.first(x))))))",
    )
    text = text.replace(
        "self.first, self.norm", "self.inner = nn.Linear(32, 32)\n        self.first, self.norm"
    )
    text += (
        "\nfrom torch.utils.checkpoint import checkpoint\n"
        "Net.twice = lambda self, x: (\n"
        "    checkpoint(self.inner, x, use_reentrant=True) if x.requires_grad else self.inner(x)\n)\n"
    )
    (job / "job.py").write_text(text)
    assert run_job(job, tmp_path / "whole", 2, rounds=2).errors == [None] * 2
    outcome = train(job, tmp_path / "buckets", 2)
    said = "parameter 'inner.[a-z]+' gets its gradient in several parts"
    assert any(re.search(said, str(error)) for error in outcome.errors), outcome.errors


def test_members_train_the_same_weights(job: Path, tmp_path: Path) -> None:
    outcome = train(job, tmp_path)
    assert outcome.errors == [None] * 3
    same_weights(outcome, 1, 2, 3)
    rows = [row for row in outcome.metrics(1) if row["phase"] == "train"]
    assert [row["trained_rounds"] for row in rows] == [1, 2, 3, 4, 5]
    assert rows[1]["round"] - rows[0]["round"] == 3  # two buckets and the buffers
    assert rows[-1]["loss"] < rows[0]["loss"]
    residuals = [session.residual for session in outcome.sessions]
    assert all(residual is not None and residual.any() for residual in residuals)


@pytest.mark.parametrize("number", [1, 3])
def test_a_member_that_is_lost_between_two_buckets(job: Path, tmp_path: Path, number: int) -> None:
    """Each bucket's mean is over the samples of those counted in its round."""

    def script(network: FakeNetwork) -> None:
        network.on_commit[8] = lambda: network.evict(number)
        network.after[12] = lambda: network.give_state(number)

    outcome = train(job, tmp_path, script=script, rounds=5, test_every=100)
    assert outcome.errors == [None] * 3 and not outcome.network.after
    left = [k for k in (1, 2, 3) if k != number]
    weights = same_weights(outcome, *left)
    rows = [row for row in outcome.metrics(left[0]) if row["phase"] == "train"]
    assert [len(row["counted"]) for row in rows] == [3, 3, 2, 2, 3]
    assert outcome.metrics(number)[-1]["weights_sha256"] == weights[-1]


def test_buckets_come_to_what_one_round_would(job: Path, tmp_path: Path) -> None:
    """But for the rounding to lanes of 32 bits."""
    settings = {"lane": "i32", "rounds": 3, "test_every": 100}
    one = run_job(job, tmp_path / "one", 3, **settings)
    many = train(job, tmp_path / "many", **settings)
    assert one.errors == many.errors == [None] * 3
    losses = [[r["loss"] for r in o.metrics(1) if r["phase"] == "train"] for o in (one, many)]
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-4)


def test_a_gradient_that_is_not_finite_is_named(job: Path, tmp_path: Path) -> None:
    (job / "job.py").write_text(JOB.replace("lr=0.2", "lr=1e30"))
    outcome = train(job, tmp_path, members=2)
    assert any("is not finite" in str(error) for error in outcome.errors)
    assert any("parameter" in str(error) for error in outcome.errors)
