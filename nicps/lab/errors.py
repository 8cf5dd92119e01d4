# SPDX-License-Identifier: Apache-2.0
"""What can be wrong with a lab, as branches of the tree in nicps.errors.

    EnvironmentProblem              exit code 3
    └── LabProblem                      the lab cannot be made, used or removed
        ├── LabExists                   a lab of that name stands already
        └── LabNotFound                 no lab of that name, or it has no such host
    JobFailed                       5
    └── AgentFailed                     an agent ended before it answered

The exit code of AgentFailed is the agent's own.
"""

from __future__ import annotations

from nicps.errors import EnvironmentProblem, JobFailed


class LabProblem(EnvironmentProblem):
    """The lab cannot be made, used or removed."""


class LabExists(LabProblem):
    """A lab of that name stands already."""


class LabNotFound(LabProblem):
    """No lab of that name stands, or it has no such host."""


class AgentFailed(JobFailed):
    """An agent in the lab ended before it answered; `exit_code` is the agent's own."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code if 0 < exit_code < 128 else 4
