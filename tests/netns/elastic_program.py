# SPDX-License-Identifier: Apache-2.0
"""A DDP script with a State, started on every host: `python -m tests.netns.elastic_program SETTINGS`.

It prints a JSON object a line: `formed`, one for each step, `done`.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import orjson
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import nicps.torch


def say(**values: Any) -> None:
    """Print a line for the test."""
    print(orjson.dumps(values).decode(), flush=True)


def make(kind: str, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model, and its optimizer."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8))
    if kind == "adam":
        return model, torch.optim.Adam(model.parameters(), lr=0.01)
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def loss_of(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    """The data of that step and rank."""
    random = torch.Generator().manual_seed(1000 * step + rank)
    x, y = torch.randn(16, 32, generator=random), torch.randn(16, 8, generator=random)
    return nn.functional.mse_loss(model(x), y)


def flat(model: nn.Module) -> torch.Tensor:
    """All weights."""
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def train(settings: dict[str, Any]) -> None:
    """Train with the present ranks, until so many steps after the last arrival."""
    kind, every = settings.get("optimizer", "sgd"), settings.get("sync_every", 1)
    inner, _ = make(kind, seed=dist.get_rank())  # a late process makes another model
    model = DistributedDataParallel(inner, find_unused_parameters=True)
    _, optimizer = make(kind, 0)
    optimizer = type(optimizer)(model.parameters(), **optimizer.defaults)
    if not settings.get("plain"):
        model.register_comm_hook(None, nicps.torch.average)
    steps, comes = settings.get("steps", 5000), settings.get("comes", 1)
    state = nicps.torch.State(model=model, optimizer=optimizer, step=0, end=steps, comes=comes)
    group = dist.group.WORLD.group
    late = group.late
    moment = time.monotonic()
    say(built=True, at=time.time())
    while state.step < state.end:
        if settings.get("stateless"):
            loss_of(model, 0, 0).backward()
        came = state.sync() if state.step % every == 0 or late else False
        late = False
        state.comes -= came
        if came and not state.comes:
            state.end = state.step + 8
        step, rank = state.step, dist.get_rank()
        if settings.get("dies") == [rank, step]:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            loss = loss_of(model, step, rank)
            optimizer.zero_grad()
            loss.backward()
        except RuntimeError as error:
            if not (settings.get("returns") and group.out):
                raise
            say(out=str(error))
            late = True
            continue
        optimizer.step()
        before, moment = moment, time.monotonic()
        digest = hashlib.sha256(flat(model).numpy().tobytes()).hexdigest()
        here = [k for k in range(group.size) if k not in group.lost]
        said = {"step": step, "rank": rank, "here": here, "came": came, "digest": digest}
        say(**said, seconds=round(moment - before, 3), at=time.time())
        state.step += 1
        time.sleep(settings.get("pace_s", 0.0))
    say(weights=flat(model).tolist(), changes=group.changes, lost=group.lost)


def report_end(run: Callable[[], None]) -> int:
    """Run it, and say how it has ended; return the exit code."""
    try:
        run()
    except Exception as error:
        say(error=str(error), kind=type(error).__name__)
        return 1
    say(done=True)
    return 0


def main(settings: dict[str, Any]) -> int:
    """Join, and train."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")

    def run() -> None:
        dist.init_process_group("nicps")
        late, at = dist.group.WORLD.group.late, time.time()
        say(formed=dist.get_rank(), size=dist.get_world_size(), late=late, at=at)
        train(settings)
        dist.destroy_process_group()

    return report_end(run)


if __name__ == "__main__":
    sys.exit(main(orjson.loads(sys.argv[1])))
