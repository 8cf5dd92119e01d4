# SPDX-License-Identifier: Apache-2.0
"""Gradients that travel while the next forward pass runs, in one line (docs/pytorch.md).

On every host, beside `nicps join`: python overlap.py
"""

from __future__ import annotations

import hashlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

import nicps.torch

STEPS = 40


def main() -> None:
    """Learn a function of random numbers, and say what came of it."""
    dist.init_process_group("nicps")
    torch.manual_seed(1)
    layers = [nn.Linear(64, 512), *(nn.Linear(512, 512) for _ in range(6)), nn.Linear(512, 8)]
    model = DistributedDataParallel(
        nn.Sequential(*(each for layer in layers for each in (layer, nn.Tanh())))
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    handle = nicps.torch.overlap(model, optimizer)

    random = torch.Generator().manual_seed(dist.get_rank())
    for step in range(STEPS):
        x = torch.randn(32, 64, generator=random)
        optimizer.zero_grad()
        loss = mse_loss(model(x), x[:, :8].sin())
        loss.backward()
        optimizer.step()
        if step % 10 == 9:
            print(f"step {step + 1}: loss {loss.item():.4f}, {handle.figures}", flush=True)

    weights = torch.cat([each.detach().reshape(-1) for each in model.parameters()])
    digest = hashlib.sha256(weights.numpy().tobytes()).hexdigest()[:16]
    print(f"rank {dist.get_rank()} of {dist.get_world_size()}: weights {digest}, {handle.plan}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
