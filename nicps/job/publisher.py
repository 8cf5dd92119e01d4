# SPDX-License-Identifier: Apache-2.0
"""What users see of a job: its events and its end, and what `nicps status` shows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nicps.errors import Alarm, Cancelled, JobFailed
from nicps.job.actions import Log, Publish, RunHook
from nicps.job.orders import Orders
from nicps.job.submission import Submission
from nicps.job.text import one_line
from nicps.job.under_way import UnderWay
from nicps.session.events import EVENTS
from nicps.session.messages import Error, LastJob, Result


class Publisher:
    """For the operator, the submitter and the watchers.

    Attributes: `trouble`, why this host stands by in the middle of a job; `other_job`, the name of a job that is under
    way without this host; `progress`, what its training program reported last; `last_job`, how the last job ended that
    was submitted here or led from here (docs/socket.md).
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.trouble = self.other_job = ""
        self.progress: dict[str, Any] = {}
        self.last_job: LastJob | None = None

    def note_other_job(self, job: str) -> Orders:
        """A job is under way that admits nobody, so not this host; or, without a name, it is over.

        Args:
            job: as any host may have sent it.
        """
        before, self.other_job = self.other_job, one_line(job)
        if UnderWay.read(self.other_job) is not None:
            return [Log(f"{self.other_job} is under way")] if before != self.other_job else []
        if self.other_job:
            text = "is under way and admits no more hosts: this one takes part in the next"
            return [Log(f"job {self.other_job} {text}")]
        return [Log(f"job {before} has ended, or is not heard of any more")] if before else []

    def make_event(
        self, event: str, job_id: str, values: Mapping[str, Any], submission: Submission | None
    ) -> Orders:
        """An event of a job, which may be the one that was submitted here."""
        mine = submission is not None and submission.job_id == job_id
        message = EVENTS[event](job_id, **values)
        return [Publish(message, submission.number if submission is not None and mine else 0)]

    def make_end(
        self,
        job_id: str,
        submission: int,
        result: Mapping[str, Any],
        error: str | None,
        code: int = JobFailed.exit_code,
    ) -> Orders:
        """A job that was submitted here, or led from here, has ended.

        Args:
            code: the exit code that the submitter ends with where there is an error.
        """
        self.last_job = LastJob(job_id, error, result)
        message = Result(result) if error is None else Error(error, code)
        return [Publish(message, submission)]


def exit_code(settings: Mapping[str, Any]) -> int:
    """Of a submitter whose job has ended with a STOP of these settings."""
    if settings.get("cancelled"):
        return Cancelled.exit_code
    saved = settings.get("alarm") and settings.get("saved")
    return (Alarm if saved else JobFailed).exit_code


def run_hook(settings: Mapping[str, Any], reason: str) -> Orders:
    """The alarm's hook, if that STOP is an alarm's."""
    return [RunHook(reason)] if settings.get("alarm") else []
