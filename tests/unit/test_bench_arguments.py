# SPDX-License-Identifier: Apache-2.0
"""What `nicps bench` refuses before it makes anything: one line each, and exit code 2."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from nicps.bench import arguments, planned_job
from nicps.cli import build_parser, main
from nicps.errors import UsageProblem

HOSTS = "argument --hosts: takes a whole number from"
#: By benchmark and option: the least that it takes.
WHOLE = {
    ("allreduce", "--hosts"): 2,
    ("allreduce", "--params"): 1,
    ("allreduce", "--rounds"): 1,
    ("flood", "--hosts"): 2,
    ("flood", "--frames"): 1,
    ("flood", "--cycles"): 1,
    ("flood", "--reference"): 2,
    ("handout", "--hosts"): 2,
    ("handout", "--bytes"): 1,
    ("idle", "--hosts"): 2,
    ("idle", "--wakes"): 1,
    ("kernel", "--params"): 1,
    ("kernel", "--passes"): 1,
    ("memory", "--hosts"): 2,
    ("memory", "--params"): 1,
    ("memory", "--channels"): 1,
    ("return", "--hosts"): 2,
    ("return", "--repeat"): 1,
    ("return", "--rounds"): 1,
    ("silence", "--hosts"): 3,
    ("silence", "--repeat"): 1,
    ("switch", "--hosts"): 2,
    ("switch", "--windows"): 1,
    ("switch", "--repeat"): 1,
}
#: Of these, several with commas.
LISTS = [
    ("allreduce", "--hosts"),
    ("allreduce", "--params"),
    ("memory", "--hosts"),
    ("memory", "--channels"),
]
SECONDS = [
    ("flood", "--seconds"),
    ("idle", "--seconds"),
    ("idle", "--silence"),
    ("silence", "--wait"),
    ("silence", "--timeout"),
]


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The error's text."""
    try:
        code = main(["bench", *words])
    except SystemExit as end:
        code = int(str(end.code))
    out, err = capsys.readouterr()
    assert code == 2 and not out
    assert err.startswith("nicps: error: ") and err.count("\n") == 1, err
    return err.removeprefix("nicps: error: ")


@pytest.mark.parametrize(("option", "least"), WHOLE.items(), ids=lambda value: str(value))
def test_whole_numbers(
    option: tuple[str, str], least: int, capsys: pytest.CaptureFixture[str]
) -> None:
    benchmark, name = option
    for text in (str(least - 1), "-1", "1.5", "nan", "inf", "1e400", "many", ""):
        said = refused(capsys, benchmark, f"{name}={text}")
        assert said.startswith(f"argument {name}: takes a whole number from {least} "), said
        assert f", not {text!r}" in said
    key = name.removeprefix("--")
    args = build_parser("bench").parse_args(["bench", benchmark, name, str(least)])
    assert getattr(args, key) == ((least,) if option in LISTS else least)


@pytest.mark.parametrize(("benchmark", "name"), SECONDS)
def test_seconds(benchmark: str, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    for text in ("0", "-1", "nan", "inf", "soon"):
        said = refused(capsys, benchmark, f"{name}={text}")
        assert said.startswith(f"argument {name}: takes seconds, more than 0, not {text!r}")


def test_every_number_of_every_benchmark_is_checked() -> None:
    """None is taken as `int` or `float` takes it: 0, -1 and nan would be found out late, or not at all."""
    benchmarks = build_parser("bench")._subparsers._group_actions[0].choices["bench"]  # type: ignore
    found = {
        (name, action.option_strings[0])
        for name, parser in benchmarks._subparsers._group_actions[0].choices.items()
        for action in parser._actions
        if action.type not in (None, Path)
    }
    names = {
        (name, option) for name in ("allreduce", "memory") for option in ("--lane", "--exchange")
    }
    assert found == WHOLE.keys() | set(SECONDS) | names | {("silence", "--scenes")}


def test_lists(capsys: pytest.CaptureFixture[str]) -> None:
    for benchmark, name in LISTS:
        assert ", not 'x'" in refused(capsys, benchmark, f"{name}=2,x")
        args = build_parser("bench").parse_args(["bench", benchmark, f"{name}=2,3"])
        assert getattr(args, name.removeprefix("--")) == (2, 3)
    assert "'fast' is not a rate" in refused(capsys, "allreduce", "--rate=1gbit,fast")


def test_names(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (("allreduce", "--lane=i64"), ("allreduce", "--lane="), ("allreduce", "--lane=,")):
        assert "argument --lane: takes some of i32,i16,i8, not " in refused(capsys, *words)
    said = refused(capsys, "silence", "--scenes", "killed,bored")
    assert "takes some of killed,stopped,unplugged, not 'killed,bored'" in said
    parse = build_parser("bench").parse_args
    assert parse(["bench", "allreduce", "--lane", "i8,i32,"]).lane == ("i8", "i32")


@pytest.mark.parametrize(
    "words",
    [
        ["allreduce", "--hosts", "65"],
        ["flood", "--hosts", "64"],
        ["silence", "--hosts", "2"],
        ["switch", "--hosts", "17"],
    ],
)
def test_more_hosts_than_there_can_be(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert refused(capsys, *words).startswith(HOSTS)


@pytest.mark.parametrize(
    "words",
    [
        ["allreduce", "--params", "1000000000000000"],
        ["allreduce", "--params", "1e15"],
        ["kernel", "--params", "1e15"],
        ["switch", "--windows", "1e12"],
        ["handout", "--bytes", "1e18"],
    ],
)
def test_what_does_not_fit_this_machine(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert " GB are free: give less" in refused(capsys, *words)


@pytest.mark.parametrize(
    "words",
    [
        ["allreduce", "--rate", "0"],
        ["allreduce", "--rate", "fast"],
        ["allreduce", "--rate", "1tbit"],
        ["allreduce", "--rate", "1gbit,1tbit"],
        ["allreduce", "--exchange", "stripes,tree"],
        ["handout", "--bytes", "1", "--rate", "-1"],
        ["handout", "--bytes", "1", "--loss", "2"],
        ["sums", "/nonexistent"],
    ],
)
def test_other_values(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    refused(capsys, *words)


def test_what_is_free_is_what_the_kernel_says() -> None:
    arguments.need_memory(1, "a byte")
    arguments.need_disk(1, "a byte")
    all_ = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with pytest.raises(UsageProblem, match=r"^all needs .* GB of memory, and .* GB are free"):
        arguments.need_memory(all_, "all")


def test_channels_are_those_of_stripes(capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(capsys, "memory", "--channels=1,4", "--exchange=broadcast,stripes")
    assert said.startswith("--channels is for --exchange stripes, not broadcast,stripes: ")


@pytest.mark.parametrize(
    ("params", "ends"),
    [
        (1, [1]),
        (1441, [1440, 1441]),
        (5 * 1440 - 3, [1440, 3 * 1440, 5 * 1440 - 3]),
        (10**6, [332_640, 666_720, 10**6]),
    ],
)
def test_a_step_has_a_round_on_each_channel(params: int, ends: list[int]) -> None:
    """Of whole fragments, but for the last one; the front on the most urgent channel."""
    assert planned_job.ends_of(params, 3, 1440) == ends
    vector = np.arange(params, dtype=np.float32)
    parts = planned_job.cut(vector, vector.copy(), ends)
    assert [len(channel) for channel in parts] == [1] * len(ends)
    whole = [number for channel in reversed(parts) for number in channel[0].vector]
    assert whole == vector.tolist()
