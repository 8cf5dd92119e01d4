# SPDX-License-Identifier: Apache-2.0
"""The jobs that ship. Digits is trained in test_trainer_loop.py."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import numpy as np
import pytest

from tests.trainer_lab import run_job
from trainer import JobError
from trainer.idx import find
from trainer.prepare import prepare

JOBS = Path(__file__).resolve().parents[2] / "trainer" / "jobs"
MNIST = JOBS / "mnist"
FILES = tuple(
    f"{part}-{name}-ubyte" for part in ("train", "t10k") for name in ("images-idx3", "labels-idx1")
)


def make_mnist(folder: Path, train: int = 120, test: int = 30) -> Path:
    """IDX files like MNIST's, with bright squares whose place is the label."""
    random = np.random.default_rng(0)
    folder.mkdir()
    for part, count in (("train", train), ("t10k", test)):
        labels = random.integers(0, 10, count, dtype=np.uint8)
        images = random.integers(0, 60, (count, 28, 28), dtype=np.uint8)
        for image, label in zip(images, labels, strict=True):
            image[2 * label : 2 * label + 8, 8:20] = 250
        for name, array in (("images-idx3", images), ("labels-idx1", labels)):
            header = struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape)
            (folder / f"{part}-{name}-ubyte").write_bytes(header + array.tobytes())
    return folder


def test_mnist_learns_from_idx_files(tmp_path: Path) -> None:
    data = str(make_mnist(tmp_path / "data"))
    settings = {"batch": 60, "rounds": 30, "test_every": 100}
    outcome = run_job(MNIST, tmp_path / "run", 2, data, quorum=1.0, **settings)
    assert outcome.errors == [None, None]
    last = [outcome.metrics(number)[-1] for number in (1, 2)]
    assert last[0]["weights_sha256"] == last[1]["weights_sha256"]
    assert last[0]["samples"] == 30
    assert last[0]["accuracy"] > 0.8


def test_branches_learn_the_digits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NICPS_DATA", raising=False)
    outcome = run_job(JOBS / "branches", tmp_path / "run", 2, epochs=6)
    assert outcome.errors == [None, None]
    last = [outcome.metrics(number)[-1] for number in (1, 2)]
    assert last[0]["weights_sha256"] == last[1]["weights_sha256"]
    assert last[0]["samples"] == 359 and last[0]["accuracy"] >= 0.96


def test_branches_take_mnist_where_it_is_given(tmp_path: Path) -> None:
    data = make_mnist(tmp_path / "data")
    prepared = prepare(JOBS / "branches", tmp_path / "out", str(data), {})
    assert prepared["train"] == {
        "records": 120,
        "fields": [
            {"name": "image", "dtype": "uint8", "shape": [28, 28]},
            {"name": "label", "dtype": "uint8", "shape": []},
        ],
    }
    os.truncate(data / FILES[3], 30)
    with pytest.raises(JobError, match="is cut off: "):
        prepare(JOBS / "branches", tmp_path / "out", str(data), {})
    with pytest.raises(JobError, match="no such data folder"):
        prepare(JOBS / "branches", tmp_path / "out", str(tmp_path / "wrong"), {})


@pytest.mark.parametrize("name", FILES)
def test_mnist_says_what_is_missing_or_cut_off(tmp_path: Path, name: str) -> None:
    data = make_mnist(tmp_path / "data")
    os.truncate(data / name, (data / name).stat().st_size - 7)
    with pytest.raises(JobError, match=f"{name} is cut off: "):
        prepare(MNIST, tmp_path / "out", str(data), {})
    (data / name).unlink()
    with pytest.raises(JobError, match=f"no {name} or {name}.gz in {data}"):
        prepare(MNIST, tmp_path / "out", str(data), {})


def test_text_learns_what_comes_next(tmp_path: Path) -> None:
    """The first of twenty files and the twenty-first are the test's."""
    (tmp_path / "text").mkdir()
    for number in range(22):
        start = number % 7
        words = b"the quick brown fox jumps over the lazy dog. "
        (tmp_path / "text" / f"{number:02}").write_bytes((words[start:] + words) * 9)
    settings = {"batch": 64, "rounds": 40, "test_every": 100, "width": 32, "lr": 0.01}
    data = str(tmp_path)
    outcome = run_job(JOBS / "text", tmp_path / "run", 2, data, quorum=1.0, **settings)
    assert outcome.errors == [None, None]
    last = outcome.metrics(1)[-1]
    assert last["samples"] == 9 * (45 + 45) + 9 * (39 + 45) - 16, "windows of 17 bytes"
    assert last["accuracy"] > 0.9


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.skipif(
    find(os.environ.get("NICPS_DATA"), FILES[0]) is None,
    reason="needs MNIST in the folder that NICPS_DATA names",
)
def test_the_real_mnist_reaches_98_percent_whatever_the_seed(tmp_path: Path) -> None:
    for seed in (1, 2, 3):
        for members in (1, 4):
            folder = tmp_path / f"{seed}-{members}"
            outcome = run_job(MNIST, folder, members, os.environ["NICPS_DATA"], seed=seed)
            assert outcome.errors == [None] * members
            assert outcome.metrics(1)[-1]["accuracy"] >= 0.983, (seed, members)
