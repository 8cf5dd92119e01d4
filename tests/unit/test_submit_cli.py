# SPDX-License-Identifier: Apache-2.0
"""`nicps submit` and `nicps resume`: what they refuse, and what they say while they wait."""

from __future__ import annotations

from pathlib import Path

import pytest

from nicps import cli

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
