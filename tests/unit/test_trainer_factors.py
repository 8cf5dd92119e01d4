# SPDX-License-Identifier: Apache-2.0
"""A job with low rank: gradients as factors, in two rounds a step, through the trainer's own loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.fake_session import FakeNetwork
from tests.trainer_lab import run_job
from trainer.errors import JobError
from trainer.factors import Factors
from trainer.flat import FlatModel
from trainer.job import load
from trainer.settings import Settings, merge
from trainer.training import Training

LAYOUT: list[dict[str, Any]] = [
    {"name": "first", "kind": "parameter", "shape": [24, 4, 5]},
    {"name": "bias", "kind": "parameter", "shape": [24]},
    {"name": "small", "kind": "parameter", "shape": [2, 3]},
    {"name": "second", "kind": "parameter", "shape": [30, 40]},
    {"name": "mean", "kind": "buffer", "shape": [7]},
    {"name": "mask", "kind": "fixed", "shape": [9]},
]
FIRST, BIAS, SECOND, MEAN = slice(0, 480), slice(480, 504), slice(510, 1710), slice(1710, 1717)


@pytest.fixture(scope="module")
def digits(checkout: Path) -> Path:
    return checkout / "trainer" / "jobs" / "digits"


def settings(**values: Any) -> dict[str, Any]:
    return {"rank": 2, "rounds": 12, "test_every": 5, "checkpoint_s": 0.0, **values}


def add(vectors: list[np.ndarray], what: str) -> np.ndarray:
    return np.sum(vectors, axis=0, dtype=np.float32)


# ---- the factors of one member


def test_what_is_a_matrix_goes_as_factors_and_the_rest_as_it_is() -> None:
    """Alone, a member's sum is its vector, less what is in the error."""
    factors, calls = Factors(LAYOUT, 2), []

    def alone(vector: np.ndarray, what: str) -> np.ndarray:
        calls.append((what, len(vector)))
        return vector.copy()

    random = np.random.default_rng(3)
    vector = random.standard_normal(1717).astype(np.float32)
    before, out = vector.copy(), np.empty_like(vector)
    factors.exchange(vector, out, alone)
    assert calls == [("P", 2 * (24 + 30)), ("Q", 2 * (20 + 40) + 24 + 6 + 7)]
    assert (vector == before).all()
    assert (out[480:510] == vector[480:510]).all() and (out[MEAN] == vector[MEAN]).all()
    error = np.concatenate([vector[FIRST] - out[FIRST], vector[SECOND] - out[SECOND]])
    factors.settle()
    np.testing.assert_allclose(factors.error, error, atol=1e-5)
    assert np.linalg.matrix_rank(out[SECOND].reshape(30, 40)) == 2
    assert factors.room == 360


def test_errors_come_to_what_was_given() -> None:
    """Over steps of two members: the sums and both errors together."""
    members, given, got = [Factors(LAYOUT, 2) for _ in range(2)], np.zeros(1717), np.zeros(1717)
    random = np.random.default_rng(4)
    for _ in range(15):
        vectors = [random.standard_normal(1717).astype(np.float32) for _ in members]
        outs = lockstep(members, vectors)
        assert (outs[0] == outs[1]).all()
        given += np.sum(vectors, axis=0)
        got += outs[0]
    for member in members:
        member.settle()
    left = np.sum([member.error for member in members], axis=0)
    np.testing.assert_allclose(got[FIRST] + left[:480], given[FIRST], atol=1e-3)
    np.testing.assert_allclose(got[SECOND] + left[480:], given[SECOND], atol=1e-3)
    assert [bytes(part) for part in members[0].parts()] == [
        bytes(part) for part in members[1].parts()
    ]
    assert np.abs(members[0].error - members[1].error).max() > 0.1


def lockstep(members: list[Factors], vectors: list[np.ndarray]) -> list[np.ndarray]:
    """A step of all members, one after the other: what one adds is made of what the others would."""
    said: list[list[np.ndarray]] = [[] for _ in members]

    class Waits(Exception):
        """Its sum is not known yet."""

    def attempt(at: int, member: Factors, vector: np.ndarray, sums: list[np.ndarray]) -> Any:
        member.settle()
        kept, starts = member.error.copy(), [t.clone() for t in member.start().values()]
        asked: list[np.ndarray] = []

        def sum_of(part: np.ndarray, what: str) -> np.ndarray:
            asked.append(part)
            if len(asked) > len(sums):
                said[at] = asked
                raise Waits
            return sums[len(asked) - 1].copy()

        out = np.empty_like(vector)
        try:
            member.exchange(vector, out, sum_of)
        except Waits:
            member.settle()
            member.error[:] = kept
            for tensor, start in zip(member.start().values(), starts, strict=True):
                tensor.copy_(start)
            return None
        return out

    sums: list[np.ndarray] = []
    while True:
        outs = [attempt(at, m, vectors[at], sums) for at, m in enumerate(members)]
        if outs[0] is not None:
            return outs
        sums.append(add([each[len(sums)] for each in said], ""))


def test_a_sum_that_is_not_finite_leaves_errors_and_beginnings_as_they_were() -> None:
    factors = Factors(LAYOUT, 1)
    vector, out = np.ones(1717, np.float32), np.empty(1717, np.float32)
    factors.exchange(vector, out, lambda part, what: part.copy())
    factors.settle()
    error, start = factors.error.copy(), [t.clone() for t in factors.start().values()]

    def lost(part: np.ndarray, what: str) -> np.ndarray:
        return part if what == "P" else np.full_like(part, np.nan)

    factors.exchange(vector, out, lost)
    factors.settle()
    assert np.isnan(out).all() and (factors.error == error).all()
    assert all(torch.equal(a, b) for a, b in zip(factors.start().values(), start, strict=True))


def test_a_beginning_of_another_rank_is_not_taken() -> None:
    one, two = Factors(LAYOUT, 1), Factors(LAYOUT, 2)
    fresh = {name: tensor.clone() for name, tensor in two.start().items()}
    two.take(one.start())
    assert all(torch.equal(two.start()[name], tensor) for name, tensor in fresh.items())
    other = Factors(LAYOUT, 2)
    other.start()["second"].mul_(3.0)
    two.take(other.start())
    assert torch.equal(two.start()["second"], other.start()["second"])


def test_what_factors_begin_with_is_part_of_the_digest(digits: Path) -> None:
    """R19: a host whose factors differ is found with the next step."""
    job = load(digits, {"rank": 2})
    training = Training(job, FlatModel(job.model()), 100)
    before = training.digest()
    assert training.factors is not None
    training.factors.start()["1.weight"][1, 5] += 1e-3
    assert training.digest() != before


# ---- settings


def test_rank_implies_lanes_of_32_bits_and_a_whole_quorum() -> None:
    found = merge(Settings(epochs=1), {"rank": "3", "micro_batches": 1})
    assert (found.rank, found.lane, found.quorum) == (3, "i32", 1.0)
    assert merge(Settings(epochs=1), {}).lane == "i16"


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"rank": 0}, "setting rank is 0; it must be more than 0"),
        ({"rank": 2, "exchange": "broadcast"}, "it must be auto or stripes, as rank is set"),
        ({"rank": 2, "save_gradients": True}, "it must be false, as rank is set"),
    ],
)
def test_what_does_not_go_with_rank(values: dict[str, Any], said: str) -> None:
    with pytest.raises(JobError) as error:
        merge(Settings(epochs=1), values)
    assert said in str(error.value) and "\n" not in str(error.value)


def test_a_rank_that_compresses_nothing(digits: Path, tmp_path: Path) -> None:
    with pytest.raises(JobError, match="rank=40 compresses no parameter"):
        run_job(digits, tmp_path, 2, **settings(rank=40))


# ---- the loop


def test_members_train_the_same_weights_in_two_rounds_a_step(digits: Path, tmp_path: Path) -> None:
    outcome = run_job(digits, tmp_path, 3, **settings())
    assert outcome.errors == [None] * 3
    lines = [outcome.metrics(number) for number in (1, 2, 3)]
    trained = [[line for line in each if line["phase"] == "train"] for each in lines]
    assert [line["trained_rounds"] for line in trained[0]] == list(range(1, 13))
    assert [line["round"] for line in trained[0]] == [2, 4, 6, 8, 10, 13, 15, 17, 19, 21, 24, 26]
    for rows in zip(*lines, strict=True):
        assert len({row["weights_sha256"] for row in rows}) == 1
    assert all(row["counted"] == {"1": 40, "2": 40, "3": 40} for row in trained[0])
    assert trained[0][-1]["loss"] < trained[0][0]["loss"] * 0.8
    errors = [session.residual for session in outcome.sessions]
    assert all(error is not None and error.any() for error in errors)


@pytest.mark.parametrize("number", [1, 3])
def test_a_member_that_is_lost_between_two_rounds_of_a_step(
    digits: Path, tmp_path: Path, number: int
) -> None:
    """Also the lead, before it has said that the step goes on. The basis is of three, the mean of the two others."""

    def script(network: FakeNetwork) -> None:
        network.on_commit[3] = lambda: network.evict(number)
        network.after[8] = lambda: network.give_state(number)

    outcome = run_job(digits, tmp_path, 3, script=script, **settings(rounds=6, test_every=100))
    assert outcome.errors == [None] * 3 and not outcome.network.after
    left = [k for k in (1, 2, 3) if k != number]
    rows = [outcome.metrics(k) for k in left]
    assert [row["weights_sha256"] for row in rows[0]] == [row["weights_sha256"] for row in rows[1]]
    counted = [sorted(map(int, row["counted"])) for row in rows[0] if row["phase"] == "train"]
    assert counted[0] == [1, 2, 3] and counted[1] == left
    back = outcome.metrics(number)
    assert back[-1]["weights_sha256"] == rows[0][-1]["weights_sha256"]
    assert counted[-1] == [1, 2, 3]


def test_a_job_goes_on_from_a_checkpoint_with_what_factors_begin_with(
    digits: Path, tmp_path: Path
) -> None:
    first = run_job(digits, tmp_path / "a", 2, **settings(rounds=4, checkpoint_s=0.001))
    assert first.errors == [None] * 2 and first.network.checkpoints
    checkpoint = tmp_path / "a" / "h1" / "checkpoint.npz"
    with np.load(checkpoint) as archive:
        names = [name for name in archive.files if name.startswith("factors/")]
    assert names == ["factors/1.weight", "factors/3.weight"]
    again = run_job(digits, tmp_path / "b", 2, resume=checkpoint, **settings(rounds=6))
    assert again.errors == [None] * 2
    assert [row["trained_rounds"] for row in again.metrics(1) if row["phase"] == "train"] == [5, 6]
