# SPDX-License-Identifier: Apache-2.0
"""The compiled program in the repository is what p4c makes of the sources."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from nicps.switch import program

pytestmark = pytest.mark.p4("p4c-bm2-ss")


def without_places(value: Any) -> Any:
    """p4c's output without what depends on where, and by which p4c, it was compiled."""
    if isinstance(value, dict):
        skip = {"source_info", "program", "__meta__", "id"}
        return {k: without_places(v) for k, v in value.items() if k not in skip}
    if isinstance(value, list):
        return [without_places(entry) for entry in value]
    return value


def test_the_compiled_program_is_up_to_date(tmp_path: Path) -> None:
    made = tmp_path / "nicps.json"
    source = program.folder() / "nicps.p4"
    done = subprocess.run(
        ["p4c-bm2-ss", "--std", "p4-16", "--Wdisable=unused", "-o", str(made), str(source)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "warning" not in done.stderr, done.stderr
    fresh, kept = (json.loads(path.read_text()) for path in (made, program.compiled()))
    assert without_places(fresh) == without_places(kept)
