# SPDX-License-Identifier: Apache-2.0
"""MNIST with DistributedDataParallel on nicps, whose gradients travel while the next forward pass runs: mnist.py with
one line more.

On every host, beside `nicps join`: python overlap.py --data /srv/mnist
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import os
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import nicps.torch


def read_idx(folder: Path, name: str) -> torch.Tensor:
    """One of MNIST's files, compressed or not, as uint8."""
    plain = folder / name
    data = (
        plain.read_bytes() if plain.exists() else gzip.decompress(Path(f"{plain}.gz").read_bytes())
    )
    dimensions = data[3]
    shape = np.frombuffer(data, ">i4", dimensions, 4)
    return torch.from_numpy(
        np.frombuffer(data, np.uint8, offset=4 + 4 * dimensions).copy()
    ).reshape(*shape)


def data_set(folder: Path, part: str) -> TensorDataset:
    """Images float32 (n, 1, 28, 28), of mean 0 and deviation 1, and labels int64 (n,)."""
    images = read_idx(folder, f"{part}-images-idx3-ubyte")[:, None].float()
    labels = read_idx(folder, f"{part}-labels-idx1-ubyte").long()
    return TensorDataset((images / 255 - 0.1307) / 0.3081, labels)


def network() -> nn.Module:
    """Two convolutions and two linear layers, 417,006 parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, stride=2), nn.ReLU(), nn.Conv2d(32, 64, 3, stride=2), nn.ReLU(), nn.Flatten(),
        nn.Linear(64 * 6 * 6, 172), nn.ReLU(), nn.Linear(172, 10),
    )  # fmt: skip


def report(model: DistributedDataParallel, data: Path) -> None:
    """Test the model, and print the accuracy and a digest of the weights."""
    with torch.no_grad():
        images, labels = data_set(data, "t10k").tensors
        accuracy = (model.module(images).argmax(1) == labels).float().mean().item()
    weights = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    digest = hashlib.sha256(weights.numpy().tobytes()).hexdigest()[:16]
    print(
        f"rank {dist.get_rank()} of {dist.get_world_size()}: {accuracy:.2%}, weights {digest}",
        flush=True,
    )


def main() -> None:
    """Train, test, and say what came of it."""
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--data", type=Path, default=Path(os.environ.get("NICPS_DATA", ".")) / "mnist"
    )
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch", type=int, default=64, help="of each rank")
    args = parser.parse_args()

    dist.init_process_group("nicps")
    torch.manual_seed(1)
    model = DistributedDataParallel(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    nicps.torch.overlap(model, optimizer)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs)
    train = data_set(args.data, "train")
    sampler = DistributedSampler(train)
    loader = DataLoader(train, args.batch, sampler=sampler)

    began = time.monotonic()
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
        scheduler.step()
        print(
            f"epoch {epoch + 1}: loss {loss.item():.4f}, {time.monotonic() - began:.1f} s",
            flush=True,
        )

    report(model, args.data)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
