# SPDX-License-Identifier: Apache-2.0
"""What a member tells of its training while it goes on."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from nicps.client import Session
from trainer.journal import Journal
from trainer.settings import Settings, State
from trainer.training import Training


@pytest.mark.parametrize(
    ("trained", "planned", "told"), [(174, 165, 165), (33, 165, 33), (174, None, 174)]
)
def test_progress_never_passes_the_plan(
    tmp_path: Path, trained: int, planned: int | None, told: int
) -> None:
    """With servers rounds are counted at synchronisations, and the last one may have more than was planned."""
    reports: list[dict[str, Any]] = []
    session = SimpleNamespace(report=reports.append, lead=False)
    job = SimpleNamespace(settings=Settings(epochs=1), name="job")
    training = SimpleNamespace(job=job, state=State(round=trained), rounds=planned)
    journal = Journal(cast(Session, session), cast(Training, training), tmp_path, lambda: 1000.0)
    with journal:
        journal.report(11, 64, 0.5, 0)
    assert [report["trained_rounds"] for report in reports] == [told]
    assert reports[0].get("rounds_total") == planned
