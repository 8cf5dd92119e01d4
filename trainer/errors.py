# SPDX-License-Identifier: Apache-2.0
"""The trainer's branch of the error tree."""

from __future__ import annotations

from nicps.errors import JobFailed, UsageProblem


class JobError(JobFailed):
    """The job's code, data or model is wrong; a job may raise it too, for a message of its own."""


class SettingError(JobError):
    """A setting that was given with the job: there is no such one, or it cannot have that value."""

    exit_code = UsageProblem.exit_code


class FolderError(JobError):
    """The folder that was given cannot be sent as it is."""

    exit_code = UsageProblem.exit_code
