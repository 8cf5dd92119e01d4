# SPDX-License-Identifier: Apache-2.0
"""B1: which branches are found in a model, and what job.py may name."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import Tensor, nn

from tests.branched import Branching, GoogLeNet, InceptionResidual, Residual, Towers, Transformer
from tests.unit.test_trainer_prepare import JOB, make
from trainer import JobError
from trainer.branches import Item, find, items_of, named, trace
from trainer.job import load

SHIPPED = Path(__file__).resolve().parents[2] / "trainer" / "jobs" / "branches"


def found(model: nn.Module) -> list[Item]:
    items = find(model, trace(model))
    covers(model, items)
    return items


def covers(model: nn.Module, items: list[Item]) -> None:
    """Each parameter and each buffer is in one item."""
    names = [name for name, _ in (*model.named_parameters(), *model.named_buffers())]
    assert sorted(name for item in items for name in item.tensors) == sorted(names)
    assert sum(item.size for item in items) == sum(p.numel() for p in model.parameters())


def branches(items: list[Item]) -> list[tuple[str, ...]]:
    return [item.modules for item in items if item.is_branch]


def singles(items: list[Item]) -> list[str]:
    assert all(len(item.modules) == 1 for item in items if not item.is_branch)
    return [item.modules[0] for item in items if not item.is_branch]


def test_the_job_that_ships() -> None:
    items = items_of(load(SHIPPED, {}))
    ways = ("one", "three", "twice", "pool")
    due = [f"{block}.{way}." for block in (1, 3) for way in ways]
    assert len(branches(items)) == 8
    for prefix, modules in zip(due, branches(items), strict=True):
        assert all(name.startswith(prefix) for name in modules)
    assert singles(items) == ["0.0", "0.1", "7"]
    twice = items[4]
    assert (len(twice.modules), len(twice.parameters), len(twice.buffers)) == (6, 9, 9)
    assert twice.size == 8 * 8 + 2 * (8 * 8 * 9) + 3 * 2 * 8


def test_a_googlenet() -> None:
    items = found(GoogLeNet())
    assert len(branches(items)) == 36
    assert singles(items) == ["stem.0.0", "stem.0.1", "stem.1.0", "stem.1.1", "head"]


def test_a_branch_that_is_most_of_the_model_is_taken_apart() -> None:
    """The other way is the head in the middle: its fork would leave two items."""
    items = found(GoogLeNet(heads=True))
    assert len(branches(items)) == 36 + 1
    assert ("middle",) in branches(items) and singles(items)[-1] == "head"


def test_four_ways_and_one_past_them() -> None:
    items = found(InceptionResidual())
    assert len(branches(items)) == 4 and singles(items) == ["stem.0", "stem.1"]


def test_towers_begin_at_the_inputs() -> None:
    items = found(Towers(32, 52))
    assert branches(items) == [("left.0", "wide", "deep"), ("right.0", "right.2")]
    assert singles(items) == ["shared", "join"]
    items = found(Towers(320, 8))
    assert branches(items) == [("wide",), ("deep",), ("right.0", "right.2")]
    assert singles(items) == ["shared", "left.0", "join"]


def test_a_transformer() -> None:
    """q and k meet before v comes; a residual connection is no branch; weights that are tied are in one item."""
    items = found(Transformer())
    due = [((f"blocks.{n}.q", f"blocks.{n}.k"), (f"blocks.{n}.v",)) for n in (0, 1)]
    assert branches(items) == [*due[0], *due[1]]
    assert singles(items)[:4] == ["place", "embed", "blocks.0", "blocks.0.norm"]
    assert "head" not in singles(items)


@pytest.mark.parametrize("shortcut", [False, True])
def test_a_residual_block(shortcut: bool) -> None:
    items = found(Residual(shortcut))
    assert branches(items) == (
        [("first", "norm", "second"), ("past.0", "past.1")] if shortcut else []
    )
    assert singles(items) == ([] if shortcut else ["first", "norm", "second"])


def test_a_chain_has_single_modules_only() -> None:
    items = found(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 4), nn.BatchNorm1d(4)))
    assert singles(items) == ["0", "2", "3"] and not branches(items)
    assert [item.size for item in items] == [16, 20, 8]


class Siamese(nn.Module):
    """`twice` is on both ways, `again` on one and behind them; `off` is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.twice, self.again, self.off = nn.Linear(3, 3), nn.Linear(3, 3), nn.BatchNorm1d(5)
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.again(self.a(self.twice(x)) + self.again(self.b(self.twice(x))))


def test_what_is_used_elsewhere_is_in_no_branch() -> None:
    items = found(Siamese())
    assert branches(items) == [("a",), ("b",)]
    assert singles(items) == ["twice", "again", "off"]


def test_frozen_parameters_have_no_size() -> None:
    model = Residual(True)
    model.past.requires_grad_(False)
    items = find(model, trace(model))
    assert branches(items) == [] and [item.size for item in items] == [148, 8, 148, 0, 0]


# ---- branches() of job.py


def test_modules_that_are_named() -> None:
    model = Branching()
    items = named(model, [["left"], ["right.1", "head"]])
    covers(model, items)
    assert branches(items) == [("left",), ("right.1", "head")]
    assert singles(items) == ["right.0"]


def test_pytorchs_own_modules_stay_whole() -> None:
    model = nn.Module()
    model.attention = nn.MultiheadAttention(4, 2)
    model.list = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    assert singles(named(model, [])) == ["attention", "list.0", "list.1"]


@pytest.mark.parametrize(
    ("lists", "message"),
    [
        ([["left"], ["wrong"]], "the model has no module 'wrong'"),
        ([["left"], ["head", "left"]], "'left.weight' is in two branches: in that of 'left'"),
        ([["right"], ["right.1"]], "'right.1.weight' is in two branches: in that of 'right'"),
        ([["left"], []], r"branch 2 \(empty\) has no parameters"),
    ],
)
def test_modules_that_cannot_be_named(lists: list[list[str]], message: str) -> None:
    with pytest.raises(JobError, match=message) as raised:
        named(Branching(), lists)
    assert "\n" not in str(raised.value) and str(raised.value).startswith("job.py: branches(): ")


UNTRACEABLE = JOB.replace("return torch.nn.Linear(3, 2)", "from nets import Net\n    return Net()")
NET = """\
import torch
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    def forward(self, x):
        return self.a(x) if x.sum() > 0 else self.b(x)
"""


def test_a_model_that_cannot_be_traced_needs_them(tmp_path: Path) -> None:
    job = make(tmp_path / "job", UNTRACEABLE.replace("nets", "nets_of_branches"))
    (job / "nets_of_branches.py").write_text(NET)
    due = r"nets_of_branches.py:7, in forward\(\)\): define branches\(model\) in job.py"
    with pytest.raises(JobError, match=due) as raised:
        items_of(load(job, {}))
    assert "\n" not in str(raised.value)
    with (job / "job.py").open("a") as file:
        file.write("\ndef branches(model):\n    return [['a'], ['b']]\n")
    assert branches(items_of(load(job, {}))) == [("a",), ("b",)]


@pytest.mark.parametrize("wrong", ["None", "['a', 'b']", "[[1]]", "[model.a]"])
def test_branches_of_another_form(tmp_path: Path, wrong: str) -> None:
    text = JOB + f"\ndef branches(model):\n    model.a = 1\n    return {wrong}\n"
    due = r"job.py: branches\(\) must return lists of module names, one for each branch"
    with pytest.raises(JobError, match=due):
        items_of(load(make(tmp_path / "job", text), {}))


def test_they_stand_over_what_is_found(tmp_path: Path) -> None:
    text = JOB.replace(
        "torch.nn.Linear(3, 2)", "torch.nn.Sequential(*map(torch.nn.Linear, (3, 2), (2, 2)))"
    )
    job = load(make(tmp_path / "job", text), {})
    assert branches(items_of(job)) == []
    job = load(
        make(tmp_path / "more", text + "\ndef branches(model):\n    return [['0'], ['1']]\n"), {}
    )
    assert branches(items_of(job)) == [("0",), ("1",)]
