# SPDX-License-Identifier: Apache-2.0
"""One rank of `benchmarks.priorities` with DDP: a network that computes by sleeping; prints a JSON line.

Ways: `gloo`; `compress` and `overlap`, the calls of `nicps.torch` of that name.
"""

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
    parser.add_argument("--way", choices=("gloo", "compress", "overlap"), required=True)
    parser.add_argument("--settings", type=orjson.loads, required=True)
    parser.add_argument("--bucket-mb", type=float, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    job = load(Path(__file__).parent / "sleeping", args.settings)
    if args.way != "gloo":
        import nicps.torch
    dist.init_process_group("gloo" if args.way == "gloo" else "nicps")
    model = DistributedDataParallel(
        job.model(), bucket_cap_mb=args.bucket_mb, gradient_as_bucket_view=True
    )
    optimizer = job.optimizer(model.parameters())
    lane, handle = args.settings["lane"], None
    if args.way == "compress":
        nicps.torch.compress(model, lane=lane)
    elif args.way == "overlap":
        most = args.settings["priorities"]
        handle = nicps.torch.overlap(model, optimizer, lane=lane, channels=most)
    batch, ends = {"x": torch.zeros(1, 1)}, []
    for _ in range(args.settings["rounds"]):
        job.loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        ends.append(time.monotonic())
    steps = [later - end for end, later in pairwise(ends)]
    found = {"median": statistics.median(steps[len(steps) // 2 :])}
    if handle is not None:
        found["predicted_seconds"] = handle.figures.predicted_seconds
        found["channels"] = len({channel for _, channel in handle.plan})
        handle.close()
    print(orjson.dumps(found).decode())
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
