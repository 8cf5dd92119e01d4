# SPDX-License-Identifier: Apache-2.0
"""The PyTorch floor of nicps: jobs, and the loop that trains them.

A job is a folder with a `job.py` (docs/jobs.md); it needs `Settings` from here, `State` for its end
rule and perhaps `JobError`. `python -m trainer check|prepare|run|report` are for `nicps lab run`
and the agent.
"""

from trainer.errors import JobError
from trainer.settings import Settings, State

__all__ = ["JobError", "Settings", "State"]
