# SPDX-License-Identifier: Apache-2.0
"""`benchmarks.accuracy`, given what it cannot use: one line, before a lab is made."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import accuracy

JOBS = Path(accuracy.__file__).parents[1] / "trainer" / "jobs"

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--out", "{tmp}/none/rows"], "cannot keep rows in {tmp}/none/rows: No such file"),
        (["--out", "{tmp}"], "cannot keep rows in {tmp}: Is a directory"),
        (["--out", "{tmp}/text"], "{tmp}/text has a line that is not a row"),
        (["--exchange", "stripes,foo"], "--exchange takes some of broadcast,stripes,switch, not"),
        (
            ["--job", "none"],
            f"no job.py in {JOBS}/none: --job takes the name of a folder in {JOBS}",
        ),
        (["--lane", "i4"], "--lane takes some of i32,i16,i8, not 'i4'"),
    ],
)
def test_what_it_cannot_use_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], given: list[str], said: str
) -> None:
    (tmp_path / "text").write_text("seed 1\n")
    assert accuracy.main([text.replace("{tmp}", str(tmp_path)) for text in given]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("accuracy: error: " + said.replace("{tmp}", str(tmp_path)))
