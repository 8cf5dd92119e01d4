# SPDX-License-Identifier: Apache-2.0
"""The preparation of a job that was submitted here: the user's code makes model and data (R5)."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import orjson

from nicps.agent.children import Children
from nicps.agent.crash import name_log
from nicps.agent.driver import Driver, log
from nicps.agent.folders import new_job_id, remove, working_folder
from nicps.agent.loop import Loop
from nicps.agent.prepared import NAME, read_prepared
from nicps.agent.process import Child, User, python
from nicps.agent.records import MOST_LOG_BYTES, keep_tail
from nicps.errors import (
    EnvironmentProblem,
    JobFailed,
    NetworkProblem,
    NicpsError,
    UsageProblem,
    explain,
)
from nicps.job.actions import CloseSubmission
from nicps.protocol import NodeState
from nicps.session.messages import Submit

_MOST_TEXT = 600  # characters of an error: its reader is on this host


class Preparation:
    """One job at a time: its process, and its folder.

    Args:
        work: the folder in which folders are made.
        runs: the folder in which the log of a failed preparation is kept.
        user: the user that the job runs as.
    """

    def __init__(
        self, driver: Driver, loop: Loop, children: Children, work: Path, runs: Path, user: User
    ) -> None:
        self._driver, self._loop, self._children = driver, loop, children
        self._work, self._runs, self._user = work, runs, user
        self._number = 0
        self._job = ""
        self._base: Path | None = None
        self._child: Child | None = None

    @property
    def job(self) -> str:
        """The submission that is being prepared, or is prepared and not in the network yet; else empty."""
        submission, node = self._driver.life.roles.submission, self._driver.life.node
        on_its_way = submission is not None and (
            not submission.job_id or node.state is NodeState.FORMING
        )
        return self._job if on_its_way else ""

    @property
    def folder(self) -> Path:
        """The folder that the preparation fills."""
        assert self._base is not None
        return self._base / "prepared"

    def begin(self, job: Submit) -> int:
        """Prepare a submission; return its number.

        Raises:
            NetworkProblem: a job is under way.
            UsageProblem, NicpsError, OSError: it cannot be prepared; no file of it is left.
        """
        life = self._driver.life
        number = life.submit()
        try:
            self._base = working_folder(self._work)
            self._number, self._job = number, job.job
            self.folder.mkdir()
            os.chown(self.folder, self._user.uid, self._user.gid)
            self._start(number, job)
            return number
        except BaseException as error:
            life.withdraw_submission()
            self._clear()
            if isinstance(error, KeyError | TypeError | ValueError):
                raise UsageProblem(f"no job can be made of what was submitted: {error!r}") from None
            raise

    def begin_group(self, number: int, prepared: Mapping[str, Any]) -> None:
        """Make the folder of a group that begins to form; a group needs no preparation.

        Raises:
            NicpsError, OSError: its folder cannot be made.
        """
        driver, life = self._driver, self._driver.life
        self._number, self._job = number, ""
        try:
            self._base = working_folder(self._work)
            self.folder.mkdir()
            files = [{"path": NAME, "store": "all"}]
            (self.folder / NAME).write_bytes(orjson.dumps({**prepared, "files": files}))
            job_id, read = read_preparation(self.folder)
        except (NicpsError, OSError) as error:
            reason = explain("form a group", error)
            driver.carry_out(life.submission_failed(driver.now, number, reason))
            raise NetworkProblem(reason) from None
        driver.carry_out(life.submission_prepared(driver.now, number, job_id, read))

    def _start(self, number: int, job: Submit) -> None:
        """Run the preparation as the training user; no other host hears of it yet."""
        arguments = ["prepare", "--job", job.job, "--out", str(self.folder)]
        if job.data:
            arguments += ["--data", job.data]
        if job.resume:
            arguments += ["--resume", job.resume]
        arguments += ["--settings", orjson.dumps(job.settings or {}).decode()]
        assert self._base is not None
        self._child = self._children.spawn(
            python(job.entry or "trainer", *arguments),
            self.folder,
            self._base / "prepare.log",
            partial(self._ended, number),
            network_access=True,
        )

    def _ended(self, number: int, code: int) -> None:
        child, self._child = self._child, None
        assert child is not None
        driver, life = self._driver, self._driver.life
        if code:
            known = UsageProblem.exit_code, EnvironmentProblem.exit_code
            reason = code if code in known else JobFailed.exit_code
            why = child.reported_error() or f"the job's preparation ended: {child.last_line()}"
            if reason == JobFailed.exit_code:
                why = self._keep_log(child.log, why)
            driver.carry_out(life.submission_failed(driver.now, number, why, reason))
            return
        try:
            job_id, prepared = read_preparation(self.folder)
        except JobFailed as error:
            driver.carry_out(life.submission_failed(driver.now, number, str(error)))
            return
        driver.carry_out(life.submission_prepared(driver.now, number, job_id, prepared))

    def _keep_log(self, written: Path, why: str) -> str:
        """The log has a call stack: keep it like that of a run. Return the reason and the log's path, in one line."""
        try:
            with written.open("rb") as file:
                if len(file.read(MOST_LOG_BYTES).splitlines()) < 2:
                    return why
            kept = self._runs / new_job_id(Path(self._job).name) / written.name
            keep_tail(written, kept)
        except (OSError, JobFailed) as error:
            log(explain("keep the log of the preparation", error))
            return why
        return name_log(why, kept, _MOST_TEXT)

    def close(self, action: CloseSubmission) -> None:
        """Remove the folder."""
        if action.submission == self._number:
            self._clear()

    def _clear(self) -> None:
        child, self._child = self._child, None
        base, self._base = self._base, None
        if child is not None:
            self._children.end(child)
        if base is not None:
            clear = partial(remove, base)
            self._children.once_gone(lambda: self._loop.background(clear, lambda: None))


def read_preparation(folder: Path) -> tuple[str, dict[str, Any]]:
    """Make a name for the run, and read the job's prepared.json.

    Raises:
        JobFailed: the preparation has left no valid one.
    """
    try:
        prepared = read_prepared(folder)
        return new_job_id(prepared.get("job", "job")), prepared
    except NicpsError as error:
        raise JobFailed(f"the job's preparation is not usable: {error}") from None
