# SPDX-License-Identifier: Apache-2.0
"""The trainer without PyTorch (docs/examples/mlp) computes what PyTorch computes."""

from __future__ import annotations

import ast
import importlib.util
import json
import socket
import sys
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from nicps import gateway
from nicps.session.channel import Channel
from tests.fake_session import FakeNetwork, FakeSession
from tests.trainer_lab import run_job
from trainer.errors import JobError
from trainer.flat import FlatModel
from trainer.job import Job, load
from trainer.training import Training


@pytest.fixture(scope="module")
def folder(checkout: Path) -> Path:
    return checkout / "docs" / "examples" / "mlp"


@pytest.fixture(scope="module")
def program(folder: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("numpy_trainer", folder / "numpy_trainer.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def job(folder: Path) -> Job:
    return load(folder, {})


@pytest.fixture
def both(program: ModuleType, job: Job) -> tuple[FlatModel, Any]:
    """The model in PyTorch, and in NumPy with the same weights."""
    model = FlatModel(job.model())
    arrays = {name: array.copy() for name, array in model.arrays().items()}
    return model, program.Mlp(arrays, job.settings.lr, job.settings.momentum)  # type: ignore[attr-defined]


def test_it_imports_neither_torch_nor_nicps(folder: Path) -> None:
    tree = ast.parse((folder / "numpy_trainer.py").read_text())
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import)]
    imports += [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    names = {alias.name for node in imports for alias in node.names}
    names |= {node.module for node in imports if isinstance(node, ast.ImportFrom)}
    roots = {name.split(".")[0] for name in names if name} - {"Path"}
    assert roots - sys.stdlib_module_names == {"numpy", "xxhash"}


def test_the_update_is_the_same_bit_for_bit(both: tuple[FlatModel, Any], job: Job) -> None:
    """R12, over 300 steps with sums of all sizes and every number of samples."""
    model, mlp = both
    training = Training(job, model, 1000)
    random = np.random.default_rng(7)
    assert mlp.sha256() == model.sha256()
    assert mlp.digest() == training.digest()
    for _ in range(300):
        size = np.float32(10.0 ** random.uniform(-6, 3))
        total = random.standard_normal(model.lanes).astype(np.float32) * size
        samples = int(random.integers(1, 129))
        named, first = {}, 0
        for name, array in mlp.weights.items():
            named[name] = total[first : first + array.size].reshape(array.shape).copy()
            first += array.size
        mlp.step(named, samples)
        training.step(total, samples)
        assert mlp.sha256() == model.sha256()
        assert mlp.digest() == training.digest()


def test_the_gradient_is_the_same_but_for_rounding(both: tuple[FlatModel, Any], job: Job) -> None:
    model, mlp = both
    random = np.random.default_rng(8)
    images = random.integers(0, 17, (32, 8, 8)).astype(np.uint8)
    labels = random.integers(0, 10, 32).astype(np.uint8)
    model.begin()
    batch = {"image": torch.from_numpy(images), "label": torch.from_numpy(labels)}
    loss = job.loss(model.model, batch) * 32
    job.backward(loss)
    inputs = images.reshape(32, -1).astype(np.float32) / np.float32(16)
    found, total = mlp.gradient(inputs, labels.astype(np.int64))
    vector = np.concatenate([array.reshape(-1) for array in found.values()])
    np.testing.assert_allclose(vector, model.finish(32), rtol=1e-4, atol=1e-5)
    assert total == pytest.approx(loss.item(), rel=1e-5)


def test_a_rate_that_rounds_is_refused(folder: Path) -> None:
    job = load(folder, {"lr": 0.1})
    trained = FlatModel(job.model()).trained
    with pytest.raises(JobError, match=r"lr is 0.1; it must be a power of two"):
        job.optimizer(trained)


def test_it_gives_and_takes_state(
    program: ModuleType, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R20, R22: among two with PyTorch; as the lead it saves what they go on from, and it goes on from theirs."""

    def member(session: FakeSession, workdir: Path) -> None:
        ours, theirs = socket.socketpair()
        prepared = json.loads((workdir / "prepared.json").read_text())
        (workdir / "out").mkdir()
        monkeypatch.setenv("NICPS_SOCKET", f"fd:{theirs.detach()}")

        def serve() -> None:
            channel = Channel(ours)
            assert channel.recv(10.0)[0]["op"] == "attach"  # the agent takes this one
            gateway.run(channel, session, prepared["model"])  # type: ignore[arg-type]

        serving = threading.Thread(target=serve)
        serving.start()
        training = program.Member()
        training.run()
        training.agent.socket.close()
        serving.join(10.0)
        ours.close()
        assert session.failure is None

    def script(network: FakeNetwork) -> None:
        network.after = {
            5: lambda: network.leave(1),
            10: lambda: network.give_state(1),  # from NumPy to PyTorch
            13: lambda: network.leave(2),
            18: lambda: network.give_state(2),  # from PyTorch to NumPy
        }

    settings = {"rounds": 22, "test_every": 7, "quorum": 1.0, "checkpoint_s": 0.001}
    outcome = run_job(folder, tmp_path, 3, script=script, programs={2: member}, **settings)
    assert outcome.errors == [None] * 3
    network = outcome.network
    assert not network.after
    for round_, digests in network.digests.items():
        assert len(set(digests.values())) == 1, round_
    lines = [outcome.metrics(number) for number in (1, 2, 3)]
    assert [line["trained_rounds"] for line in lines[2] if line["phase"] == "test"] == [
        7,
        14,
        21,
        22,
    ]
    assert len({line[-1]["weights_sha256"] for line in lines}) == 1
    assert {number for number, _ in network.checkpoints} == {1, 2}
    assert lines[2][-1]["accuracy"] > 0.8
