# SPDX-License-Identifier: Apache-2.0
"""MNIST with DistributedDataParallel on nicps, on hosts that go and come: mnist.py with a State.

On every host, beside `nicps join`: WORLD_SIZE=3 python mnist_elastic.py --data /srv/mnist
A host that is lost in the middle does not stop the others. Start the same command there again, also if `nicps run` has
begun the run: it goes on with them. Until then the lost rank's share of each batch is not trained. docs/pytorch.md,
"Hosts that come back", has the details.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from mnist import data_set, network, report
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import nicps.torch


def main() -> None:
    """Train, test, and say what came of it."""
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--data", type=Path, default=Path(os.environ.get("NICPS_DATA", ".")) / "mnist"
    )
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch", type=int, default=64, help="of each rank")
    parser.add_argument("--sync-every", type=int, default=20, help="batches")
    args = parser.parse_args()

    dist.init_process_group("nicps")
    torch.manual_seed(1)
    # Buckets are not laid out anew after the first step: a host that comes back would do that by itself. PyTorch warns
    # that there are no unused parameters: ignore that.
    model = DistributedDataParallel(network(), find_unused_parameters=True)
    model.register_comm_hook(None, nicps.torch.average)  # over the ranks that are there
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    train = data_set(args.data, "train")
    state = nicps.torch.State(model=model, optimizer=optimizer, epoch=0, batch=0)
    state.sync()

    while state.epoch < args.epochs:
        order = torch.randperm(len(train), generator=torch.Generator().manual_seed(state.epoch))
        while True:
            if state.batch % args.sync_every == 0 and state.sync():
                break  # somebody has come, perhaps this process: epoch and ranks may be others
            rank, size = dist.get_rank(), dist.get_world_size()
            first = state.batch * args.batch * size
            if first + args.batch * size > len(train):
                state.epoch, state.batch = state.epoch + 1, 0
                break
            mine = order[first + rank * args.batch :][: args.batch]
            images, labels = train[mine]
            optimizer.zero_grad()
            functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
            state.batch += 1
        if dist.get_rank() == 0:
            print(f"epoch {state.epoch}, batch {state.batch}", flush=True)

    report(model, args.data)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
