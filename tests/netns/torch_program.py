# SPDX-License-Identifier: Apache-2.0
"""A script of torch.distributed with the backend, started on every host: `python -m tests.netns.torch_program WHAT`.

It prints a JSON object a line.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import orjson
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import nicps.torch

STEPS, DIES_AT = 12, 6


def say(**values: Any) -> None:
    """Print a line for the test."""
    print(orjson.dumps(values).decode(), flush=True)


def of(rank: int, dtype: torch.dtype = torch.float32, length: int = 1000) -> torch.Tensor:
    """The tensor of that rank."""
    random = torch.Generator().manual_seed(rank)
    if dtype.is_floating_point:
        return torch.randn(length, generator=random).to(dtype)
    return torch.randint(0, 100, (length,), generator=random).to(dtype)


def collectives() -> None:
    """All of them, against torch's result for the same tensors here."""
    rank, size = dist.get_rank(), dist.get_world_size()
    every = range(size)
    for dtype in (torch.float32, torch.float64, torch.int64, torch.uint8, torch.bfloat16):
        for name, fold in (("SUM", torch.sum), ("MAX", torch.amax), ("PRODUCT", torch.prod)):
            tensor = of(rank, dtype)
            dist.all_reduce(tensor, getattr(dist.ReduceOp, name))
            whole = torch.stack([of(k, dtype) for k in every])
            wide = whole.float() if dtype is torch.bfloat16 else whole
            expected = fold(wide, dim=0).to(dtype)
            torch.testing.assert_close(
                tensor, expected, rtol=1e-2 if dtype is torch.bfloat16 else 1e-5, atol=1e-5
            )
        tensor = of(rank, dtype)
        dist.broadcast(tensor, 1)
        assert torch.equal(tensor, of(1, dtype))
        out = [torch.empty_like(tensor) for _ in every]
        dist.all_gather(out, of(rank, dtype))
        assert all(torch.equal(out[k], of(k, dtype)) for k in every)
    matrix = of(rank, length=1200).view(30, 40)
    strided = matrix.t()
    dist.all_reduce(strided)
    torch.testing.assert_close(matrix, sum(of(k, length=1200).view(30, 40) for k in every))
    assert not strided.is_contiguous()
    flat = torch.empty(size * 1000)
    work = dist.all_gather_into_tensor(flat, of(rank), async_op=True)
    work.wait()
    assert work.is_completed() and torch.equal(flat, torch.cat([of(k) for k in every]))
    part, total = torch.empty(300), sum(of(k, length=300 * size) for k in every)
    dist.reduce_scatter_tensor(part, of(rank, length=300 * size))
    torch.testing.assert_close(part, total[rank * 300 : (rank + 1) * 300])
    dist.reduce_scatter(part, list(of(rank, length=300 * size).split(300)), dist.ReduceOp.AVG)
    torch.testing.assert_close(part, total[rank * 300 : (rank + 1) * 300] / size)
    tensor = of(rank)
    dist.reduce(tensor, 2)
    expected = sum(of(k) for k in every) if rank == 2 else of(rank)
    torch.testing.assert_close(tensor, expected)
    rows = [torch.empty(1000) for _ in every] if rank == 1 else None
    dist.gather(of(rank), rows, 1)
    assert rows is None or all(torch.equal(row, of(k)) for k, row in enumerate(rows))
    tensor = torch.empty(1000)
    dist.scatter(tensor, [of(k) for k in every] if rank == 0 else None, 0)
    assert torch.equal(tensor, of(rank))
    found: list[Any] = [None] * size
    dist.all_gather_object(found, {"rank": rank})
    assert found == [{"rank": k} for k in every]
    pair = torch.tensor([1e10 if rank == 0 else -1e10 if rank == 1 else 0.0, 1.0])
    dist.all_reduce(pair)
    assert pair.tolist() == [0.0, size]
    dist.barrier()


def refusals() -> None:
    """Calls that the backend refuses raise one line, and it goes on."""

    def refused(call: Callable[[], Any]) -> str:
        try:
            call()
        except Exception as error:
            return str(error)
        raise AssertionError("it was not refused")

    tensor = torch.ones(3)
    say(send=refused(lambda: dist.send(tensor, (dist.get_rank() + 1) % 3)))
    say(subgroup=refused(lambda: dist.new_group([0, 1, 2])))
    say(gloo=refused(lambda: dist.new_group([0, 1, 2], backend="gloo")))
    say(sparse=refused(lambda: dist.all_reduce(tensor.to_sparse())))
    say(meta=refused(lambda: dist.all_reduce(tensor.to("meta"))))
    if dist.get_rank():
        say(differs=refused(lambda: dist.all_reduce(torch.ones(4))))
    else:
        say(differs=refused(lambda: dist.all_reduce(torch.ones(5, dtype=torch.int32))))
    dist.all_reduce(tensor)
    assert tensor.tolist() == [3.0] * 3


def over_tcp() -> None:
    """The calls that Gloo does for the backend, and the store, without MASTER_ADDR."""
    rank, size = dist.get_rank(), dist.get_world_size()
    after, before = (rank + 1) % size, (rank - 1) % size
    sent, got = of(rank), torch.empty(1000)
    work = dist.isend(sent, after)
    dist.recv(got, before)
    work.wait()
    assert torch.equal(got, of(before))
    if rank == 0:
        found = {dist.recv(got) for _ in range(1, size)}
        assert found == set(range(1, size))
    else:
        dist.send(sent, 0)
    parts, out = list(of(rank, length=size * 7).split(7)), torch.empty(size * 7)
    dist.all_to_all_single(out, of(rank, length=size * 7))
    expected = torch.cat([of(k, length=size * 7).split(7)[rank] for k in range(size)])
    assert torch.equal(out, expected)
    rows = [torch.empty(7) for _ in range(size)]
    dist.all_to_all(rows, parts)
    assert torch.equal(torch.cat(rows), expected)
    for backend in (None, "gloo"):
        some = dist.new_group([0, size - 1], backend=backend)
        if rank in (0, size - 1):
            total = of(rank)
            dist.all_reduce(total, group=some)
            torch.testing.assert_close(total, of(0) + of(size - 1))
            assert dist.get_backend(some) == (backend or "nicps")
    store = dist.distributed_c10d._get_default_store()
    store.set(f"of {rank}", str(rank))
    assert [int(store.get(f"of {k}")) for k in range(size)] == list(range(size))
    total = of(rank)
    dist.all_reduce(total)  # the group's own, in between
    torch.testing.assert_close(total, sum(of(k) for k in range(size)))


def regroups() -> None:
    """Rank 0 dies, and the others make a subgroup."""
    if dist.get_rank() == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    while not dist.group.WORLD.group.lost:
        dist.barrier()
    some = dist.new_group([1, 2])
    total = of(dist.get_rank())
    dist.all_reduce(total, group=some)
    torch.testing.assert_close(total, of(1) + of(2))


def again() -> None:
    """Rank 1 dies, and the others make a process group of their own."""
    rank = dist.get_rank()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    while not dist.group.WORLD.group.lost:
        dist.barrier()
    dist.destroy_process_group()
    dist.init_process_group("nicps", timeout=timedelta(seconds=60))
    total = torch.ones(3)
    dist.all_reduce(total)
    assert total.tolist() == [2.0] * 3
    store = dist.distributed_c10d._get_default_store()
    store.set(f"of {dist.get_rank()}", "there")
    assert store.get(f"of {1 - dist.get_rank()}") == b"there"
    say(ranks=[rank, dist.get_rank(), dist.get_world_size()], environ=_environ())


class Model(nn.Module):
    """Two layers, and a buffer, which DDP broadcasts before each forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(32, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 8)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(n, 8)."""
        return self.layers(x)


def train(dies: int | None = None) -> None:
    """A script of DDP; one rank may be killed in the middle."""
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)  # DDP gives all ranks the model of rank 0
    model = DistributedDataParallel(Model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    random = torch.Generator().manual_seed(7)
    times = []
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for step in range(STEPS):
            x = torch.randn(size, 16, 32, generator=random)
            y = torch.randn(size, 16, 8, generator=random)
            began = time.monotonic()
            loss = nn.functional.mse_loss(model(x[rank]), y[rank])
            if rank == dies and step == DIES_AT:
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            times.append(time.monotonic() - began)
    weights = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    say(
        weights=hashlib.sha256(weights.numpy().tobytes()).hexdigest(),
        lost=[str(each.message) for each in told if "nicps: lost" in str(each.message)],
        seconds=round(max(times[DIES_AT:]), 3),
        loss=loss.item(),
    )


def buckets() -> int:
    """Into how many DDP deals a million gradients once it has seen a step: 4 MB."""
    model = DistributedDataParallel(nn.Sequential(*(nn.Linear(500, 500) for _ in range(4))))
    for _ in range(2):
        model(torch.ones(1, 500)).sum().backward()
    return len(model.reducer._get_zeros_like_grad_buckets())


def _environ() -> str:
    return " ".join(os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))


def main(what: str) -> int:
    """Join, and run that part."""
    torch.set_num_threads(1)
    try:
        dist.init_process_group("nicps")
    except Exception as error:
        say(error=str(error))
        return 1
    assert nicps.torch.ProcessGroupNicps
    rank = dist.get_rank()
    say(rank=rank, host=dist.group.WORLD.group.names[rank], environ=_environ())
    if what == "collectives":
        collectives()
    elif what == "refusals":
        refusals()
    elif what == "over_tcp":
        over_tcp()
    elif what == "regroups":
        regroups()
    elif what == "again":
        again()
    else:
        train(2 if what == "dies" else None)
        if what == "train":
            say(buckets=buckets())
    dist.destroy_process_group()
    say(done=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
