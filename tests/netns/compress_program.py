# SPDX-License-Identifier: Apache-2.0
"""A script of DDP with compressed gradients, started on every host: `python -m tests.netns.compress_program WHAT`.

It prints a JSON object a line.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import time
from typing import Any

import numpy as np
import orjson
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    default_hooks,
    post_localSGD_hook,
    powerSGD_hook,
)
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.parallel import DistributedDataParallel

import nicps.torch
from nicps.collective.feedback import Compressed
from nicps.collective.lanes import PER_FRAGMENT
from nicps.collective.operations import LANES
from tests.collectives import make

STEPS, DIES_AT = 12, 6


def say(**values: Any) -> None:
    """Print a line for the test."""
    print(orjson.dumps(values).decode(), flush=True)


def digest(model: nn.Module) -> str:
    """The digest of all weights."""
    weights = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    return hashlib.sha256(weights.numpy().tobytes()).hexdigest()


def made(name: str = "") -> tuple[DistributedDataParallel, torch.optim.Optimizer]:
    """A model of several buckets, and its optimizer."""
    torch.manual_seed(3)
    layers = nn.Sequential(nn.Linear(32, 300), nn.ReLU(), nn.Linear(300, 200), nn.Linear(200, 8))
    model = DistributedDataParallel(layers, bucket_cap_mb=0.1)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The data of that rank, of that step: the targets follow from the inputs."""
    random = torch.Generator().manual_seed(step * 100 + rank)
    x = torch.randn(16, 32, generator=random)
    return x, x[:, :8].sin()


def loss_of(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    x, y = batch(step, rank)
    return nn.functional.mse_loss(model(x), y)


def means() -> None:
    """Means of vectors of several rounds, in all lanes, between other calls: bit for bit against the model.

    Each rank knows the vectors and residuals of all.
    """
    group, rank, size = dist.group.WORLD.group, dist.get_rank(), dist.get_world_size()
    room = 400  # two rounds a vector
    group.plan([0], [room * PER_FRAGMENT]).result()
    for lane, width in LANES.items():
        length = 150_001
        own = np.zeros(length, np.float32)
        residuals = [np.zeros(length, np.float32) for _ in range(size)]
        for step in range(2):
            random = np.random.default_rng([step, width])
            vectors = [random.standard_normal(length).astype(np.float32) for _ in range(size)]
            if step == 1:
                vectors[1][1500] = np.nan
            mine = vectors[rank].copy()
            future = group.average(mine, own, lane=lane)
            tensor = torch.ones(1000)
            dist.all_reduce(tensor)
            assert (tensor == size).all()
            future.result()
            for at in range(0, length, room * PER_FRAGMENT):
                here = slice(at, at + room * PER_FRAGMENT)
                of = [
                    Compressed(v[here], r[here], width)
                    for v, r in zip(vectors, residuals, strict=True)
                ]
                round_ = make(of)  # type: ignore[arg-type]
                for k, each in enumerate(of):
                    each.settle(round_.outcome(k))
            assert mine.tobytes() == vectors[rank].tobytes(), (lane, step, "mean")
            assert own.tobytes() == residuals[rank].tobytes(), (lane, step, "residual")
            assert np.isnan(mine).any() == (step == 1)
        say(lane=lane, digest=hashlib.sha256(mine.tobytes()).hexdigest())


def train(lane: str, dies: int | None = None) -> None:
    """DDP; one rank may be killed in the middle of its backward pass."""
    rank, size = dist.get_rank(), dist.get_world_size()
    model, optimizer = made()
    handle = nicps.torch.compress(model, lane=lane)
    told: list[list[int]] = []
    handle.on_loss = lambda lost: told.append(list(lost))
    given = {
        name: torch.zeros(p.shape, dtype=torch.float64)
        for name, p in model.module.named_parameters()
    }
    taken = {name: torch.zeros_like(total) for name, total in given.items()}
    times, losses = [], []
    for step in range(STEPS):
        own = loss_of(model.module, step, rank)
        for (name, _), part in zip(
            model.module.named_parameters(),
            torch.autograd.grad(own, list(model.module.parameters())),
            strict=True,
        ):
            given[name] += part
        began = time.monotonic()
        loss = loss_of(model, step, rank)
        if rank == dies and step == DIES_AT:
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        loss.backward()
        for name, parameter in model.module.named_parameters():
            taken[name] += parameter.grad.double() * (size - len(handle.lost))
        optimizer.step()
        times.append(time.monotonic() - began)
        losses.append(loss.item())
    missing = 0.0
    if dies is None:  # rounding errors are in the sums or in the residuals
        kept = handle.state_dict()
        for name, total in given.items():
            both = torch.stack([total, kept[name].double().view(total.shape)])
            dist.all_reduce(both)
            missing = max(missing, float((taken[name] + both[1] - both[0]).abs().max()))
    say(
        weights=digest(model),
        lost=list(handle.lost),
        told=told,
        seconds=round(max(times[DIES_AT:]), 3),
        losses=losses,
        missing=missing,
        buckets=handle.figures.buckets,
    )


def scaled() -> None:
    """A loss scaler: NaN at one rank skips the step at all; a checkpoint in between changes nothing."""
    rank = dist.get_rank()

    def run(resumed: bool) -> torch.Tensor:
        model, optimizer = made()
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=3)
        handle = nicps.torch.compress(model, lane="i8", scaler=scaler)
        skipped = []
        for step in range(STEPS):
            optimizer.zero_grad()
            loss = loss_of(model, step, rank)
            if step == 4 and rank == 1:
                loss = loss * float("nan")
            scaler.scale(loss).backward()
            before, scale = digest(model), scaler.get_scale()
            scaler.step(optimizer)
            scaler.update()
            if digest(model) == before:
                skipped.append((step, scale, scaler.get_scale()))
            if resumed and step == 7:
                states = handle.state_dict(), model.module.state_dict(), scaler.state_dict()
                model, optimizer = made()
                model.module.load_state_dict(states[1])
                scaler = torch.amp.GradScaler("cpu")
                scaler.load_state_dict(states[2])
                handle = nicps.torch.compress(model, lane="i8", scaler=scaler)
                handle.load_state_dict(states[0])
                again = handle.state_dict()
                assert any(each.any() for each in again.values())
                assert all(torch.equal(again[name], each) for name, each in states[0].items())
        say(weights=digest(model), skipped=skipped)
        return torch.cat([p.detach().reshape(-1) for p in model.parameters()])

    through, resumed = run(resumed=False), run(resumed=True)
    # Not the same bits: DDP begins with other buckets, whose fragments are others.
    say(far=float((through - resumed).abs().max()))


def others() -> None:
    """PyTorch's own hooks and averagers over the backend."""
    rank = dist.get_rank()

    def run(name: str, model: DistributedDataParallel, optimizer: Any, after: Any = None) -> None:
        losses = []
        for step in range(STEPS):
            optimizer.zero_grad()
            loss = loss_of(model, step, rank)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            if after is not None:
                after(model)
        say(hook=name, weights=digest(model), losses=losses)

    model, optimizer = made()
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    run("fp16_compress", model, optimizer)

    torch.manual_seed(3)
    layers = nn.Sequential(nn.Linear(32, 300), nn.ReLU(), nn.Linear(300, 8))
    model = DistributedDataParallel(layers, bucket_cap_mb=25)
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=3)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    run("PowerSGD", model, torch.optim.SGD(model.parameters(), lr=0.1))

    for kind in (PeriodicModelAverager, nicps.torch.ChangeAverager):
        model, optimizer = made()
        local = post_localSGD_hook.PostLocalSGDState(
            process_group=None,
            subgroup=dist.group.WORLD,
            start_localSGD_iter=3,
            post_local_gradient_allreduce=False,
        )
        model.register_comm_hook(local, post_localSGD_hook.post_localSGD_hook)
        averager = kind(period=4, warmup_steps=3)  # the last step is averaged
        run(kind.__name__, model, PostLocalSGDOptimizer(optimizer, averager))


def main(what: str) -> int:
    """Join, and do that."""
    torch.set_num_threads(1)
    dist.init_process_group("nicps")
    say(rank=dist.get_rank())
    if what == "others":
        others()
    else:
        means()
        for lane in ("i8", "i16"):
            train(lane)
        scaled()
        train("i8", dies=2)
    dist.destroy_process_group()
    say(done=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
