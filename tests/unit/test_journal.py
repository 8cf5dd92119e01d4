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


def test_a_member_that_has_written_no_row_tells_no_shares(tmp_path: Path) -> None:
    """A server of parameters that does not lead: "computing 0 %, waiting 0 %" would be said of no time at all."""
    reports: list[dict[str, Any]] = []
    session = SimpleNamespace(report=reports.append, lead=False, view=1)
    job = SimpleNamespace(settings=Settings(epochs=1), name="job")
    training = SimpleNamespace(job=job, state=State(round=3), rounds=None)
    now = [1000.0]
    journal = Journal(cast(Session, session), cast(Training, training), tmp_path, lambda: now[0])
    times = {"seconds_compute": 1.0, "seconds_wait": 3.0, "seconds_network": 0.0}
    with journal:
        journal.report(3, 64, 0.5, 0)
        now[0] += 1.0
        journal.round({"phase": "train", "t_start": 0.0, "t_end": 4.0, **times})
        journal.report(4, 64, 0.5, 0)
    without, with_ = reports
    assert without["trained_rounds"] == 3 and not [key for key in without if "share" in key]
    shares = {"share_compute": 0.25, "share_wait": 0.75, "share_network": 0.0}
    assert with_.items() >= shares.items()


def test_steps_of_a_plan_are_told_with_the_medians_of_the_last_ones(tmp_path: Path) -> None:
    """Of a job without a plan nothing of the kind is told."""
    reports: list[dict[str, Any]] = []
    session = SimpleNamespace(report=reports.append, lead=False, view=1)
    job = SimpleNamespace(settings=Settings(epochs=1), name="job")
    training = SimpleNamespace(job=job, state=State(round=1), rounds=9)
    times = iter(range(1000, 2000))
    journal = Journal(
        cast(Session, session), cast(Training, training), tmp_path, lambda: float(next(times))
    )
    parts = {"seconds_compute": 0.25, "seconds_wait": 0.5, "seconds_network": 0.0}
    row = {"phase": "train", **parts, "t_start": 1.0}
    plan = {"channels": 3, "predicted_seconds": 2.0}
    with journal:
        journal.round({**row, "t_end": 2.0})
        journal.report(11, 64, 0.5, 0)
        for took in (9.0, *[4.0] * 50):
            journal.round({**row, **plan, "t_end": 1.0 + took, "seconds_wait": took / 4})
        journal.report(11, 64, 0.5, 0)
    assert not {"channels", "step_seconds"} & reports[0].keys()
    told = {key: reports[1][key] for key in ("channels", "step_seconds", "wait_seconds")}
    assert told == {"channels": 3, "step_seconds": 4.0, "wait_seconds": 1.0}
    assert reports[1]["predicted_seconds"] == 2.0
