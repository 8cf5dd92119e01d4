# SPDX-License-Identifier: Apache-2.0
"""The trainer's branch of the error tree."""

from __future__ import annotations

import traceback

from nicps.errors import JobFailed, UsageProblem


def print_cause(error: BaseException) -> None:
    """Print the call stack of what is behind an error, such as one that the job's code has raised, into the log."""
    if error.__cause__ is not None:
        traceback.print_exception(error.__cause__)


class JobError(JobFailed):
    """The job's code, data or model is wrong; a job may raise it too, for a message of its own."""


class SettingError(JobError):
    """A setting that was given with the job: there is no such one, or it cannot have that value."""

    exit_code = UsageProblem.exit_code


class Untraceable(JobError):
    """torch.fx cannot trace the model's forward pass, or what it has traced computes something else."""


class FolderError(JobError):
    """The folder that was given cannot be sent as it is."""

    exit_code = UsageProblem.exit_code
