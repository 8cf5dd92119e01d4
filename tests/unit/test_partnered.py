# SPDX-License-Identifier: Apache-2.0
"""System B from the trainer's side (B3): steps are computed while parameters arrive, on servers in this process."""

from __future__ import annotations

import contextlib
import hashlib
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.served_session import FakeServed, ServedNetwork
from tests.trainer_lab import Outcome, run_job
from trainer import partnered
from trainer.errors import Untraceable
from trainer.job import load
from trainer.order import Traced
from trainer.partnered import Ahead
from trainer.training import Training

pytestmark = pytest.mark.usefixtures("one_thread")

#: No dropout: the threads share their random numbers. Members 1 and 2 serve about a set each, 3 to 5 train.
JOB = """\
import torch
import numpy as np
from torch import nn
from trainer import Settings

settings = Settings(
    batch=36, rounds=7, test_every=4, quorum=1.0, micro_batches=2, checkpoint_s=0.0, lane="i32"
)

def data(path):
    rng = np.random.default_rng(7)
    x = rng.standard_normal((203, 12)).astype(np.float32)
    y = x[:, :3].argmax(1)
    return {"x": x[:161], "y": y[:161]}, {"x": x[161:], "y": y[161:]}

class Way(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(12, 150), nn.BatchNorm1d(150, momentum=None))

class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.ways, self.last = nn.ModuleList(Way() for _ in range(4)), nn.Linear(600, 3)

    def forward(self, x):
        return self.last(torch.cat([way(x) for way in self.ways], 1).tanh())

def model():
    return Branches()

def loss(model, batch):
    return nn.functional.cross_entropy(model(batch["x"]), batch["y"])

def success(model, batch):
    return model(batch["x"]).argmax(1) == batch["y"]

def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)

def scheduler(optimizer, rounds):
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, rounds)
"""
#: Of a step that is dropped, momentum would keep what depends on when that was.
SGD = JOB.replace(", momentum=0.9", "")
#: Its buffer is replaced, not changed in place, which cannot be traced: the model computes as it is written.
UNTRACED = JOB.replace(
    "\n    def forward(self, x):\n",
    """
        self.register_buffer("moved", torch.zeros(3))

    def forward(self, x):
        if self.training:
            self.moved = self.moved + x[0, 0]
""",
)
BRANCHES = "\ndef branches(model):\n    return [[f'ways.{k}'] for k in range(4)]\n"
UNTRACED += BRANCHES
#: The samples say which branches a step needs; each has fragments of its own.
SKIPPING = (
    JOB.replace("600", "2400")
    .replace("150", "600")
    .replace(
        "[way(x) for way in self.ways]",
        "[way(x) if len(x) == 2 or x[0, k] > 0 else x.new_zeros(len(x), 600) for k, way in enumerate(self.ways)]",
    )
)
SKIPPING = SKIPPING.replace('lane="i32"', 'lane="i32", average_all_buffers=True') + BRANCHES

TRACED: list[Traced] = []


def run(
    folder: Path,
    script: Callable[[ServedNetwork], None] = lambda _: None,
    text: str = JOB,
    servers: tuple[int, int] = (1, 2),
    seed: int = 1,
    **settings: Any,
) -> tuple[ServedNetwork, Outcome]:
    (folder / "job").mkdir(parents=True)
    (folder / "job" / "job.py").write_text(text)
    with contextlib.suppress(Untraceable):
        TRACED.append(Traced(load(folder / "job", {"system": "B"}).model))
    network = ServedNetwork(5, 36, servers, seed, (1, 1, 1, 0.3, 1))
    script(network)
    how = {"network": network, "programs": network.programs()}
    of = folder / "job", folder / "run", network.members
    outcome = run_job(*of, **how, system="B", servers="2", **settings)  # type: ignore[arg-type]
    errors = [error for error in outcome.errors if error is not None]
    for error in sorted(errors, key=lambda error: type(error).__name__ == "JobAborted"):
        raise error
    return network, outcome


def weights(outcome: Outcome, number: int) -> list[tuple[int, str]]:
    """After each round of training, and as it was tested."""
    rows = outcome.metrics(number)
    return [(row["trained_rounds"], row["weights_sha256"]) for row in rows]


def in_turn(self: Ahead, round_: int, step: int) -> None:
    """Nothing is computed before all parameters are there."""


@pytest.fixture(autouse=True)
def traced_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """While torch.fx traces it changes all modules' calls; in training each member is a process."""
    monkeypatch.setattr(partnered, "Traced", lambda build: TRACED[-1])


@pytest.fixture
def text() -> str:
    return JOB


@pytest.fixture
def plain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> list[tuple[int, str]]:
    """The weights of plain synchronous training, in which each step is computed when all parameters are there."""
    with monkeypatch.context() as patch:
        patch.setattr(Ahead, "compute", in_turn)
        network, outcome = run(tmp_path / "plain", text=text)
    assert not [event for event in network.log if event[0] == "waits"]
    return weights(outcome, 3)


@pytest.mark.parametrize(
    "text", [JOB, UNTRACED, SKIPPING], ids=["traced", "as written", "skipping"]
)
def test_the_bits_are_those_of_plain_synchronous_training(
    tmp_path: Path, plain: list[tuple[int, str]], text: str
) -> None:
    """Buffers that a forward pass has moved belong to its step, and not to the commit before."""
    network, outcome = run(tmp_path / "ahead", text=text)
    assert len({sha for _, sha in plain}) == 7 and len(plain) == 9
    for number in (3, 4, 5):
        assert weights(outcome, number) == plain
    assert [event for event in network.log if event[0] == "waits"]


def test_a_step_that_is_dropped_for_a_test_leaves_no_momentum(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which workers have computed one before they hear of the test depends on turns. The bits do not."""
    monkeypatch.setattr(Ahead, "compute", in_turn)
    found = []
    for seed in (1, 2, 3):
        network, outcome = run(tmp_path / str(seed), seed=seed)
        at = [at for at, event in enumerate(network.log) if event[0] == "commit"][3]
        phase = network.log.index(("phase", (0, 0, 12, 12, 12)), at)
        early = {event[1] for event in network.log[at:phase] if event[0] == "step"}
        found.append((early, weights(outcome, 3)))
    assert len({*map(frozenset, (early for early, _ in found))}) > 1
    assert found[0][1] == found[1][1] == found[2][1]


def test_what_is_there_first_is_computed_first(tmp_path: Path) -> None:
    """Workers 3 and 5 have set 1 as their own, 4 has set 2: none waits for the other set before it must."""
    network, outcome = run(tmp_path)
    prepared = (outcome.folders[2] / "prepared.json").read_text()
    assert '"orders"' in prepared
    for number, own in ((3, 0), (4, 1), (5, 0)):
        pulls = [event[2] for event in network.log if event[:2] == ("pull", number)]
        begins = zip(pulls[::2], pulls[1::2], strict=True)
        ahead = [pair for pair in begins if pair == (own, 1 - own)]
        assert len(ahead) >= 5, "but where a test is due"


def test_computing_while_parameters_arrive_is_no_waiting(tmp_path: Path) -> None:
    """A row's times make up its time. It has the computing of the next step, which takes 20 ms here."""
    slow = JOB.replace("def loss(model, batch):", "def loss(model, batch):\n    time.sleep(0.02)")
    _, outcome = run(tmp_path, text="import time\n" + slow, micro_batches=1)
    rows = [row for row in outcome.metrics(3) if row["phase"] == "train"]
    for row in rows:
        parts = [row[f"seconds_{what}"] for what in ("compute", "wait", "network")]
        assert sum(parts) == pytest.approx(row["t_end"] - row["t_start"], abs=0.002)
        assert min(parts) >= 0.0
    computing = sorted(row["seconds_compute"] for row in rows)
    assert computing[len(rows) // 2] >= 0.02
    final = json.loads((outcome.folders[2] / "out" / "final.json").read_text())
    waits = [row["seconds_wait"] + row["seconds_network"] for row in rows]
    assert final["wait_seconds"] == pytest.approx(statistics.median(waits))
    final = json.loads((outcome.folders[0] / "out" / "final.json").read_text())
    assert final["step_seconds"] is None and final["wait_seconds"] is None, "it only serves"


@pytest.mark.parametrize("text", [SGD], ids=["SGD"])
def test_a_phase_ends_while_parameters_arrive(
    tmp_path: Path, plain: list[tuple[int, str]], text: str
) -> None:
    """The step is dropped, and computed anew from the same parameters. A momentum would have moved."""
    dropped: list[int] = []

    def script(network: ServedNetwork) -> None:
        def before(turn: int) -> None:
            waits = network.log[-1][0] == "waits" and network.kind == "train"
            if waits and len(dropped) < 3 and turn > 10 + 12 * len(dropped):
                dropped.append(network.open_round)
                network.drop()

        network.before = before

    _, outcome = run(tmp_path / "dropped", script, text)
    assert len(dropped) == 3
    for number in (3, 4, 5):
        found = weights(outcome, number)
        assert found[-1] == plain[-1] and set(found) <= set(plain)


@pytest.mark.parametrize("text", [SGD], ids=["SGD"])
def test_what_is_tested_while_parameters_arrive_is_the_last_commit(
    tmp_path: Path, plain: list[tuple[int, str]], text: str
) -> None:
    """A new lead may judge so; a pull outlasts that."""
    tested: list[int] = []

    def script(network: ServedNetwork) -> None:
        def before(turn: int) -> None:
            waits = network.log[-1][0] == "waits" and network.kind == "train"
            if waits and len(network.commits) == 2 and not tested:
                network.drop("test")
                tested.append(network.open_round)

        network.before = before

    network, outcome = run(tmp_path / "tested", script, text)
    for number in range(1, network.members + 1):
        rows = [row for row in outcome.metrics(number) if row["phase"] == "test"]
        (row,) = (row for row in rows if row["round"] == tested[0])
        assert (row["trained_rounds"], row["weights_sha256"]) == plain[1]
    assert weights(outcome, 3)[-1] == plain[-1]


@pytest.mark.parametrize("text", [SGD], ids=["SGD"])
def test_a_worker_whose_set_is_another_one_computes_in_its_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    """Worker 3 is lost, and groups are dealt out anew: then 4 has set 1 as its own, and 5 has set 2."""

    def script(network: ServedNetwork) -> None:
        network.on_commit[2] = lambda: network.evict(3)
        network.on_commit[3] = network.drop

    network, outcome = run(tmp_path / "ahead", script, text)
    phase = [at for at, event in enumerate(network.log) if event[0] == "phase"][-1]
    first = {}
    for worker in (4, 5):
        pulls = [at for at, event in enumerate(network.log) if event[:2] == ("pull", worker)]
        orders = [network.log[at][2] for at in pulls if at < phase]
        # Nothing is computed during the first pull, of both parts.
        first[worker] = orders[2], next(network.log[at][2] for at in pulls if at > phase)
    assert first == {4: (1, 0), 5: (0, 1)}
    with monkeypatch.context() as patch:
        patch.setattr(Ahead, "compute", in_turn)
        _, plain = run(tmp_path / "plain", script, text)
    for worker in (4, 5):
        assert weights(outcome, worker) == weights(plain, worker)


def handed_out(monkeypatch: pytest.MonkeyPatch) -> list[np.ndarray]:
    """The weights that programs have for the part of a server, as phases begin."""
    filled: list[np.ndarray] = []
    monkeypatch.setattr(FakeServed, "fill", lambda _, weights: filled.append(weights.copy()))
    return filled


def test_a_phase_ends_before_anything_has_been_pulled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that takes a server's place then fills the part with what was handed out."""
    filled = handed_out(monkeypatch)
    dropped: list[int] = []

    def script(network: ServedNetwork) -> None:
        def before(turn: int) -> None:
            if turn == 2:
                dropped.append(len(filled))
                network.drop()

        network.before = before

    run(tmp_path, script)
    assert dropped == [5], "by then each program has begun the first phase"
    assert all((weights == filled[0]).all() for weights in filled[:10]) and filled[0].any()


def test_a_state_that_is_saved_while_parameters_arrive_is_the_last_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R22: after a phase that has begun, and has pulled nothing whole yet."""
    saved: list[bytes] = []

    def save(self: Training, path: Path) -> None:
        saved.append(b"".join(bytes(part) for part in self.model.parts()))

    monkeypatch.setattr(Training, "save", save)

    def script(network: ServedNetwork) -> None:
        def before(turn: int) -> None:
            begins = [at for at, event in enumerate(network.log) if event[0] == "phase"]
            since = {event[:2] for event in network.log[begins[-1] :]}
            if len(begins) == 2 and since >= {("waits", 1), ("pull", 1)} and not saved:
                network.enter("save", network.open_round, to=[1])

        network.before = before
        network.after[2] = network.drop
        network.saved = lambda source, digest: network.drop()  # type: ignore[method-assign]

    _, outcome = run(tmp_path, script, servers=(4, 5))
    (last,) = (sha for round_, sha in weights(outcome, 1) if round_ == 2)
    assert [hashlib.sha256(each).hexdigest() for each in saved] == [last]
