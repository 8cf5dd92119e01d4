# SPDX-License-Identifier: Apache-2.0
"""Working folders: an agent that was killed leaves one, the next agent on the host removes it. What it is given for
them, and for results, is tried before anything else.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from nicps.agent.folders import check_runs, check_work, new_job_id, sweep, working_folder
from nicps.agent.process import User
from nicps.errors import EnvironmentProblem, JobFailed, explain

pytestmark = pytest.mark.unit


def test_only_what_nobody_uses_any_more_is_removed(tmp_path: Path) -> None:
    living = working_folder(tmp_path)
    gone = int(Path("/proc/sys/kernel/pid_max").read_text())  # no process has this number
    dead, other = tmp_path / f"nicps-{gone}-abc", tmp_path / "nicps-run-abc"
    for folder in (dead, other):
        folder.mkdir()
        (folder / "file").write_text("left")
    sweep(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([living.name, other.name])
    assert living.name.startswith(f"nicps-{os.getpid()}-")


def test_one_that_goes_while_it_is_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Agents that start together try the same folder, each with one of its own."""
    monkeypatch.setattr(Path, "glob", lambda *_: iter([tmp_path / "nicps-1-gone"]))
    sweep(tmp_path)


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("tiny", "tiny"),
        ("", ""),
        ("my job (2)", "my-job--2-"),
        ("../..", "-----"),
        ("gr\u00f6\u00dfe", "gr\u00f6\u00dfe"),
        ("x" * 100, "x" * 100),
    ],
)
def test_a_runs_name_is_a_folders(tmp_path: Path, name: str, shown: str) -> None:
    made = new_job_id(name)
    assert made[16:-5] == shown
    (tmp_path / made).mkdir()


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("x" * 101, "the job's name has 101 bytes, 100 at most: give its folder a shorter one"),
        ("\u00e4" * 51, "the job's name has 102 bytes, 100 at most: give its folder a shorter one"),
        ("a\nb", "the job's name is to be printable text, not 'a\\nb'"),
        ("\x1b" * 9999, "the job's name is to be printable text, not '" + 24 * "\\x1b" + "\\x1"),
        (None, "the job's name is to be printable text, not None"),
        (["x"], "the job's name is to be printable text, not ['x']"),
    ],
)
def test_a_jobs_name_that_is_none(name: object, said: str) -> None:
    with pytest.raises(JobFailed) as raised:
        new_job_id(name)
    assert str(raised.value).startswith(said)
    assert len(str(raised.value)) < 200 and str(raised.value).isprintable()


NOBODY = User("nobody", 65534, 65534)


@pytest.mark.parametrize("work", ["missing", "file/x", "file"])
def test_a_working_folder_that_cannot_be_had(tmp_path: Path, work: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(EnvironmentProblem) as raised:
        check_work(tmp_path / work, NOBODY)
    why = "No such file or directory" if work == "missing" else "Not a directory"
    assert str(raised.value).startswith(f"jobs cannot work in {tmp_path / work}: {why}; ")
    assert "--work" in str(raised.value)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can ask for another user")
def test_a_working_folder_that_the_training_user_cannot_enter(open_path: Path) -> None:
    inner = open_path / "closed" / "work"
    inner.mkdir(parents=True)
    check_work(inner, NOBODY)
    inner.parent.chmod(0o700)
    with pytest.raises(EnvironmentProblem, match=f"user nobody cannot enter {inner}.*--work"):
        check_work(inner, NOBODY)
    assert not list(inner.iterdir())


@pytest.mark.parametrize("runs", ["runs", "new/runs"])
def test_results_can_be_left_where_a_folder_can_be_made(tmp_path: Path, runs: str) -> None:
    (tmp_path / "runs").mkdir()
    check_runs(tmp_path / runs)
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]
    assert not list((tmp_path / "runs").iterdir())


@pytest.mark.parametrize("runs", ["file", "file/x", "link"])
def test_results_that_cannot_be_left(tmp_path: Path, runs: str) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("nowhere")
    with pytest.raises(EnvironmentProblem, match=f"left in {tmp_path / runs}: .*; .*--runs"):
        check_runs(tmp_path / runs)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "link"]


def test_what_the_system_says_is_not_all_that_is_said() -> None:
    error = FileNotFoundError(2, "No such file or directory", "/nope/x")
    assert explain("send", error) == "cannot send: /nope/x: No such file or directory"
    assert explain("send", OSError(28, "No space left on device")).endswith(
        "send: No space left on device"
    )
    assert explain("send", JobFailed("the job is wrong")) == "the job is wrong"
