# SPDX-License-Identifier: Apache-2.0
"""A model laid out flat: gradients and buffers in one vector, and back."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from trainer import JobError, weights
from trainer.flat import FlatModel


class Net(nn.Module):
    """Has everything: BatchNorm, a frozen parameter, tied weights, a shared buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4)
        self.second = nn.Linear(4, 4)
        self.tied = nn.Linear(4, 4)
        self.tied.weight = self.second.weight
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.other = nn.Module()
        self.other.register_buffer("mean", self.norm.running_mean)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.tied(self.second(self.norm(self.first(x)))) * self.frozen[0]


@pytest.fixture
def flat() -> FlatModel:
    torch.manual_seed(3)
    return FlatModel(Net())


def test_layout(flat: FlatModel) -> None:
    kinds = [(entry["name"], entry["kind"]) for entry in flat.layout]
    assert kinds == [
        ("first.weight", "parameter"),
        ("first.bias", "parameter"),
        ("norm.weight", "parameter"),
        ("norm.bias", "parameter"),
        ("second.weight", "parameter"),
        ("second.bias", "parameter"),
        ("tied.bias", "parameter"),
        ("norm.running_mean", "buffer"),
        ("norm.running_var", "buffer"),
        ("frozen", "fixed"),
        ("calls", "fixed"),
        ("norm.num_batches_tracked", "fixed"),
    ]
    assert flat.lanes == 12 + 4 + 4 + 4 + 16 + 4 + 4 + 4 + 4
    assert flat.name_at(0) == "parameter 'first.weight'"
    assert flat.name_at(12) == "parameter 'first.bias'"
    assert flat.name_at(flat.lanes - 1) == "buffer 'norm.running_var'"
    assert flat.place_of(11) == ("parameter 'first.weight'", 11)
    assert flat.place_of(14) == ("parameter 'first.bias'", 2)


def test_the_vector_is_the_sum_of_gradients_and_of_buffer_changes(flat: FlatModel) -> None:
    torch.manual_seed(3)
    twin = Net()
    parts = torch.randn(3, 5, 3)
    flat.begin()
    for part in parts:
        (flat.model(part).square().mean() * 5).backward()
        (twin(part).square().mean() * 5).backward()
    before = {"running_mean": np.zeros(4), "running_var": np.ones(4)}
    due = [parameter.grad.reshape(-1).numpy() for _, parameter in twin.named_parameters()
           if parameter.grad is not None]  # fmt: skip
    for name in ("running_mean", "running_var"):
        buffer = getattr(twin.norm, name).numpy()
        due.append(15 * (buffer - before[name]).astype(np.float32))
    assert np.allclose(flat.finish(15), np.concatenate(due), rtol=1e-6, atol=1e-6)


def test_apply_takes_the_mean_and_leaves_the_rest(flat: FlatModel) -> None:
    common = {name: array.copy() for name, array in flat.arrays().items()}
    flat.begin()
    flat.model(torch.randn(5, 3)).sum().backward()
    flat.finish(5)
    total = np.arange(flat.lanes, dtype=np.float32)
    flat.apply(total.copy(), 4)
    assert np.array_equal(flat.model.first.weight.grad.reshape(-1), total[:12] / 4)
    assert np.array_equal(flat.model.norm.running_var, 1 + total[-4:] / 4)
    assert flat.model.other.mean is flat.model.norm.running_mean
    assert flat.model.calls == 0  # whole numbers stay as they were
    assert flat.model.norm.num_batches_tracked == 0
    assert np.array_equal(flat.arrays()["frozen"], common["frozen"])
    assert np.array_equal(flat.arrays()["first.weight"], common["first.weight"])


def test_the_optimizer_works_on_the_flat_weights(flat: FlatModel) -> None:
    before = flat.sha256()
    optimizer = torch.optim.SGD(flat.trained, lr=0.5)
    flat.begin()
    flat.apply(np.ones(flat.lanes, np.float32), 1)
    old = flat.arrays()["first.bias"].copy()
    optimizer.step()
    assert np.array_equal(flat.arrays()["first.bias"], old - np.float32(0.5))
    assert np.array_equal(flat.model.first.bias.detach(), old - np.float32(0.5))
    assert flat.sha256() != before


def test_restore_undoes_a_dropped_round(flat: FlatModel) -> None:
    before = flat.sha256()
    flat.begin()
    flat.model(torch.randn(5, 3)).sum().backward()
    assert flat.sha256() != before  # BatchNorm and `calls` moved on
    flat.restore()
    assert flat.sha256() == before


def test_survives_gradients_and_buffers_that_are_replaced(flat: FlatModel) -> None:
    flat.begin()
    flat.model.zero_grad(set_to_none=True)
    flat.model(torch.randn(5, 3)).sum().backward()
    gradient = flat.model.first.bias.grad.clone()
    flat.model.norm.running_mean = torch.full((4,), 2.0)
    vector = flat.finish(3)
    assert np.array_equal(vector[12:16], gradient)
    assert np.array_equal(vector[-8:-4], np.full(4, 6.0))
    flat.begin()
    assert np.array_equal(flat.model.norm.running_mean, np.zeros(4))
    assert not flat.vector.any()


def test_digests_are_the_same_with_and_without_pytorch(flat: FlatModel, tmp_path: Path) -> None:
    weights.save(tmp_path / "model.npz", flat.arrays())
    arrays = weights.load(tmp_path / "model.npz")
    assert weights.weights_sha256(flat.layout, arrays) == flat.sha256()
    other = FlatModel(Net())
    assert other.sha256() != flat.sha256()
    other.load(arrays)
    assert other.sha256() == flat.sha256()
    assert weights.model_digest(flat.layout, "a") != weights.model_digest(flat.layout, "b")
    assert weights.model_digest(flat.layout, "a") != weights.model_digest(flat.layout[1:], "a")


def test_a_large_gradient_is_clipped(flat: FlatModel) -> None:
    """The mean over the samples, over all parameters together; what goes out for buffers is left alone."""
    flat.begin()
    flat.model(torch.randn(5, 3)).sum().backward()
    whole = flat.finish(4).copy()
    end = len(whole) - 8  # running_mean and running_var
    norm = np.linalg.norm(whole[:end].astype(np.float64)) / 4
    assert not flat.clip(4, norm * 1.001)
    assert np.array_equal(flat.vector, whole)
    assert flat.clip(4, norm / 10)
    np.testing.assert_allclose(flat.vector[:end], whole[:end] / 10, rtol=1e-6)
    assert np.array_equal(flat.vector[end:], whole[end:])
    for value in (np.nan, np.inf):
        flat.vector[3] = value
        assert not flat.clip(4, 0.1)  # refused when it is offered, by its name
    flat.vector[3] = 1e30  # its square is too large for float32
    assert flat.clip(4, 0.1)
    assert np.linalg.norm(flat.vector[:end]) == pytest.approx(0.4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: a.pop("frozen"), "'frozen' is only here"),
        (lambda a: a.update(more=a["frozen"]), "'more' is missing here"),
        (
            lambda a: a.update({"norm.bias": np.zeros(5, np.float32)}),
            r"'norm.bias' is float32 \(4,\) here, float32 \(5,\) there",
        ),
        (lambda a: a.update(calls=np.zeros((), np.int32)), "'calls' is int64 .* here, int32"),
    ],
)
def test_another_model_is_refused(flat: FlatModel, change, message: str) -> None:  # type: ignore[no-untyped-def]
    arrays = {name: array.copy() for name, array in flat.arrays().items()}
    change(arrays)
    with pytest.raises(JobError, match=f"differs from the one handed out: {message}"):
        flat.load(arrays)


def test_a_model_file_that_is_damaged(tmp_path: Path, flat: FlatModel) -> None:
    weights.save(tmp_path / "model.npz", flat.arrays())
    content = (tmp_path / "model.npz").read_bytes()
    (tmp_path / "model.npz").write_bytes(content[: len(content) // 2])
    with pytest.raises(JobError, match="cannot read the model"):
        weights.load(tmp_path / "model.npz")
