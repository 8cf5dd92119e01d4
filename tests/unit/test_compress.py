# SPDX-License-Identifier: Apache-2.0
"""What `nicps.torch.compress` keeps of parameters, in whichever buckets DDP puts them."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest

from nicps.errors import UsageProblem

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

from nicps.torch import callbacks, compress  # noqa: E402
from nicps.torch.callbacks import elsewhere  # noqa: E402
from nicps.torch.low_rank import LowRank  # noqa: E402
from tests.far import Far, stage  # noqa: E402

Compression = compress.__globals__["Compression"]


class Bucket:
    """As DDP gives one to a hook."""

    def __init__(self, index: int, parameters: list[nn.Parameter], dtype: Any = None) -> None:
        self._index, self._parameters = index, parameters
        self._buffer = torch.cat([torch.ones(p.numel(), dtype=dtype) for p in parameters])

    def index(self) -> int:
        return self._index

    def parameters(self) -> list[nn.Parameter]:
        return self._parameters

    def buffer(self) -> Any:
        return self._buffer


class Group:
    """A group whose rounding leaves a tenth of every number over."""

    on_loss = None
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
    handle.residual_of(Bucket(0, [a, b]))[:6] = np.arange(6)
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_bucket_of_a_gpu_goes_by_way_of_the_host(
    dtype: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In its own type, which may be half as long."""
    copied = stage(monkeypatch)
    handle, parameters, _ = made()
    bucket = Bucket(0, parameters, dtype)
    bucket._buffer = bucket._buffer.as_subclass(Far)
    assert handle.average(bucket).wait() is bucket.buffer()
    assert (bucket.buffer() == 2).all() and copied == [dtype, dtype]
    assert handle.residual_of(bucket).tolist() == [0.125] * 11
    if torch.cuda.is_available():
        bucket._buffer = torch.ones(11, dtype=dtype, device="cuda")
        monkeypatch.undo()
        assert (handle.average(bucket).wait() == 2).all()


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
