# SPDX-License-Identifier: Apache-2.0
"""`benchmarks.servers` without a lab: its arguments, the settings of each way, throughput, the table."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks import served_training, servers
from benchmarks.rows import Row, Rows, fill, missing
from benchmarks.served_training import Way, parse_rates, parse_ways, summary, table, throughput
from benchmarks.time_to_accuracy import JOBS, job_with_end
from nicps.errors import UsageProblem
from tests.trainer_lab import startup  # as the real programs import PyTorch
from trainer.job import load

assert startup

RATES = (0.1, 1.0)


@pytest.mark.parametrize(
    ("text", "settings"),
    [
        ("s-16", {"system": "S", "sync_every": 16, "servers": "h1", "staleness": True}),
        ("s-0", {"system": "S", "sync_every": 0, "servers": "h1", "staleness": True}),
        ("asynchronous", {"system": "S", "sync_every": 0, "servers": "h1", "staleness": False}),
        ("synchronous", {"system": "S", "sync_every": 1, "servers": "h1", "staleness": True}),
        ("ring", {}),
        ("ring-0.75", {"quorum": 0.75}),
        ("alone", {}),
    ],
)
def test_what_a_way_asks_of_a_job(text: str, settings: Row) -> None:
    (way,) = parse_ways(text)
    assert way.settings == settings and way.name == text
    for job in ("digits", "mnist"):
        load(JOBS / job, {**settings, "test_every": 64})


def test_rates_are_tried_with_every_way_but_alone() -> None:
    assert [way.name for way in Way("s-4").variants(RATES)] == ["s-4:0.1", "s-4:1"]
    assert [way.name for way in Way("alone").variants(RATES)] == ["alone:0.1"]
    assert parse_rates("0.1,1,0.1") == RATES


@pytest.mark.parametrize(
    "text", ["s", "s-x", "s--1", "gloo", "ring-2", "ring-x", "s-4,s-4", "s-4,"]
)
def test_a_way_that_is_none(text: str) -> None:
    with pytest.raises(UsageProblem):
        parse_ways(text)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("", "required"),
        ("pulls --rate fast", "is not a rate"),
        ("pulls --workers 0", "from 1"),
        ("training", "--target"),
        ("training --target 0.9 --ways none", "'none' is not a way"),
        ("training --target 0.9 --rates 0", "above 0"),
        ("training --target 0.9 --batch 3", "from 4"),
        ("training --target 0.9 --set slow.h2=4", "not the same for all ways"),
    ],
)
def test_wrong_arguments(arguments: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        servers.main(arguments.split())
    assert ended.value.code == 2
    assert says in capsys.readouterr().err


def test_the_rate_is_that_of_plain_sgd_without_a_schedule(tmp_path: Path) -> None:
    more = served_training._RATE.format(lr=0.25)
    job = load(job_with_end(JOBS / "mnist", tmp_path, 0.9, 60.0, more), {})
    optimizer = job.optimizer(job.model().parameters())
    assert isinstance(optimizer, torch.optim.SGD)
    assert [(group["lr"], group["momentum"]) for group in optimizer.param_groups] == [(0.25, 0)]
    assert job.scheduler(optimizer, 100) is None


def rows_of(samples: float, pushes: bool) -> list[Row]:
    """Of a worker that has trained for 4 s in two rounds, and has tested for 2 s."""
    times = [{"t_start": at, "t_end": at + 1.0} for at in (0.0, 1.0, 4.0, 5.0)]
    first = {"phase": "push" if pushes else "train", "own_samples": samples, "samples": 100}
    round_ = {"phase": "train", "own_samples": 2 * samples if pushes else samples, "samples": 100}
    rows = [{**kind, **at} for kind, at in zip((first, round_, first, round_), times, strict=True)]
    return [*rows, {"phase": "test", "t_start": 2.0, "t_end": 4.0, "own_samples": None}]


def test_throughput_of_pushes() -> None:
    """A round's row has the samples of its pushes. All of them count, in a round without a synchronisation as well."""
    workers = [rows_of(40.0, pushes=True), rows_of(20.0, pushes=True), rows_of(8.0, pushes=True)]
    for row in workers[0]:
        row["samples"] = 0
    assert throughput(workers) == {"all": 68.0, "fast": 30.0}


def test_throughput_of_the_ring() -> None:
    """What is counted, not what was computed."""
    workers = [
        rows_of(40.0, pushes=False),
        rows_of(60.0, pushes=False),
        rows_of(20.0, pushes=False),
    ]
    assert throughput(workers) == {"all": 100.0, "fast": 50.0}
    assert throughput(workers[:1]) == {"all": 100.0, "fast": 40.0}


def test_the_best_rate_is_kept_and_the_table_shows_what_is_there() -> None:
    """With the second rate training diverges: that is a row as well."""
    ways, ran = (Way("s-16"), Way("alone")), list[tuple[str, int]]()

    def run(way: Way, seed: int) -> Row:
        ran.append((way.name, seed))
        row: Row = {"seconds": 2.0 * seed, "steps": 10, "best": 0.9, "all": 99.0, "fast": 50.0}
        if way.lr == 1.0:
            return {
                **row,
                "seconds": None,
                "steps": None,
                "best": 0.0,
                "steps_in_all": 0,
                "seconds_in_all": 0.0,
            }
        return row | ({"fast": 100.0} if way.alone else {"staleness_mean": 2.5})

    rows = Rows(None, {})
    fill(rows, "1gbit", ways, 3, RATES, run)
    tried = [("s-16:0.1", 1), ("s-16:1", 1), ("alone:0.1", 1)]
    assert ran == [*tried, *((name, seed) for seed in (2, 3) for name in ("s-16:0.1", "alone:0.1"))]
    assert not missing(rows, "1gbit", ways, 3, RATES)
    served, alone = summary(rows, "1gbit", ways, 3, RATES)
    assert (served["way"], served["lr"], served["reached"], served["seconds_median"]) == (
        "s-16",
        0.1,
        3,
        4.0,
    )
    assert (served["of_alone"], served["staleness_mean"]) == (0.5, 2.5)
    assert (alone["of_alone"], alone["staleness_mean"]) == (1.0, None)
    assert "50.0%" in table([served, alone])
    assert next(summary(rows, "1gbit", ways[:1], 1, RATES))["of_alone"] == 0.5
