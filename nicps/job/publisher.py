# SPDX-License-Identifier: Apache-2.0
"""Messages to users about a job: its events and its end, and the contents of `nicps status`."""

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
    """Publishes to the operator, the submitter and the watchers.

    Attributes: `trouble`, why this host stands by in the middle of a job; `other_job`, the name of a job that is under
    way without this host; `progress`, the last report of its training program; `last_job`, the end of the last job that
    was submitted here or led from here (docs/socket.md).
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.trouble = self.other_job = ""
        self.progress: dict[str, Any] = {}
        self.last_job: LastJob | None = None

    def note_other_job(self, job: str) -> Orders:
        """A job is under way that admits no host, so not this one; or, without a name, it is over.

        Args:
            job: its name, as any host may have sent it.
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
        """Publish an event of a job, which may be the one that was submitted here."""
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
            code: the exit code of the submitter after an error.
        """
        self.last_job = LastJob(job_id, error, result)
        message = Result(result) if error is None else Error(error, code)
        return [Publish(message, submission)]


def exit_code(settings: Mapping[str, Any]) -> int:
    """The error for a submitter whose job has ended with a STOP of these settings."""
    if settings.get("cancelled"):
        return Cancelled.exit_code
    saved = settings.get("alarm") and settings.get("saved")
    return (Alarm if saved else JobFailed).exit_code


def run_hook(settings: Mapping[str, Any], reason: str) -> Orders:
    """The alarm's hook, if that STOP is an alarm's."""
    return [RunHook(reason)] if settings.get("alarm") else []
