# SPDX-License-Identifier: Apache-2.0
"""`python -m tests.simulator`: many seeds, or one again with its trace.

python -m tests.simulator --seeds 2000            seeds 0 to 1999
python -m tests.simulator --seed 17 --trace 200   one, and the last 200 lines of its trace
"""

from __future__ import annotations

import argparse
import collections
import multiprocessing
import sys
import traceback

from tests.simulator import faults


def one(job: tuple[int, int | None]) -> tuple[int, str, str]:
    """(seed, outcome, why)"""
    seed, hosts = job
    try:
        outcome = faults.run(seed, hosts)
    except faults.Violation as error:
        return seed, "violation", str(error)
    except Exception as error:
        return seed, "error", f"{error!r} {traceback.format_exc().splitlines()[-3].strip()}"
    return seed, "done" if outcome.done else "standing by", outcome.why


def main() -> int:
    """Run; the exit code is 1 if any seed fails."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulator")
    parser.add_argument("--seeds", type=int, default=500)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--hosts", type=int, help="default: 3 to 9, as the seed has it")
    parser.add_argument("--seed", type=int, help="this one only")
    parser.add_argument("--trace", type=int, default=0, metavar="LINES")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    options = parser.parse_args()
    if options.seed is not None:
        lan, rng = faults.lan_of(options.seed, options.hosts)
        try:
            faults.schedule(lan, rng)
            lan.hosts[0].submit()
            done = lan.run(lambda: faults._over(lan), faults.LIMIT_S)
            print("done" if done else f"not done: {faults.stuck(lan) or faults.places(lan)}")
        except Exception:
            traceback.print_exc()
        for line in list(lan.trace)[-options.trace :] if options.trace else []:
            print(line)
        return 0
    seeds = range(options.first, options.first + options.seeds)
    counts: collections.Counter[str] = collections.Counter()
    failed = 0
    with multiprocessing.Pool(options.jobs) as pool:
        jobs = ((seed, options.hosts) for seed in seeds)
        for seed, outcome, why in pool.imap_unordered(one, jobs, chunksize=4):
            counts[outcome] += 1
            if outcome in ("violation", "error"):
                failed += 1
                print(f"seed {seed}: {outcome}: {why}", flush=True)
            elif outcome == "standing by":
                counts[why.split(" of ")[0].split(" has ")[0][:60]] += 0
    print(", ".join(f"{count} {what}" for what, count in sorted(counts.items()) if count))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
