# SPDX-License-Identifier: Apache-2.0
"""The errors of a lab, as branches of the tree in nicps.errors.

    UsageProblem                    exit code 2
    ├── LabExists                       a lab of that name stands already
    └── LabNotFound                     no lab of that name, or it has no such host
    EnvironmentProblem              3
    └── LabProblem                      the lab cannot be made, used or removed
        └── NothingRuns             4   no agent, or no training program, runs on that host
    JobFailed                       5
    └── AgentFailed                     an agent ended before it answered

The exit code of AgentFailed is the agent's own.
"""

from __future__ import annotations

from nicps.errors import EnvironmentProblem, JobFailed, NetworkProblem, UsageProblem


class LabExists(UsageProblem):
    """A lab of that name stands already."""


class LabNotFound(UsageProblem):
    """No lab of that name stands, or it has no such host."""


class LabProblem(EnvironmentProblem):
    """The lab cannot be made, used or removed."""


class NothingRuns(LabProblem):
    """No agent, or no training program, runs on that host."""

    exit_code = NetworkProblem.exit_code


class AgentFailed(JobFailed):
    """An agent in the lab ended before it answered; `exit_code` is the agent's own."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code if 0 < exit_code < 128 else 4
