# SPDX-License-Identifier: Apache-2.0
"""What a State takes, what it hands over, and what a process that comes late may call."""

from __future__ import annotations

import sys
import threading
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from nicps.collective import Group  # noqa: E402
from nicps.collective.admission import Admission  # noqa: E402
from nicps.errors import UsageProblem  # noqa: E402
from nicps.torch import ChangeAverager, ProcessGroupNicps, State, compress, elastic  # noqa: E402
from nicps.torch.elastic import _check  # noqa: E402
from nicps.torch.low_rank import LowRank  # noqa: E402
from nicps.torch.tcp import Tcp  # noqa: E402
from tests.collectives import Meeting, together  # noqa: E402
from tests.heard import Heard  # noqa: E402

pytestmark = pytest.mark.unit

Averaging = compress.__globals__["Averaging"]


def parts(seed: int, kind: type[torch.optim.Optimizer], steps: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 2))
    options = {"momentum": 0.9} if kind is torch.optim.SGD else {}
    optimizer = kind(model.parameters(), lr=0.1 * (seed + 1), **options)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(9, 5)).sum().backward()
        optimizer.step()
        scheduler.step()
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler}


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW])
def test_what_is_loaded_goes_on_as_what_was_packed(kind: type[torch.optim.Optimizer]) -> None:
    """In place, bit for bit: weights, buffers, momentum, learning rate; and the next step is the same."""
    old = State(**parts(0, kind, 5), epoch=3, name="x", seen=[1, {"a": torch.arange(3)}])
    new = State(**parts(1, kind, 2), epoch=0, name="", seen=[])
    weights = [p.data_ptr() for p in new.model.parameters()]
    new._load(old._pack())
    assert [p.data_ptr() for p in new.model.parameters()] == weights
    assert (new.epoch, new.name) == (3, "x") and torch.equal(new.seen[1]["a"], torch.arange(3))
    x = torch.randn(9, 5)
    for state in (old, new):
        state.optimizer.zero_grad()
        state.model(x).sum().backward()
        state.optimizer.step()
        state.scheduler.step()
    for mine, other in zip(
        new.model.state_dict().values(), old.model.state_dict().values(), strict=True
    ):
        assert torch.equal(mine, other)
    assert new.optimizer.param_groups[0]["lr"] == old.optimizer.param_groups[0]["lr"]


def test_what_a_state_cannot_hold() -> None:
    with pytest.raises(UsageProblem, match="is no plain value"):
        State(order=iter([1]))
    with pytest.raises(UsageProblem, match="order: dict"):
        State(order={"a": object()})
    with pytest.raises(UsageProblem, match="cannot be the name"):
        State(sync=1)

    class Wrapped(nn.parallel.DistributedDataParallel):
        def __init__(self) -> None:
            nn.Module.__init__(self)
            self.find_unused_parameters = False

    with pytest.raises(UsageProblem, match="find_unused_parameters=True"):
        _check("model", Wrapped())


def test_another_script_at_a_host_that_comes_late() -> None:
    old, new = State(epoch=1, step=2), State(epoch=0)
    with pytest.raises(UsageProblem, match="has epoch here, and epoch, step at the others"):
        new._load(old._pack())


def test_a_state_travels_whatever_device_is_the_scripts_default() -> None:
    def program(group: Group) -> bytes:
        with torch.device("meta"):
            return elastic._broadcast(group, b"state" if group.rank == 1 else b"", 1)

    assert together(Meeting(2), program) == [b"state"] * 2


def test_a_part_whose_state_is_not_plain() -> None:
    """torch says so in a dozen lines."""

    class Sampler:
        order: Any = None

        def state_dict(self) -> Any:
            return {"order": self.order}

        def load_state_dict(self, state: Any) -> None:
            self.order = state["order"]

    old, new = State(sampler=Sampler()), State(sampler=Sampler())
    old.sampler.order = np.arange(3)
    with pytest.raises(UsageProblem) as caught:
        new._load(old._pack())
    assert "the state of the others has a numpy" in str(caught.value)
    assert "\n" not in str(caught.value)
    old.sampler.order = [0, 1, 2]
    new._load(old._pack())
    assert new.sampler.order == [0, 1, 2]


def test_a_sync_without_the_backend() -> None:
    with pytest.raises(UsageProblem, match="needs the process group of nicps"):
        State(epoch=0).sync()


def test_a_process_that_comes_late_and_does_not_sync() -> None:
    """Broadcasts give back its own, so that DDP can be made; a sum with others is refused when it is waited for."""
    group = ProcessGroupNicps(Group(None, 1, 1.0, None, 3), Tcp("it has come late"))
    assert (group.rank(), group.size(), group.getSize()) == (1, 3, 3)
    tensor = torch.arange(4.0)
    work = group.allreduce([tensor])
    with pytest.raises(RuntimeError, match="has come late to a group"):
        work.wait()

    class Root:
        rootRank, reduceOp = 0, torch.distributed.ReduceOp.SUM  # noqa: N815

    for work in (
        group.reduce([tensor], Root()),
        group.reduce_scatter_single(torch.zeros(1), torch.ones(3), Root()),
    ):
        with pytest.raises(RuntimeError, match="has come late to a group"):
            work.wait()
    group.broadcast([tensor], Root()).wait()
    assert torch.equal(tensor, torch.arange(4.0))
    rows = [[torch.zeros(4) for _ in range(3)]]
    group.allgather(rows, [tensor]).wait()
    assert all(torch.equal(row, tensor) for row in rows[0])
    group.shutdown()


class Bucket:
    """The only one of a model with one parameter, as DDP gives it to a hook."""

    def __init__(self, parameter: nn.Parameter) -> None:
        self._parameter = parameter

    def index(self) -> int:
        return 0

    def is_last(self) -> bool:
        return True

    def parameters(self) -> list[nn.Parameter]:
        return [self._parameter]

    def buffer(self) -> Any:
        return torch.ones(self._parameter.numel())


def with_lanes(group: Any, module: nn.Linear) -> None:
    model: Any = SimpleNamespace(module=module)
    Averaging(model, group, "i8", None).average(Bucket(module.weight)).wait()


def with_factors(group: Any, module: nn.Linear, warmup_steps: int = 0) -> None:
    model: Any = SimpleNamespace(module=module, register_comm_hook=lambda *_: None)
    LowRank(model, group, 1, None, warmup_steps).add(Bucket(module.weight)).wait()


def with_local_steps(group: Any, module: nn.Linear) -> None:
    process_group: Any = SimpleNamespace(group=group)
    ChangeAverager(2, 0, process_group).average(module.parameters())


@pytest.mark.parametrize(
    "average", [with_lanes, with_factors, partial(with_factors, warmup_steps=1), with_local_steps]
)
def test_a_late_process_does_not_train_alone(average: Any) -> None:
    """It would train another model, and its script would never notice."""
    group, module = Group(None, 1, 1.0, None, 3), nn.Linear(30, 30, bias=False)
    with pytest.raises(RuntimeError, match="has come late to a group"):
        average(group, module)
    group.close()


class Waiting:
    """A group that lets a process in once something is on its stderr, or at once."""

    out = False

    def __init__(self, late: bool, quiet: threading.Event) -> None:
        self.late, self._quiet = late, quiet

    def admit(self) -> Any:
        return self

    def result(self) -> Admission:
        if self.late:
            assert self._quiet.wait(30.0)
        return Admission((), (), self.late)


@pytest.mark.parametrize("late", [False, True])
def test_a_process_that_waits_to_come_in_says_so(
    late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    stderr = Heard()
    group: Any = Waiting(late, stderr.told)
    monkeypatch.setattr(elastic, "_QUIET_S", 0.01)
    monkeypatch.setattr(elastic, "_group", lambda: group)
    monkeypatch.setattr(sys, "stderr", stderr)
    assert not State(epoch=1).sync()
    text = "it waits until the other ranks call State.sync()\n"
    assert stderr.said.endswith(text) if late else not stderr.said


class Handle:
    """One whose renewal is a call."""

    def __init__(self, alike: int, group: Group) -> None:
        self.alike, self._group = alike, group
        self.renewed: list[Any] = []

    def forget(self) -> None:
        """As `Renewed`."""

    def renew(self) -> None:
        if self.alike:
            call = self._group.all_reduce(np.full(3 + self.alike, 1.0, np.float32))
            self.renewed.append(call.result()[0])
        else:
            self.renewed.append(None)


@pytest.mark.parametrize(
    ("made", "renewed"),
    [
        ([[7], [7], [7]], [[0], [0], [0]]),
        # Those that a script has let go of are garbage at some ranks, and were never made at a late one.
        ([[7, 9], [9], [9]], [[1], [0], [0]]),
        ([[7, 7, 9], [7, 9], [9, 7]], [[1, 2], [0, 1], [0, 1]]),
        ([[7], [], []], [[], [], []]),
        ([[7, 0], [0], [0]], [[1], [0], [0]]),
        ([[], [], []], [[], [], []]),
    ],
)
def test_only_handles_that_all_ranks_have_are_renewed(
    made: list[list[int]], renewed: list[list[int]]
) -> None:
    """The calls of the others would be answered by no rank."""

    def program(group: Group) -> list[int]:
        handles = [Handle(alike, group) for alike in made[group.rank]]
        for each in elastic.common(group, handles):  # type: ignore[arg-type]
            each.renew()
        return [at for at, each in enumerate(handles) if each.renewed]

    assert together(Meeting(3), program) == renewed


def test_handles_of_different_models_are_named() -> None:
    made = [[7, 9], [7, 8], [9, 7]]

    def program(group: Group) -> None:
        with pytest.raises(UsageProblem, match=r"at h2 \(rank 1\) are not those of h1 \(rank 0\)"):
            elastic.common(group, [Handle(each, group) for each in made[group.rank]])  # type: ignore[misc]

    assert together(Meeting(3), program) == [None] * 3


def test_a_lost_rank_has_no_say() -> None:
    made = [[7, 9], [8], [9]]

    def program(group: Group) -> int:
        handles = [Handle(alike, group) for alike in made[group.rank]]
        return sum(each.alike for each in elastic.common(group, handles))

    found = together(Meeting(3, loses={2: 2}), program)
    assert [found[0], found[2]] == [9, 9]


def test_a_host_comes_in_where_a_handle_was_let_go_of_without_closing_it() -> None:
    def program(group: Group) -> tuple[int, list[int]]:
        handles = [Handle(alike, group) for alike in ([9] if group.late else [7, 9])]
        for each in handles:
            elastic.note_renewed(group, each)
        state = State(epoch=0 if group.late else 5)
        assert state._sync(group)
        return state.epoch, [each.alike for each in handles if each.renewed]

    assert together(Meeting(2, expects=1), program, late=1) == [(5, [9])] * 3
