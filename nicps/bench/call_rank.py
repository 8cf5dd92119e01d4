# SPDX-License-Identifier: Apache-2.0
"""One member of a group that all-reduces float32 (`nicps.collective`): `python -m nicps.bench.call_rank`."""

from __future__ import annotations

import argparse
import os
import sys
import time

from nicps.bench import workload
from nicps.bench.barrier import BarrierClient, peak_rss_bytes
from nicps.collective import Group


def main() -> int:
    """Rounds from a common start."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--hosts", type=int, required=True)
    parser.add_argument("--params", type=int, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--barrier", required=True)
    args = parser.parse_args()
    source = workload.tensor(args.rank + 1, args.params)
    with Group.form(args.hosts, rank=args.rank) as group:
        barrier = BarrierClient(args.barrier)
        said: dict[str, object] = {}
        result = source
        for _ in range(args.rounds):
            barrier.wait(said)
            result = group.all_reduce(source).result()
            barrier.send({"ended": time.monotonic()})
            said = {"digest": workload.digest(result)}
        error = workload.worst_error(result, args.hosts)
        barrier.send({**said, "error": error, "rss": peak_rss_bytes(os.getpid())})
    return 0


if __name__ == "__main__":
    sys.exit(main())
