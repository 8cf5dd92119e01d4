# SPDX-License-Identifier: Apache-2.0
"""`nicps submit` and `nicps resume`: what they refuse, and what they say while they wait."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nicps import cli
from nicps.cli import submit
from nicps.cli.resume import find
from nicps.errors import UsageProblem
from nicps.session.events import Forming, Training

ROOT = Path(__file__).resolve().parents[2]
DIGITS = str(ROOT / "trainer/jobs/digits")


@pytest.mark.parametrize("command", [["submit", DIGITS], ["resume"], ["lab", "run", DIGITS]])
@pytest.mark.parametrize("how", ["--data", "NICPS_DATA"])
def test_data_that_are_not_there(
    command: list[str],
    how: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Though this job reads none: who names data means them."""
    missing = str(tmp_path / "no data")
    if how == "--data":
        command = [*command, "--data", missing]
    else:
        monkeypatch.setenv("NICPS_DATA", missing)
    with pytest.raises(SystemExit) as stop:
        cli.main(command)
    assert stop.value.code == 2
    text = capsys.readouterr().err
    assert f"{missing!r}: No such file or directory" in text and text.count("\n") == 1


class Interrupted:
    """A connection at which the user does not wait any longer."""

    sent: dict[str, Any] | None = None

    def send(self, message: dict[str, Any]) -> None:
        self.sent = message

    def recv(self, timeout_s: float | None) -> None:
        assert self.sent is not None and self.sent["op"] == "submit"
        raise KeyboardInterrupt


@pytest.mark.parametrize("command", ["submit", "resume"])
def test_who_waits_no_longer_is_told_that_the_job_goes_on(
    command: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    @contextlib.contextmanager
    def connect(address: str) -> Iterator[Interrupted]:
        yield Interrupted()

    monkeypatch.setattr(submit, "connect", connect)
    (tmp_path / "checkpoint").mkdir()
    for name in ("checkpoint.npz", "job.tar"):
        (tmp_path / "checkpoint" / name).touch()
    what = DIGITS if command == "submit" else str(tmp_path)
    assert cli.main([command, what, "--wait"]) == 130
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1
    for word in ("goes on", "`nicps status --watch`", "`nicps cancel`"):
        assert word in said.err


def test_a_run_that_is_not_there_is_told_from_one_without_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    runs = tmp_path / "kept"
    for folder in ("kept/bare", "here", "kept/whole/checkpoint", "kept/member/checkpoint"):
        (tmp_path / folder).mkdir(parents=True)
    member = runs / "member"  # of a host that did not lead
    (member / "checkpoint" / "h2.residual.npz").touch()
    with pytest.raises(UsageProblem) as error:
        find(runs, "runs/nope")
    assert str(error.value) == (
        f"there is no run 'runs/nope': no folder {tmp_path}/runs/nope nor {runs}/runs/nope;"
        " name the run's folder, or --runs"
    )
    with pytest.raises(UsageProblem, match="no folder /no/such/run; name"):
        find(runs, "/no/such/run")
    for name, folder in (("bare", runs / "bare"), ("here", tmp_path / "here"), ("member", member)):
        with pytest.raises(UsageProblem, match=f"{folder} holds no checkpoint"):
            find(runs, name)
    whole = runs / "whole" / "checkpoint"
    (whole / "checkpoint.npz").touch()
    assert find(runs, "whole") == whole
    assert find(runs, str(whole)) == whole, "the folder that the end of a job names"


def test_what_is_not_there_is_not_shown(capsys: pytest.CaptureFixture[str]) -> None:
    """Preparing a script reports no data, so the field is left out."""
    submit.show(Forming("run-1", "digits"))
    submit.show(Forming("run-1", None))
    assert capsys.readouterr().err == "nicps: forming: data digits\nnicps: forming\n"


def test_the_exchange_is_shown_with_its_reason(capsys: pytest.CaptureFixture[str]) -> None:
    submit.show(Training("run-1", "stripes", "no switch is heard"))
    submit.show(Training("run-1"))  # of an agent that does not tell it
    told = "nicps: training: exchange stripes: no switch is heard\nnicps: training\n"
    assert capsys.readouterr().err == told


@pytest.mark.parametrize(
    ("value", "shown"),
    [(None, "-"), ([], "-"), (["h1", "h2"], "h1 h2"), ({"a": 1, "b": None}, "a=1"), (0.5, "0.5")],
)
def test_a_value_of_the_result_for_people(value: object, shown: str) -> None:
    assert submit.readable(value) == shown


def test_progress_of_a_job_with_channels_is_in_words() -> None:
    told = {"trained_rounds": 7, "rounds_total": 9, "channels": 3, "share_compute": 0.5}
    told |= {"step_seconds": 0.52812, "wait_seconds": 0.18, "predicted_seconds": 0.7618}
    assert submit.progress_line(told) == (
        "round 7/9  computing 50%  a step 0.528 s  waiting in it 0.180 s  predicted 0.762 s  channels 3"
    )
