# SPDX-License-Identifier: Apache-2.0
"""MNIST with DistributedDataParallel on nicps, for slow links: mnist.py with local SGD, in lanes of 8 bits.

At first gradients are averaged in each step, as by `compress`. Then each rank trains its own model, and the changes
of all models are averaged every few steps (post-local SGD, Lin and others 2018): with a period of 8 a 32nd of the bytes
of DDP.

On every host, beside `nicps join`: python local_sgd.py --data /srv/mnist
"""

from __future__ import annotations

import argparse
import contextlib
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from mnist import data_set, network, report
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.utils.data import DataLoader, DistributedSampler

import nicps.torch


class ChangeAverager:
    """Averages what the ranks' models have changed since the last time.

    Changes are small beside weights, so that 8 bits a number are enough for them; what rounding leaves over is added to
    the next ones. All ranks add the same mean to the same weights, so all have the same bits.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.before = parameters_to_vector(model.parameters()).detach().clone()
        self.residual = torch.zeros_like(self.before)

    @torch.no_grad()
    def average(self) -> None:
        """Over all ranks that are there; all call it at the same point."""
        change = parameters_to_vector(self.model.parameters()) - self.before
        group = dist.group.WORLD.group
        group.average(change.numpy(), self.residual.numpy(), lane="i8").result()
        self.before += change
        vector_to_parameters(self.before.clone(), self.model.parameters())


def main() -> None:
    """Train, test, and say what came of it."""
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--data", type=Path, default=Path(os.environ.get("NICPS_DATA", ".")) / "mnist"
    )
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch", type=int, default=64, help="of each rank")
    parser.add_argument("--period", type=int, default=8, help="steps between two averages")
    parser.add_argument("--warmup", type=int, default=50, help="steps before the first one")
    args = parser.parse_args()

    dist.init_process_group("nicps")
    torch.manual_seed(1)
    model = DistributedDataParallel(network())
    nicps.torch.compress(model, lane="i8")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs)
    train = data_set(args.data, "train")
    sampler = DistributedSampler(train)
    loader = DataLoader(train, args.batch, sampler=sampler)

    began, step, averager = time.monotonic(), 0, None
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            optimizer.zero_grad()
            with model.no_sync() if averager else contextlib.nullcontext():
                loss = functional.cross_entropy(model(images), labels)
                loss.backward()
            optimizer.step()
            step += 1
            if averager and (step - args.warmup) % args.period == 0:
                averager.average()
            elif step == args.warmup:
                averager = ChangeAverager(model)
        if averager:
            averager.average()  # what is tested, and kept, is the same model everywhere
        scheduler.step()
        print(
            f"epoch {epoch + 1}: loss {loss.item():.4f}, {time.monotonic() - began:.1f} s",
            flush=True,
        )

    report(model, args.data)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
