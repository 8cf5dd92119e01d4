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
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import nicps.torch


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

    averager = nicps.torch.ChangeAverager(args.period, args.warmup)
    began = time.monotonic()
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            optimizer.zero_grad()
            with model.no_sync() if averager.local else contextlib.nullcontext():
                loss = functional.cross_entropy(model(images), labels)
                loss.backward()
            optimizer.step()
            averager.average_parameters(model.parameters())
        averager.average(model.parameters())  # what is tested is the same model everywhere
        scheduler.step()
        print(
            f"epoch {epoch + 1}: loss {loss.item():.4f}, {time.monotonic() - began:.1f} s",
            flush=True,
        )

    report(model, args.data)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
