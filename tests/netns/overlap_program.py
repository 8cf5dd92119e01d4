# SPDX-License-Identifier: Apache-2.0
"""A DDP script with `nicps.torch.overlap`, on every host: `python -m tests.netns.overlap_program SETTINGS`.

It prints a JSON object a line.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import time
import warnings
from typing import Any

import orjson
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import nicps.torch
from nicps.errors import UsageProblem

CUTS = [4, 8]


def say(**values: Any) -> None:
    """Print a line for the test."""
    print(orjson.dumps(values).decode(), flush=True)


def digest(model: nn.Module, *, buffers: bool = False) -> str:
    """Of all weights; and of buffers, which each rank's own samples have moved."""
    found = [each.detach() for each in model.parameters()] + [*model.buffers()] * buffers
    return hashlib.sha256(b"".join(each.numpy().tobytes() for each in found)).hexdigest()[:16]


def made(*, from_first: bool = True) -> tuple[DistributedDataParallel, torch.optim.Optimizer]:
    """A model with BatchNorm's statistics, and its optimizer.

    Args:
        from_first: DDP hands out the statistics of rank 0 before each forward pass; without it each rank has its own.
    """
    torch.manual_seed(3)
    layers = [nn.Linear(32, 100), nn.BatchNorm1d(100), nn.ReLU(), nn.Linear(100, 100), nn.ReLU()]
    rest = [nn.Linear(100, 100), nn.ReLU(), nn.Linear(100, 60), nn.ReLU(), nn.Linear(60, 8)]
    model = DistributedDataParallel(
        nn.Sequential(*layers, *rest), find_unused_parameters=True, broadcast_buffers=from_first
    )
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def loss_of(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    """Of that rank's samples of that step."""
    random = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(16, 32, generator=random)
    return nn.functional.mse_loss(model(x), x[:, :8].sin())


def step_of(model: DistributedDataParallel, optimizer: torch.optim.Optimizer, step: int) -> float:
    """One step of two backward passes."""
    rank = dist.get_rank()
    optimizer.zero_grad()
    with model.no_sync():
        loss_of(model, 2 * step, rank).backward()
    loss = loss_of(model, 2 * step + 1, rank)
    loss.backward()
    optimizer.step()
    return loss.item()


def bits(settings: dict[str, Any]) -> None:
    """The same steps, with the same parts in a queue, on channels, and on channels that are measured."""
    for scope, cuts in (("queue", CUTS), ("channels", CUTS), ("channels", None)):
        model, optimizer = made()
        handle = nicps.torch.overlap(
            model, optimizer, lane="i8", channels=3, cuts=cuts, scope=scope
        )
        losses, digests = [], []
        for step in range(settings["steps"]):
            losses.append(step_of(model, optimizer, step))
            if step % 3 == 0:  # the others overlap
                digests.append(digest(model))
        digests.append(digest(model))
        figures = handle.figures
        say(
            scope=scope,
            cuts=cuts,
            plan=handle.plan,
            digests=digests,
            own=[losses[0], losses[-1], digest(model, buffers=True)],
            steps=figures.steps,
            numbers=figures.numbers,
            predicted=figures.predicted_seconds,
        )
        handle.close()


def scaled(settings: dict[str, Any]) -> None:
    """A loss scaler; in one step the gradients of one rank alone are infinite."""
    for lane, fused in (("i8", False), ("i32", True)):
        model, _ = made()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=100)
        handle = nicps.torch.overlap(model, optimizer, lane=lane, channels=2, scaler=scaler)
        skipped, found = [], []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # each step waits for all sums
            for step in range(settings["steps"]):
                optimizer.zero_grad()
                loss = loss_of(model, step, dist.get_rank())
                if [dist.get_rank(), step] == settings["infinite"]:
                    loss = loss * float("inf")
                scaler.scale(loss).backward()
                before, scale = digest(model), scaler.get_scale()
                scaler.step(optimizer)
                scaler.update()
                found.append(digest(model))
                if found[-1] == before:
                    skipped.append([step, scale, scaler.get_scale()])
        kept = all(each.isfinite().all().item() for each in handle.state_dict().values())
        say(lane=lane, skipped=skipped, digests=found, finite=kept, steps=handle.figures.steps)
        handle.close()


def lossy(settings: dict[str, Any]) -> None:
    """A rank is killed in the middle of a step's backward pass."""
    model, optimizer = made(from_first=False)  # which may be the one that is killed
    handle = nicps.torch.overlap(model, optimizer, lane="i8", channels=2)
    told: list[list[int]] = []
    handle.on_loss = lambda lost: told.append(list(lost))
    for step in range(settings["steps"]):
        if [dist.get_rank(), step] == settings["dies"]:
            model.module[0].weight.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
        step_of(model, optimizer, step)
    say(digest=digest(model), lost=handle.lost, told=told, steps=handle.figures.steps)


def elastic(settings: dict[str, Any]) -> None:
    """Hosts are taken in between two steps, until all have made so many together."""
    model, optimizer = made()
    handle = nicps.torch.overlap(model, optimizer, lane="i8", channels=2)
    state = nicps.torch.State(model=model, optimizer=optimizer, step=0, whole=0)
    while state.whole < settings["steps"]:
        came = state.sync()
        step_of(model, optimizer, state.step)
        say(step=state.step, came=came, digest=digest(model), here=[], parts=len(handle.plan))
        state.step += 1
        state.whole += not handle.lost and state.step > settings["least"]
        time.sleep(0.05)


def uneven(settings: dict[str, Any]) -> None:
    """Each rank has more samples than the one before."""
    model, optimizer = made()
    handle = nicps.torch.overlap(model, optimizer, channels=2)
    ended = ""
    try:
        with model.join(throw_on_early_termination=settings["together"]):
            for step in range(settings["steps"] + dist.get_rank()):
                step_of(model, optimizer, step)
    except (RuntimeError, UsageProblem) as error:
        ended = str(error)
    say(ended=ended, digest=digest(model), steps=handle.figures.steps)


def run(settings: dict[str, Any]) -> None:
    """What the settings say."""
    dist.init_process_group("nicps")
    say(rank=dist.get_rank())
    kinds = {"bits": bits, "scaled": scaled, "lossy": lossy, "elastic": elastic, "uneven": uneven}
    kinds[settings["what"]](settings)
    dist.destroy_process_group()
    say(done=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    run(orjson.loads(sys.argv[1]))
