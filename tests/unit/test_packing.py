# SPDX-License-Identifier: Apache-2.0
"""B1 and B2: two sets of near-equal size, the vector in their order, and groups of workers."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from benchmarks import partners
from nicps import client
from nicps.wire import lanes_per_fragment
from tests.branched import GoogLeNet, ResNeXt, Towers
from tests.trainer_lab import run_job
from trainer import packing, weights
from trainer import prepare as preparing
from trainer.branches import Item, find, items_of, trace
from trainer.flat import FlatModel
from trainer.job import load
from trainer.packing import Sets, pack
from trainer.prepare import prepare

SHIPPED = Path(__file__).resolve().parents[2] / "trainer" / "jobs" / "branches"


@pytest.fixture(autouse=True)
def _no_other_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NICPS_DATA", raising=False)


def items(*sizes: int) -> list[Item]:
    return [
        Item((f"m{at}",), (f"m{at}.weight",), (), (size,), True) for at, size in enumerate(sizes)
    ]


def off(sets: Sets) -> int:
    first, second = sets.sizes
    return abs(first - second)


def test_no_division_is_better() -> None:
    random = np.random.default_rng(5)
    for count in range(1, 12):
        sizes = [int(size) for size in random.integers(0, 1000, count)]
        best = min(
            abs(sum(sizes) - 2 * sum(some))
            for n in range(count + 1)
            for some in itertools.combinations(sizes, n)
        )
        sets = pack(items(*sizes))
        assert off(sets) == best, sizes
        assert sum(sets.sizes) == sum(sizes)
        assert sets.items[0][0].modules == ("m0",)
        assert all(list(of) == sorted(of, key=lambda i: int(i.modules[0][1:])) for of in sets.items)


def test_where_the_largest_first_would_fail() -> None:
    """8 7 | 6 5 4 is 15 | 15; the largest first alone gives 17 | 13."""
    sets = pack(items(8, 7, 6, 5, 4))
    assert [item.size for item in sets.items[0]] == [8, 7] and off(sets) == 0


def test_hundreds_of_items_and_millions_of_parameters() -> None:
    random = np.random.default_rng(6)
    sizes = [int(size) for size in random.lognormal(9, 2, 300)]
    assert sum(sizes) > 1 << 20
    sets = pack(items(*sizes))
    assert off(sets) <= 65 * packing.FRAGMENT
    assert len(sets.items[0]) + len(sets.items[1]) == 300


def test_the_models() -> None:
    assert off(pack(items_of(load(SHIPPED, {})))) < 0.01 * 6338
    for model, most in (
        (GoogLeNet(), 0.001),
        (GoogLeNet(heads=True), 0.001),
        (ResNeXt(), 0.01),
        (Towers(), 0.05),
    ):
        sets = pack(find(model, trace(model)))
        assert off(sets) < most * sum(sets.sizes) and sets.warning() is None
    wide = load(SHIPPED, {"width": "64"})
    assert off(pack(items_of(wide))) < 0.01 * 316_042
    chain = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 7))
    assert pack(find(chain, trace(chain))).sizes == (72, 63)


def test_a_command_shows_how_equal_the_sets_are(capsys: pytest.CaptureFixture[str]) -> None:
    """B1: under 5 % of all parameters, of the job that ships and of others."""
    assert partners.main(["--sets", "--json"]) == 0
    *table, last = capsys.readouterr().out.splitlines()
    rows = json.loads(last)
    assert len(rows) == len(table) - 1 >= 5
    for row, line in zip(rows, table[1:], strict=True):
        assert line.startswith(row["network"]) and f"{row['first']:,}" in line
        assert abs(row["first"] - row["second"]) < 0.05 * (row["first"] + row["second"])
    assert (rows[0]["first"] + rows[0]["second"], rows[0]["branches"]) == (6_338, 8)


def test_sets_that_are_not_near_equal_are_a_warning() -> None:
    assert pack(items(100, 91)).warning() is None  # 4.7 % of all
    warning = pack(items(4100, 3700)).warning()
    assert warning is not None
    assert "4,100 and 3,700 parameters: they differ by 5% of all; branches(model)" in warning


def test_a_model_without_branches_is_told_of() -> None:
    """Also where its layers cannot be packed into equal sets: it has no other branches that its user could name."""
    for outputs, sizes in ((4, "16 and 16 parameters"), (400, "16 and 1,600 parameters")):
        chain = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(3, outputs))
        warning = pack(find(chain, trace(chain))).warning()
        assert warning is not None and warning.startswith("the model has no parallel branches")
        assert sizes in warning and "branches(model)" not in warning
    assert pack(items_of(load(SHIPPED, {}))).warning() is None


def test_sets_are_described() -> None:
    """The first branches by name, a branch of several modules by the first and the last one, and how many follow."""
    several = Item(("b.0", "b.1", "b.3"), ("b.0.weight",), (), (1000,), True)
    other = Item(("head",), ("head.weight",), (), (200,), False)
    few = [Item((f"m{at}",), (f"m{at}.weight",), (), (300,), True) for at in range(6)]
    told = Sets(((several, other), tuple(few))).describe()
    assert told == (
        "set 1 has 1,200 parameters: b.0 to b.3, 1 in no branch; set 2 has 1,800: m0, m1, m2, m3, 2 more"
    )


def test_a_fragment_has_as_many_parameters_as_on_the_wire() -> None:
    assert lanes_per_fragment(32) == packing.FRAGMENT


# ---- the vector


def layout_of(folder: Path, **settings: Any) -> dict[str, Any]:
    return prepare(SHIPPED, folder, None, settings, packed=True)


def test_the_vector_has_set_1_first_and_its_buffers_before_its_modules(tmp_path: Path) -> None:
    prepared = layout_of(tmp_path / "out")
    assert prepared["branches"] == pack(items_of(load(SHIPPED, {}))).describe()
    assert json.loads((tmp_path / "out" / "prepared.json").read_text())["sets"] == list(
        prepared["sets"]
    )
    sets = pack(items_of(load(SHIPPED, {})))
    first = {name for item in sets.items[0] for name in item.tensors}
    entries = [entry for entry in prepared["model"] if entry["kind"] != "fixed"]
    assert [entry["name"] in first for entry in entries] == sorted(
        (entry["name"] in first for entry in entries), reverse=True
    )
    kinds = [kind for kind, _ in itertools.groupby(entry["kind"] for entry in entries)]
    assert kinds == ["buffer", "parameter", "buffer", "parameter"]
    seconds = [entry for entry in entries if entry["name"] not in first]
    kind, ahead = next((k, list(of)) for k, of in itertools.groupby(seconds, lambda e: e["kind"]))
    names = [name for item in sets.items[1] for name in item.parameters]
    assert kind == "parameter" and [e["name"] for e in ahead] == names[-len(ahead) :]
    assert sum(map(weights.size, ahead)) >= 360 > sum(map(weights.size, ahead[1:]))
    lanes = sum(weights.size(entry) for entry in entries if entry["name"] in first)
    assert prepared["sets"] == (lanes, weights.lanes(prepared["model"]) - lanes)
    places = packing.fragments(prepared["model"])
    begins = client.second_begins(prepared["sets"])
    assert max(places[name].stop for name in first & places.keys()) == begins
    later = places.keys() - first
    assert min(places[name].start for name in later) in (begins, begins - 1)
    assert max(place.stop for place in places.values()) == -(
        -weights.lanes(prepared["model"]) // 360
    )


def net() -> nn.Module:
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2), nn.BatchNorm1d(2))


ORDER = ["3.running_mean", "2.weight", "3.bias", "1.running_var", "1.running_mean", "0.weight"]


def test_a_set_lies_in_the_order_of_the_forward_pass() -> None:
    """Set 2 begins with what it needs last, as many as fill a fragment; buffers are first all the same."""
    sets = pack(items_of(load(SHIPPED, {})))
    plain, need = sets.order(), list(reversed(sets.order()))
    firsts = {name for item in sets.items[0] for name in item.tensors}
    buffers = {name for items in sets.items for item in items for name in item.buffers}
    turned = sets.order(need)
    assert sorted(turned) == sorted(plain) and sets.order(plain) != turned
    own = [name for name in turned if name in firsts]
    assert turned[: len(own)] == own
    place = [need.index(name) for name in own if name not in buffers]
    assert place == sorted(place)
    other = [name for name in turned if name not in firsts and name not in buffers]
    place = [need.index(name) for name in other]
    late = place.index(min(place))
    assert late and place == sorted(place)[-late:] + sorted(place)[:-late]


def test_steps_do_not_depend_on_the_order() -> None:
    """Two members of another order: the same bits by name, of weights, buffers, clipped gradients and a state."""
    models = [FlatModel(net()), FlatModel(net(), order=ORDER)]
    assert weights.order(models[1].layout)[: len(ORDER)] == ORDER
    assert sorted(weights.order(models[1].layout)) == sorted(weights.order(models[0].layout))
    optimizers = [torch.optim.Adam(model.trained, lr=0.1) for model in models]
    for step in range(3):
        for model, optimizer in zip(models, optimizers, strict=True):
            total = np.zeros(model.lanes, np.float32)
            for member in (1, 2):
                model.begin_training(step)
                model.model(torch.randn(6, 3) * member).square().sum().backward()
                assert step or model.changed_buffers() == {
                    f"{at}.running_{what}" for at in (1, 3) for what in ("mean", "var")
                }
                total += model.finish(6)
            model.begin()
            model.apply(total, 12)
            optimizer.step()
    plain, ordered = (model.arrays() for model in models)
    assert plain.keys() == ordered.keys() and list(plain) != list(ordered)
    for name, array in plain.items():
        assert np.array_equal(array, ordered[name]), name
    states = [optimizer.state_dict()["state"] for optimizer in optimizers]
    for at, state in states[0].items():
        assert torch.equal(state["exp_avg"], states[1][at]["exp_avg"]), at
    again = FlatModel(net(), order=ORDER)
    again.load(plain)
    assert again.sha256() == models[1].sha256() != models[0].sha256()


def test_clipping_scales_the_whole_gradient() -> None:
    model = FlatModel(net(), order=ORDER)
    model.begin_training(1)
    (model.model(torch.randn(6, 3)) * torch.randn(6, 2)).sum().backward()
    model.finish(1)
    norm = np.sqrt(sum(float(p.grad.square().sum()) for p in model.trained if p.grad is not None))
    assert model.clip(1, norm * 1.01) is False
    assert model.clip(1, norm / 2) is True
    half = np.sqrt(sum(float(p.grad.square().sum()) for p in model.trained if p.grad is not None))
    assert half == pytest.approx(norm / 2, rel=1e-5)


def test_a_run_in_that_order_is_saved_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its members agree after each round, its model is by name, and a checkpoint fits either order."""
    settings = {"batch": 48, "test_every": 100, "checkpoint_s": 0.001}
    source = tmp_path / "branches"
    source.mkdir()
    text = (SHIPPED / "job.py").read_text()
    text = text.replace(
        "def scheduler", "def no_scheduler"
    )  # rates depend on how many rounds are planned
    text = text.replace(
        "Dropout(0.1)", "Dropout(0.0)"
    )  # the members' threads have one source of random numbers
    (source / "job.py").write_text(text)

    def packed(*args: Any) -> dict[str, Any]:
        return prepare(*args, packed=True)

    monkeypatch.setattr("tests.trainer_lab.prepare", packed)
    once = run_job(source, tmp_path / "once", 2, rounds=6, **settings)
    assert once.errors == [None, None]
    for lines in zip(once.metrics(1), once.metrics(2), strict=True):
        assert len({line["weights_sha256"] for line in lines}) == 1
    state = torch.load(once.folders[0] / "out" / "model.pt")
    job = load(SHIPPED, {})
    job.model().load_state_dict(state)
    half = run_job(source, tmp_path / "half", 2, rounds=3, **settings)
    checkpoint = half.folders[0] / "checkpoint.npz"
    again = run_job(source, tmp_path / "again", 2, resume=checkpoint, rounds=6, **settings)
    assert again.metrics(1)[-1]["weights_sha256"] == once.metrics(1)[-1]["weights_sha256"]
    monkeypatch.setattr("tests.trainer_lab.prepare", preparing.prepare)
    plain = run_job(source, tmp_path / "plain", 2, resume=checkpoint, rounds=6, **settings)
    assert plain.errors == [None, None]
    assert plain.network.ready != again.network.ready, "the vector has another layout"
    other = torch.load(plain.folders[0] / "out" / "model.pt")
    assert state.keys() == other.keys()
    for name, tensor in state.items():
        assert torch.allclose(tensor, other[name], atol=1e-3), name


def test_a_warning_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("trainer.packing.UNEQUAL", 0.0)
    prepared = layout_of(tmp_path / "out")
    (note,) = prepared["notes"]  # which the host that hands the job out tells its user
    assert note.startswith("the two sets of branches have ")
    assert f"trainer: warning: {note}" in capsys.readouterr().err
