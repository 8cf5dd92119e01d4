# SPDX-License-Identifier: Apache-2.0
"""One rank that `benchmarks.low_rank` measures: it prints the seconds of computing alone, and of a step of DDP.

Of each there is the time that passed, and the processor's time of this process, which other programs disturb less.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import statistics
import sys
import time

import orjson
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import nicps.torch
from nicps.lab.links import HOST_INTERFACE

_WARM_UP = 5


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--way", choices=("nicps", "powersgd"), required=True)
    parser.add_argument("--low-rank", type=int, required=True)
    parser.add_argument("--width", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    args = parser.parse_args()
    os.environ["GLOO_SOCKET_IFNAME"] = HOST_INTERFACE
    torch.set_num_threads(1)
    dist.init_process_group("nicps" if args.way == "nicps" else "gloo")
    torch.manual_seed(1)
    layers = nn.Sequential(*[nn.Linear(args.width, args.width) for _ in range(4)])
    random = torch.Generator().manual_seed(dist.get_rank())

    def step(module: nn.Module) -> tuple[float, float]:
        x = torch.randn(1, args.width, generator=random)
        module.zero_grad()
        began, used = time.perf_counter(), time.process_time()
        nn.functional.mse_loss(module(x), x).backward()  # type: ignore[no-untyped-call]
        return time.perf_counter() - began, time.process_time() - used

    def steps(module: nn.Module) -> list[float]:
        found = [step(module) for _ in range(_WARM_UP + args.steps)][_WARM_UP:]
        return [statistics.median(each) for each in zip(*found, strict=True)]

    computing = steps(layers)
    model = DistributedDataParallel(layers, bucket_cap_mb=200, gradient_as_bucket_view=True)
    if args.way == "nicps":
        nicps.torch.compress(model, rank=args.low_rank)
    else:
        state = powerSGD_hook.PowerSGDState(
            None, matrix_approximation_rank=args.low_rank, start_powerSGD_iter=2
        )
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    seconds = steps(model)
    digest = hashlib.sha256()
    for parameter in model.parameters():
        assert parameter.grad is not None
        digest.update(parameter.grad.numpy().tobytes())
    said = {"computing": computing, "step": seconds, "gradients": digest.hexdigest()}
    print(orjson.dumps(said).decode(), flush=True)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
