# SPDX-License-Identifier: Apache-2.0
"""The lab without a lab: units, names, state files, and which processes are whose."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from nicps import wire
from nicps.cli import build_parser, main
from nicps.errors import UsageProblem
from nicps.lab import (
    Faults,
    Lab,
    LabNotFound,
    LabProblem,
    LabSettings,
    namespaces,
    parse_delay,
    parse_loss,
    parse_probability,
    processes,
    signals,
    state,
    the_only,
)
from nicps.lab.jobs import RunSettings, submission
from nicps.lab.processes import Running, program
from nicps.lab.state import LabState, ProcessRecord
from nicps.rates import format_rate, parse_line_rate, parse_rate


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


@pytest.mark.parametrize("rate_bps", [8_000, 10**6, 10**9, 2_500_000_000, None])
def test_rates_are_written_as_they_are_read(rate_bps: int | None) -> None:
    assert parse_line_rate(format_rate(rate_bps)) == rate_bps


@pytest.mark.parametrize(
    ("text", "loss"), [("2%", 0.02), ("0.02", 0.02), (".5", 0.5), ("0", 0), ("100%", 1), ("1", 1)]
)
def test_losses(text: str, loss: float) -> None:
    assert parse_loss(text) == pytest.approx(loss)


@pytest.mark.parametrize("text", ["", "2", "101%", "-1%", "two", "2%%", "nan"])
def test_what_is_no_loss(text: str) -> None:
    with pytest.raises(UsageProblem, match=r"write 2% or 0\.02"):
        parse_loss(text)


def test_a_share_that_cannot_be_read_is_called_by_its_name() -> None:
    assert parse_probability("1%", "corruption") == pytest.approx(0.01)
    with pytest.raises(UsageProblem, match="is not a corruption"):
        parse_probability("much", "corruption")
    with pytest.raises(UsageProblem, match="a corruption of 2 is more than everything"):
        parse_probability("2", "corruption")


@pytest.mark.parametrize(
    ("text", "delay_ms"), [("20", 20), ("0.5", 0.5), (".5ms", 0.5), ("3 ms", 3), ("0", 0)]
)
def test_delays(text: str, delay_ms: float) -> None:
    assert parse_delay(text) == delay_ms


@pytest.mark.parametrize("text", ["", "-1", "1s", "20 %", "nan", "1e3", "soon"])
def test_what_is_no_delay(text: str) -> None:
    with pytest.raises(UsageProblem, match="write milliseconds"):
        parse_delay(text)


@pytest.mark.parametrize(
    "wrong",
    [
        {"loss": 1.01},
        {"duplicate": -0.1},
        {"corrupt": float("nan")},
        {"reorder": 2},
        {"delay_ms": -1},
        {"delay_ms": 10_001},
        {"delay_ms": float("nan")},
    ],
)
def test_faults_that_cannot_be(wrong: dict[str, float]) -> None:
    with pytest.raises(UsageProblem):
        Faults(**wrong)


def test_faults_in_words() -> None:
    assert str(Faults()) == ""
    assert (
        str(Faults(loss=0.05, reorder=0.001, delay_ms=2.5)) == "loss 5%, reorder 0.1%, delay 2.5 ms"
    )


def agents_and_others() -> list[Running]:
    commands = [
        (10, 1, "/usr/bin/python3 -P -m nicps join --iface eth1"),
        (11, 10, "python3 -m trainer run --workdir x"),
        (12, 11, "python3 worker of the trainer"),
        (20, 1, "python3 /usr/local/bin/nicps join --iface eth1"),
        (30, 1, "python3 -m nicps submit join"),
        (31, 30, "python3 -c x"),
        (40, 1, "vi nicps join.txt"),
    ]
    return [
        Running(pid, 0, parent, command, None, True, False) for pid, parent, command in commands
    ]


def test_which_processes_are_the_agent_and_which_it_has_started() -> None:
    def chosen(part: signals.Part) -> list[int]:
        return [process.pid for process in signals.choose("h1", agents_and_others(), part)]

    assert chosen("agent") == [10, 20]
    assert chosen("trainer") == [11, 12]
    assert chosen("both") == [10, 20, 11, 12]


@pytest.mark.parametrize(
    ("command", "word"),
    [
        ("/a/rather/long/way/to/.venv/bin/python3 -P -m nicps join --iface eth1", "agent"),
        ("/usr/bin/python3 /a/rather/long/way/to/.venv/bin/nicps join --iface eth1", "agent"),
        ("/a/rather/long/way/to/.venv/bin/python3 -P -m nicps submit trainer/join", "submit"),
        ("nicps status", "status"),
        ("python3 -P -m trainer run --workdir x", "trainer"),
        ("ping 10.77.0.2", "ping 10.77.0.2"),
        ("vi nicps join.txt", "vi nicps join.txt"),
        ("cat " + 50 * "x", "cat " + 36 * "x"),
    ],
)
def test_what_runs_in_a_word(command: str, word: str) -> None:
    assert program(command) == word


def test_nothing_to_signal_is_told() -> None:
    running = agents_and_others()
    with pytest.raises(LabProblem, match="no agent runs on h1"):
        signals.choose("h1", running[4:], "both")
    with pytest.raises(LabProblem, match="no training program runs on h1"):
        signals.choose("h1", running[3:4], "trainer")
    assert len(signals.choose("h1", running[3:4], "both")) == 1


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
        {"priorities": True},
        {"queue_bytes": 65_536},
        {"queue_bytes": 1_000, "rate_bps": 10**9},
        {"queue_bytes": 65_536, "rate_bps": 10**9, "priorities": True},
        {"priorities": True, "rate_bps": 10**9, "switch": "xdp"},
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
        ["up", "--queue", "64K"],
        ["up", "--queue", "much", "--rate", "1gbit"],
        ["up", "--loss", "2"],
        ["up", "--lab", "a/b"],
        ["exec", "h1"],
        ["fault", "h1"],
        ["fault", "--loss", "1%"],
        ["fault", "h1", "--loss"],
        ["fault", "h1", "--loss", "2"],
        ["fault", "h1", "--delay", "soon"],
        ["fault", "h1", "--delay", "1", "--clear"],
        ["cut"],
        ["kill", "h1", "--agent", "--trainer"],
        ["link", "h1", "sideways"],
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


def test_a_run_with_an_mtu_that_agents_refuse_makes_no_lab() -> None:
    least = wire.LEAST_MTU
    with pytest.raises(UsageProblem, match=f"an MTU of {least} at least, not {least - 1}"):
        RunSettings(Path("job"), LabSettings(mtu=least - 1))
    assert RunSettings(Path("job"), LabSettings(mtu=least)).shape == LabSettings()


def test_a_job_needs_no_file_for_its_result() -> None:
    """The labs of vm-lab submit so; only a script's result goes to a file."""
    job = RunSettings(Path("/job"), LabSettings(), settings={"lane": "i8"})
    assert submission(job)[-6:] == ["submit", "/job", "--wait", "--json", "--set", 'lane="i8"']
    script = RunSettings(Path("/job"), LabSettings(), script=Path("/job/a.py"))
    assert submission(script)[-2:] == ["run", "/job/a.py"]
    assert submission(script, Path("/r"))[-4:] == ["run", "--result", "/r", "/job/a.py"]


def test_a_command_keeps_its_own_options() -> None:
    parser = build_parser("lab")
    args = parser.parse_args(["lab", "exec", "--lab", "x", "h1", "--", "ls", "--lab", "--", "-a"])
    assert (args.lab, args.host) == ("x", "h1")
    assert args.argv[-4:] == ["ls", "--lab", "--", "-a"]
    assert args.argv[:-4] in ([], ["--"])


def test_a_host_without_a_name_is_told_as_such() -> None:
    lab = Lab(LabSettings("x", hosts=2))
    for hosts in ("", "h1,", "h2, ,h1"):
        with pytest.raises(LabNotFound, match="lab x has no host '': its hosts are h1 to h2"):
            lab.select(hosts)


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


def test_the_lab_that_is_meant_where_none_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(namespaces.enter, "NETNS_DIR", str(tmp_path / "netns"))
    monkeypatch.setattr(state, "LABS_DIR", tmp_path)
    with pytest.raises(LabNotFound, match="no lab stands: run `nicps lab up`"):
        the_only()
    state.write(LabState(LabSettings("try")))
    assert the_only() == "try"
    state.write(LabState(LabSettings("lab")))
    with pytest.raises(LabNotFound, match="the labs lab, try stand: say which one with --lab"):
        the_only()


@pytest.mark.parametrize("command", ["exec", "fault", "heal", "link", "kill", "down"])
def test_without_a_name_the_only_lab_is_meant(command: str) -> None:
    arguments = {"exec": ["h1", "true"], "link": ["h1", "up"], "heal": [], "down": []}
    words = ["lab", command, *arguments.get(command, ["h1"])]
    assert build_parser("lab").parse_args(words).lab is None
    assert build_parser("lab").parse_args(["lab", "up"]).lab == "lab"


def test_state_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "LABS_DIR", tmp_path)
    record = ProcessRecord(12, 3456, "h1", ("ping", "-c1"))
    shape = LabSettings("x", 3, 10**9, 1400, 0.02)
    kept = LabState(shape, True, 17, 18, (record,), tmp_path / "scratch")
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
