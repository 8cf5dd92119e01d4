# SPDX-License-Identifier: Apache-2.0
"""Seconds until a test reaches a target accuracy with parameter servers, and without (`benchmarks.servers training`).

Four workers, of which one is four times slower: a micro-batch takes a fixed time, by sleeping. Every way has the same
model, first weights, data and seeds, plain SGD, and a learning rate that the same search has found with the first seed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.pulls import server_pids, user_seconds
from benchmarks.rows import Row, Rows, chosen, fill, missing
from benchmarks.time_to_accuracy import JOBS, job_with_end, measure_rows, train
from nicps.errors import JobFailed, UsageProblem
from nicps.lab import Lab, LabSettings
from nicps.lab.agents import joined, open_folder
from nicps.rates import format_rate

WORKERS = 4
FACTOR = 4.0
#: The server is the lab's first host, the slow worker its last.
_SERVER, _SLOW = "h1", f"h{WORKERS + 1}"
DEFAULT = "s-4,s-16,s-64,s-0,asynchronous,synchronous,ring"
FORMS = """\
s-T           servers, with a synchronisation every T pushes; 0: never
asynchronous  the same with T = 0, and all pushes count alike
synchronous   the same with T = 1: plain synchronous training
ring          the ring at its quorum; ring-Q: at that one
alone         one worker with its share of the batch, and nobody else: the others' throughput is held against its own"""

_FORM = re.compile(r"s-(\d+)|ring(?:-(0?\.\d+|1))?|asynchronous|synchronous|alone")
#: Words of the errors that a learning rate which is too high brings.
_TOO_HIGH = re.compile("a smaller learning rate may help|servers take steps below")
_RATE = """

def optimizer(parameters):  # of benchmarks/served_training.py
    return torch.optim.SGD(parameters, lr={lr!r})

def scheduler(optimizer, rounds):
    return None
"""


@dataclass(frozen=True)
class Way:
    """A way of training, as it is written, and the learning rate; None where that is not chosen yet."""

    kind: str
    lr: float | None = None

    @property
    def name(self) -> str:
        """With the rate."""
        return self.kind if self.lr is None else f"{self.kind}:{self.lr:g}"

    def variants(self, rates: Sequence[float]) -> list[Way]:
        """The ways among which the best one is chosen."""
        return [replace(self, lr=rate) for rate in (rates[:1] if self.alone else rates)]

    @property
    def alone(self) -> bool:
        """Whether one worker trains by itself."""
        return self.kind == "alone"

    @property
    def served(self) -> bool:
        """Whether there is a server."""
        return not self.alone and not self.kind.startswith("ring")

    @property
    def settings(self) -> Row:
        """Of its job."""
        if not self.served:
            quorum = self.kind.removeprefix("ring").removeprefix("-")
            return {"quorum": float(quorum)} if quorum and not self.alone else {}
        every = {"asynchronous": 0, "synchronous": 1}.get(self.kind)
        if every is None:
            every = int(self.kind.removeprefix("s-"))
        weighed = self.kind != "asynchronous"
        return {"system": "S", "sync_every": every, "servers": _SERVER, "staleness": weighed}


def parse_ways(text: str) -> tuple[Way, ...]:
    """Several, with commas.

    Raises:
        UsageProblem: there is no such way, or one is named twice.
    """
    names = text.split(",")
    for name in names:
        if not _FORM.fullmatch(name):
            raise UsageProblem(f"{name!r} is not a way of training: write some of\n{FORMS}")
        if names.count(name) > 1:
            raise UsageProblem(f"{name} is named twice")
    return tuple(Way(name) for name in names)


def parse_rates(text: str) -> tuple[float, ...]:
    """Learning rates, with commas.

    Raises:
        UsageProblem: one is not a number above 0.
    """
    rates = tuple(_number(part) for part in text.split(","))
    if not all(0 < rate < 1e9 for rate in rates):
        raise UsageProblem(f"{text!r}: a learning rate must be a number above 0")
    return tuple(dict.fromkeys(rates))


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0


@dataclass(frozen=True)
class Bench:
    """What all runs have in common."""

    lab: Lab
    job: str
    data: str | None
    settings: Mapping[str, Any]
    target: float
    limit_s: float

    def run(self, way: Way, seed: int) -> Row:
        """One run: a row for the file."""
        asked = {**self.settings, **way.settings, "seed": seed, f"slow.{_SLOW}": FACTOR}
        hosts = [host.name for host in self.lab.hosts][not way.served :]
        if way.alone:
            hosts = hosts[:1]
            asked["batch"] = max(1, int(asked["batch"]) // WORKERS)
        with open_folder("nicps-servers-") as folder:
            end = folder / "job", self.target, self.limit_s
            job = job_with_end(JOBS / self.job, *end, more=_RATE.format(lr=way.lr))
            with joined(self.lab, hosts, folder) as agents:
                used = UserTime(lambda: server_pids(self.lab, agents[0]))
                try:
                    with used:
                        found, result = train(agents, job, asked, self.data, self.limit_s)
                except JobFailed as error:
                    if not _TOO_HIGH.search(str(error)):
                        raise
                    none: Row = {"steps_in_all": 0, "seconds_in_all": 0.0, "fast": 0.0}
                    return {
                        "seconds": None,
                        "steps": None,
                        "best": 0.0,
                        "failed": str(error),
                        **none,
                    }
        workers = found[way.served :]
        row = measure_rows([*workers, *found[: way.served]]).row(self.target)
        told = {key: value for key, value in result.items() if key in _TOLD}
        if way.served:
            trained = [row for rows in workers for row in rows if row["phase"] != "test"]
            times = [row["t_start"] for row in trained], [row["t_end"] for row in trained]
            told["server_user"] = used.share(min(times[0]), max(times[1]))
        return {**row, **throughput(workers), **told}


class UserTime:
    """User-space time of a host's programs while a job runs, looked at twice a second.

    Args:
        pids: of the programs that there are.
    """

    _EVERY_S = 0.5

    def __init__(self, pids: Callable[[], Sequence[int]]) -> None:
        self._pids, self._end = pids, threading.Event()
        self._seen: list[tuple[float, dict[int, float]]] = []
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._end.wait(self._EVERY_S):
            used = {pid: user_seconds([pid]) for pid in self._pids()}
            self._seen.append((time.monotonic(), used))

    def share(self, first: float, last: float) -> float | None:
        """Of a processor, between these moments (CLOCK_MONOTONIC); None if it was not looked at twice in between."""
        inside = [(at, used) for at, used in self._seen if first <= at <= last]
        if len(inside) < 2:
            return None
        (began, before), (ended, after) = inside[0], inside[-1]
        grown = sum(seconds - before.get(pid, 0.0) for pid, seconds in after.items())
        return round(grown / (ended - began), 5)


_TOLD = ("versions", "staleness_mean", "staleness_max", "forced_synchronisations")


def throughput(workers: Sequence[Sequence[Row]]) -> Row:
    """Samples a second while they trained, out of metrics.jsonl: `all`, those that count, and `fast`, those of a worker
    that is not slow, on average. The last worker is the slow one, unless it is alone.
    """
    own, counted = [], []
    for rows in workers:
        rounds = [row for row in rows if row["phase"] == "train"]
        trained = sum(row["t_end"] - row["t_start"] for row in rows if row["phase"] != "test")
        own.append(sum(row["own_samples"] for row in rounds) / trained)
        counted.append(sum(row["samples"] for row in rounds) / trained)
    pushed = any(row["phase"] == "push" for rows in workers for row in rows)
    total = sum(own) if pushed else max(counted)  # every push counts
    return {"all": round(total, 2), "fast": round(statistics.mean(own[:-1] or own), 2)}


def summary(
    rows: Rows, rate: str, ways: Sequence[Way], seeds: int, rates: Sequence[float]
) -> Iterator[Row]:
    """A line for each way. Seconds are of the seeds that reached the target.

    `of_alone` is a fast worker's throughput as a part of what it reaches alone; None where that has not been measured.
    """
    alone = _fast(rows, rate, Way("alone"), seeds, rates)
    for asked in ways:
        way = chosen(rows, rate, asked, rates)
        if way is None:
            continue
        found = [row for seed in range(1, seeds + 1) if (row := rows.find(rate, way.name, seed))]
        took = [row["seconds"] for row in found if row["seconds"] is not None]
        fast = _fast(rows, rate, asked, seeds, rates)
        users = [row["server_user"] for row in found if row.get("server_user") is not None]
        means = [row["staleness_mean"] for row in found if row.get("staleness_mean") is not None]
        yield {
            "way": asked.kind,
            "lr": way.lr,
            "seeds": len(found),
            "reached": len(took),
            "seconds_median": statistics.median(took) if took else None,
            "seconds_least": min(took, default=None),
            "seconds_most": max(took, default=None),
            "steps_median": statistics.median(r["steps"] for r in found if r["steps"])
            if took
            else None,
            "samples_per_second": statistics.median(row.get("all", 0.0) for row in found),
            "fast_samples_per_second": fast,
            "of_alone": round(fast / alone, 4) if fast and alone else None,
            "staleness_mean": round(statistics.mean(means), 3) if means else None,
            "best": max(row["best"] for row in found),
            "server_user": statistics.median(users) if users else None,
        }


def _fast(rows: Rows, rate: str, asked: Way, seeds: int, rates: Sequence[float]) -> float | None:
    way = chosen(rows, rate, asked, rates)
    if way is None:
        return None
    found = (rows.find(rate, way.name, seed) for seed in range(1, seeds + 1))
    return statistics.median(row["fast"] for row in found if row)


def table(lines: Sequence[Row]) -> str:
    """A table of the rows, for the terminal."""
    text = [
        f"{'way':<14}{'lr':>7}{'reached':>9}{'median':>10}{'least':>10}{'most':>10}{'steps':>7}{'samples/s':>11}"
        f"{'a fast one':>12}{'of alone':>10}{'staleness':>11}{'best test':>11}"
    ]
    for line in lines:
        seconds = "".join(
            f"{'never' if value is None else f'{value:.1f} s':>10}"
            for value in (line["seconds_median"], line["seconds_least"], line["seconds_most"])
        )
        steps, stale, part = (
            "" if line[key] is None else f"{line[key]:{form}}"
            for key, form in (
                ("steps_median", ".0f"),
                ("staleness_mean", ".2f"),
                ("of_alone", ".1%"),
            )
        )
        reached = f"{line['reached']} of {line['seeds']}"
        text.append(
            f"{line['way']:<14}{line['lr']:>7g}{reached:>9}{seconds}{steps:>7}{line['samples_per_second']:>11.1f}"
            f"{line['fast_samples_per_second']:>12.1f}{part:>10}{stale:>11}{line['best']:>11.4f}"
        )
    return "\n".join(text)


def run(args: argparse.Namespace) -> int:
    """Run what is missing, and print the table."""
    settings = {
        "epochs": None,
        "rounds": None,
        "checkpoint_s": 0.0,
        "batch": args.batch,
        "test_every": args.test_every,
        "microbatch_seconds": args.microbatch,
        **dict(args.set),
    }
    asked = {"job": args.job, "target": args.target, "limit_s": args.limit, "settings": settings}
    rows, rate = Rows(args.out, asked), format_rate(args.rate)
    ways = (*args.ways, *(() if Way("alone") in args.ways else (Way("alone"),)))
    if missing(rows, rate, ways, args.seeds, args.rates):
        with Lab(LabSettings(f"servers-{os.getpid()}", WORKERS + 1, args.rate)) as lab:
            data = args.data or os.environ.get("NICPS_DATA")
            bench = Bench(lab, args.job, data, settings, args.target, args.limit)

            def measured(way: Way, seed: int) -> Row:
                others = round(os.getloadavg()[0], 2)  # they make figures worse
                return {**bench.run(way, seed), "load_before": others}

            fill(rows, rate, ways, args.seeds, args.rates, measured)
    lines = list(summary(rows, rate, ways, args.seeds, args.rates))
    print(table(lines))
    if args.json:
        print(json.dumps(lines))
    return 0
