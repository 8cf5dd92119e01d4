# SPDX-License-Identifier: Apache-2.0
"""`benchmarks.time_to_accuracy` without a lab: its arguments, what it runs, resuming, the table; and a rank of DDP."""

from __future__ import annotations

import itertools
import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import time_to_accuracy
from benchmarks.rows import Row, Rows, fill, missing, summary, table
from benchmarks.time_to_accuracy import (
    Measured,
    check_settings,
    job_with_end,
    measure_ranks,
    measure_rows,
    parse_arguments,
)
from benchmarks.ways import DEFAULT, Way, parse_way, parse_ways
from nicps.errors import JobFailed, UsageProblem
from nicps.lab.agents import environment
from tests.trainer_lab import startup  # as the real programs import PyTorch
from trainer.flat import FlatModel
from trainer.job import load
from trainer.prepare import prepare
from trainer.records import Part, Place, Records
from trainer.settings import Settings, State
from trainer.training import Training

DIGITS = Path(time_to_accuracy.__file__).parents[1] / "trainer" / "jobs" / "digits"
ASKED = {"job": "digits", "target": 0.9}
WAYS = parse_ways("ddp,powersgd-1,stripes-i8")
STARTS = (10, 60)

assert startup


# ---- ways


@pytest.mark.parametrize(
    ("text", "way"),
    [
        ("ddp", Way("ddp")),
        ("fp16", Way("fp16")),
        ("powersgd-4", Way("powersgd", number=4)),
        ("powersgd-1:2", Way("powersgd", number=1, start=2)),
        ("lowrank-2", Way("lowrank", number=2)),
        ("lowrank-2:60", Way("lowrank", number=2, start=60)),
        ("local-32:0", Way("local", number=32, start=0)),
        ("changes-8:2", Way("changes", number=8, start=2)),
        ("stripes-i8", Way("stripes", lane="i8")),
    ],
)
def test_a_way_is_what_is_written(text: str, way: Way) -> None:
    assert parse_way(text) == way
    assert way.name == text


def test_the_default_is_all_that_issue_15_asks_for() -> None:
    ways = parse_ways(DEFAULT)
    assert [way.number for way in ways if way.kind == "powersgd"] == [1, 2, 4]
    assert [way.number for way in ways if way.kind == "local"] == [4, 8, 32]
    assert [way.lane for way in ways if way.ours] == ["i16", "i8"]


NOT_WAYS = ["gloo", "ddp-1", "ddp:10", "ddp,ddp", "ddp,", "stripes", "stripes-i7", "stripes-i8:10"]
NOT_WAYS += [
    "powersgd",
    "powersgd-0",
    "powersgd-i8",
    "powersgd-1:1",
    "powersgd-1:x",
    "local-1",
    "changes-1",
]
NOT_WAYS += ["lowrank", "lowrank-0", "lowrank-2:x"]


@pytest.mark.parametrize("text", NOT_WAYS)
def test_a_way_that_is_none(text: str) -> None:
    with pytest.raises(UsageProblem):
        parse_ways(text)


def test_start_iterations_are_tried_where_there_are_any() -> None:
    names = [way.name for way in parse_way("powersgd-1").variants((0, 2, 10))]
    assert names == ["powersgd-1:2", "powersgd-1:10"], "none below the least, and none twice"
    assert [way.name for way in parse_way("local-4").variants((0, 2))] == ["local-4:0", "local-4:2"]
    for text in ("powersgd-1:7", "ddp", "stripes-i8"):
        assert [way.name for way in parse_way(text).variants(STARTS)] == [text]


# ---- arguments


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("", "--target"),
        ("--target 1.5", "at most 1"),
        ("--target 0", "over 0"),
        ("--target nan", "over 0"),
        ("--target 0.9 --hosts 1", "from 2"),
        ("--target 0.9 --seeds 0", "from 1"),
        ("--target 0.9 --rate fast", "is not a rate"),
        ("--target 0.9 --ways ddp,gloo", "'gloo' is not a way"),
        ("--target 0.9 --limit 0", "more than 0"),
        ("--target 0.9 --set batch", "KEY=VALUE"),
        ("--target 0.9 --set lane=i8", "not the same for all ways"),
        ("--target 0.9 --set slow.h2=4", "not the same for all ways"),
    ],
)
def test_wrong_arguments(arguments: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse_arguments(arguments.split())
    assert ended.value.code == 2
    assert says in capsys.readouterr().err


def test_defaults() -> None:
    args = parse_arguments(["--target", "0.5"])
    assert (args.job, args.hosts, args.seeds, args.rate) == ("text", 2, 3, ("1gbit", "100mbit"))
    assert args.ways == parse_ways(DEFAULT) and args.starts == (10, 60, 200)


def test_a_job_that_ddp_would_train_otherwise() -> None:
    check_settings(Settings(batch=120), 3)
    with pytest.raises(UsageProblem, match="multiple of 7"):
        check_settings(Settings(batch=120), 7)
    with pytest.raises(UsageProblem, match="clip=2"):
        check_settings(Settings(batch=120, clip=2.0), 2)


def test_the_job_ends_at_the_target_or_at_the_limit(tmp_path: Path) -> None:
    job = load(job_with_end(DIGITS, tmp_path, target=0.9, limit_s=60.0), {})
    assert not job.done(State(round=1), 1000)
    assert not job.done(State(round=1, accuracy=0.89, best=0.89, seconds=59.0), 1000)
    assert job.done(State(round=1, accuracy=0.9, best=0.9), 1000)
    assert job.done(State(round=1, seconds=60.0), 1000)
    assert not (DIGITS / "job.py").read_text().count("def done"), "the job itself is as it was"
    with pytest.raises(UsageProblem, match=r"no job\.py in"):
        job_with_end(DIGITS.with_name("none"), tmp_path, 0.9, 60.0)


# ---- what a run has measured


def test_time_runs_until_the_last_host_knows() -> None:
    def host(began: float, later: float) -> list[Row]:
        spent = {"seconds_compute": 1.5, "seconds_wait": 0.5 + later, "seconds_network": 0.25}
        train = {"phase": "train", "t_start": began, **spent}
        tests = [(5, 12.0, 0.5), (10, 14.0, 0.95)]
        return [train, train] + [
            {"phase": "test", "trained_rounds": steps, "t_end": end + later, "accuracy": right}
            for steps, end, right in tests
        ]

    row = measure_rows([host(10.0, 0.0), host(10.5, 0.25)]).row(0.9)
    assert (row["seconds"], row["steps"], row["best"]) == (4.25, 10, 0.95)
    assert row["tests"] == [[5, 2.25, 0.5], [10, 4.25, 0.95]]
    ranks: list[Row] = [
        {"began": 10.5, "tests": [[5, 12.0, 0.5], [10, 14.25, 0.95]], "weights": "a"},
        {"began": 10.0, "tests": [[5, 12.25, 0.5], [10, 14.0, 0.95]], "weights": "a"},
    ]
    parts = {"seconds_compute": 3.0, "seconds_wait": 1.0, "seconds_network": 0.5}
    assert {**measure_ranks(ranks).row(0.9), **parts} == row


def test_hosts_that_have_tested_something_else() -> None:
    ranks: list[Row] = [
        {"began": 0.0, "tests": [[5, 1.0, 0.5]], "weights": "a"},
        {"began": 0.0, "tests": [[5, 1.0, 0.6]], "weights": "a"},
    ]
    with pytest.raises(JobFailed, match="not tested the same"):
        measure_ranks(ranks)
    ranks[1]["tests"] = []
    with pytest.raises(JobFailed, match="not tested the same"):
        measure_ranks(ranks)
    with pytest.raises(JobFailed, match="without a test"):
        measure_ranks([{"began": 0.0, "tests": [], "weights": "a"}])
    ranks[1] = {**ranks[0], "weights": "b"}
    with pytest.raises(JobFailed, match="weights differ"):
        measure_ranks(ranks)


def test_a_target_that_is_not_reached_leaves_the_best_figure() -> None:
    row = Measured([(5, 2.0, 0.7), (10, 4.0, 0.6)]).row(0.9)
    assert (row["seconds"], row["steps"], row["best"]) == (None, None, 0.7)
    assert (row["seconds_in_all"], row["steps_in_all"]) == (4.0, 10)


# ---- what is run, and what was


#: For which each way trains.
SECONDS = {"ddp": 8.0, "powersgd-1:10": None, "powersgd-1:60": 4.0, "stripes-i8": 6.0}


class Lab:
    """In the place of one."""

    def __init__(self) -> None:
        self.ran: list[tuple[str, int]] = []

    def run(self, way: Way, seed: int) -> Row:
        self.ran.append((way.name, seed))
        seconds = SECONDS[way.name]
        if seconds is None:
            return Measured([(10, 9.0, 0.8)]).row(0.9)
        return Measured([(10, seconds * seed, 0.9 + seed / 100)]).row(0.9)


def test_the_best_start_with_the_first_seed_is_kept(capsys: pytest.CaptureFixture[str]) -> None:
    lab, rows = Lab(), Rows(None, ASKED)
    assert missing(rows, "1gbit", WAYS, 2, STARTS)
    fill(rows, "1gbit", WAYS, 2, STARTS, lab.run)
    first = ["ddp", "powersgd-1:10", "powersgd-1:60", "stripes-i8"]
    then = ["ddp", "powersgd-1:60", "stripes-i8"]
    assert lab.ran == [(way, 1) for way in first] + [(way, 2) for way in then]
    assert not missing(rows, "1gbit", WAYS, 2, STARTS)
    said = capsys.readouterr().err
    assert "not reached: at best 0.8000 after 10 steps, 9.0 s" in said and "4.0 s, 10 steps" in said


def test_what_is_in_the_file_is_not_run_again(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    fill(Rows(file, ASKED), "1gbit", WAYS, 1, STARTS, Lab().run)
    again, lab = Rows(file, ASKED), Lab()
    assert not missing(again, "1gbit", WAYS, 1, STARTS)
    assert missing(again, "100mbit", WAYS, 1, STARTS) and missing(again, "1gbit", WAYS, 2, STARTS)
    fill(again, "1gbit", WAYS, 2, STARTS, lab.run)
    assert lab.ran == [("ddp", 2), ("powersgd-1:60", 2), ("stripes-i8", 2)]
    assert len(file.read_text().splitlines()) == 7
    other = Rows(file, {**ASKED, "target": 0.95})
    assert other.rows == [] and missing(other, "1gbit", WAYS, 1, STARTS), "another question"


def test_a_file_that_is_cut_off(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    fill(Rows(file, ASKED), "1gbit", WAYS, 1, STARTS, Lab().run)
    file.write_text(file.read_text()[:-20])
    with pytest.raises(UsageProblem, match=r"rows\.jsonl, line 4: not a JSON object"):
        Rows(file, ASKED)


def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none" / "rows.jsonl"):
        with pytest.raises(UsageProblem, match="--out takes a file"):
            Rows(path, ASKED)


def test_the_table() -> None:
    rows = Rows(None, ASKED)
    fill(rows, "1gbit", WAYS, 3, STARTS, Lab().run)
    lines = {line["way"]: line for line in summary(rows, ("1gbit",), WAYS, 3, STARTS)}
    assert list(lines) == ["ddp", "powersgd-1:60", "stripes-i8"]
    ours = lines["stripes-i8"]
    assert (ours["seconds_median"], ours["seconds_least"], ours["seconds_most"]) == (12, 6, 18)
    assert (ours["of_ddp"], ours["reached"], ours["seeds"]) == (0.75, 3, 3)
    assert lines["powersgd-1:60"]["of_ddp"] == 0.5
    text = table(list(lines.values())).splitlines()
    assert text[3].split()[:3] == ["1gbit", "stripes-i8", "3"] and " 0.75 " in text[3]


def test_the_table_of_a_way_that_never_gets_there() -> None:
    rows, ways = Rows(None, ASKED), parse_ways("ddp,powersgd-1:10")
    fill(rows, "1gbit", ways, 2, STARTS, Lab().run)
    line = list(summary(rows, ("1gbit", "100mbit"), ways, 2, STARTS))[1]
    assert (line["reached"], line["seconds_median"], line["of_ddp"], line["best"]) == (
        0,
        None,
        None,
        0.8,
    )
    assert "0 of 2     never" in table([line])


# ---- a rank


def train_two(folder: Path, way: str) -> Row:
    """Two ranks on the loopback interface; what came of it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        master = f"127.0.0.1:{probe.getsockname()[1]}"
    outs = [folder / f"{way}-{rank}.json" for rank in range(2)]
    command = [sys.executable, "-P", "-m", "benchmarks.ddp_rank", "--hosts", "2", "--way", way]
    command += ["--master", master, "--job", str(folder / "digits"), "--prepared", str(folder)]
    env = {**environment(), "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        subprocess.Popen(
            [*command, "--rank", str(rank), "--out", str(out)], env=env, stderr=subprocess.PIPE
        )
        for rank, out in enumerate(outs)
    ]
    try:
        for process in ranks:
            said = process.communicate(timeout=120.0)[1]
            assert process.returncode == 0, said.decode()
    finally:
        for process in ranks:
            process.kill()
    return measure_ranks([json.loads(out.read_text()) for out in outs]).row(2.0)


def accuracies(folder: Path, prepared: dict[str, Any], hosts: int, settings: Row) -> list[float]:
    """At each test of a training in float32 by this process, with the samples that so many members would take."""
    job = load(folder / "digits", settings)
    model = FlatModel(job.model())
    training = Training(job, model, prepared["train"]["records"])
    records, tests = (
        Records(folder / f"{what}.bin", prepared[what]["fields"]) for what in ("train", "test")
    )
    share = job.settings.batch // hosts
    parts = [
        Part(records, Place(rank + 1, hosts, share), None, job.settings.seed)
        for rank in range(hosts)
    ]
    found = []
    for round_ in range(job.settings.rounds or 0):
        training.begin(1)
        for part in parts:
            training.compute(part.take(part.indices(round_ * share, share)), share)
        training.step(model.finish(share * hosts), share * hosts)
        if (round_ + 1) % (job.settings.test_every or 1) == 0:
            everything = Part(tests, Place(1, 1, 1), None, 0)
            counts = np.sum(list(training.test(everything.batches(1000))), axis=0)
            found.append(counts[0] / counts.sum())
    return found


@pytest.mark.long
def test_ddp_trains_what_the_trainer_trains(tmp_path: Path) -> None:
    """The same samples in the same order from the same weights: so the same accuracies, but for float32's rounding."""
    job_with_end(DIGITS, tmp_path, target=0.999, limit_s=600.0)
    settings = {"rounds": 12, "test_every": 3}
    prepared = prepare(tmp_path / "digits", tmp_path, None, settings)
    expected = accuracies(tmp_path, prepared, 2, settings)
    found = train_two(tmp_path, "ddp")
    assert [steps for steps, _, _ in found["tests"]] == [3, 6, 9, 12]
    one = 1 / prepared["test"]["records"]
    for right, (_, _, accuracy) in itertools.zip_longest(expected, found["tests"]):
        assert accuracy == pytest.approx(right, abs=1.01 * one)
    assert len(set(expected)) == 4, "it learns"


@pytest.mark.long
def test_local_sgd_tests_the_average(tmp_path: Path) -> None:
    """Ranks that train apart from the third step on, averaged after steps 3 and 7, test one model after the ninth."""
    job_with_end(DIGITS, tmp_path, target=0.999, limit_s=600.0)
    prepare(tmp_path / "digits", tmp_path, None, {"rounds": 9, "test_every": 3})
    found = train_two(tmp_path, "local-4:2")
    assert [steps for steps, _, _ in found["tests"]] == [3, 6, 9]
