# SPDX-License-Identifier: Apache-2.0
"""B3: what is computed while parameters arrive, in which order, and that no bit depends on when they do."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.branched import (
    Branching,
    GoogLeNet,
    Inception,
    InceptionResidual,
    Residual,
    Towers,
    Transformer,
)
from tests.unit.test_branches import NET, UNTRACEABLE
from tests.unit.test_trainer_prepare import make
from trainer import JobError, weights
from trainer.branches import find, needs_of, trace
from trainer.errors import Untraceable
from trainer.flat import FlatModel
from trainer.job import load
from trainer.order import (
    Arrivals,
    Fragments,
    Traced,
    attach,
    difference,
    joined,
    late,
    orders_of,
    train,
    verify,
)
from trainer.packing import FRAGMENT, pack
from trainer.prepare import prepare

pytestmark = pytest.mark.usefixtures("one_thread")

SHIPPED = Path(__file__).resolve().parents[2] / "trainer" / "jobs" / "branches"
SEED = 7

Loss = Callable[[nn.Module], Tensor]


class Case:
    """A model, its loss, and the vector in the order of its sets."""

    def __init__(self, build: Callable[[], nn.Module], loss: Loss) -> None:
        self._build, self.loss = build, loss
        model = self.build()
        sets = pack(find(model, trace(model)))
        self.layout = FlatModel(self.build(), order=sets.order()).layout
        self.sets = sets.lanes(self.layout)

    def build(self) -> nn.Module:
        torch.manual_seed(SEED)
        return self._build()

    def flat(self) -> FlatModel:
        return FlatModel(self.build(), order=weights.order(self.layout))

    def traced(self) -> Traced:
        traced = Traced(self.build)
        traced.learn(self.build, self.loss, SEED)
        return traced


def random(*shape: int) -> Tensor:
    return torch.from_numpy(np.random.default_rng(3).normal(size=shape).astype(np.float32))


def summed(model: nn.Module, *inputs: Tensor, **more: Tensor) -> Tensor:
    out = model(*inputs, **more)
    return sum(part.square().mean() for part in (out if isinstance(out, tuple) else (out,)))


def on(*inputs: Tensor) -> Loss:
    return lambda model: summed(model, *inputs)


def chain() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 40), nn.BatchNorm1d(40), nn.Dropout(0.5), nn.Linear(40, 9))


def images(channels: int = 1) -> Loss:
    return on(random(2, channels, 6, 6))


CASES = {
    "shipped": (lambda: load(SHIPPED, {}).model(), images()),
    "googlenet": (lambda: GoogLeNet(heads=True), images()),
    "towers": (lambda: Towers(64, 64), lambda m: summed(m, b=random(4, 6), a=random(4, 6) + 1)),
    "transformer": (Transformer, on(torch.tensor([[1, 2, 3, 4, 5], [10, 9, 0, 1, 2]]))),
    "residual": (lambda: Residual(True), images(4)),
    "five ways": (InceptionResidual, images()),
    "chain": (chain, on(random(4, 6))),
}


@pytest.fixture(params=CASES, scope="module")
def case(request: pytest.FixtureRequest) -> Case:
    return Case(*CASES[request.param])


def test_what_needs_the_first_set_only_comes_first(case: Case) -> None:
    model = case.build()
    graph = trace(model)
    needs = {node.name: set(names) for node, names in needs_of(model, graph).items()}
    inputs = {node.name: {n.name for n in node.all_input_nodes} for node in graph.nodes}
    for first, order in enumerate(
        orders_of(case.build, case.loss, case.layout, case.sets, SEED), 1
    ):
        slow = late(case.layout, case.sets, first)
        assert slow
        waits: dict[str, bool] = {}
        for name in order:  # inputs come before
            waits[name] = bool(needs[name] & slow) or any(waits[n] for n in inputs[name])
        begun = next(name for name in order if needs[name] & slow)
        behind = order[order.index(begun) :]
        assert all(waits[name] for name in behind)
        assert any(not waits[name] for name in order)


def test_branches_of_the_first_set_are_computed_before_the_others() -> None:
    """In the model itself the four ways come in turn."""
    case = Case(lambda: Inception(2, 8, 12, 8, 8), images(2))
    model = case.build()
    needs = {n.name: set(names) for n, names in needs_of(model, trace(model)).items()}
    orders = orders_of(case.build, case.loss, case.layout, case.sets, SEED)
    for first, order in enumerate(orders, 1):
        slow = late(case.layout, case.sets, first)
        written, begun = (
            [bool(needs[name] & slow) for name in names if needs[name]] for names in (needs, order)
        )
        assert begun.index(True) > written.index(True)
        assert begun[begun.index(True) :].count(False) <= 2 * (first - 1), "in the fragment of both"


class Line:
    """Brings fragments from another thread, in an order of its own."""

    def __init__(self, flat: FlatModel, seed: int) -> None:
        self._flat, self._real = flat, flat.weights.copy()
        self._count = -(-flat.lanes // FRAGMENT)
        self._here: set[int] = set()
        self._changed = threading.Condition()
        self._order = np.random.default_rng(seed).permutation(self._count)
        self.waited = 0
        self.arrivals = Arrivals(self._count, self._wait)
        flat.weights[:] = np.nan
        self._thread = threading.Thread(target=self._bring)

    def __enter__(self) -> Line:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._thread.join()

    def _bring(self) -> None:
        for at in self._order:
            with self._changed:
                self._here.add(int(at))
                self._changed.notify()

    def _wait(self, pieces: Fragments) -> None:
        self.waited += 1
        for piece in pieces:
            with self._changed:
                assert self._changed.wait_for(lambda: self._here.issuperset(piece), 60)  # noqa: B023
            lanes = slice(piece.start * FRAGMENT, piece.stop * FRAGMENT)
            self._flat.weights[lanes] = self._real[lanes]


def test_no_bit_depends_on_what_arrives_when(case: Case) -> None:
    """Loss, gradients, buffers and random numbers; of the two orders, all but gradients are the model's own."""
    traced = case.traced()
    written = train(case.build(), case.loss, SEED)
    for first in (1, 2):
        order = traced.order(late(case.layout, case.sets, first))
        there = case.flat()
        attach(there.model, case.layout, lambda pieces: None, traced, order)
        due = train(there.model, case.loss, SEED)
        assert difference(written, due, gradients=False) is None
        for name in due:
            assert torch.allclose(written[name], due[name], rtol=1e-3, atol=1e-5), name
        for seed in range(2):
            flat = case.flat()
            with Line(flat, seed) as line:
                attach(flat.model, case.layout, line.arrivals.require, traced, order)
                assert difference(due, train(flat.model, case.loss, SEED)) is None
            assert line.waited > 1
            assert np.isfinite(flat.weights).all()


def seeded(kind: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        torch.manual_seed(SEED)
        return kind()

    return build


@pytest.mark.parametrize("sign", [1, -1])
def test_modules_wait_in_a_model_that_is_not_traced(sign: int) -> None:
    layout = FlatModel(Branching()).layout
    verify(seeded(Branching), on(torch.ones(2, 3) * sign), layout, SEED)


class Early(nn.Module):
    """Reads a weight before its module is called."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 1e9:
            return x
        return self.b(self.a(x @ self.b.weight))


def test_what_is_read_without_waiting_is_found() -> None:
    build, loss = seeded(Early), on(random(2, 3))
    with pytest.raises(
        JobError, match="reads parameters before the module that holds them is called"
    ):
        verify(build, loss, FlatModel(Early()).layout, SEED)


# ---- side effects


class Effects(nn.Module):
    """Two ways to each of three traps; the late one of each pair comes first as it is written."""

    def __init__(self) -> None:
        super().__init__()
        self.late = nn.Linear(4, 400)
        self.early = nn.Linear(4, 400)
        self.norm = nn.BatchNorm1d(400)
        self.last = nn.Linear(400, 400)

    def forward(self, x: Tensor) -> Tensor:
        y = x.repeat(1, 100)
        a, b = self.late(x), self.early(x) + y
        a, b = nn.functional.dropout(a, 0.5), nn.functional.dropout(b, 0.5)
        a, b = self.norm(a), self.norm(b)  # statistics: first a's, then b's
        y.add_(a.mean())  # what comes after reads another y
        return a.sum() + self.last(b).sum() + (y * b.mean()).sum()


def test_side_effects_keep_their_order() -> None:
    case = Case(Effects, lambda model: model(random(4, 4)))
    traced = case.traced()
    names = [node.name for node in traced.graph.nodes]
    for slow in ("late", "early", "last", "norm"):
        order = traced.order({f"{slow}.weight"})
        assert order.index("dropout") < order.index("dropout_1"), slow
        assert order.index("norm") < order.index("norm_1"), slow
        assert order.index("add") < order.index("add_") < order.index("mul")
        verify(case.build, case.loss, case.layout, SEED, traced, order)
    assert traced.order(set()) == names
    first = traced.order({"late.weight"})
    assert first.index("early") < first.index("late") > names.index("late")


def test_an_order_that_breaks_one_is_found() -> None:
    case = Case(Effects, lambda model: model(random(4, 4)))
    traced = case.traced()
    names = [node.name for node in traced.graph.nodes]
    for one, other in (("dropout", "dropout_1"), ("norm", "norm_1"), ("early", "late")):
        swapped = names.copy()
        a, b = names.index(one), names.index(other)
        swapped[a], swapped[b] = other, one
        if one == "early":
            verify(case.build, case.loss, case.layout, SEED, traced, swapped)
        else:
            with pytest.raises(
                JobError, match="in the order of its branches the model computes another"
            ):
                verify(case.build, case.loss, case.layout, SEED, traced, swapped)


class Trapped(nn.Module):
    """What it does in `trap` is done as it is traced, and not later."""

    def __init__(self, trap: Callable[[Trapped, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.register_buffer("scale", torch.ones(1))
        self.trap = trap

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.layer(self.trap(self, x) if mask is None else x * mask)


def scaling(model: Trapped, x: Tensor) -> Tensor:
    model.scale.mul_(2)
    return x * model.scale


@pytest.mark.parametrize(
    ("trap", "message"),
    [
        (scaling, "computes another"),
        (lambda model, x: x + torch.rand(3), "computes another"),
        (lambda model, x: x, "fails|computes another"),
    ],
)
def test_a_trace_that_computes_something_else_is_found(
    trap: Callable[[Trapped, Tensor], Tensor], message: str
) -> None:
    def loss(model: nn.Module) -> Tensor:
        try:
            return summed(model, torch.ones(2, 3))
        except TypeError as error:
            raise JobError(str(error)) from error

    build = seeded(lambda: Trapped(trap))
    if message == "computes another":  # not because of the mask
        build = seeded(lambda: WithoutMask(trap))
    with pytest.raises(Untraceable, match=f"as torch.fx has traced it, the model ({message})"):
        Traced(build).learn(build, loss, SEED)


class WithoutMask(Trapped):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return self.layer(self.trap(self, x))


class Modes(nn.Module):
    """A constant, and another way in tests."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor, scale: float = 2.0) -> Tensor:
        if self.training:
            x = x * torch.tensor([1.0, 2.0, 3.0])
        return self.layer(x) * scale


def test_a_constant_a_default_and_a_test() -> None:
    build = seeded(Modes)
    traced = Traced(build)
    traced.learn(build, on(random(2, 3)), SEED)
    flat = FlatModel(build())
    attach(flat.model, flat.layout, lambda pieces: None, traced, traced.order(set()))
    for training in (True, False):
        for arguments in ((random(2, 3),), (random(2, 3), 0.5)):
            outs = [model.train(training)(*arguments) for model in (build(), flat.model)]
            assert torch.equal(*outs)
    assert torch.equal(flat.model(scale=3.0, x=random(2, 3)), build().eval()(random(2, 3), 3.0))


# ---- fragments


def test_each_fragment_is_waited_for_once_a_step() -> None:
    asked: list[Fragments] = []
    arrivals = Arrivals(12, asked.append)
    arrivals.require((range(2, 4), range(7, 8)))
    arrivals.require((range(3, 4),))
    arrivals.require((range(9),))
    assert asked == [(range(2, 4), range(7, 8)), (range(2), range(4, 7), range(8, 9))]
    arrivals.begin()
    arrivals.require((range(3, 4),))
    assert asked[2:] == [(range(3, 4),)]


def test_a_wait_that_fails_is_asked_again() -> None:
    asked: list[Fragments] = []

    def wait(pieces: Fragments) -> None:
        asked.append(pieces)
        if len(asked) == 1:
            raise JobError("over")

    arrivals = Arrivals(3, wait)
    with pytest.raises(JobError):
        arrivals.require((range(1, 2),))
    arrivals.require((range(1, 2),))
    assert asked == [(range(1, 2),)] * 2


def test_ranges_are_joined() -> None:
    pieces = [range(5, 7), range(2), range(1, 3), range(3, 4), range(6, 7)]
    assert joined(pieces) == (range(4), range(5, 7))


def test_the_fragment_in_which_both_sets_meet_is_late_for_set_2() -> None:
    layout = [
        {"name": name, "kind": "parameter", "shape": [size], "dtype": "float32"}
        for name, size in (("a", 360), ("b", 100), ("c", 200), ("d", 500))
    ]
    assert late(layout, (460, 700), 1) == {"d"}
    assert late(layout, (460, 700), 2) == {"a", "b", "c", "d"}
    layout[2]["shape"] = [260]
    assert late(layout, (460, 760), 2) == {"a", "b", "c"}
    assert late(layout, (720, 500), 1) == {"d"}


# ---- as a job is prepared


def test_prepared_json_has_the_orders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NICPS_DATA", raising=False)
    prepare(SHIPPED, tmp_path / "out", None, {}, packed=True)
    prepared = json.loads((tmp_path / "out" / "prepared.json").read_text())
    build = load(SHIPPED, {}).model
    traced = Traced(build)
    flat = FlatModel(build(), order=weights.order(prepared["model"]))
    assert flat.layout == prepared["model"]
    one, two = prepared["orders"]
    assert one != two
    for order in (one, two):
        graph = traced.in_order(order)
        graph.lint()
        assert [node.op for node in graph.nodes][-1] == "output"
    with pytest.raises(JobError, match="its forward pass is another"):
        traced.in_order(one[1:])


def test_a_model_that_is_not_traced_computes_as_it_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = UNTRACEABLE.replace("nets", "nets_of_order")
    job = make(tmp_path / "job", text + "\ndef branches(model):\n    return [['a'], ['b']]\n")
    (job / "nets_of_order.py").write_text(NET)
    prepared = prepare(job, tmp_path / "out", None, {}, packed=True)
    assert prepared["sets"] == (8, 8) and "orders" not in prepared
    (note,) = prepared["notes"]
    assert note.startswith("the model computes in its own order")
    assert f"warning: {note}" in capsys.readouterr().err
    read = "self.b(x @ self.b.weight.t() @ self.a.weight)"
    (job / "nets_of_order.py").write_text(NET.replace("self.a(x)", read))
    (job / "job.py").write_text(
        (job / "job.py").read_text().replace("nets_of_order", "nets_of_late")
    )
    (job / "nets_of_order.py").rename(job / "nets_of_late.py")
    with pytest.raises(JobError, match="such a model cannot have partners"):
        prepare(job, tmp_path / "late", None, {}, packed=True)
