# SPDX-License-Identifier: Apache-2.0
"""What a host keeps of a job that may have to be resumed, and what it tells its user without a majority (R18, R22)."""

from __future__ import annotations

import errno
import math
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from nicps.agent.executor import keep_checkpoint
from nicps.agent.jobfiles import JobFiles
from nicps.agent.process import User
from nicps.job.actions import Post
from nicps.job.checkpoints import CHECKPOINT, STATE, Checkpoints
from nicps.job.orders import Orders, ShowTrouble, Warn
from nicps.job.program import Program
from nicps.job.slow_work import KeepCheckpoint
from nicps.job.tasks import Tasks
from nicps.job.text import one_line
from nicps.session.shared_form import Keep
from tests.parts import FakeNode

pytestmark = pytest.mark.unit

FILES = (CHECKPOINT, STATE, "prepared.json", "job.tar")
REASON = "h1 cannot be heard"


# ---- the files


@pytest.fixture
def job(tmp_path: Path) -> Iterator[JobFiles]:
    user = User("me", os.getuid(), os.getgid())
    files = JobFiles("job", "h1", tmp_path, tmp_path / "runs" / "job", user, 0.0)
    for name in FILES:
        (files.folder / name).write_text(name)
    yield files
    files.clear({}, keep_records=False)


def test_a_checkpoint_has_all_that_resuming_needs(job: JobFiles) -> None:
    keep_checkpoint(job, CHECKPOINT)
    kept = job.run / "checkpoint"
    assert sorted(path.name for path in kept.iterdir()) == [CHECKPOINT, "job.tar", "prepared.json"]
    assert (kept / CHECKPOINT).read_text() == CHECKPOINT
    keep_checkpoint(job, STATE)
    assert (kept / CHECKPOINT).read_text() == STATE and not (kept / STATE).exists()


def test_it_is_on_the_disk_before_it_takes_the_former_ones_place(
    job: JobFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    fsync, replace = os.fsync, os.replace

    def sync(fd: int) -> None:
        done.append(os.readlink(f"/proc/self/fd/{fd}"))
        fsync(fd)

    def put(source: Path, target: Path) -> None:
        assert done[-1] == str(source)
        done.append(str(target))
        replace(source, target)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(os, "replace", put)
    keep_checkpoint(job, CHECKPOINT)
    kept = job.run / "checkpoint"
    files = [str(kept / name) for name in ("job.tar", "prepared.json", CHECKPOINT)]
    assert [path for path in done if path in files] == files
    base = kept.parents[2]  # that has been there before
    assert done[-4:] == [str(path) for path in (kept, kept.parent, kept.parent.parent, base)]


@pytest.mark.parametrize("how", ["missing", "a link", "a folder", "a full disk"])
def test_what_cannot_be_kept_is_an_error(
    job: JobFiles, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the former one stays."""
    keep_checkpoint(job, CHECKPOINT)
    path = job.folder / CHECKPOINT
    path.unlink()
    if how == "a link":
        path.symlink_to(job.folder / STATE)
    elif how == "a folder":
        path.mkdir()
    elif how == "a full disk":
        path.write_text("newer")

        def full(fd: int) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left" if how == "a full disk" else CHECKPOINT):
        keep_checkpoint(job, CHECKPOINT)
    kept = job.run / "checkpoint"
    assert (kept / CHECKPOINT).read_text() == CHECKPOINT
    assert sorted(path.name for path in kept.iterdir()) == [CHECKPOINT, "job.tar", "prepared.json"]


# ---- who is told


class Host:
    """The checkpoints of one job, whose training program holds the state; `told` is what the hook is run with."""

    def __init__(self) -> None:
        self.spot = FakeNode(number=2)
        self.tasks = Tasks()
        self.checkpoints = Checkpoints(self.spot, self.tasks, self, "/runs/job/checkpoint")
        self.program = Program(1, 60.0, 0.0)
        self.program.ready = self.program.holds_state = True
        self.asked: Orders = []

    def do(self, orders: Orders) -> None:
        self.asked += orders

    def cut_off(self, program: Program | None) -> None:
        self.do(self.checkpoints.save_without_majority(10.0, REASON, program))

    def write(self, rounds: int, error: str = "") -> None:
        """The program has written one; whether it can be kept is up to the disk."""
        self.do(self.checkpoints.write(rounds, error))

    def keep(self, error: str = "") -> None:
        """The disk is done with it."""
        (begin,) = [order for order in self.asked if hasattr(order, "ticket")]
        assert begin.task == KeepCheckpoint(CHECKPOINT)  # type: ignore[union-attr]
        self.asked.clear()
        ticket = begin.ticket  # type: ignore[union-attr]
        outcome = self.tasks.fail(10.0, ticket, error) if error else None
        self.do(self.tasks.finish(10.0, ticket, None) if outcome is None else outcome)

    @property
    def told(self) -> list[str]:
        found = [order for order in self.asked if isinstance(order, ShowTrouble)]
        assert all(trouble.hook for trouble in found)
        return [trouble.text for trouble in found]


@pytest.fixture
def host() -> Host:
    return Host()


def test_without_a_majority_the_user_is_told_once_it_is_saved(host: Host) -> None:
    host.cut_off(host.program)
    assert host.asked == [Post(1, Keep())]
    host.asked.clear()
    host.write(7)
    assert not host.told
    host.keep()
    said = f"{REASON}; saved after 7 rounds of training in /runs/job/checkpoint"
    assert host.told == [said]
    host.asked.clear()
    host.write(8)  # it may lead, and writes one now and then
    host.keep()
    host.do(host.checkpoints.tick(1000.0))
    assert not host.asked


def test_the_user_is_told_if_it_is_not_saved(host: Host) -> None:
    host.cut_off(host.program)
    host.write(7, "the disk is full")
    assert host.told == [f"{REASON}; not saved: the disk is full"]


def test_the_user_is_told_if_it_cannot_be_kept(host: Host) -> None:
    host.cut_off(host.program)
    host.asked.clear()
    host.write(7)
    host.keep("the disk is full")
    warning = Warn("no checkpoint in /runs/job/checkpoint: the disk is full")
    assert host.asked[0] == warning
    assert host.told == [f"{REASON}; not saved: the disk is full"]


def test_what_a_program_says_is_one_line_without_tricks() -> None:
    """It is what the alarm's hook gets, which root runs, and what a terminal shows."""
    assert one_line("the disk\n\x1b[2Jis  full\0 ") == "the disk [2Jis full"
    assert len(one_line("x" * 100_000)) == 300


def test_a_program_that_does_not_answer(host: Host) -> None:
    host.cut_off(host.program)
    host.do(host.checkpoints.tick(11.0))
    assert not host.told
    host.do(host.checkpoints.tick(host.checkpoints.deadline()))
    assert len(host.told) == 1
    assert "not saved: the training program has not answered" in host.told[0]


@pytest.mark.parametrize("why", ["none", "ended", "new", "learns"])
def test_what_is_not_the_others_state_is_not_saved(host: Host, why: str) -> None:
    if why == "learns":
        host.spot.learners = frozenset({2})
    host.program.ended, host.program.holds_state = why == "ended", why != "new"
    host.cut_off(None if why == "none" else host.program)
    assert len(host.asked) == 1
    assert len(host.told) == 1 and "not saved: this host has" in host.told[0]


def test_a_majority_that_is_there_again_is_no_trouble(host: Host) -> None:
    host.cut_off(host.program)
    host.checkpoints.note_majority()
    host.asked.clear()
    host.write(7)
    host.keep()
    assert not host.told and host.checkpoints.deadline() == math.inf
