# SPDX-License-Identifier: Apache-2.0
"""A job of system S, trained by members in this process, and the same by the reference."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.served_session import ServedNetwork
from tests.served_training import Reference, vector_of
from tests.trainer_lab import LINEAR, Outcome, run_job
from trainer import weights
from trainer.job import load
from trainer.records import Records

JOB = (
    """\
import torch
import numpy as np
from torch import nn
from trainer import Settings

settings = Settings(batch=40, rounds=6, test_every=6, quorum=1.0, micro_batches=1, checkpoint_s=0.0)
"""
    + LINEAR
    + """
def model():
    return nn.Sequential(nn.Linear(3, 300), nn.Tanh(), nn.Linear(300, 1))

def loss(model, batch):
    return (model(batch["x"]) - batch["y"]).square().mean()

def success(model, batch):
    return (model(batch["x"]) - batch["y"]).abs().squeeze(1) < 0.5

def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.01)
"""
)
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
    order = weights.order(prepared["model"])
    initial = vector_of(job.model(), order)
    workers = network.all_working
    reference = Reference(job, initial, records, workers, len(network.servers), order)
    reference.replay(network.log)
    return reference


def rows(outcome: Outcome, number: int, phase: str) -> list[dict[str, Any]]:
    return [row for row in outcome.metrics(number) if row["phase"] == phase]


def enumerate_rounds(outcome: Outcome, reference: Reference) -> list[tuple[int, str]]:
    """Rounds, and the weights after them."""
    numbers = [row["round"] for row in rows(outcome, outcome.network.members, "train")]
    return list(zip(numbers, reference.commits, strict=True))


def bits(
    network: ServedNetwork, outcome: Outcome, folder: Path, *, interrupted: bool = False
) -> Reference:
    """After the assertion that all workers that are left have the weights of the reference.

    Args:
        interrupted: a worker may have been called away before it had pulled what a commit came to.
    """
    reference = replayed(network, outcome, folder)
    due = list(zip(reference.commits, reference.rounds, strict=True))
    for number in network.working():
        lines = rows(outcome, number, "train")
        found = [(row["weights_sha256"], row["trained_rounds"]) for row in lines]
        assert found == [each for each in due if each in found or not interrupted]
        assert found[-1] == due[-1]
    return reference
