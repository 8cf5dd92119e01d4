# SPDX-License-Identifier: Apache-2.0
"""A job as it was handed out to one host (R5)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from nicps.job.plan import is_group
from nicps.job.script import is_script


@dataclass(slots=True)
class HandedJob:
    """What is here of a job.

    Attributes: `digest` of the hand-out, once all of it is here; `prepared`, the job's settings from it. `has_state`:
    another member's state is here, which the training program has not loaded yet.
    """

    digest: str = ""
    prepared: Mapping[str, Any] = field(default_factory=dict)
    has_state: bool = False

    @property
    def settings(self) -> dict[str, Any]:
        """The job's settings, as they were handed out; a training program cannot change them."""
        settings = self.prepared.get("settings", {})
        return settings if isinstance(settings, dict) else {}

    @property
    def group(self) -> bool:
        """Whether it is no job but a group of programs (`nicps.collective`)."""
        return is_group(self.settings)

    @property
    def script(self) -> bool:
        """Whether it is no job but a script (`nicps run`)."""
        return is_script(self.settings)

    @property
    def entry(self) -> str:
        """The training program's module, as the prepared job names it."""
        return str(self.prepared.get("entry", "trainer"))
