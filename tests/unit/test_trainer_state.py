# SPDX-License-Identifier: Apache-2.0
"""State as a file and a digest: who loads it goes on with the same bits (R20, R22)."""

from __future__ import annotations

import json
import resource
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from trainer import JobError
from trainer.flat import FlatModel
from trainer.job import load
from trainer.state import Saved, pack, unpack
from trainer.training import Training

JOB = """\
import torch
from torch import nn, optim
from torch.optim.lr_scheduler import *
from trainer import Settings

settings = Settings(batch=10, rounds=40)

def data(path): ...
def loss(model, batch): ...
def success(model, batch): ...

def model():
    return nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Conv1d(5, 4, 3), nn.Linear(2, 1))
"""
OPTIMIZERS = {
    "SGD": ("optim.SGD(p, 0.1)", None),
    "momentum": ("optim.SGD(p, 0.1, momentum=0.9, nesterov=True)", "StepLR(o, 3, 0.5)"),
    "two groups": (
        "optim.AdamW([{'params': p[:3]}, {'params': p[3:], 'weight_decay': 0.0}])",
        "ExponentialLR(o, 0.9)",
    ),
    "Adam": ("optim.Adam(p, 0.01)", "CosineAnnealingLR(o, rounds)"),
    "amsgrad": ("optim.Adam(p, amsgrad=True)", "OneCycleLR(o, 0.1, total_steps=rounds)"),
    "RMSprop": ("optim.RMSprop(p, momentum=0.5, centered=True)", "MultiStepLR(o, [2, 5, 9])"),
    "Adagrad": ("optim.Adagrad(p)", "LambdaLR(o, lambda n: 1 / (n + 1))"),
    "NAdam": ("optim.NAdam(p)", "PolynomialLR(o, 30, 2.0)"),
    "Rprop": ("optim.Rprop(p)", None),
    "ASGD": ("optim.ASGD(p, t0=3)", "CosineAnnealingWarmRestarts(o, 4)"),
    "Adadelta": (
        "optim.Adadelta(p)",
        "SequentialLR(o, [ConstantLR(o, 0.1, 4), LinearLR(o, 1.0, 0.1, 9)], [4])",
    ),
}
Make = Callable[..., Training]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """A training with that optimizer and scheduler, such as each member builds for itself."""

    def build(kind: str = "momentum", **settings: Any) -> Training:
        optimizer, scheduler = OPTIMIZERS[kind]
        text = JOB + f"\ndef optimizer(p):\n    return {optimizer}\n"
        if scheduler is not None:
            text += f"\ndef scheduler(o, rounds):\n    return {scheduler}\n"
        folder = tmp_path / "job"
        folder.mkdir(exist_ok=True)
        (folder / "job.py").write_text(text)
        job = load(folder, settings)
        return Training(job, FlatModel(job.model()), 100)

    return build


def train(training: Training, first: int, count: int) -> list[str]:
    """Rounds with sums that depend on nothing but the round's number: the digests after them."""
    digests = []
    for round_ in range(first, first + count):
        total = np.random.default_rng(round_).standard_normal(training.model.lanes)
        training.step(total.astype(np.float32), 7)
        digests.append(training.digest())
    return digests


def whole(training: Training) -> Any:
    """Everything that there is, as plain values."""
    forms, arrays = training.packed()
    values = {name: array.tobytes() for name, array in arrays.items()}
    return forms, values, training.state, training.finishing, training.unit, training.commits


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_who_loads_goes_on_with_the_same_bits(make: Make, tmp_path: Path, kind: str) -> None:
    ours, theirs = make(kind), make(kind)
    assert ours.digest() == theirs.digest()
    train(ours, 0, 7)
    ours.finishing, ours.unit = True, -12
    train(theirs, 100, 3)
    assert ours.digest() != theirs.digest()
    ours.save(tmp_path / "state.npz")
    theirs.load(tmp_path / "state.npz")
    assert whole(ours) == whole(theirs)
    digests = train(ours, 7, 10)
    assert train(theirs, 7, 10) == digests
    assert len(set(digests)) == 10
    assert whole(ours) == whole(theirs)


def test_what_is_loaded_is_nobody_elses(make: Make, tmp_path: Path) -> None:
    """Two that load one file do not share memory with it, or with each other."""
    source = make()
    train(source, 0, 3)
    source.save(tmp_path / "state.npz")
    before = (tmp_path / "state.npz").read_bytes()
    members = [make(), make()]
    for member in members:
        member.load(tmp_path / "state.npz")
    train(members[0], 3, 5)
    assert train(members[1], 3, 5) == train(source, 3, 5)
    assert (tmp_path / "state.npz").read_bytes() == before


def test_the_same_state_is_the_same_file(make: Make, tmp_path: Path) -> None:
    for name in "ab":
        training = make("Adam")
        train(training, 0, 3)
        training.save(tmp_path / f"{name}.npz")
    assert (tmp_path / "a.npz").read_bytes() == (tmp_path / "b.npz").read_bytes()


@torch.no_grad()
def _flip(tensor: torch.Tensor) -> None:
    """One bit, the lowest of the last number."""
    tensor.view(-1)[-1:].view(torch.int32).bitwise_xor_(1)


TAMPERED: dict[str, Callable[[Training], Any]] = {
    "weight": lambda t: _flip(t.model.trained[-1]),
    "BatchNorm": lambda t: _flip(t.model.model[1].running_var),  # type: ignore[index, arg-type, union-attr]
    "fixed": lambda t: t.model.model[1].num_batches_tracked.add_(1),  # type: ignore[index, union-attr, operator]
    "moment": lambda t: _flip(t.optimizer.state[t.model.trained[2]]["exp_avg_sq"]),
    "step": lambda t: t.optimizer.state[t.model.trained[0]]["step"].add_(1),
    "rate": lambda t: t.optimizer.param_groups[0].update(lr=0.02),
    "rounds": lambda t: setattr(t, "state", type(t.state)(round=4)),
}


@pytest.mark.parametrize("what", TAMPERED)
def test_the_digest_shows_a_changed_bit(make: Make, what: str) -> None:
    one, other = make("Adam"), make("Adam")
    assert train(one, 0, 3) == train(other, 0, 3)
    TAMPERED[what](other)
    assert one.digest() != other.digest()


def test_a_large_models_weights_are_hashed_now_and_then(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = make()
    own = training.model.sha256()
    assert [training.hash_weights(k, last=False) for k in range(3)] == [own] * 3
    monkeypatch.setattr("trainer.training._LARGE", len(training.model.vector))
    hashed = [k for k in range(40) if training.hash_weights(k, last=False)]
    assert hashed == [0, 16, 32]
    assert training.hash_weights(7, last=True) == training.hash_weights(16, last=False) == own


def test_the_file_can_be_read_with_numpy_alone(make: Make, tmp_path: Path) -> None:
    training = make("momentum")
    train(training, 0, 2)
    training.save(tmp_path / "state.npz")
    with np.load(tmp_path / "state.npz", allow_pickle=False) as archive:
        head = json.loads(archive["state.json"])
        weight = archive["model/0.weight"]
        momentum = archive["optimizer/state/0/momentum_buffer"]
    assert np.array_equal(weight, training.model.arrays()["0.weight"])
    assert momentum.shape == (5, 3)
    assert (head["format"], head["version"]) == ("nicps-state", 1)
    assert head["progress"]["round"] == 2
    assert head["settings"]["rounds"] == 40


def test_trees_come_back_as_they_were() -> None:
    tree = {
        "a": [1, 2.5, None, True, "x"],
        3: (torch.arange(4), {"inf": float("inf"), "small": 5e-324}),
        "scalar": torch.tensor(7.0),
    }
    arrays: dict[str, Any] = {}
    form = json.loads(json.dumps(pack("tree", tree, arrays), allow_nan=False))
    again = unpack(form, arrays, torch.from_numpy)
    assert str(again) == str(tree)
    assert set(arrays) == {"tree/3/0", "tree/scalar"}


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"x": [object()]}, "optimizer/x/0 cannot be saved: it is a object"),
        ({"x": torch.zeros(2, dtype=torch.bfloat16)}, "optimizer/x cannot be saved: .*BFloat16"),
        ({(1, 2): 3}, "optimizer cannot be saved: it is a dict"),
    ],
)
def test_what_cannot_be_saved(tree: Any, message: str) -> None:
    with pytest.raises(JobError, match=message):
        pack("optimizer", tree, {})


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-200])


def _damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[content.index(b"NUMPY") + 140] ^= 1  # behind the 128 bytes of its header
    path.write_bytes(content)


def _rewrite(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    """Change state.json."""

    def rewrite(path: Path) -> None:
        with zipfile.ZipFile(path) as archive:
            members = {name: archive.read(name) for name in archive.namelist()}
        head = json.loads(members["state.json"])
        change(head)
        with zipfile.ZipFile(path, "w") as archive:
            for name, content in members.items():
                archive.writestr(
                    name, json.dumps(head).encode() if name == "state.json" else content
                )

    return rewrite


WRONG: dict[str, tuple[Callable[[Path], Any], str]] = {
    "missing": (Path.unlink, "cannot read the state in .*No such file"),
    "cut off": (_cut, "cannot read the state in"),
    "damaged": (_damage, "cannot read the state in .*CRC"),
    "garbage": (lambda path: path.write_bytes(b"garbage"), "cannot read the state in"),
    "version": (_rewrite(lambda head: head.update(version=2)), "its version is 2, not 1"),
    "setting": (
        _rewrite(lambda head: head["settings"].update(batch=11)),
        "other settings: batch is 11 there, 10 here",
    ),
    "no optimizer": (_rewrite(lambda head: head.pop("optimizer")), "no usable optimizer"),
    "no such array": (
        _rewrite(lambda head: head.update(optimizer={"array": "x"})),
        "no usable optimizer",
    ),
    "other groups": (
        _rewrite(lambda head: head.update(optimizer={"dict": [["param_groups", []]]})),
        "does not fit the job",
    ),
    "no scheduler": (
        _rewrite(lambda head: head.update(scheduler=None)),
        "only the job has a scheduler",
    ),
    "progress": (_rewrite(lambda head: head.update(progress={"x": 1})), "does not fit the job"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_file_that_does_not_fit(make: Make, tmp_path: Path, case: str) -> None:
    training = make()
    train(training, 0, 2)
    path = tmp_path / "state.npz"
    training.save(path)
    tamper, message = WRONG[case]
    tamper(path)
    with pytest.raises(JobError, match=message) as caught:
        make().load(path)
    assert "\n" not in str(caught.value)


def test_a_model_of_another_shape(make: Make, tmp_path: Path) -> None:
    training = make()
    training.save(tmp_path / "state.npz")
    saved = Saved(tmp_path / "state.npz")
    saved.model["0.weight"] = saved.model["0.weight"].T
    with pytest.raises(JobError, match=r"'0.weight' is float32 \(5, 3\) here, float32 \(3, 5\)"):
        make().take(saved, tmp_path / "state.npz")


@contextmanager
def no_file_larger_than(size: int) -> Iterator[None]:
    """As if the disk were full: writing fails part of the way."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("size", [0, 100, 1000, 3000, 5000])
def test_a_full_disk_leaves_the_former_file(make: Make, tmp_path: Path, size: int) -> None:
    training, path = make("Adam"), tmp_path / "state.npz"
    train(training, 0, 2)
    training.save(path)
    before = path.read_bytes()
    assert len(before) > 5000
    train(training, 2, 1)
    with (
        no_file_larger_than(size),
        pytest.raises(JobError, match=r"^cannot write .*state.npz: File too large$"),
    ):
        training.save(path)
    assert path.read_bytes() == before
    assert not list(tmp_path.glob("*.part"))
    training.save(path)
    assert path.read_bytes() != before
