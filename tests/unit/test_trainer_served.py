# SPDX-License-Identifier: Apache-2.0
"""System S from the trainer's side (S1 to S5), on servers in this process."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.served_reference import Reference, vector_of
from tests.served_session import ServedNetwork
from tests.trainer_lab import Outcome, run_job
from trainer.job import load
from trainer.records import Part, Place, Records

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
    shares = outcome.network.first_shares  # type: ignore[attr-defined]
    places = {k: Place.of(k, shares) for k, share in enumerate(shares, 1) if share}
    parts = {k: Part(records, place, None, job.settings.seed) for k, place in places.items()}
    reference = Reference(
        job,
        vector_of(job.model()),
        parts,
        {k: place.share for k, place in places.items()},
        len(network.servers),
        len(records),
    )
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
