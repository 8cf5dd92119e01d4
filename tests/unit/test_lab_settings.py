# SPDX-License-Identifier: Apache-2.0
"""The lab without a lab: units, names, state files, and which processes are whose."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from nicps.cli import build_parser, main
from nicps.errors import UsageProblem
from nicps.lab import LabSettings, format_rate, namespaces, parse_loss, parse_rate, processes, state
from nicps.lab.state import LabState, ProcessRecord


@pytest.mark.parametrize(
    ("text", "rate_bps"),
    [
        ("1gbit", 10**9),
        ("1Gbit", 10**9),
        ("100mbit", 10**8),
        ("2.5g", 2_500_000_000),
        ("512kbit", 512_000),
        ("1000000", 10**6),
        ("10 mbit", 10**7),
    ],
)
def test_rates(text: str, rate_bps: int) -> None:
    assert parse_rate(text) == rate_bps


@pytest.mark.parametrize("text", ["", "fast", "1gb", "1MB", "-1gbit", "1e9", "1,5gbit", "nan"])
def test_what_is_no_rate(text: str) -> None:
    with pytest.raises(UsageProblem, match="is not a rate"):
        parse_rate(text)


@pytest.mark.parametrize("rate_bps", [8_000, 10**6, 10**9, 2_500_000_000])
def test_rates_are_written_as_they_are_read(rate_bps: int) -> None:
    assert parse_rate(format_rate(rate_bps)) == rate_bps


@pytest.mark.parametrize(
    ("text", "loss"), [("2%", 0.02), ("0.02", 0.02), (".5", 0.5), ("0", 0), ("100%", 1), ("1", 1)]
)
def test_losses(text: str, loss: float) -> None:
    assert parse_loss(text) == pytest.approx(loss)


@pytest.mark.parametrize("text", ["", "2", "101%", "-1%", "two", "2%%", "nan"])
def test_what_is_no_loss(text: str) -> None:
    with pytest.raises(UsageProblem, match=r"write 2% or 0\.02"):
        parse_loss(text)


@pytest.mark.parametrize(
    "wrong",
    [
        {"name": ""},
        {"name": "../etc"},
        {"name": "-x"},
        {"name": "a b"},
        {"name": "x" * 41},
        {"hosts": 0},
        {"hosts": 65},
        {"mtu": 500},
        {"mtu": 70_000},
        {"loss": 1.5},
        {"loss": -0.1},
        {"loss": float("nan")},
        {"rate_bps": 0},
        {"rate_bps": 10**12},
    ],
)
def test_settings_that_cannot_be(wrong: dict[str, object]) -> None:
    with pytest.raises(UsageProblem):
        LabSettings(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "arguments",
    [
        ["up", "--hosts", "none"],
        ["up", "--rate", "fast"],
        ["up", "--loss", "2"],
        ["up", "--lab", "a/b"],
        ["exec", "h1"],
        ["run"],
        [],
    ],
)
def test_wrong_use_is_one_line(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = main(["lab", *arguments])
    except SystemExit as end:
        code = int(str(end.code))
    said = capsys.readouterr()
    assert code == 2
    assert said.out == ""
    assert said.err.startswith("nicps: error: ")
    assert said.err.count("\n") == 1


def test_a_command_keeps_its_own_options() -> None:
    parser = build_parser("lab")
    args = parser.parse_args(["lab", "exec", "--lab", "x", "h1", "--", "ls", "--lab", "--", "-a"])
    assert (args.lab, args.host) == ("x", "h1")
    assert args.argv[-4:] == ["ls", "--lab", "--", "-a"]
    assert args.argv[:-4] in ([], ["--"])


def test_namespaces_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [
        *("nicps-a-switch", "nicps-a-h1", "nicps-a-h12", "nicps-a-h1-switch", "nicps-a-h1-h1"),
        *("nicps-a-h0", "nicps-a", "nicps--h", "other-a-h1", "xnicps-a-h1", "nicps-a-h1x"),
    ]
    for name in names:
        (tmp_path / name).touch()
    monkeypatch.setattr(namespaces.enter, "NETNS_DIR", str(tmp_path))
    assert namespaces.find() == {
        "a": ["nicps-a-h1", "nicps-a-h12", "nicps-a-switch"],
        "a-h1": ["nicps-a-h1-h1", "nicps-a-h1-switch"],
    }
    with pytest.raises(ValueError, match="not a namespace of ours"):
        namespaces.remove(["other-a-h1"])


def test_state_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "LABS_DIR", tmp_path)
    record = ProcessRecord(12, 3456, "h1", ("ping", "-c1"))
    kept = LabState(LabSettings("x", 3, 10**9, 1400, 0.02), True, 17, (record,))
    state.write(kept)
    assert state.read("x") == kept
    assert state.names() == ["x"]
    later = ProcessRecord(13, 3457, "h2", ("true",))
    state.add_process("x", later, keep=lambda process: process.pid != 12)
    found = state.read("x")
    assert found is not None
    assert found.processes == (later,)
    (tmp_path / ".x.json.99").touch()  # a draft that a killed process left
    state.remove("x")
    assert list(tmp_path.iterdir()) == []
    assert state.read("x") is None


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"version": 99}', "\x00", '{"version": 1}'])
def test_state_that_cannot_be_read_is_none(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state, "LABS_DIR", tmp_path)
    (tmp_path / "x.json").write_text(text)
    assert state.read("x") is None


def test_only_marked_and_recorded_processes_are_the_labs() -> None:
    lab = f"unit-{os.getpid()}"
    # The second one has a mark that only begins like ours.
    marked = subprocess.Popen(["sleep", "1000"], env=processes.environment(lab))
    other = subprocess.Popen(["sleep", "1000"], env=processes.environment(f"{lab}-2"))
    recorded = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        start = processes.start_time(recorded.pid)
        assert start is not None
        right = ProcessRecord(recorded.pid, start, "h1", ())
        wrong = ProcessRecord(other.pid, start + 1, "h1", ())  # it started earlier
        assert [p.pid for p in processes.find(lab)] == [marked.pid]
        found = processes.find(lab, [right, wrong])
        assert [p.pid for p in found] == sorted([marked.pid, recorded.pid])
        # Never the caller, even when it carries the mark or is an ancestor of who does.
        own = processes.start_time(os.getpid())
        assert own is not None
        mine = ProcessRecord(os.getpid(), own, "h1", ())
        assert os.getpid() not in [p.pid for p in processes.find(lab, [mine])]
        assert [p.pid for p in processes.end(lab)] == [marked.pid]
        assert marked.wait(timeout=10) < 0
        assert other.poll() is None
        assert recorded.poll() is None
    finally:
        for child in (marked, other, recorded):
            child.kill()
            child.wait()
        assert recorded.stdin is not None
        recorded.stdin.close()
