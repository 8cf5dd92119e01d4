# SPDX-License-Identifier: Apache-2.0
"""Buffers: which are averaged over the hosts, and what becomes of numbers that are not finite (docs/jobs.md)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.fake_session import FakeNetwork
from tests.trainer_lab import run_job
from tests.transformer import JOB
from tests.unit.test_trainer_faults import checked
from trainer import JobError, state, weights
from trainer.flat import FlatModel
from trainer.prepare import prepare
from trainer.state import Saved

INF, NAN = float("inf"), float("nan")

#: A buffer whose value moves from the third call of loss() on.
LATE = """
calls = 0

def model():
    made = Model()
    made.register_buffer("tau", torch.ones(3))
    return made

def loss(model, batch):
    global calls
    calls += model.training
    if calls > 2:
        model.tau.mul_(0.5)
    logits = model(batch["x"]) * model.tau[0]
    return cross_entropy(logits.flatten(0, 1), batch["y"].long().flatten())
"""
#: The largest value so far, from -inf on: in the second half of the training nothing new comes.
LARGEST = """
def model():
    made = Model()
    made.register_buffer("largest", torch.tensor(-math.inf))
    return made

def loss(model, batch):
    model.largest.copy_(torch.maximum(model.largest, batch["x"].max()))
    return cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].long().flatten())
"""


def make(folder: Path, more: str = "") -> Path:
    folder.mkdir()
    (folder / "job.py").write_text(JOB + more)
    return folder


def kinds(prepared: dict[str, Any]) -> dict[str, str]:
    return {e["name"]: e["kind"] for e in prepared["model"] if e["kind"] != "parameter"}


# ---- which buffers are averaged


def test_only_buffers_that_training_changes_are_averaged(tmp_path: Path) -> None:
    prepared = prepare(make(tmp_path / "job"), tmp_path / "out", None, {})
    assert kinds(prepared) == {
        "norm.running_mean": "buffer",
        "norm.running_var": "buffer",
        "norm.num_batches_tracked": "fixed",
        "attention.mask": "fixed",
        "attention.scale": "fixed",
    }
    # The layout is that of a model that is built with it, so all hosts have the same.
    names = weights.averaged(prepared["model"])
    module: dict[str, Any] = {}
    exec(JOB, module)
    assert FlatModel(module["model"](), names).layout == prepared["model"]


def test_a_job_can_have_all_of_them_averaged(tmp_path: Path) -> None:
    settings = {"average_all_buffers": True}
    prepared = prepare(make(tmp_path / "job"), tmp_path / "out", None, settings)
    assert [name for name, kind in kinds(prepared).items() if kind == "fixed"] == [
        "norm.num_batches_tracked"
    ]


def test_statistics_that_begin_to_move_later_go_with_their_module() -> None:
    """BatchNorm behind a layer that gives only zeros at first: the mean stays 0, the variance does not stay 1."""
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.BatchNorm1d(4, momentum=0.0))
    nn.init.zeros_(model[0].weight)
    nn.init.zeros_(model[0].bias)
    flat = FlatModel(model)
    flat.begin()
    flat.model(torch.randn(5, 3))
    assert not flat.model[1].running_mean.any()
    assert flat.changed_buffers() == {"1.running_mean", "1.running_var"}


class Caching(nn.Module):
    """Replaces a buffer by a longer one, takes one away, and registers one that was not there."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.register_buffer("table", torch.zeros(1))
        self.register_buffer("gone", torch.ones(2))
        self.register_buffer("wide", torch.ones(1, 1).expand(3, 2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.table = torch.arange(5.0)
        self.gone = None
        self.register_buffer("late", torch.ones(2))
        return (x * self.weight).sum()


@pytest.mark.parametrize("averaged", [None, ()])
def test_a_cache_is_its_hosts_own(averaged: tuple[str, ...] | None) -> None:
    flat = FlatModel(Caching(), averaged)
    before = flat.sha256()
    for _ in range(2):
        flat.begin()
        flat.model(torch.ones(3)).backward()
        if averaged is None:
            assert flat.changed_buffers() == frozenset()
        flat.finish(3)
        flat.restore()
        assert flat.sha256() == before
        assert flat.model.table.shape == (1,) and flat.model.gone.shape == (2,)
    assert flat.model.late.shape == (2,)


def test_an_averaged_buffer_that_grows_is_refused() -> None:
    flat = FlatModel(Caching())
    flat.begin()
    flat.model(torch.ones(3)).backward()
    with pytest.raises(
        JobError, match=r"'table' .* has become torch.float32 \[5\]; it was .* \[1\]"
    ):
        flat.finish(3)


def test_what_changes_only_later_is_named_with_its_remedy(tmp_path: Path) -> None:
    job = make(tmp_path / "job", LATE)
    outcome = run_job(job, tmp_path / "run", 2)
    said = {str(error) for error in outcome.errors}
    (reason,) = {text for text in said if "'tau'" in text}
    assert reason == (
        "buffer 'tau' has changed, but did not when the job was tried: it is not averaged; "
        "set average_all_buffers=true"
    )
    checked(run_job(job, tmp_path / "again", 2, average_all_buffers=True))


# ---- numbers that are not finite


class One(nn.Module):
    def __init__(self, *values: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.register_buffer("b", torch.tensor(values))


def averaged(common: float, *members: tuple[float, int]) -> float:
    """What an element becomes where each member has a value of its own, over so many samples; the same at all."""
    hosts = [FlatModel(One(common)) for _ in members]
    for host, (value, samples) in zip(hosts, members, strict=True):
        host.begin()
        host.model.b[0] = value
        assert np.isfinite(host.finish(samples)).all()
    total = np.sum([host.vector for host in hosts], axis=0, dtype=np.float32)
    for host in hosts:
        host.apply(total.copy(), sum(samples for _, samples in members))
    assert len({host.sha256() for host in hosts}) == 1
    return float(hosts[0].model.b[0])


@pytest.mark.parametrize(
    ("common", "members", "becomes"),
    [
        (2.0, ((4.0, 1), (8.0, 3)), 7.0),
        (2.0, ((4.0, 1), (2.0, 3)), 2.5),  # changed at some members only
        (-INF, ((-INF, 1), (-INF, 3)), -INF),
        (INF, ((-INF, 1), (NAN, 3)), INF),  # something else, and not finite either
        (-INF, ((4.0, 1), (8.0, 3)), 7.0),  # the first value of a largest-so-far
        (-INF, ((4.0, 1), (-INF, 3)), 1.0),  # finite at one only: the others count as 0
        (2.0, ((NAN, 1), (NAN, 3)), 2.0),
        (2.0, ((INF, 1), (8.0, 3)), 6.5),  # finite at one only: the other has not changed it
        (-3e38, ((3e38, 1), (-3e38, 3)), -3e38),  # a change that float32 does not hold
    ],
)
def test_an_element(common: float, members: tuple[tuple[float, int], ...], becomes: float) -> None:
    assert averaged(common, *members) == np.float32(becomes)


def test_the_bits_of_nan_stay() -> None:
    """Also its payload: the digest sees it."""
    flat = FlatModel(One(0.0, -INF, 1.0))
    bits = np.array([0x7FC0BEEF, 0xFF800000, 0x80000000], np.uint32)
    flat.load({"weight": np.ones((), np.float32), "b": bits.view(np.float32)})
    flat.begin()
    flat.finish(3)
    flat.apply(flat.vector.copy(), 3)
    assert flat.model.b.numpy().view(np.uint32).tolist() == bits.tolist()


# ---- a transformer, from the first round to a host that comes back and to another run


def state_of(folder: Path) -> dict[str, Any]:
    return dict(torch.load(folder / "out" / "model.pt", weights_only=True))


@pytest.mark.parametrize("all_buffers", [False, True])
def test_a_transformer_with_a_float_mask(tmp_path: Path, all_buffers: bool) -> None:
    """One host goes and comes back; then the job is resumed. The mask has the same bits in the end."""

    def script(network: FakeNetwork) -> None:
        network.after = {2: lambda: network.leave(3), 4: lambda: network.give_state(3)}

    job = make(tmp_path / "job")
    outcome = checked(
        run_job(job, tmp_path / "run", 3, script=script, average_all_buffers=all_buffers)
    )
    mask = np.triu(np.full((6, 6), -INF, np.float32), 1)
    for folder in outcome.folders:
        found = state_of(folder)
        assert np.array_equal(found["attention.mask"].numpy(), mask)
        assert "attention.scale" not in found
        assert found["norm.running_mean"].any() and not found["norm.num_batches_tracked"]
    first = checked(
        run_job(
            job, tmp_path / "first", 2, rounds=3, checkpoint_s=1000, average_all_buffers=all_buffers
        )
    )
    checkpoint = first.folders[0] / "checkpoint.npz"
    assert np.array_equal(Saved(checkpoint).model["attention.mask"], mask)
    again = checked(run_job(job, tmp_path / "again", 2, resume=checkpoint, rounds=6))
    assert np.array_equal(state_of(again.folders[1])["attention.mask"].numpy(), mask)


def test_the_digest_covers_what_does_not_travel(tmp_path: Path) -> None:
    """A mask that is damaged at one host shows, whoever sends what."""
    prepared = prepare(make(tmp_path / "job"), tmp_path / "out", None, {})
    module: dict[str, Any] = {}
    exec(JOB, module)
    flat = FlatModel(module["model"](), weights.averaged(prepared["model"]))
    for name in (
        "attention.mask",
        "attention.scale",
        "norm.running_var",
        "norm.num_batches_tracked",
    ):
        before = flat.sha256()
        with torch.no_grad():
            flat.model.get_buffer(name).view(-1)[0] += 1
        assert flat.sha256() != before, name


def resumed(folder: Path, change: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """prepared.json of a run that goes on from one of two rounds; `change` alters what its checkpoint says."""
    job = make(folder / "job", LARGEST)
    first = checked(run_job(job, folder / "first", 2, rounds=2, checkpoint_s=1000))
    checkpoint = first.folders[0] / "checkpoint.npz"
    saved = Saved(checkpoint)
    assert saved.model["largest"] == 4.0
    change(saved.head)
    state.write(checkpoint, saved.head, saved._arrays)
    return prepare(job, folder / "out", None, {"rounds": 4}, checkpoint)


def test_what_has_stopped_moving_is_averaged_after_a_resume(tmp_path: Path) -> None:
    """The trial finds nothing larger than the largest so far; the run before has averaged it."""
    prepared = resumed(tmp_path, lambda head: None)
    assert kinds(prepared)["largest"] == "buffer"
    assert json.loads((tmp_path / "out" / "prepared.json").read_text()) == prepared


def test_a_checkpoint_that_does_not_say_what_was_averaged(tmp_path: Path) -> None:
    """Another program has written it."""
    prepared = resumed(tmp_path, lambda head: head.pop("averaged"))
    assert kinds(prepared)["largest"] == "fixed"
