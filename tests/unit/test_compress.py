# SPDX-License-Identifier: Apache-2.0
"""What `nicps.torch.compress` keeps of parameters, in whichever buckets DDP puts them."""

from __future__ import annotations

import subprocess
import sys
import threading
from concurrent.futures import Future
from datetime import timedelta
from functools import partial
from typing import Any

import numpy as np
import pytest

from nicps.errors import UsageProblem

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

from nicps.torch import ProcessGroupNicps, callbacks, compress  # noqa: E402
from nicps.torch.callbacks import elsewhere  # noqa: E402
from nicps.torch.low_rank import LowRank  # noqa: E402
from nicps.torch.tcp import Tcp  # noqa: E402
from tests.averages import checked  # noqa: E402
from tests.collectives import Meeting  # noqa: E402
from tests.far import Far  # noqa: E402

Compression = compress.__globals__["Compression"]
#: A machine without a GPU has nothing to skip: it has one device.
DEVICES = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)


class Bucket:
    """As DDP gives one to a hook."""

    def __init__(self, index: int, parameters: list[nn.Parameter], dtype: Any = None) -> None:
        self._index, self._parameters = index, parameters
        ones = (torch.ones(p.numel(), dtype=dtype, device=p.device) for p in parameters)
        self._buffer = torch.cat(list(ones))

    def index(self) -> int:
        return self._index

    def parameters(self) -> list[nn.Parameter]:
        return self._parameters

    def buffer(self) -> Any:
        return self._buffer


class Group:
    """A group whose rounding leaves a tenth of every number over."""

    on_loss, late = None, False
    lost: tuple[int, ...] = ()
    size, names = 3, ("h1", "h2", "h3")

    def average(self, vector: Any, residual: Any, *, lane: str) -> Future[Any]:
        residual += vector * np.float32(0.125)
        vector *= 2
        future: Future[Any] = Future()
        future.set_result(vector)
        return future


class Model:
    """As much of DDP as a handle needs."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def register_comm_hook(self, state: Any, hook: Any) -> None:
        self.hook = hook, state


class Scaler:
    scale = 1.0

    def get_scale(self) -> float:
        return self.scale


def made(scaler: Scaler | None = None) -> tuple[Any, list[nn.Parameter], Any]:
    module = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    model = Model(module)
    handle = Compression(model, Group(), "i8", scaler)
    return handle, list(module.parameters()), model


def step(handle: Any, buckets: list[list[nn.Parameter]]) -> None:
    for index, parameters in enumerate(buckets):
        bucket = Bucket(index, parameters)
        assert handle.average(bucket).wait() is bucket.buffer()
        assert (bucket.buffer() == 2).all()


def test_residuals_follow_parameters_into_other_buckets() -> None:
    handle, (a, b, c, d), _ = made()
    step(handle, [[a, b], [c, d]])
    handle.residual_of(Bucket(0, [a, b]))[:6] = torch.arange(6)
    for buckets in ([[d], [c, b, a]], [[a], [b], [c], [d]], [[d, c, b, a]]):
        step(handle, buckets)
    kept = handle.state_dict()
    assert kept["0.weight"].tolist() == [k + 0.375 for k in range(6)]
    assert kept["0.bias"].tolist() == [0.5, 0.5] and kept["1.weight"].tolist() == [0.5, 0.5]
    assert list(handle._buckets) == [0]
    assert handle.figures.buckets == 9 and handle.figures.numbers == 4 * 11


def test_residuals_follow_the_loss_scale() -> None:
    scaler = Scaler()
    scaler.scale = 8.0
    handle, (a, b, c, d), _ = made(scaler)
    step(handle, [[a, b, c, d]])
    assert handle.state_dict()["1.bias"].tolist() == [0.125 / 8]
    scaler.scale = 2.0
    assert handle.residual_of(Bucket(0, [a, b, c, d]))[-1] == 0.125 / 4
    assert handle.state_dict()["1.bias"].tolist() == [0.125 / 8]


def test_a_checkpoint_goes_on_where_it_was() -> None:
    scaler = Scaler()
    handle, parameters, _ = made()
    step(handle, [parameters])
    other, again, _ = made(scaler)
    scaler.scale = 4.0
    step(other, [again])
    other.load_state_dict(handle.state_dict())
    assert all(torch.equal(v, handle.state_dict()[k]) for k, v in other.state_dict().items())
    assert (other.residual_of(Bucket(0, again)) == 0.5).all()
    with pytest.raises(UsageProblem, match=r"the residual of 1.bias has 2 numbers.*parameter 1:"):
        other.load_state_dict({"1.bias": torch.zeros(2)})
    with pytest.raises(UsageProblem, match="it is that of another model"):
        other.load_state_dict({"else": torch.zeros(2)})


def test_losses_are_told_once_by_each_handle() -> None:
    handle, _, model = made()
    group = handle._group
    told: list[Any] = []
    second = Compression(model, group, "i8", None)
    second.on_loss = told.append
    group.lost = (1,)
    with pytest.warns(UserWarning, match=r"lost h2 \(rank 1\): .* averaged over the 2 hosts"):
        group.on_loss((1,))
    assert told == [(1,)] and handle.lost == second.lost == (1,)


def test_what_cannot_be_compressed() -> None:
    with pytest.raises(UsageProblem, match="takes a DistributedDataParallel, not Linear"):
        compress(nn.Linear(1, 1))
    with pytest.raises(UsageProblem, match="lane must be one of i8, i16, i32, not 'i4'"):
        Compression(Model(nn.Linear(1, 1)), Group(), "i4", None)
    with pytest.raises(UsageProblem, match=r"and weight is torch.float64"):
        Compression(Model(nn.Linear(1, 1).double()), Group(), "i8", None)
    nowhere = Model(nn.Linear(9, 9, device="meta"))
    for kind, how in ((Compression, "i8"), (LowRank, 1)):
        with pytest.raises(UsageProblem, match=r"processor and of CUDA, and weight is on meta"):
            kind(nowhere, Group(), how, None)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_buckets_of_a_gpu_are_converted_there(dtype: Any, device: str) -> None:
    """Its numbers are never the host's; residuals are there, too, go into other buckets, and through a checkpoint."""

    def program(group: Any) -> Any:
        far = group.rank == 1
        model = Model(nn.Sequential(nn.Linear(30, 60), nn.Linear(60, 1)).to(device))
        handle, other = (Compression(model, group, "i8", None) for _ in range(2))
        a, b, c, d = model.module.parameters()
        found = []
        for step, parameters in enumerate(([a, b, c, d], [b, a], [d, b, c, a], [a, b, c, d])):
            bucket = Bucket(0, parameters, dtype)
            random = torch.Generator().manual_seed(10 * step + group.rank)
            bucket._buffer = torch.randn(len(bucket._buffer), generator=random).to(device, dtype)
            if far:
                bucket._buffer = bucket._buffer.as_subclass(Far)
            if step == 3:
                other.load_state_dict(handle.state_dict())
                handle = other
            assert handle.average(bucket).wait() is bucket.buffer()
            residual = handle.residual_of(bucket)
            assert residual.any() and residual.device.type == device
            found.append(bucket.buffer().as_subclass(torch.Tensor).cpu())
        return found

    near, far = checked(Meeting(2), program)
    assert all(torch.equal(*pair) for pair in zip(near, far, strict=True))


def test_a_callback_can_wait_for_what_the_same_thread_completes() -> None:
    """As PowerSGD's do: the thread that completes futures must not run what waits for them."""
    first: Any = torch.futures.Future()
    second: Any = torch.futures.Future()
    done = elsewhere(first).then(lambda f: f.value() + elsewhere(second).wait())
    first.set_result(1)
    second.set_result(2)
    assert done.wait() == 3
    failed: Any = torch.futures.Future()
    shown = elsewhere(failed.then(lambda _: 1 / 0))
    failed.set_result(None)
    with pytest.raises(RuntimeError, match="division by zero"):
        shown.wait()


def test_a_callback_of_a_mean_that_would_wait_for_itself_is_told_so() -> None:
    """It is called in the thread that carries out calls: `backward` would never end."""

    def program(group: Any) -> str:
        pg, held = ProcessGroupNicps(group, Tcp("threads")), threading.Event()
        module = nn.Linear(3, 2)
        handle = Compression(Model(module), group, "i8", None)
        group._workers.put(0, partial(held.wait, 20))
        mean = handle.average(Bucket(0, list(module.parameters())))

        def call(_: Any) -> None:
            pg.allreduce([torch.ones(3)]).wait(timedelta(seconds=5))

        done = mean.then(call)
        held.set()
        with pytest.raises(RuntimeError) as error:
            done.wait()
        assert pg.allreduce([torch.ones(3)]).wait(timedelta(seconds=20))
        return str(error.value)

    for said in checked(Meeting(2), program):
        assert "UsageProblem: this callback of a future is called in the thread" in said


def test_a_future_is_done_where_no_thread_can_be_had_for_its_callbacks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("cannot schedule new futures after shutdown")

    monkeypatch.setattr(callbacks._threads, "submit", refuse)
    done: Any = torch.futures.Future()
    shown = elsewhere(done)
    done.set_result(3)
    assert shown.done() and shown.wait() == 3


_FORKS = """
import os, signal, sys, time, torch
from nicps.torch import callbacks

def wait():
    done = torch.futures.Future()
    shown = callbacks.elsewhere(done)
    done.set_result(3)
    return shown.wait()

assert wait() == 3
time.sleep(0.2)  # so its thread is idle
if not (child := os.fork()):
    signal.alarm(20)
    os._exit(wait())
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


_ENDS = """
import sys, threading, torch
from nicps.collective import endings
from nicps.torch.callbacks import elsewhere

class Owned:  # a group with a call that the others do not make
    def give_up(self):
        left.set()
    def disown(self):
        pass

def call(_):
    waits.set()
    left.wait()
    print("left", flush=True)

left, waits, owned, done = threading.Event(), threading.Event(), Owned(), torch.futures.Future()
endings.note(owned)
shown = elsewhere(done).then(call)
done.set_result(1)
waits.wait()
sys.exit(3)
"""


def test_a_callback_that_waits_holds_up_no_script_that_ends() -> None:
    """The other ranks would wait for this one, and it for them."""
    done = subprocess.run([sys.executable, "-c", _ENDS], capture_output=True, timeout=120)
    assert (done.returncode, done.stdout) == (3, b"left\n"), done.stderr


def test_callbacks_have_a_thread_each_for_as_long_as_they_wait() -> None:
    """Those that are done take others."""
    pool, gate, count = type(callbacks._threads)(), threading.Event(), 8
    ready, done = threading.Barrier(count + 1), threading.Semaphore(0)

    def wait() -> None:
        ready.wait(20)
        assert gate.wait(20)
        done.release()

    for _ in range(count):
        pool.submit(wait)
    ready.wait(20)
    gate.set()
    for _ in range(count):
        assert done.acquire(timeout=20)
    for _ in range(100):
        pool.submit(done.release)
        assert done.acquire(timeout=20)
    assert len(pool._made) <= count + 1
    threads = [*pool._made]
    pool._join()
    assert not any(each.is_alive() for each in threads)


def test_a_process_that_was_forked_has_threads_of_its_own_for_callbacks() -> None:
    done = subprocess.run([sys.executable, "-c", _FORKS], capture_output=True, timeout=120)
    assert done.returncode == 3, done.stderr
