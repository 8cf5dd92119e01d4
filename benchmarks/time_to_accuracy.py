# SPDX-License-Identifier: Apache-2.0
"""Seconds until a test reaches a target accuracy: nicps beside DistributedDataParallel on Gloo, in the same lab.

`python -m benchmarks.time_to_accuracy --job text --target 0.56 --out FILE`. A job of the trainer's is trained in each
of the ways: the same model, first weights, data, order, shards, loss, optimizer, schedule and tests. Time counts from
the first step of the first host to the moment at which the last host knows of a test that reached the target.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.command import finish
from benchmarks.rows import Row, Rows, fill, missing, summary, table
from benchmarks.ways import DEFAULT, FORMS, Way, parse_ways
from nicps.bench.arguments import as_type, duration, host_count, several, whole
from nicps.errors import JobFailed, UsageProblem
from nicps.lab import Lab, LabSettings
from nicps.lab.agents import AgentProcess, environment, joined, open_folder
from nicps.lab.links import HOST_INTERFACE
from nicps.rates import format_rate, parse_rate
from nicps.session.commands import await_result
from trainer.job import load
from trainer.prepare import prepare
from trainer.settings import Settings

JOBS = Path(__file__).parents[1] / "trainer" / "jobs"
SLACK_S = 300.0  # for what is before the first step, and for the test that ends a run
_POLL_S = 0.1
_PORT = 29500
#: All samples are counted, as in DDP; no checkpoints, as the rivals write none.
_COMMON = {"quorum": 1.0, "checkpoint_s": 0.0, "micro_batches": 1}
_PARTS = ("compute", "wait", "network")  # as in metrics.jsonl
_TRAINED = ("train", "push")  # likewise
#: What nicps does to a job's training, and the rivals' program does not.
_OURS_ALONE = ("clip", "slow", "microbatch_seconds", "lane", "exchange", "seed")
_END = """

def done(state):  # of benchmarks/time_to_accuracy.py
    return state.seconds >= {limit_s!r} or (state.best is not None and state.best >= {target!r})
"""


def job_with_end(source: Path, folder: Path, target: float, limit_s: float, more: str = "") -> Path:
    """A copy of a job's folder whose `done` says that the target is reached, or the time is over.

    Args:
        more: what else is behind its job.py.

    Raises:
        UsageProblem: there is no such job.
    """
    if not (source / "job.py").is_file():
        raise UsageProblem(f"no job.py in {source}: --job takes the name of a folder in {JOBS}")
    copy = folder / source.name
    copy.mkdir(parents=True)
    for path in source.iterdir():
        if path.is_file():
            (copy / path.name).write_bytes(path.read_bytes())
    with (copy / "job.py").open("a") as file:
        file.write(more + _END.format(target=target, limit_s=limit_s))
    return copy


@dataclass(frozen=True)
class Measured:
    """One run. `tests`: of each the steps before it, the seconds after which all hosts knew its result, accuracy.

    `parts`: of nicps the seconds of the first host's training rounds by what they went to; empty for the rivals.
    """

    tests: list[tuple[int, float, float]]
    parts: Mapping[str, float] = field(default_factory=dict)

    def row(self, target: float) -> Row:
        """For the file: with `seconds` and `steps` to the target, which are None where it was not reached."""
        first = next((test for test in self.tests if test[2] >= target), None)
        steps, seconds = (first[0], round(first[1], 3)) if first else (None, None)
        last = self.tests[-1]
        return {
            "seconds": seconds,
            "steps": steps,
            "best": max(accuracy for _, _, accuracy in self.tests),
            "seconds_in_all": round(last[1], 3),
            "steps_in_all": last[0],
            "tests": [[steps, round(seconds, 3), right] for steps, seconds, right in self.tests],
            **{f"seconds_{name}": round(seconds, 3) for name, seconds in self.parts.items()},
        }


def measure_rows(hosts: list[list[Row]]) -> Measured:
    """Out of all hosts' metrics.jsonl, whose clocks are one: the hosts of a lab share a kernel.

    Raises:
        JobFailed: a host has tested other than the first.
    """
    trained, tested = (
        [[row for row in rows if row["phase"] in phases] for rows in hosts]
        for phases in (_TRAINED, ("test",))
    )
    began = min(row["t_start"] for rows in trained for row in rows)
    tests = _together(
        began, [[(r["trained_rounds"], r["t_end"], r["accuracy"]) for r in rows] for rows in tested]
    )
    parts = {part: sum(row[f"seconds_{part}"] for row in trained[0]) for part in _PARTS}
    return Measured(tests, parts)


def measure_ranks(ranks: list[Row]) -> Measured:
    """Out of what all ranks of `benchmarks.ddp_rank` have written.

    Raises:
        JobFailed: they have tested something else, or another model, than the first.
    """
    if len({rank["weights"] for rank in ranks}) != 1:
        raise JobFailed("the ranks' weights differ after the last test")
    began = min(rank["began"] for rank in ranks)
    return Measured(_together(began, [rank["tests"] for rank in ranks]))


def _together(
    began: float, tested: list[list[tuple[int, float, float]]]
) -> list[tuple[int, float, float]]:
    """Of each test when the last host knew its result."""
    found = []
    for same in itertools.zip_longest(*tested):
        if None in same or len({(steps, accuracy) for steps, _, accuracy in same}) != 1:
            raise JobFailed(f"the hosts have not tested the same: {same}")
        steps, _, accuracy = same[0]
        found.append((steps, max(end for _, end, _ in same) - began, accuracy))
    if not found:
        raise JobFailed("the job has ended without a test")
    return found


def train(
    agents: Sequence[AgentProcess],
    job: Path,
    settings: Mapping[str, Any],
    data: str | None,
    limit_s: float,
) -> tuple[list[list[Row]], Row]:
    """A job, submitted at the first agent: all hosts' metrics.jsonl, and the result.

    Raises:
        JobFailed: it has failed, or takes longer than the limit and `SLACK_S`.
    """
    with closing(agents[0].submit(job, settings, data=data)) as channel:
        most_s = limit_s + SLACK_S
        try:
            result, _ = await_result(channel, most_s)
        except TimeoutError:
            raise JobFailed(f"nothing came from the job in {most_s:g} s") from None
    if not result["weights_identical"]:
        raise JobFailed(f"the hosts' weights differ: {result}")
    (run,) = agents[0].folders.runs.iterdir()
    files = [run / agent.host / "metrics.jsonl" for agent in agents]
    rows = [[json.loads(line) for line in file.read_text().splitlines()] for file in files]
    return rows, result


@dataclass(frozen=True)
class Bench:
    """What all runs at one rate have in common."""

    lab: Lab
    job: Path
    data: str | None
    settings: Mapping[str, Any]
    limit_s: float

    def run(self, way: Way, seed: int) -> Measured:
        """One run."""
        settings = {**_COMMON, **self.settings, "seed": seed}
        with open_folder("nicps-tta-") as folder:
            if way.ours:
                return self._ours(way, settings, folder)
            if not way.needs_agents:
                return self._rival(way, settings, folder)
            with joined(self.lab, self.lab.hosts, folder):
                return self._rival(way, settings, folder)

    def _ours(self, way: Way, settings: Mapping[str, Any], folder: Path) -> Measured:
        """By nicps. Its agents are there for this run only: they take some of a processor also while they wait."""
        asked = {**settings, "exchange": way.kind, "lane": way.lane}
        with joined(self.lab, self.lab.hosts, folder) as agents:
            rows, _ = train(agents, self.job, asked, self.data, self.limit_s)
            return measure_rows(rows)

    def _rival(self, way: Way, settings: Mapping[str, Any], folder: Path) -> Measured:
        """By DDP, one rank a host."""
        prepared = folder / "prepared"
        prepare(self.job, prepared, self.data, settings)
        hosts = self.lab.hosts
        command = [sys.executable, "-P", "-m", "benchmarks.ddp_rank", "--hosts", str(len(hosts))]
        command += ["--master", f"{hosts[0].ip}:{_PORT}", "--way", way.name]
        command += ["--job", str(self.job), "--prepared", str(prepared)]
        surroundings = {**environment(), "GLOO_SOCKET_IFNAME": HOST_INTERFACE}
        ranks: list[subprocess.Popen[Any]] = []
        outs = [folder / f"rank-{rank}.json" for rank in range(len(hosts))]
        try:
            for rank, host in enumerate(hosts):
                more = ["--rank", str(rank), "--out", str(outs[rank])]
                with outs[rank].with_suffix(".log").open("wb") as log:
                    streams: Row = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
                    ranks.append(self.lab.run(host, command + more, env=surroundings, **streams))
            _await_ranks(ranks, outs, self.limit_s + SLACK_S)
        finally:
            for process in ranks:
                process.kill()
            for process in ranks:
                process.wait()
        return measure_ranks([json.loads(out.read_text()) for out in outs])


def _await_ranks(ranks: list[subprocess.Popen[Any]], outs: list[Path], most_s: float) -> None:
    """Wait until all have ended.

    Raises:
        JobFailed: one has failed, or some are not done in time.
    """
    deadline = time.monotonic() + most_s
    while None in (codes := [process.poll() for process in ranks]) or any(codes):
        for number, code in enumerate(codes):
            if code:
                words = outs[number].with_suffix(".log").read_text(errors="replace").split("\n")
                last = next((line.strip() for line in reversed(words) if line.strip()), "nothing")
                raise JobFailed(f"rank {number} ended with exit code {code}; it said last: {last}")
        if time.monotonic() > deadline:
            raise JobFailed(f"the ranks are not done after {most_s:g} s")
        time.sleep(_POLL_S)


def share(text: str) -> float:
    if not re.fullmatch(r"0?\.\d+|1(\.0*)?", text) or not float(text):
        raise argparse.ArgumentTypeError(f"takes an accuracy, over 0 and at most 1, not {text!r}")
    return float(text)


def _rates(text: str) -> tuple[str, ...]:
    return tuple(format_rate(parse_rate(part)) for part in text.split(","))


def setting(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not (key and equals):
        raise argparse.ArgumentTypeError(f"takes KEY=VALUE, not {text!r}")
    if key.partition(".")[0] in _OURS_ALONE:
        raise argparse.ArgumentTypeError(f"{key} cannot be set: it is not the same for all ways")
    return key, value


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line's."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog=f"ways:\n{FORMS}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--job", default="text", help="a folder in trainer/jobs (%(default)s)")
    parser.add_argument("--data", help="what the job's data() is given; default: NICPS_DATA")
    parser.add_argument("--hosts", type=host_count(2), default=2)
    parser.add_argument("--rate", type=as_type(_rates), default="1gbit,100mbit", metavar="RATES")
    parser.add_argument("--ways", type=as_type(parse_ways), default=DEFAULT, help=f"({DEFAULT})")
    parser.add_argument("--seeds", type=whole(1), default=3)
    parser.add_argument(
        "--starts",
        type=several(whole(0)),
        default="10,60,200",
        help="start iterations that are tried with seed 1; the best one is kept (%(default)s)",
    )
    parser.add_argument("--target", type=share, required=True, help="accuracy on the test set")
    parser.add_argument("--limit", type=duration, default=900.0, help="seconds (%(default)g)")
    parser.add_argument("--set", type=setting, action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--out", type=Path, help="JSON lines: what is there is not run again")
    parser.add_argument("--json", action="store_true", help="a JSON list as the last line")
    return parser.parse_args(arguments)


def check_settings(settings: Settings, hosts: int) -> None:
    """Refuse a job that DDP would train otherwise than nicps does.

    Raises:
        UsageProblem: the hosts' shares differ, so that the mean over ranks is not that over samples; or they clip.
    """
    if settings.batch % hosts:
        raise UsageProblem(
            f"a batch of {settings.batch} cannot be shared equally by {hosts} hosts: "
            f"--set batch=N, a multiple of {hosts}"
        )
    if settings.clip is not None:
        raise UsageProblem(
            f"the job sets clip={settings.clip:g}, which nicps does on each host and DDP does not: take another job"
        )


def compare(args: argparse.Namespace) -> int:
    """Run what is missing, and print the table."""
    settings = dict(args.set)
    data = args.data or os.environ.get("NICPS_DATA")
    asked = {
        "job": args.job,
        "hosts": args.hosts,
        "target": args.target,
        "limit_s": args.limit,
        "settings": settings,
    }
    rows = Rows(args.out, asked)
    with open_folder("nicps-tta-job-") as folder:
        job = job_with_end(JOBS / args.job, folder, args.target, args.limit)
        check_settings(load(job, settings).settings, args.hosts)
        for rate in args.rate:
            if not missing(rows, rate, args.ways, args.seeds, args.starts):
                continue
            shape = LabSettings(f"tta-{os.getpid()}", args.hosts, parse_rate(rate))
            with Lab(shape) as lab:
                bench = Bench(lab, job, data, settings, args.limit)

                def run(way: Way, seed: int, bench: Bench = bench) -> Row:
                    others = round(os.getloadavg()[0], 2)  # they make figures worse
                    return {**bench.run(way, seed).row(args.target), "load_before": others}

                fill(rows, rate, args.ways, args.seeds, args.starts, run)
    lines = list(summary(rows, args.rate, args.ways, args.seeds, args.starts))
    print(table(lines))
    if args.json:
        print(json.dumps(lines))
    return 0


def main() -> int:
    """The command."""
    args = parse_arguments()
    return finish("time_to_accuracy", compare, args)


if __name__ == "__main__":
    raise SystemExit(main())
