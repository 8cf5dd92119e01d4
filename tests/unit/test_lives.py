# SPDX-License-Identifier: Apache-2.0
"""What is kept of agents and training programs that ended before their job did."""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path

import pytest

from nicps.agent import process
from nicps.agent.folders import sweep
from nicps.agent.lives import earlier_files, keep_life, keep_programs, rescue, set_aside
from nicps.agent.process import User
from nicps.agent.records import Records
from nicps.job import Life
from nicps.job.actions import Action, CloseJob, NoteEvent, OpenJob, StartProgram
from tests.rooms import Rooms


def write(folder: Path, text: str) -> None:
    """As a training program does, into its metrics."""
    (folder / "work" / "out").mkdir(parents=True, exist_ok=True)
    (folder / "work" / "out" / "metrics.jsonl").write_text(text)


def begin(folder: Path, job: str = "run-1", name: str = "h2", now: float = 5.0) -> Records:
    folder.mkdir(parents=True, exist_ok=True)
    return Records(folder, job, name, now)


def kept(folder: Path) -> dict[str, str]:
    return {name: (folder / name).read_text() for name in earlier_files(folder)}


def lines(folder: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder / "timeline.jsonl").read_text().splitlines()]


def test_a_killed_host_loses_a_second_of_its_time_line_at_most(tmp_path: Path) -> None:
    records = begin(tmp_path)
    assert lines(tmp_path) == [
        {"t0": 5.0, "t1": 5.0, "kind": "begin", "round": 0, "job": "run-1", "name": "h2"}
    ]
    records.note("send", 5.1, 5.2, 1)
    assert len(lines(tmp_path)) == 1
    records.event("view", 5.3, 1, live=["h2"])
    assert [row["kind"] for row in lines(tmp_path)] == ["begin", "send", "view"]
    records.note("hold", 5.4, 5.9, 1)
    records.note("commit", 6.1, 6.1, 1)
    assert [row["kind"] for row in lines(tmp_path)] == ["begin", "send", "view", "hold", "commit"]
    records.close()


def test_lives_of_agents_and_of_programs(tmp_path: Path) -> None:
    """The first agent is killed, in its second program's life; the second agent's last program sees the end."""
    runs, host = tmp_path / "runs", tmp_path / "runs" / "run-1" / "h2"
    first, second = tmp_path / "first", tmp_path / "second"
    begin(first).close()
    write(first, "one")
    set_aside(first / "work" / "out", first)
    write(first, "two")
    rescue(first, runs)
    begin(second, now=9.0).close()
    write(second, "three")
    set_aside(second / "work" / "out", second)
    write(second, "four")
    keep_programs(second, host)
    found = kept(host)
    assert json.loads(found.pop("earlier-1.timeline.jsonl"))["t0"] == 5.0
    assert found == {
        "earlier-1.1.metrics.jsonl": "one",
        "earlier-1.2.metrics.jsonl": "two",
        "earlier-2.1.metrics.jsonl": "three",
    }
    assert list(found) == [
        "earlier-1.1.metrics.jsonl",
        "earlier-1.2.metrics.jsonl",
        "earlier-2.1.metrics.jsonl",
    ]


def test_the_next_agent_takes_what_a_killed_one_has_left(tmp_path: Path) -> None:
    gone = int(Path("/proc/sys/kernel/pid_max").read_text())  # no process has this number
    left = tmp_path / f"nicps-{gone}-abc"
    begin(left).close()
    write(left, "one")
    sweep(tmp_path, partial(rescue, runs=tmp_path / "runs"))
    assert not left.exists()
    assert list(kept(tmp_path / "runs" / "run-1" / "h2")) == [
        "earlier-1.timeline.jsonl",
        "earlier-1.1.metrics.jsonl",
    ]


@pytest.mark.parametrize(
    "first_line",
    [
        None,
        "",
        "{",
        "[]",
        "{}",
        '{"job": "../up", "name": "h2"}',
        '{"job": "x", "name": 7}',
        "\xff",
    ],
)
def test_a_folder_without_a_job(tmp_path: Path, first_line: str | None) -> None:
    base = tmp_path / "base"
    base.mkdir()
    if first_line is not None:
        (base / "timeline.jsonl").write_text(first_line)
    write(base, "one")
    rescue(base, tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("trap", ["metrics", "out", "folder", "fifo", "nothing"])
def test_what_a_program_leaves_instead_is_not_followed(tmp_path: Path, trap: str) -> None:
    """The training user owns its folder, and could point at what only root can read."""
    base, host = tmp_path / "base", tmp_path / "host"
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "metrics.jsonl").write_text("secret")
    begin(base).close()
    (base / "work").mkdir()
    out = base / "work" / "out"
    if trap == "out":
        out.symlink_to(secret)
    elif trap != "nothing":
        out.mkdir()
    if trap == "metrics":
        (out / "metrics.jsonl").symlink_to(secret / "metrics.jsonl")
    elif trap == "folder":
        (out / "metrics.jsonl").mkdir()
    elif trap == "fifo":
        os.mkfifo(out / "metrics.jsonl")
    keep_life(base, host)
    assert list(kept(host)) == ["earlier-1.timeline.jsonl"]
    assert (secret / "metrics.jsonl").read_text() == "secret"


def test_no_more_is_kept_than_can_be_handed_out(tmp_path: Path) -> None:
    """All of it is open at once then. The first lives count most."""
    base, host = tmp_path / "base", tmp_path / "host"
    begin(base).close()
    for number in range(150):
        write(base, str(number))
        set_aside(base / "work" / "out", base)
    keep_programs(base, host)
    found = kept(host)
    assert len(found) == 100
    assert list(found.values())[:3] == ["0", "1", "2"]
    assert list(found)[9:11] == ["earlier-1.10.metrics.jsonl", "earlier-1.11.metrics.jsonl"]


def test_a_program_that_is_started_again_leaves_the_others_rows(tmp_path: Path) -> None:
    rooms = Rooms(tmp_path)
    try:
        rooms.executor.open_job(OpenJob("job"))
        job = rooms.executor.job
        assert job is not None
        write(job.base, "one")
        rooms.program.start(StartProgram(2, "tests.bad_trainer", network_access=False))
        assert (job.base / "program-1.metrics.jsonl").read_text() == "one"
        assert not (job.folder / "out" / "metrics.jsonl").exists()
    finally:
        rooms.executor.close_job(CloseJob())
        rooms.close()


def test_a_program_that_cannot_be_begun_did_not_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(user: User | None, network_access: bool) -> None:
        raise OSError(28, "cannot make a network namespace")

    def note(life: Life, now: float, number: int, reason: str) -> list[Action]:
        said.append((number, reason))
        return []

    said: list[tuple[int, str]] = []
    monkeypatch.setattr(process, "_before_exec", refuse)
    monkeypatch.setattr(Life, "program_unstarted", note)
    rooms = Rooms(tmp_path)
    try:
        rooms.executor.open_job(OpenJob("job"))
        rooms.program.start(StartProgram(2, "tests.bad_trainer", network_access=False))
        rooms.until(lambda: said, "the reason")
        assert said[0][0] == 2 and "cannot make a network namespace" in said[0][1]
    finally:
        rooms.executor.close_job(CloseJob())
        rooms.close()


def test_what_is_written_of_a_job_is_kept_where_others_go_on(tmp_path: Path) -> None:
    rooms = Rooms(tmp_path)
    try:
        for keep, found in ((False, []), (True, ["earlier-1.timeline.jsonl"])):
            rooms.executor.open_job(OpenJob("job"))
            rooms.executor.note_event(NoteEvent("departs", 3, {"why": "it has left"}))
            rooms.executor.close_job(CloseJob(keep_records=keep))
            rooms.until(lambda: not any((tmp_path / "work").iterdir()), "the folder is removed")
            assert list(kept(tmp_path / "runs" / "job" / "h1")) == found
        text = (tmp_path / "runs" / "job" / "h1" / "earlier-1.timeline.jsonl").read_text()
        rows = [json.loads(line) for line in text.splitlines()]
        assert [row["kind"] for row in rows] == ["begin", "departs"]
        assert (rows[1]["round"], rows[1]["why"]) == (3, "it has left")
    finally:
        rooms.close()
