# SPDX-License-Identifier: Apache-2.0
"""Working folders: an agent that was killed leaves one, the next agent on the host removes it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from nicps.agent.folders import sweep, working_folder

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
