# SPDX-License-Identifier: Apache-2.0
"""all_reduce through the backend of torch.distributed, through `nicps.collective` itself, and through Gloo, in turn.

    python -m benchmarks.torch_backend [--hosts N] [--rate-mbit M] [--repeat N] [--json]

Each host of a lab runs one rank. The three take turns call by call, so that what else the machine does falls on all of
them alike. The backend's overhead is the median of its calls over that of the collective's.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

import nicps.torch
from nicps.lab import Lab, LabSettings
from nicps.lab.agents import environment, joined, open_folder

SIZES = {"4 KB": 1024, "25 MB": 25 * 1024 * 1024 // 4}
_LIMIT_S = 900.0


def measure(repeat: int) -> dict[str, dict[str, float]]:
    """Seconds of a call, median, by size and by way, and the processor time of this rank's program."""
    torch.set_num_threads(1)
    dist.init_process_group("nicps")
    gloo = dist.new_group(backend="gloo")
    world = dist.group.WORLD
    assert isinstance(world, nicps.torch.ProcessGroupNicps)
    found: dict[str, dict[str, float]] = {}
    for size, numbers in SIZES.items():
        tensor = torch.randn(numbers)
        vector = tensor.numpy().copy()
        group = world.group
        ways: dict[str, Callable[[], Any]] = {
            "backend": lambda tensor=tensor: dist.all_reduce(tensor.clone()),
            "collective": lambda vector=vector, group=group: group.all_reduce(
                vector.copy()
            ).result(),
            "gloo": lambda tensor=tensor, gloo=gloo: dist.all_reduce(tensor.clone(), group=gloo),
        }
        times: dict[str, list[float]] = {way: [] for way in ways}
        cpu: dict[str, list[float]] = {way: [] for way in ways}
        calls = repeat if numbers > 100_000 else repeat * 10
        for turn in range(calls + 1):
            order = list(ways)[turn % len(ways) :] + list(ways)[: turn % len(ways)]
            for way in order:
                dist.barrier(group=gloo)
                began, used = time.perf_counter(), time.process_time()
                ways[way]()
                if turn:  # the first warms up
                    times[way].append(time.perf_counter() - began)
                    cpu[way].append(time.process_time() - used)
        found[size] = {way: median(each) for way, each in times.items()}
        found[f"{size}, processor"] = {way: median(each) for way, each in cpu.items()}
    dist.destroy_process_group()
    return found


def main() -> int:
    """Make the lab, start a rank on each host, and print what rank 0 has measured."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument(
        "--rate-mbit", type=float, default=1000.0, help="of every cable; 0: unshaped (%(default)s)"
    )
    parser.add_argument(
        "--repeat",
        type=int,
        default=10,
        help="calls of 25 MB; ten times as many of 4 KB (%(default)s)",
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        print(json.dumps({"rank": measure(args.repeat)}), flush=True)
        return 0
    rate = int(args.rate_mbit * 1e6) or None
    settings = LabSettings(f"torch-{os.getpid()}", args.hosts, rate_bps=rate)
    with (
        Lab(settings) as lab,
        open_folder("nicps-torch-") as folder,
        joined(lab, lab.hosts, folder),
    ):
        found = run_ranks(lab, args.repeat)
    result = {"hosts": args.hosts, "rate_mbit": args.rate_mbit, "seconds": found}
    if args.json:
        print(json.dumps(result))
        return 0
    for size, ways in found.items():
        overhead = ways["backend"] / ways["collective"] - 1
        beside = ways["backend"] / ways["gloo"]
        told = ", ".join(f"{way} {1e3 * seconds:.2f} ms" for way, seconds in ways.items())
        print(f"{size}: {told}; over the collective {overhead:+.1%}, beside Gloo x{beside:.2f}")
    return 0


def run_ranks(lab: Lab, repeat: int) -> dict[str, dict[str, float]]:
    """Of all ranks the slowest median of each."""
    command = [sys.executable, "-m", "benchmarks.torch_backend", "--rank", "--repeat", str(repeat)]
    root = Path(__file__).resolve().parents[1]
    ranks = [
        lab.run(host, command, cwd=root, env=environment(), stdout=subprocess.PIPE, text=True)
        for host in lab.hosts
    ]
    said = []
    try:
        for rank in ranks:
            out, _ = rank.communicate(timeout=_LIMIT_S)
            said.append(json.loads(out.splitlines()[-1])["rank"])
    finally:
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                rank.kill()
            rank.wait()
    return {
        size: {way: max(each[size][way] for each in said) for way in ways}
        for size, ways in said[0].items()
    }


if __name__ == "__main__":
    sys.exit(main())
