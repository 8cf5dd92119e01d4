# SPDX-License-Identifier: Apache-2.0
"""`python -m tests.simulator`: many seeds, or one again with its trace.

python -m tests.simulator --seeds 2000            seeds 0 to 1999: broadcast, or, as the seed has it, a P4 switch
python -m tests.simulator --seed 17 --trace 200   one, and the last 200 lines of its trace
python -m tests.simulator --seeds 500 --exchange stripes
python -m tests.simulator --seeds 500 --exchange servers
python -m tests.simulator --seeds 500 --exchange all   each seed has one of all five exchanges
python -m tests.simulator --seeds 500 --steps     of jobs whose steps take several rounds
python -m tests.simulator --seeds 500 --channels  of phases with channels (docs/channels.md)
python -m tests.simulator --seeds 500 --channels --steps   of jobs whose steps have a plan, on several channels
python -m tests.simulator --seeds 500 --sized     of groups with channels, whose rounds have sizes of their own
python -m tests.simulator --seeds 1000 --digest   a hash for each seed, and one over all: a refactoring changes none
"""

from __future__ import annotations

import argparse
import collections
import multiprocessing
import re
import sys
import traceback
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import NamedTuple

from nicps.exchange import Exchange
from tests.simulator import channel_lan, planned_lan, schedules, sized_lan
from tests.simulator.digest import digest_of_all
from tests.simulator.lan import Lan

ALL = "all"


class Job(NamedTuple):
    """What `schedules.lan_of` makes a LAN of."""

    seed: int
    hosts: int | None = None
    series: Exchange | None = None
    steps: bool = False
    channels: bool = False
    sized: bool = False

    def lan(self) -> Lan:
        """With its faults laid out."""
        if self.sized:
            return sized_lan.lan_of(self.seed, self.hosts)
        if self.channels and self.steps:
            return planned_lan.lan_of(self.seed, self.hosts)
        if self.channels:
            return channel_lan.lan_of(self.seed, self.hosts)
        return schedules.lan_of(self.seed, self.hosts, self.series, self.steps)

    def finish(self, lan: Lan) -> schedules.Outcome:
        """Run it to its end."""
        if isinstance(lan, channel_lan.ChannelLan):
            return channel_lan.finish(lan)
        return schedules.finish(lan)


def exchange(name: str) -> Exchange | str:
    """The value of `--exchange`."""
    return name if name == ALL else Exchange.named(name)


def jobs_of(options: argparse.Namespace, seeds: Sequence[int]) -> list[Job]:
    """The job of each of the seeds."""
    every = options.exchange == ALL
    return [
        Job(
            seed,
            options.hosts,
            schedules.exchange_of(seed) if every else options.exchange,
            options.steps,
            options.channels,
            options.sized,
        )
        for seed in seeds
    ]


def one(job: Job) -> tuple[int, str, str]:
    """(seed, outcome, why)"""
    seed = job.seed
    try:
        outcome = job.finish(job.lan())
    except schedules.Violation as error:
        return seed, "violation", str(error)
    except Exception as error:
        return seed, "error", f"{error!r} {traceback.format_exc().splitlines()[-3].strip()}"
    return seed, outcome.what, outcome.why


def digest(job: Job) -> tuple[int, str, str]:
    """(seed, digest, outcome), also of a seed that fails."""
    lan = job.lan()
    try:
        what = job.finish(lan).what
    except Exception as error:
        what = f"error: {error!r}"
    return job[0], lan.digest.hexdigest(), what


def digests(jobs: list[Job], processes: int) -> int:
    """Print the digest of each seed, in order, and of all."""
    found = []
    with ProcessPoolExecutor(processes) as pool:  # which ends if one of its processes is killed
        for seed, hexdigest, what in pool.map(digest, jobs):
            print(f"{seed:6} {hexdigest} {what}", flush=True)
            found.append((seed, hexdigest))
    print(f"{len(found)} seeds: {digest_of_all(found)}")
    return 0


def again(job: Job, lines: int) -> int:
    """One seed, and the last lines of its trace."""
    lan = job.lan()
    try:
        outcome = job.finish(lan)
        print(f"{outcome.what}: {outcome.why}" if outcome.why else outcome.what)
    except Exception:
        traceback.print_exc(file=sys.stdout)
    for line in list(lan.trace)[-lines:] if lines else []:
        print(line)
    return 0


def main() -> int:
    """Run; the exit code is 1 if any seed fails."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulator")
    parser.add_argument("--seeds", type=int, default=500, help="how many")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--hosts", type=int, help="default: 3 to 9, as the seed has it")
    parser.add_argument(
        "--exchange",
        type=exchange,
        help="of all jobs; all: each seed has one of all exchanges; default: broadcast, or a P4 "
        "switch in four seeds of ten",
    )
    parser.add_argument(
        "--steps", action="store_true", help="of jobs whose steps take several rounds, in stripes"
    )
    parser.add_argument(
        "--channels",
        action="store_true",
        help="of phases with several channels; with --steps of jobs whose steps have a plan",
    )
    parser.add_argument(
        "--sized",
        action="store_true",
        help="of groups with several channels, whose rounds have sizes of their own",
    )
    parser.add_argument("--seed", type=int, help="this one only")
    parser.add_argument("--trace", type=int, default=0, metavar="LINES", help="of that one")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument(
        "--digest", action="store_true", help="a hash of all frames and commits, by seed"
    )
    options = parser.parse_args()
    if options.exchange == ALL and (options.steps or options.channels or options.sized):
        parser.error("--exchange all is not possible with --steps, --channels or --sized")
    if options.sized and (options.steps or options.channels):
        parser.error("--sized is possible by itself only")
    if options.seed is not None:
        return again(*jobs_of(options, [options.seed]), options.trace)
    jobs = jobs_of(options, range(options.first, options.first + options.seeds))
    if options.digest:
        return digests(jobs, options.jobs)
    return many(jobs, options.jobs, by_exchange=options.exchange == ALL)


def many(jobs: list[Job], processes: int, by_exchange: bool) -> int:
    """Print the seeds that fail, and how often each outcome came; the exit code.

    Args:
        by_exchange: how many seeds each exchange had, too.
    """
    counts: collections.Counter[str] = collections.Counter()
    exchanges = {job.seed: job.series.name for job in jobs if job.series}
    outcomes: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    failed = 0
    with multiprocessing.Pool(processes) as pool:
        for at, (seed, outcome, why) in enumerate(pool.imap_unordered(one, jobs, chunksize=4), 1):
            if at % 100 == 0:
                print(f"{at} of {len(jobs)}, {failed} failed", file=sys.stderr, flush=True)
            if outcome in ("violation", "error"):
                failed += 1
                of = f" --exchange {exchanges[seed]}" if by_exchange else ""
                print(f"seed {seed}{of}: {outcome}: {why}", flush=True)
                counts[outcome] += 1
            else:
                counts[f"{outcome}: {_kind(why)}" if why else outcome] += 1
            outcomes[exchanges.get(seed, "")][outcome] += 1
    for what, count in counts.most_common():
        print(f"{count:6} {what}")
    if by_exchange:
        for series in schedules.EXCHANGES:
            found = outcomes[series.name]
            each = ", ".join(f"{what} {count}" for what, count in sorted(found.items()))
            print(f"{found.total():6} {series.name}: {each}")
    return 1 if failed else 0


def _kind(why: str) -> str:
    """A reason without its figures."""
    return re.sub(r"\[[^]]*\]|h\d+|m?\d+", "..", why)


if __name__ == "__main__":
    sys.exit(main())
