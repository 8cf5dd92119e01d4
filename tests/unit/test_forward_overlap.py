# SPDX-License-Identifier: Apache-2.0
"""Jobs with priorities: parameters are updated part by part while the next forward pass runs (P3), on fake sessions."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nicps.client import Commit
from nicps.errors import NetworkProblem
from nicps.flows import ChannelPlan
from tests.fake_channels import PlannedNetwork, UrgentFirst, Watched
from tests.trainer_lab import Outcome, run_job
from tests.unit.test_trainer_loop import checked, make
from trainer import updates, weights
from trainer.decisions import Decisions
from trainer.planner import Planner
from trainer.state import Saved

JOB = """\
import torch
import numpy as np
from torch import nn
from trainer import Settings

settings = Settings(batch=24, rounds=8, quorum=1.0, micro_batches=1, test_every=4, checkpoint_s=0)

def data(path):
    rng = np.random.default_rng(7)
    x = rng.standard_normal((203, 6)).astype(np.float32)
    y = x[:, :3].argmax(1)
    return {"x": x[:161], "y": y[:161]}, {"x": x[161:], "y": y[161:]}

class Front(nn.Linear):
    pass

class Rear(nn.Linear):
    pass

def model():
    return nn.Sequential(
        Front(6, 40), nn.BatchNorm1d(40), nn.ReLU(), nn.Linear(40, 40), nn.Tanh(),
        nn.Linear(40, 40), nn.ReLU(), Rear(40, 3),
    )

def loss(model, batch):
    decay = sum(each.square().sum() for each in (model[0].bias, model[3].bias))
    return nn.functional.cross_entropy(model(batch["x"]), batch["y"]) + 0.01 * decay

def success(model, batch):
    return model(batch["x"]).argmax(1) == batch["y"]

def optimizer(parameters):
    return torch.optim.AdamW(parameters, lr=0.02, weight_decay=0.1)

def scheduler(optimizer, rounds):
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
"""
SETTINGS = {"priorities": 3, "bucket_mb": 0.002, "lane": "i8"}


def run(
    folder: Path,
    order: random.Random | int | None = 0,
    script: Callable[[Any], None] | None = None,
    text: str = JOB,
    **settings: Any,
) -> Outcome:
    """Two members; sums come one by one, each when both wait, in an order of that seed. None: at once."""
    drawn = random.Random(order) if isinstance(order, int) else order
    network = PlannedNetwork(2, 24, drawn)
    with Watched(network):
        job = make(folder / "job", text)
        return run_job(job, folder, 2, network=network, script=script, **SETTINGS | settings)


def weights_of(outcome: Outcome) -> list[str]:
    """After each row of the metrics."""
    return [row["weights_sha256"] for row in checked(outcome)[0]]


@pytest.fixture
def whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Outcome]:
    """Runs in which all steps are whole."""

    def made(**options: Any) -> Outcome:
        with monkeypatch.context() as patch:
            patch.setattr(updates, "updates_of", lambda *_: "the test wants it so")
            return run(tmp_path / "whole", None, **options)

    (tmp_path / "whole").mkdir()
    return made


@pytest.mark.parametrize("batches", [1, 3])
def test_the_weights_are_those_of_whole_steps(
    tmp_path: Path, whole: Callable[..., Outcome], batches: int
) -> None:
    expected = weights_of(whole(micro_batches=batches))
    assert len({*expected}) == 8, "every step changes the weights"
    for seed in range(3):
        folder = tmp_path / str(seed)
        folder.mkdir()
        outcome = run(folder, seed, micro_batches=batches)
        assert weights_of(outcome) == expected, seed
        for session in outcome.sessions:
            assert [row for row in session.reports if "warning" in row] == []


def test_in_a_queue_one_round_is_open_at_a_time(tmp_path: Path) -> None:
    """And the weights are those of the same rounds on several channels at once."""
    found = {}
    for scope in ("queue", "order"):
        (tmp_path / scope).mkdir()
        outcome = run(tmp_path / scope, priority_scope=scope)
        found[scope] = weights_of(outcome)
        network: Any = outcome.network
        assert (network.most_open == 1) == (scope == "queue"), (scope, network.most_open)
    assert found["queue"] == found["order"]


def test_a_module_waits_for_its_own_parameters_only(tmp_path: Path) -> None:
    """The front layers run as soon as the most urgent channel's sums are there; the rear one waits for the last."""
    log = run(tmp_path, UrgentFirst()).network.log  # type: ignore[attr-defined]
    commits = [at for at, what in enumerate(log) if what[0] == "commit"]
    a_step = len(commits) // 8
    for step in range(8):
        first, last = commits[step * a_step], commits[(step + 1) * a_step - 1]
        early = {what[2] for what in log[first:last] if what[0] == "forward"}
        if step in (3, 7):
            assert not early, "a test waits for all"
        else:
            assert {"Front", "BatchNorm1d"} <= early and "Rear" not in early, step


def test_rows_say_what_forward_has_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each wait has its module, and the module's channel; a step before a test has no forward pass beside it."""
    monkeypatch.setattr(updates, "_LEAST_S", 0.0)
    rows = checked(run(tmp_path, UrgentFirst()))[0]
    trained = [row for row in rows if row["phase"] == "train"]
    assert ["waits" in row for row in trained] == [True] * 3 + [False] + [True] * 3 + [False]
    for row in trained:
        needs = [(module, channel) for _, _, module, channel in row.get("waits", [])]
        if needs:
            channels = [channel for _, channel in needs if channel is not None]
            assert needs[0] == ("0", 2) and channels[-1] == 0, "from the front to the rear"
            assert channels == sorted(channels, reverse=True)
        spans = [
            (begun, ended) for begun, ended, *_ in row.get("waits", []) + row.get("updates", [])
        ]
        assert all(begun <= ended for begun, ended in spans)
        inside = sorted(spans)
        assert all(one[1] <= other[0] for one, other in pairwise(inside)), "one after the other"
        if spans:
            assert row["t_offer"] <= inside[0][0] + 1e-6 and inside[-1][1] <= row["t_commit"] + 1e-6


@pytest.mark.parametrize("channels", [1, 4])
def test_another_plan_comes_between_two_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, channels: int
) -> None:
    """The lead decides on it after step 2. From then on all have its rounds, in whichever order their sums come."""

    def propose(self: Planner, trained: int, hosts: int) -> list[list[int]]:
        parts = self._parts
        if trained != 2:
            return []
        whole = sum(sum(each) for each in parts.fragments[:-1]) + sum(parts.fragments[-1][:-1])
        assert whole >= 4
        return [[1] * (whole - 3), [1], [1], [1, 1]] if channels == 4 else [[whole, 1]]

    monkeypatch.setattr(Planner, "propose", propose)
    found = []
    for seed in (None, 1, 2):
        folder = tmp_path / str(seed)
        folder.mkdir()
        outcome = run(folder, seed, lane="i32", bucket_mb=None, test_every=100)
        rows = [row for row in checked(outcome)[0] if row["phase"] == "train"]
        assert [row["channels"] for row in rows] == [3, 3, *[channels] * 6]
        assert [what for _, what in outcome.network.decisions].index("plan") == 1
        found.append(weights_of(outcome))
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("counts", [True, False])
def test_a_lead_whose_word_does_not_count_goes_on(tmp_path: Path, counts: bool) -> None:
    """A quorum has begun the next step under the lead before it: no test comes, and no other plan."""
    said = []

    def decide(*told: Any, **more: Any) -> bool:
        said.append(told)
        return counts

    session: Any = SimpleNamespace(lead=True, decide=decide)
    settings = SimpleNamespace(checkpoint_s=0)
    training: Any = SimpleNamespace(job=SimpleNamespace(settings=settings))
    journal: Any = None
    decisions = Decisions(session, training, journal, tmp_path / "checkpoint", lambda: 0.0)
    commit, plan = Commit(7, 4, {1: 4}, -30, 0.0), [ChannelPlan(0, (1,))]
    assert decisions.after_training(commit, False, 0.0)
    assert decisions.after_training(commit, True, 0.0) is not counts
    assert decisions.after_training(commit, False, 0.0, plan) is not counts
    assert said == [(7, "continue"), (7, "test"), (7, "plan")]


def test_an_optimizer_that_needs_all_makes_whole_steps(tmp_path: Path) -> None:
    text = JOB.replace(
        "AdamW(parameters, lr=0.02, weight_decay=0.1)", "Adamax(parameters, lr=0.02)"
    )
    outcome = run(tmp_path, text=text)
    checked(outcome)
    for session in outcome.sessions:
        (warning,) = [row["warning"] for row in session.reports if "warning" in row]
        assert warning == (
            "the forward pass waits for all parameters: Adamax cannot update parameters part by part: take one of"
            " SGD, Adam, AdamW, RMSprop, Adagrad"
        )


def test_a_hook_at_the_step_makes_it_whole(tmp_path: Path) -> None:
    text = JOB.replace("    return torch.optim.AdamW(", "    made = torch.optim.AdamW(")
    text = text.replace(
        "weight_decay=0.1)\n",
        "weight_decay=0.1)\n    made.register_step_post_hook(lambda *_: None)\n    return made\n",
        1,
    )
    log = run(tmp_path, text=text).network.log  # type: ignore[attr-defined]
    commits = [at for at, what in enumerate(log) if what[0] == "commit"]
    a_step = len(commits) // 8
    for step in range(8):
        between = log[commits[step * a_step] : commits[(step + 1) * a_step - 1]]
        assert [what for what in between if what[0] == "forward"] == []


def test_a_phase_that_ends_before_a_sum_leaves_the_step_before(
    tmp_path: Path, whole: Callable[..., Outcome]
) -> None:
    """No round of step 3 is committed when a test comes in between: the same step is made again after it."""
    expected = [row for row in checked(whole())[0] if row["phase"] == "train"]

    def script(network: PlannedNetwork) -> None:
        network.held = lambda to: len(network.decisions) == 2

        def interrupt() -> None:
            network.decisions.append((0, "a test"))
            network.enter("test", 100)

        network.on_wait = interrupt

    outcome = run(tmp_path, script=script)
    rows = checked(outcome)[0]
    assert rows[2]["phase"] == "test" and rows[2]["trained_rounds"] == 2
    trained = [row["weights_sha256"] for row in rows if row["phase"] == "train"]
    assert trained == [row["weights_sha256"] for row in expected]


def test_a_phase_that_ends_in_the_middle_of_a_step_ends_the_program(tmp_path: Path) -> None:
    """Some parameters are of the step, and others are not: this host needs the state of the others."""

    def script(network: PlannedNetwork) -> None:
        network.held = lambda to: len(network.decisions) == 2 and to[0] != 2
        network.on_wait = lambda: network.enter("test", 100)

    outcome = run(tmp_path, script=script)
    assert None not in outcome.errors
    (error, *_) = [each for each in outcome.errors if isinstance(each, NetworkProblem)]
    assert "between two steps" in str(error)


@pytest.mark.parametrize("held", ["all rounds", "most rounds"])
def test_no_majority_is_left(tmp_path: Path, held: str) -> None:
    """R18: while a step is under way the state before it is saved, or nothing once an update has been made."""
    found: list[tuple[int, str]] = []

    def script(network: PlannedNetwork) -> None:
        network.held = lambda to: (
            len(network.decisions) == 2 and (to[0] != 2 or held == "all rounds")
        )

        def keep() -> None:
            session = network.sessions[1]
            session.checkpoint = lambda round_, error="": found.append((round_, error))  # type: ignore[method-assign]
            session.on_keep()
            network.held = lambda to: False
            network.changed.notify_all()

        network.on_wait = keep

    outcome = run(tmp_path, script=script)
    rows = checked(outcome)[0]
    path = outcome.folders[0] / "checkpoint.npz"
    if held == "all rounds":
        assert found == [(2, "")]
        assert sha_of(path) == rows[1]["weights_sha256"]
    else:
        why = "some parameters are of the step that is under way, and others are not"
        assert found == [(2, why)] and not path.exists()


def sha_of(path: Path) -> str:
    """Of the weights in a state file."""
    saved = Saved(path)
    layout = [
        {"name": name, "kind": "fixed", "shape": list(array.shape), "dtype": str(array.dtype)}
        for name, array in saved.model.items()
    ]
    return weights.weights_sha256(layout, saved.model)


def test_a_checkpoint_is_that_of_its_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lead has run forward for the next step already, and that has moved buffers."""
    found: dict[int, str] = {}
    plain = Decisions.checkpoint

    def checkpoint(self: Decisions) -> None:
        plain(self)
        found[self._training.state.round] = sha_of(self._path)

    monkeypatch.setattr(Decisions, "checkpoint", checkpoint)
    outcome = run(tmp_path, checkpoint_s=1e-6)
    rows = [row for row in checked(outcome)[0] if row["phase"] == "train"]
    expected = {row["trained_rounds"]: row["weights_sha256"] for row in rows}
    assert len(found) > 5 and found == {at: expected[at] for at in found}
