# SPDX-License-Identifier: Apache-2.0
"""Working folders: an agent that was killed leaves one, the next agent on the host removes it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from nicps.agent.folders import new_job_id, sweep, working_folder
from nicps.errors import JobFailed

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
