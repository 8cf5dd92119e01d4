# SPDX-License-Identifier: Apache-2.0
"""A script of DDP with factors of low rank, started on every host: `python -m tests.netns.low_rank_program [DIES]`.

It prints a JSON object a line. The optimizer's factors are powers of two: PyTorch's own multiply-add would otherwise
round differently on another processor.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import time
from typing import Any

import orjson
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import nicps.torch

STEPS, DIES_AT, OVERFLOWS_AT = 14, 6, 9


def say(**values: Any) -> None:
    """Print a line for the test."""
    print(orjson.dumps(values).decode(), flush=True)


def train(dies: int | None) -> None:
    """Steps of a model of several buckets; one rank may be killed, and one's gradient is infinite once."""
    rank = dist.get_rank()
    torch.manual_seed(rank)  # DDP gives all ranks the model of rank 0
    layers = nn.Sequential(nn.Linear(30, 300), nn.ReLU(), nn.Linear(300, 201), nn.Linear(201, 8))
    model = DistributedDataParallel(layers, bucket_cap_mb=0.1, gradient_as_bucket_view=True)
    handle = nicps.torch.compress(model, rank=2)
    told: list[list[int]] = []
    handle.on_loss = lambda lost: told.append(list(lost))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125, momentum=0.5)
    random = torch.Generator().manual_seed(rank)
    times, losses, skipped = [], [], 0
    for step in range(STEPS):
        x = torch.randn(16, 30, generator=random)
        began = time.monotonic()
        loss = nn.functional.mse_loss(model(x), x[:, :8].sin())
        if rank == dies and step == DIES_AT:
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        (loss * (float("inf") if step == OVERFLOWS_AT and rank == 1 else 1.0)).backward()
        if all(p.grad.isfinite().all() for p in model.parameters()):
            optimizer.step()
        else:
            skipped += 1
        times.append(time.monotonic() - began)
        losses.append(loss.item())
    weights = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    say(
        weights=hashlib.sha256(weights.numpy().tobytes()).hexdigest(),
        starts={
            name: hashlib.sha256(t.numpy().tobytes()).hexdigest()
            for name, t in handle.state_dict()["start"].items()
        },
        told=told,
        skipped=skipped,
        losses=losses,
        seconds=round(max(times[DIES_AT:]), 3),
    )


def main() -> int:
    """Join, and train."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    dist.init_process_group("nicps")
    say(rank=dist.get_rank(), capability=torch.backends.cpu.get_cpu_capability())
    train(int(sys.argv[1]) if len(sys.argv) > 1 else None)
    dist.destroy_process_group()
    say(done=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
