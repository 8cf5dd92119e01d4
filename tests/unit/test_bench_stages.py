# SPDX-License-Identifier: Apache-2.0
"""The stages of a round that `nicps bench allreduce --profile` shows, out of the hosts' time lines."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest

from nicps.bench.stages import Stages

pytestmark = pytest.mark.unit


def keep(folder: Path, host: str, *rows: tuple[str, int, float]) -> None:
    path = folder / host / "runs" / "job-1" / host / "timeline.jsonl"
    path.parent.mkdir(parents=True)
    lines = [{"kind": kind, "round": number, "t0": at, "t1": at} for kind, number, at in rows]
    path.write_bytes(b"\n".join(map(orjson.dumps, lines)))


def test_each_stage_ends_with_the_last_host(tmp_path: Path) -> None:
    keep(
        tmp_path, "h1", ("send", 3, 10.2), ("send", 3, 10.9), ("sums", 3, 11.0), ("commit", 3, 11.4)
    )
    keep(tmp_path, "h2", ("send", 3, 10.3), ("sums", 3, 11.2), ("commit", 3, 11.5))
    stages = Stages()
    stages.add(
        10.0,
        [
            {"round": 3, "converted": 10.5, "ended": 11.7},
            {"round": 3, "converted": 10.6, "ended": 11.6},
        ],
    )
    found = stages.medians(tmp_path)
    expected = {"conversion": 0.6, "list": 0.3, "exchange": 0.9}
    expected |= {"marks": 0.2, "commit": 0.3, "reading": 0.2}
    assert found == pytest.approx(expected)
    assert list(found) == list(expected)
    parts = ("list", "exchange", "commit", "reading")
    assert sum(found[name] for name in parts) == pytest.approx(11.7 - 10.0)


def test_marks_end_with_the_first_commit(tmp_path: Path) -> None:
    """That host, the lead, has the marks of all. Its own one brings the others to commit."""
    keep(tmp_path, "h1", ("send", 3, 10.2), ("sums", 3, 11.0), ("commit", 3, 11.5))
    keep(tmp_path, "h2", ("send", 3, 10.2), ("sums", 3, 11.1), ("commit", 3, 11.9))
    keep(tmp_path, "h3", ("send", 3, 10.2), ("sums", 3, 11.2), ("commit", 3, 11.8))
    stages = Stages()
    stages.add(10.0, [{"round": 3, "converted": 10.5, "ended": 12.0}])
    found = stages.medians(tmp_path)
    assert (found["marks"], found["commit"]) == pytest.approx((0.3, 0.7))


def test_sums_that_are_noted_after_a_commit_leave_no_time_for_marks(tmp_path: Path) -> None:
    keep(tmp_path, "h1", ("send", 3, 10.2), ("sums", 3, 11.2), ("commit", 3, 11.1))
    keep(tmp_path, "h2", ("send", 3, 10.2), ("sums", 3, 11.0), ("commit", 3, 11.4))
    stages = Stages()
    stages.add(10.0, [{"round": 3, "converted": 10.5, "ended": 12.0}])
    found = stages.medians(tmp_path)
    assert (found["marks"], found["commit"]) == pytest.approx((0.0, 0.2))


def test_medians_of_the_rounds_that_were_counted(tmp_path: Path) -> None:
    """Rounds that nobody has counted, and those of which a stage is unknown, are left out."""
    rows = []
    for number, took in ((1, 9.0), (2, 1.0), (3, 2.0), (4, 3.0)):
        at = 100.0 * number
        rows += [("send", number, at), ("sums", number, at + took), ("commit", number, at + took)]
    rows.append(("send", 5, 500.0))
    keep(tmp_path, "h1", *rows)
    stages = Stages()
    for number in (2, 3, 4, 5):
        stages.add(
            100.0 * number, [{"round": number, "converted": 0.0, "ended": 100.0 * number + 9}]
        )
    assert stages.medians(tmp_path)["exchange"] == 2.0


def test_an_engine_that_tells_of_no_rounds_has_no_stages(tmp_path: Path) -> None:
    stages = Stages()
    stages.add(10.0, [{"ended": 11.0}])
    assert stages.medians(tmp_path) == {}
