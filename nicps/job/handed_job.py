# SPDX-License-Identifier: Apache-2.0
"""A job as it was handed out to one host (R5)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nicps.job.plan import is_group
from nicps.job.script import is_script


class HandedJob:
    """What is here of a job.

    Attributes: `digest` of the hand-out, once all of it is here. `has_state`: another member's state is here, which the
    training program has not loaded yet. `settings`, the job's, as they were handed out; a training program cannot
    change them. `group`: it is no job but a group of programs (`nicps.collective`).
    """

    def __init__(self) -> None:
        self.digest = ""
        self.has_state = False
        self.prepared = {}

    @property
    def prepared(self) -> Mapping[str, Any]:
        """What the hand-out says of the job."""
        return self._prepared

    @prepared.setter
    def prepared(self, prepared: Mapping[str, Any]) -> None:
        self._prepared = prepared
        settings = prepared.get("settings", {})
        self.settings: dict[str, Any] = settings if isinstance(settings, dict) else {}
        self.group = is_group(self.settings)

    @property
    def script(self) -> bool:
        """Whether it is no job but a script (`nicps run`)."""
        return is_script(self.settings)

    @property
    def entry(self) -> str:
        """The training program's module, as the prepared job names it."""
        return str(self.prepared.get("entry", "trainer"))
