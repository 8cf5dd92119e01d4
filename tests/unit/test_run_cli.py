# SPDX-License-Identifier: Apache-2.0
"""`nicps run`: the exit code of a run, and what is said of its end."""

from __future__ import annotations

from typing import Any

import pytest

from nicps.cli.run import _finish

WHY = "cannot keep what the script has left: No space left on device; it is in /var/tmp/nicps-left-run-1-h2"


@pytest.mark.parametrize(
    ("codes", "identical", "not_kept", "expected"),
    [
        ({"h1": 0, "h2": 0}, True, {}, 0),
        ({"h1": 0, "h2": 0}, None, {"h2": WHY}, 8),
        ({"h1": 0, "h2": 3}, None, {"h2": WHY}, 3),
        ({"h1": 0, "h2": None}, None, {"h1": WHY}, 5),
        ({"h1": 0, "h2": 0}, False, {"h1": WHY}, 5),
    ],
)
def test_exit_codes(
    codes: dict[str, int | None],
    identical: bool | None,
    not_kept: dict[str, str],
    expected: int,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A script's own code goes before that of files that could not be kept."""
    result: dict[str, Any] = {"exit_codes": codes, "weights_identical": identical, "folder": "runs"}
    assert _finish(result | {"not_kept": not_kept}, as_json=False) == expected
    said = capsys.readouterr().err.splitlines()
    assert [line for line in said if WHY in line] == [
        f"nicps: {name}: {why}" for name, why in not_kept.items()
    ]
