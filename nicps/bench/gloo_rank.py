# SPDX-License-Identifier: Apache-2.0
"""One rank of torch.distributed with Gloo, for comparison: `python -m nicps.bench.gloo_rank`."""

from __future__ import annotations

import argparse
import os
import time

from nicps.bench import workload
from nicps.bench.barrier import BarrierClient, peak_rss_bytes
from nicps.startup import leave, permanent


def main() -> int:
    """Rounds from a common start; float16 is converted on both ends, inside the measured time."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--hosts", type=int, required=True)
    parser.add_argument("--master", required=True)
    parser.add_argument("--params", type=int, required=True)
    parser.add_argument("--dtype", choices=("float32", "float16"), required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--barrier", required=True)
    args = parser.parse_args()
    with permanent():
        import torch
        import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "eth1"
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{args.master}:29500",
        rank=args.rank,
        world_size=args.hosts,
    )
    source = torch.from_numpy(workload.tensor(args.rank + 1, args.params))
    dtype = getattr(torch, args.dtype)
    barrier = BarrierClient(args.barrier)
    said: dict[str, object] = {}
    result = source
    for _ in range(args.rounds):
        fresh = source.clone() if dtype is torch.float32 else source
        barrier.wait(said)
        work = fresh if dtype is torch.float32 else fresh.to(dtype)
        dist.all_reduce(work)
        result = work.float()
        barrier.send({"ended": time.monotonic()})
        said = {"digest": workload.digest(result.numpy())}
    error = workload.worst_error(result.numpy(), args.hosts)
    barrier.send({**said, "error": error, "rss": peak_rss_bytes(os.getpid())})
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    leave(main())
