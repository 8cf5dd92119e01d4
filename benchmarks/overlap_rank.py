# SPDX-License-Identifier: Apache-2.0
"""One rank of `benchmarks.overlap`: a DDP model whose layers compute by sleeping; prints a JSON line."""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from typing import Any

import orjson
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

#: PyTorch's default is 25 MB, and 1 MB for the first: of a model of 40 MB that is three buckets.
_BUCKET_MB, _ONE_BUCKET_MB = 4.0, 10_000.0
_LANES = ("i8", "i16", "i32")
WAYS = ("gloo", "nicps", *_LANES)


class _Slow(torch.autograd.Function):
    """The identity, whose backward takes a while, as that of a layer does on a device of its own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(ctx.seconds)
        return grad, None


class Layers(nn.Module):
    """`count` layers of 1,001,000 parameters, whose backward passes together take that long."""

    def __init__(self, count: int, seconds: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1000, 1000) for _ in range(count))
        self.each_s = seconds / count

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(n, 1000)."""
        for layer in self.layers:
            x = _Slow.apply(layer(x), self.each_s)
        return x


def main() -> int:
    """Steps, and how long they took."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--way", choices=WAYS, required=True)
    parser.add_argument("--one-bucket", action="store_true")
    parser.add_argument("--layers", type=int, required=True)
    parser.add_argument("--compute", type=float, required=True, help="seconds")
    parser.add_argument("--steps", type=int, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.way != "gloo":
        import nicps.torch
    dist.init_process_group("gloo" if args.way == "gloo" else "nicps")
    torch.manual_seed(1)
    model = DistributedDataParallel(
        Layers(args.layers, args.compute),
        bucket_cap_mb=_ONE_BUCKET_MB if args.one_bucket else _BUCKET_MB,
        gradient_as_bucket_view=True,
    )
    if args.way in _LANES:
        nicps.torch.compress(model, lane=args.way)
    x = torch.randn(1, 1000)
    times = []
    for _ in range(args.steps + 2):
        dist.barrier()
        began = time.monotonic()
        model(x).square().mean().backward()
        times.append(time.monotonic() - began)
    dist.barrier()
    seconds = times[2:]  # DDP makes its buckets anew after the first
    print(orjson.dumps({"median": statistics.median(seconds), "most": max(seconds)}).decode())
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
