# SPDX-License-Identifier: Apache-2.0
"""One rank that all-reduces step by step with Gloo, and notes each in a file: `python -m nicps.bench.gloo_steps`.

A line a step, and a line a failure; after a failure the same group is tried again, until the process is ended.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import orjson
import torch
import torch.distributed as dist

_STEP_S = 0.01  # as long as a step of a small model takes
_AGAIN_S = 0.25


def main() -> int:
    """Steps without an end."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--hosts", type=int, required=True)
    parser.add_argument("--master", required=True, help="ADDRESS:PORT")
    parser.add_argument("--params", type=int, required=True)
    parser.add_argument("--timeout", type=float, help="seconds; default: Gloo's own")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "eth1"
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{args.master}",
        rank=args.rank,
        world_size=args.hosts,
    )
    # A group of its own: the first group's time-out also limits how far apart the ranks may start.
    group = dist.new_group(timeout=timedelta(seconds=args.timeout)) if args.timeout else None
    vector = torch.ones(args.params)
    with args.out.open("wb", buffering=0) as out:
        while True:
            said: dict[str, object] = {}
            try:
                dist.all_reduce(vector.clone(), group=group)
            except RuntimeError as error:
                said = {"error": str(error)}
            out.write(orjson.dumps({**said, "t": time.monotonic()}) + b"\n")
            time.sleep(_AGAIN_S if said else _STEP_S)


if __name__ == "__main__":
    sys.exit(main())
