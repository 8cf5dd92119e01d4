# SPDX-License-Identifier: Apache-2.0
"""The backend of torch.distributed between threads in place of hosts; tensors of a GPU where there is one."""

from __future__ import annotations

import gc
import ipaddress
import subprocess
import sys
import threading
import warnings
import weakref
from datetime import timedelta
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402

import nicps.torch  # noqa: E402
from nicps.cli.run import _NOT_OURS  # noqa: E402
from nicps.collective import CallMismatch, Group, GroupClosed, MemberLost  # noqa: E402
from nicps.torch import ProcessGroupNicps, join  # noqa: E402
from nicps.torch.backend import leave_digest, warn_of_loss  # noqa: E402
from nicps.torch.tcp import Tcp, shared_network  # noqa: E402
from tests.collectives import Meeting, together  # noqa: E402
from tests.heard import Heard  # noqa: E402

SIZE = 3
#: A machine without a GPU has nothing to skip: it has one device.
DEVICES = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)


def of(rank: int, device: str, length: int = 2000) -> Any:
    """What that rank has."""
    random = torch.Generator().manual_seed(rank)
    return torch.randn(length, generator=random).to(device)


@pytest.mark.parametrize("device", DEVICES)
def test_tensors_of_a_device(device: str) -> None:
    """All ranks share the GPU. A result is there for any stream as soon as `wait` returns."""

    def program(group: Group) -> None:
        rank, pg = group.rank, ProcessGroupNicps(group, Tcp("threads"))
        every = [of(k, device) for k in range(SIZE)]
        tensor = of(rank, device)
        if device == "cuda":
            with torch.cuda.stream(torch.cuda.Stream()):
                torch.cuda._sleep(50_000_000)  # the tensor is not ready when the call is made
                tensor = tensor * 2
                pg.allreduce([tensor]).wait()
                torch.testing.assert_close(tensor, sum(every) * 2)
        else:
            pg.allreduce([tensor]).wait()
            torch.testing.assert_close(tensor, sum(every))
        options = dist.BroadcastOptions()
        options.rootRank = 1
        half = of(rank, device).half()
        pg.broadcast([half], options).wait()
        assert torch.equal(half, every[1].half())
        rows = [torch.empty_like(every[0]) for _ in every]
        work = pg.allgather([rows], [of(rank, device)])
        assert work.result() == [rows]
        assert all(torch.equal(row, each) for row, each in zip(rows, every, strict=True))
        out = torch.empty(SIZE * 2000, device=device)
        pg.all_gather_single(out, of(rank, device)).wait()
        assert torch.equal(out, torch.cat(every))
        assert out.device.type == device

    for found in together(Meeting(SIZE), program):
        if isinstance(found, BaseException):
            raise found


def test_several_tensors_at_once() -> None:
    def program(group: Group) -> None:
        rank, pg = group.rank, ProcessGroupNicps(group, Tcp("threads"))
        inputs = [of(rank, "cpu", length) for length in (5, 700)]
        outputs = [torch.empty(len(each) * SIZE) for each in inputs]
        pg.allgather_into_tensor_coalesced(outputs, inputs).wait()
        for out, length in zip(outputs, (5, 700), strict=True):
            assert torch.equal(out, torch.cat([of(k, "cpu", length) for k in range(SIZE)]))
        whole = [of(rank, "cpu", length * SIZE) for length in (5, 700)]
        pg.reduce_scatter_tensor_coalesced(inputs, whole, dist.ReduceScatterOptions()).wait()
        for part, length in zip(inputs, (5, 700), strict=True):
            total = sum(of(k, "cpu", length * SIZE) for k in range(SIZE))
            torch.testing.assert_close(part, total[rank * length : (rank + 1) * length])

    for found in together(Meeting(SIZE), program):
        if isinstance(found, BaseException):
            raise found


def test_a_call_that_fails_says_so_in_one_line() -> None:
    """`wait` raises what `nicps.collective` does. Of a future torch makes a text, which lists all frames of Python."""

    def program(group: Group) -> tuple[Any, list[str]]:
        pg, rank = ProcessGroupNicps(group, Tcp("threads")), group.rank
        works = [
            pg.allreduce([torch.ones(3 + rank)]),
            pg.allreduce_coalesced([torch.ones(3 + rank)]),
        ]
        texts = []
        for work in works:
            with pytest.raises(RuntimeError) as error:
                work.get_future().wait()
            texts.append(str(error.value))
        with pytest.raises(CallMismatch) as raised:
            works[0].wait()
        with pytest.raises(CallMismatch):
            works[1].wait()
        assert not works[0].is_success() and works[0].exception() is raised.value
        return raised.value, texts

    for found in together(Meeting(2), program):
        if isinstance(found, BaseException):
            raise found
        error, texts = found
        assert isinstance(error, RuntimeError)
        assert str(error).startswith("the members have called different things: ")
        for text in texts:
            assert f": CallMismatch: {error}" in text and "\n" not in text


def test_a_rank_that_aborts_waits_for_nobody() -> None:
    left = threading.Event()

    def program(group: Group) -> None:
        pg = ProcessGroupNicps(group, Tcp("threads"))
        group.on_loss = None
        if group.rank == 1:
            assert left.wait(10)
            pg.allreduce([torch.ones(3)]).wait()
            assert group.lost == (0,)
            return
        pg.abort()
        left.set()
        with pytest.raises(GroupClosed):
            pg.barrier()

    assert together(Meeting(2), program) == [None, None]


def test_a_rank_that_has_no_more_steps_is_told_of_by_the_name_that_scripts_use() -> None:
    def program(group: Group) -> str:
        pg = ProcessGroupNicps(group, Tcp("threads"))
        group.on_loss = None
        if group.rank == 1:
            pg.shutdown()
            return ""
        with pytest.raises(CallMismatch) as raised:
            pg.allreduce([torch.ones(3)]).wait()
        pg.shutdown()
        return str(raised.value)

    text, _ = together(Meeting(2), program)
    assert text.endswith("(rank 1): destroy_process_group"), text


def test_a_digest_is_of_the_models_that_a_script_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In whichever order, and without what it has let go of: ranks collect garbage at different times."""

    class Wrapped(nn.parallel.DistributedDataParallel):
        def __init__(self, value: float) -> None:
            nn.Module.__init__(self)
            self.held, self.itself = nn.Parameter(torch.full((3,), value)), [self]

    # Models of other tests are perhaps still there.
    monkeypatch.setattr("nicps.torch.backend.DistributedDataParallel", Wrapped)

    def digest(*values: float) -> str:
        path = tmp_path / "weights"
        models = [Wrapped(value) for value in values]
        leave_digest(path)
        assert [model.held[0].item() for model in models] == [*values]
        return path.read_text()

    gc.disable()
    try:
        first = digest(1.0, 2.0)
        assert digest(2.0, 1.0) == first != digest(2.0, 1.5)
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("averages", "told"),
    [
        (True, "gradients are averaged over the 3 hosts that are left"),
        (False, "over the 3 members that are left from now on, while DDP goes on dividing by 2"),
    ],
)
def test_what_a_script_is_told_of_a_loss(
    averages: bool, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the hook that averages nothing is divided by the size of the beginning. Two more have come in since."""

    def program(group: Group) -> None:
        pg = ProcessGroupNicps(group, Tcp("threads"))
        if averages:
            call = lambda tensor, operation, async_op: pg.allreduce([tensor])  # noqa: E731
            monkeypatch.setattr(dist, "group", SimpleNamespace(WORLD=pg))
            monkeypatch.setattr(dist, "all_reduce", call)
            bucket = SimpleNamespace(buffer=lambda: torch.ones(3))
            assert nicps.torch.average(None, bucket).wait().tolist() == [1.0] * 3
        group.world, group.size, group.names = 2, 4, ("h1", "h2", "h3", "h4")
        with pytest.warns(UserWarning, match=rf"nicps: lost h2 \(rank 1\): .*{told}"):
            pg._warn_of_loss((1,))

    assert together(Meeting(1), program) == [None]


def test_a_loss_is_one_line_each_time_and_can_be_filtered() -> None:
    """No line of nicps's source is printed with it; a host may be lost, come back, and be lost again."""
    group: Any = SimpleNamespace(names=("h1", "h2"), size=2, world=2)
    printed: list[str] = []

    def show(message: Any, category: Any, name: str, number: int, *_: Any) -> None:
        printed.append(warnings.formatwarning(message, category, name, number))

    def lose(**ignored: Any) -> list[str]:
        printed.clear()
        with warnings.catch_warnings():
            warnings.simplefilter("default")
            if ignored:
                warnings.filterwarnings("ignore", **ignored)
            warnings.showwarning = show
            for _ in range(2):
                tell = partial(warn_of_loss, group, (1,), averages=True)
                thread = threading.Thread(target=tell)
                thread.start()
                thread.join()
        return printed

    said = "nicps: lost h2 (rank 1): gradients are averaged over the 1 hosts that are left"
    assert lose() == [f"<nicps>:0: UserWarning: {said}\n"] * 2
    for ignored in ({"category": UserWarning}, {"message": "nicps: lost"}, {"module": "nicps"}):
        assert lose(**ignored) == []


@pytest.mark.parametrize("url", ["env://", "tcp://localhost:29500"])
def test_under_nicps_run_an_address_of_the_script_leads_nowhere(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch's tutorials have all ranks on one host: each would wait for a store of its own."""
    met: list[str] = []

    def meet(url: str, **_: Any) -> Any:
        met.append(url)
        yield None, 1, 3

    monkeypatch.setattr(join, "meet", meet)
    monkeypatch.setenv("NICPS_WEIGHTS", "weights")
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    assert next(dist.rendezvous(url, 1, 3)) == (None, 1, 3)
    assert [each.partition("?")[2] for each in met] == ["rank=1&world_size=3"]


def test_an_address_without_a_rank_leads_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a script started by hand; under torchrun there is a rank. What an agent has given once stays in RANK."""
    met: list[str] = []

    def meet(url: str, **_: Any) -> Any:
        met.append(url)
        yield None, 1, 3

    monkeypatch.setattr(join, "meet", meet)
    monkeypatch.setattr(join, "_given", {"1"})
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.delenv("MASTER_PORT", raising=False)
    monkeypatch.delenv("RANK", raising=False)
    for rank in (None, "1"):
        if rank is not None:
            monkeypatch.setenv("RANK", rank)
        assert next(dist.rendezvous("env://")) == (None, 1, 3)
    monkeypatch.setenv("RANK", "2")
    for rank in (-1, 2):
        with pytest.raises(ValueError, match="MASTER_PORT expected"):
            next(dist.rendezvous("env://", rank))
    assert len(met) == 2


def test_a_script_that_waits_at_an_address_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    stderr = Heard()
    monkeypatch.setattr(join, "_QUIET_S", 0.01)
    monkeypatch.setattr(join, "_given", set())
    monkeypatch.setattr(sys, "stderr", stderr)
    for name, value in (("MASTER_ADDR", "localhost"), ("MASTER_PORT", "0"), ("RANK", "0")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(dist.DistStoreError):
        next(dist.rendezvous("env://", timeout=timedelta(seconds=1)))
    assert stderr.said.startswith("nicps: waits for the other ranks at MASTER_ADDR=localhost: ")


def test_nothing_of_a_call_stays_once_a_script_has_let_go_of_it() -> None:
    """Tensors may be large."""

    def program(group: Group) -> list[Any]:
        pg = ProcessGroupNicps(group, Tcp("threads"))
        tensor = torch.ones(2000)
        work = pg.allreduce([tensor])
        work.get_future().wait()
        pg.allreduce([torch.ones(1)]).wait()  # the group's thread has had another one
        return [weakref.ref(tensor), weakref.ref(work)]

    for refs in together(Meeting(2), program):
        gc.collect()
        assert [ref() for ref in refs] == [None, None]


def test_a_group_is_left_if_it_cannot_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """A script that catches the error goes on: the others must not wait for it, and it may try again."""
    left: list[Any] = []

    class Formed:
        def __exit__(self, kind: object, *_: object) -> None:
            left.append(kind)

    def fail(_: Group) -> Tcp:
        raise MemberLost("all_gather needs what h2 would have given")

    monkeypatch.setattr(join, "form", lambda *_: Formed())
    monkeypatch.setattr(Tcp, "agree", fail)
    with pytest.raises(MemberLost):
        next(join.meet("nicps://"))
    with pytest.raises(MemberLost):
        join.take(0, 2, timedelta(minutes=1))
    assert left == [MemberLost, MemberLost] and not join._formed


def test_a_profiler_sees_a_call() -> None:
    """As it sees Gloo's: asynchronous, with the shapes of its tensors."""

    def program(group: Group) -> list[Any]:
        pg = ProcessGroupNicps(group, Tcp("threads"))
        with lock, torch.autograd.profiler.profile(record_shapes=True) as profile:
            pg.allreduce([torch.ones(3, 4)]).wait()
        return [each for each in profile.function_events if each.name.startswith("nicps:")]

    lock = threading.Lock()
    (events,) = together(Meeting(1), program)
    assert [event.name for event in events] == ["nicps:all_reduce"]
    assert events[0].is_async and events[0].input_shapes == [[3, 4]]


def test_the_network_that_all_are_in() -> None:
    """Rank 0's first one in which everybody has an address."""
    told = [
        [ipaddress.ip_interface(text) for text in one]
        for one in (
            ["10.1.0.1/24", "192.168.7.1/24", "fd00::1/64"],
            ["192.168.7.9/24", "fd00::9/64"],
            ["fd00::5/64", "192.168.7.33/24"],
        )
    ]
    assert shared_network(told) == ipaddress.ip_network("192.168.7.0/24")
    assert shared_network(told[:1]) == ipaddress.ip_network("10.1.0.0/24")
    assert shared_network([*told, []]) is None
    assert shared_network([*told, [ipaddress.ip_interface("192.168.8.1/24")]]) is None


@pytest.mark.parametrize(("root", "reached"), [("127.0.0.1", True), ("203.0.113.1", False)])
def test_whether_all_can_connect_to_rank_0(root: str, reached: bool) -> None:
    """The second address is for documentation: nobody has it."""
    found = together(Meeting(SIZE), lambda group: Tcp("", None, root)._reached(group))
    assert found == [reached] * SIZE


def test_newer_pytorch_finds_it_by_name() -> None:
    """The entry point is a callable that may be called again."""
    (found,) = entry_points(group="torch.distributed.backends", name="nicps")
    register = found.load()
    assert register is nicps.torch.register
    register()
    assert dist.Backend("nicps") == "nicps" and dist.Backend._plugins["NICPS"]


_WITHOUT_IMPORT = """
import os, torch.distributed as dist
for address in ({}, {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}):
    os.environ |= address | {"RANK": "0", "WORLD_SIZE": "1"}
    try:
        dist.init_process_group("nicps")
    except (ValueError, AssertionError) as error:
        print(error)
"""


def test_what_pytorch_says_where_the_import_is_missing_is_known() -> None:
    """`nicps run` explains these lines."""
    argv = [sys.executable, "-W", "ignore", "-c", _WITHOUT_IMPORT]
    said = subprocess.run(argv, stdout=subprocess.PIPE, text=True, timeout=120).stdout.splitlines()
    assert len(said) == 2 and all(any(text in line for text in _NOT_OURS) for line in said), said


@pytest.mark.parametrize(
    ("size", "run", "of"),
    [
        (0, False, "of all hosts: start the script on every host, as `nicps run` does"),
        (3, True, "of 3 hosts"),
    ],
)
def test_a_script_that_waits_for_the_others_says_so_once(
    size: int, run: bool, of: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stderr = Heard()
    if run:
        monkeypatch.setenv("NICPS_WEIGHTS", "weights")
    monkeypatch.setattr(join, "_QUIET_S", 0.01)
    monkeypatch.setattr(sys, "stderr", stderr)
    monkeypatch.setattr(Group, "form", lambda *_, **__: stderr.told.wait(30.0))
    assert join.form(size, None, timedelta(minutes=1))
    assert stderr.said == f"nicps: waits for the other ranks {of}\n"
