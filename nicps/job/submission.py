# SPDX-License-Identifier: Apache-2.0
"""A job that was submitted on this host: prepared, and then put into the network (R1, R5)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nicps.errors import JobFailed
from nicps.exchange import Exchange
from nicps.job.plan import Plan
from nicps.job.text import one_line
from nicps.protocol import Group


@dataclass(slots=True)
class Submission:
    """From `nicps submit` until the job has ended, wherever it is led from then on.

    `number`: of the submission, at this host. `job_id` is empty until the job is prepared. `group`: it is no job, but a
    program that waits for that group.
    """

    number: int
    job_id: str = ""
    prepared: Mapping[str, Any] = field(default_factory=dict)
    group: Group | None = None

    def plan(
        self,
        job_id: str,
        prepared: Mapping[str, Any],
        exchange: Exchange,
        *,
        believes_switch: bool = False,
    ) -> Plan:
        """The job is prepared: make the plan of its settings, with what this host believes (`Plan.choose`).

        Raises:
            JobFailed: the preparation left no valid files.
        """
        try:
            settings = prepared["settings"]
            chosen = Plan.choose(settings, exchange, believes_switch=believes_switch)
            sets = prepared.get("sets", ())
            plan = Plan.of(job_id, settings, chosen, believes_switch=believes_switch, sets=sets)
            self.job_id, self.prepared = job_id, prepared
            assert self.files is not None
        except (ValueError, KeyError, TypeError) as error:
            raise JobFailed(
                f"the job's preparation left no usable prepared.json: {error!r}"
            ) from None
        return plan

    @property
    def files(self) -> Sequence[Mapping[str, Any]]:
        """The files that are handed out."""
        files: Sequence[Mapping[str, Any]] = self.prepared["files"]
        return files

    @property
    def settings(self) -> Mapping[str, Any]:
        """The job's settings."""
        settings: Mapping[str, Any] = self.prepared["settings"]
        return settings

    @property
    def notes(self) -> Sequence[str]:
        """What the preparation has chosen, for the user."""
        notes = self.prepared.get("notes", ())
        return [str(note) for note in notes] if isinstance(notes, list) else []

    @property
    def branches(self) -> str:
        """Which of the model's branches are in which set (B1), in one line; empty if they were not packed."""
        return one_line(self.prepared.get("branches", ""))

    @property
    def about(self) -> dict[str, Any]:
        """The entries for the result."""
        about = {key: self.prepared.get(key) for key in ("data", "settings")}
        return about | ({"branches": self.branches} if self.branches else {})
