# SPDX-License-Identifier: Apache-2.0
"""The lines that `nicps bench memory` prints."""

from __future__ import annotations

import pytest

from nicps.bench.memory import Measured, _show

pytestmark = pytest.mark.unit


def test_a_process_that_has_become_smaller_by_a_page_has_not_less_than_nothing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    _show(
        Measured("switch", "i8", 2, 100_000, 400_000, 0, 2_500_000, -4096, 29.0, 1_800_000, -4096)
    )
    line = capsys.readouterr().err
    assert "agent    0.0" in line and "process 0.0" in line and "-0.0" not in line
