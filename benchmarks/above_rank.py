# SPDX-License-Identifier: Apache-2.0
"""One rank that `benchmarks.above` starts: it prints the seconds of computing alone, and of a step of DDP.

Of each there is the time that passed, and the processor's time of this process, which other programs disturb less.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable

import orjson
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook, powerSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.nn.parallel import DistributedDataParallel

import nicps.torch
from benchmarks.above import GLOO, LAYERS, OURS
from nicps.lab.links import HOST_INTERFACE

_ONE_BUCKET_MB = 200.0


def hooked(layers: nn.Module, way: str, value: str) -> DistributedDataParallel:
    """DDP that trains so."""
    cap = _ONE_BUCKET_MB if way in ("rank", "powersgd") else None
    # All ranks have made the same model: at a slow rate a broadcast of it would take longer than the steps.
    model = DistributedDataParallel(
        layers, bucket_cap_mb=cap, gradient_as_bucket_view=True, init_sync=False
    )
    if way == "lane":
        nicps.torch.compress(model, lane=value)
    elif way == "rank":
        nicps.torch.compress(model, rank=int(value))
    elif way == "powersgd":
        state = powerSGD_hook.PowerSGDState(
            None, matrix_approximation_rank=int(value), start_powerSGD_iter=2
        )
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    elif way == "local":
        local = post_localSGD_hook.PostLocalSGDState(
            None, dist.group.WORLD, 0, post_local_gradient_allreduce=False
        )
        model.register_comm_hook(local, post_localSGD_hook.post_localSGD_hook)
    return model


def digest(tensors: Iterable[torch.Tensor | None]) -> str:
    """Of what is the same at all ranks."""
    found = hashlib.sha256()
    for tensor in tensors:
        assert tensor is not None
        found.update(tensor.detach().numpy().tobytes())
    return found.hexdigest()


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--way", choices=OURS + GLOO, required=True)
    parser.add_argument("--value", default="", help="lane, rank, or steps between two averages")
    parser.add_argument("--width", type=int, required=True)
    parser.add_argument("--warm-up", type=int, required=True, help="periods")
    parser.add_argument(
        "--steps", type=int, required=True, help="periods; one is a step but for `local`"
    )
    args = parser.parse_args()
    os.environ["GLOO_SOCKET_IFNAME"] = HOST_INTERFACE
    torch.set_num_threads(1)
    dist.init_process_group("gloo" if args.way in GLOO else "nicps")
    torch.manual_seed(1)
    layers = nn.Sequential(*[nn.Linear(args.width, args.width) for _ in range(LAYERS)])
    random = torch.Generator().manual_seed(dist.get_rank())
    period = int(args.value) if args.way == "local" else 1

    def step(module: nn.Module, after: Callable[[], None]) -> tuple[float, float]:
        x = torch.randn(1, args.width, generator=random)
        module.zero_grad()
        began, used = time.perf_counter(), time.process_time()
        nn.functional.mse_loss(module(x), x).backward()  # type: ignore[no-untyped-call]
        after()
        return time.perf_counter() - began, time.process_time() - used

    def steps(module: nn.Module, after: Callable[[], None] = lambda: None) -> list[float]:
        """Median of the periods' means."""
        found = [
            [statistics.fmean(each) for each in zip(*some, strict=True)]
            for some in (
                [step(module, after) for _ in range(period)]
                for _ in range(args.warm_up + args.steps)
            )
        ]
        return [statistics.median(each) for each in zip(*found[args.warm_up :], strict=True)]

    computing = steps(layers)
    model = hooked(layers, args.way, args.value)
    if args.way == "local":
        averager = PeriodicModelAverager(period, warmup_steps=period - 1)
        with torch.no_grad():  # as steps of its own would leave a rank's model
            for parameter in model.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=random), alpha=1e-3)
        seconds = steps(model, lambda: averager.average_parameters(model.parameters()))
        said = digest(model.parameters())
    else:
        seconds = steps(model)
        said = digest(parameter.grad for parameter in model.parameters())
    print(
        orjson.dumps({"computing": computing, "step": seconds, "same": said}).decode(), flush=True
    )
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
