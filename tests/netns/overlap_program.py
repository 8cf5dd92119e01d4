# SPDX-License-Identifier: Apache-2.0
"""A DDP script with `nicps.torch.overlap`, on every host: `python -m tests.netns.overlap_program SETTINGS`.

It prints a JSON object a line.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import re
import runpy
import signal
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import orjson
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import nicps.torch
from nicps.errors import UsageProblem
from nicps.torch.overlap import Overlap
from tests.pending import batch, named, network, random_cuts
from tests.spans import most_open

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


def networks(settings: dict[str, Any]) -> None:
    """Models of random shape, each with the same parts in a queue and on channels."""
    for seed in range(settings["networks"]):
        for scope in ("queue", "channels"):
            model = DistributedDataParallel(network(seed), find_unused_parameters=True)
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
            cuts = random_cuts(len(named(model)), seed)[:5]
            handle = nicps.torch.overlap(model, optimizer, lane="i8", cuts=cuts, scope=scope)
            digests, most = [], 0
            for step in range(5):
                inputs, outputs = batch(2 * step + dist.get_rank())
                optimizer.zero_grad()
                nn.functional.mse_loss(model(inputs), outputs).backward()
                optimizer.step()
                if step in (1, 2):  # the others overlap
                    digests.append(digest(model))
                    most = max(most, open_at_once(handle))
            digests.append(digest(model))
            most = max(most, open_at_once(handle))
            say(seed=seed, scope=scope, plan=handle.plan, digests=digests, open=most)
            handle.close()


def open_at_once(handle: Overlap) -> int:
    """Parts of the last step that were on their way at one time, at most."""
    assert handle._run is not None
    return most_open((each.offered, each.done) for each in handle._run.flowing.times.values())


def example(settings: dict[str, Any]) -> None:
    """docs/examples/ddp/overlap.py as a user starts it, with the same parts in a queue and on channels."""
    script = Path(__file__).resolve().parents[2] / "docs" / "examples" / "ddp" / "overlap.py"
    overlap, destroy = nicps.torch.overlap, dist.destroy_process_group
    dist.destroy_process_group = lambda: None  # there is one group for both
    dist.init_process_group = lambda _: None
    sys.argv = [str(script), "--data", settings["data"], "--epochs", "1"]
    for scope in ("queue", "channels"):
        handles: list[Overlap] = []

        def called(*args: Any, scope: str = scope, handles: Any = handles, **options: Any) -> None:
            handles.append(overlap(*args, **options, cuts=[2, 4], scope=scope))

        nicps.torch.overlap = called
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            runpy.run_path(str(script), run_name="__main__")
        (weights,) = re.findall(r": .*%, weights (\w{16})$", printed.getvalue(), re.MULTILINE)
        (handle,) = handles
        say(scope=scope, weights=weights, plan=handle.plan, steps=handle.figures.steps)
        handle.close()
    dist.destroy_process_group = destroy


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
    calls = bits, scaled, networks, example, lossy, elastic, uneven
    {call.__name__: call for call in calls}[settings["what"]](settings)
    dist.destroy_process_group()
    say(done=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    run(orjson.loads(sys.argv[1]))
