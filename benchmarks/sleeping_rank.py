# SPDX-License-Identifier: Apache-2.0
"""One rank of `benchmarks.priorities --ways gloo`: DDP with a network that computes by sleeping; prints a JSON line."""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from itertools import pairwise
from pathlib import Path

import orjson
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from trainer.job import load


def main() -> int:
    """Steps, and how long they took."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--settings", type=orjson.loads, required=True)
    parser.add_argument("--bucket-mb", type=float, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    job = load(Path(__file__).parent / "sleeping", args.settings)
    dist.init_process_group("gloo")
    model = DistributedDataParallel(
        job.model(), bucket_cap_mb=args.bucket_mb, gradient_as_bucket_view=True
    )
    optimizer = job.optimizer(model.parameters())
    batch, ends = {"x": torch.zeros(1, 1)}, []
    for _ in range(args.settings["rounds"]):
        job.loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        ends.append(time.monotonic())
    steps = [later - end for end, later in pairwise(ends)]
    print(orjson.dumps({"median": statistics.median(steps[len(steps) // 2 :])}).decode())
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
