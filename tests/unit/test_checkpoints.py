# SPDX-License-Identifier: Apache-2.0
"""What a host keeps of a job that may have to be resumed, and what it tells its user without a majority (R18, R22)."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nicps.agent.checkpoints import CHECKPOINT, STATE, Checkpoints
from nicps.agent.program import one_line
from nicps.session.shared_form import Keep

FILES = (CHECKPOINT, STATE, "prepared.json", "job.tar")
REASON = "h1 cannot be heard"


class Job:
    """As much of one as its checkpoints need; `told` is what the hook is run with."""

    def __init__(self, folder: Path) -> None:
        self.id = "job"
        self.folder = folder / "work"
        self.folder.mkdir()
        for name in FILES:
            (self.folder / name).write_text(name)
        self.program = SimpleNamespace(has_ended=False, holds_state=True, post=self.asked)
        self.questions: list[Any] = []
        self.warnings: list[str] = []
        self.told: list[str] = []
        self.agent = SimpleNamespace(
            now=10.0,
            trouble="",
            run_folder=lambda name: folder / "runs" / name,
            node=SimpleNamespace(number=2, learners=frozenset()),
            views=SimpleNamespace(say_trouble=self.say_trouble),
            endings=SimpleNamespace(run_hook=self.told.append),
            warn=self.warnings.append,
        )
        self.checkpoints = Checkpoints(self)  # type: ignore[arg-type]

    def asked(self, message: dict[str, Any]) -> None:
        self.questions.append(message)

    def say_trouble(self, text: str) -> None:
        self.agent.trouble = text

    def later(self, work: Callable[[], None], then: Callable[[], None]) -> None:
        work()
        then()


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


def test_a_checkpoint_has_all_that_resuming_needs(job: Job) -> None:
    job.checkpoints.written(7, "")
    kept = job.checkpoints.folder
    assert sorted(path.name for path in kept.iterdir()) == [CHECKPOINT, "job.tar", "prepared.json"]
    assert (kept / CHECKPOINT).read_text() == CHECKPOINT
    job.checkpoints.keep(STATE, job.warnings.append)
    assert (kept / CHECKPOINT).read_text() == STATE and not (kept / STATE).exists()
    assert job.warnings == [""] and not job.told


def test_it_is_on_the_disk_before_it_takes_the_former_ones_place(
    job: Job, monkeypatch: pytest.MonkeyPatch
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
    job.checkpoints.written(7, "")
    kept = job.checkpoints.folder
    files = [str(kept / name) for name in ("job.tar", "prepared.json", CHECKPOINT)]
    assert [path for path in done if path in files] == files
    base = kept.parents[2]  # that has been there before
    assert done[-4:] == [str(path) for path in (kept, kept.parent, kept.parent.parent, base)]


@pytest.mark.parametrize("how", ["missing", "a link", "a folder", "a full disk"])
def test_what_cannot_be_kept_is_an_error(
    job: Job, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the former one stays."""
    job.checkpoints.written(7, "")
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
    job.checkpoints.cut(REASON)
    job.checkpoints.written(8, "")
    kept = job.checkpoints.folder
    assert (kept / CHECKPOINT).read_text() == CHECKPOINT
    assert sorted(path.name for path in kept.iterdir()) == [CHECKPOINT, "job.tar", "prepared.json"]
    (warning,) = job.warnings
    assert warning.startswith(f"no checkpoint in {kept}: ")
    assert ("No space left" if how == "a full disk" else CHECKPOINT) in warning
    assert len(job.told) == 1 and "; not saved: " in job.told[0]


def test_without_a_majority_the_user_is_told_once_it_is_saved(job: Job) -> None:
    job.checkpoints.cut(REASON)
    assert job.questions == [Keep()] and not job.told
    job.checkpoints.written(7, "")
    said = f"{REASON}; saved after 7 rounds of training in {job.checkpoints.folder}"
    assert job.told == [said] and job.agent.trouble == said
    job.checkpoints.written(8, "")  # it may lead, and writes one now and then
    job.checkpoints.look(1000.0)
    assert job.told == [said]


def test_the_user_is_told_if_it_is_not_saved(job: Job) -> None:
    job.checkpoints.cut(REASON)
    job.checkpoints.written(7, "the disk is full")
    assert job.told == [f"{REASON}; not saved: the disk is full"]


def test_what_a_program_says_is_one_line_without_tricks() -> None:
    """It is what the alarm's hook gets, which root runs, and what a terminal shows."""
    assert one_line("the disk\n\x1b[2Jis  full\0 ") == "the disk [2Jis full"
    assert len(one_line("x" * 100_000)) == 300


def test_a_program_that_does_not_answer(job: Job) -> None:
    job.checkpoints.cut(REASON)
    job.checkpoints.look(job.agent.now + 1.0)
    assert not job.told
    job.checkpoints.look(job.agent.now + 1000.0)
    assert len(job.told) == 1 and "not saved: the training program has not answered" in job.told[0]


@pytest.mark.parametrize("why", ["none", "ended", "new", "learns"])
def test_what_is_not_the_others_state_is_not_saved(job: Job, why: str) -> None:
    if why == "none":
        job.program = None  # type: ignore[assignment]
    elif why == "learns":
        job.agent.node.learners = frozenset({2})
    else:
        job.program.has_ended, job.program.holds_state = why == "ended", why != "new"
    job.checkpoints.cut(REASON)
    assert not job.questions
    assert len(job.told) == 1 and "not saved: this host has" in job.told[0]


def test_a_majority_that_is_there_again_is_no_trouble(job: Job) -> None:
    job.checkpoints.cut(REASON)
    job.checkpoints.called_off()
    job.checkpoints.written(7, "")
    assert not job.told and not job.agent.trouble
    assert (job.checkpoints.folder / CHECKPOINT).exists()
