# SPDX-License-Identifier: Apache-2.0
"""A job that was submitted on this host: prepared, and then put into the network (R1, R5)."""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING, Any

import orjson

from nicps.agent.bundle import OutStream
from nicps.agent.conductor import Conductor
from nicps.agent.folders import new_job_id, remove, working_folder
from nicps.agent.prepared import read_prepared
from nicps.agent.process import Child, python
from nicps.auth import nonce
from nicps.errors import EnvironmentProblem, JobFailed, NicpsError, UsageProblem
from nicps.protocol.course import Plan
from nicps.session.messages import Submit

if TYPE_CHECKING:
    from nicps.agent.agent import Agent


class Submission:
    """From `nicps submit` until the job has ended, wherever it is led from then on."""

    def __init__(self, agent: Agent, job: Submit) -> None:
        self.agent = agent
        self.job_id = ""
        self.entry = job.entry or "trainer"
        self.prepared: dict[str, Any] = {}
        self._base = working_folder(agent.settings.work)
        self._folder = self._base / "prepared"
        self._child: Child | None = None
        try:
            self._folder.mkdir()
            os.chown(self._folder, agent.user.uid, agent.user.gid)
            self._prepare(job)
        except BaseException:
            self.close()
            raise

    def _prepare(self, job: Submit) -> None:
        """The user's code makes model and data, as the training user (R5); nobody else hears of it yet."""
        arguments = ["prepare", "--job", job.job, "--out", str(self._folder)]
        if job.data:
            arguments += ["--data", job.data]
        if job.resume:
            arguments += ["--resume", job.resume]
        arguments += ["--settings", orjson.dumps(job.settings or {}).decode()]
        self._child = self.agent.children.spawn(
            python(self.entry, *arguments),
            self._folder,
            self._base / "prepare.log",
            self._is_prepared,
            network_access=True,
        )

    def _is_prepared(self, code: int) -> None:
        child, self._child = self._child, None
        assert child is not None
        agent = self.agent
        if code:
            known = UsageProblem.exit_code, EnvironmentProblem.exit_code
            reason = code if code in known else JobFailed.exit_code
            reported = child.reported_error()
            why = reported or f"the job's preparation ended: {child.last_line()}"
            agent.endings.submission_failed(why, reason)
            return
        try:
            self.prepared = read_prepared(self._folder)
            files = self.prepared["files"]
            self.job_id = new_job_id(self.prepared.get("job", "job"))
            plan = Plan.of(self.job_id, self.prepared["settings"], agent.settings.exchange)
        except NicpsError as error:
            agent.endings.submission_failed(f"the job's preparation is not usable: {error}")
            return
        except (ValueError, KeyError, TypeError) as error:
            agent.endings.submission_failed(
                f"the job's preparation left no usable prepared.json: {error!r}"
            )
            return
        agent.tell("forming", self.job_id, data=self.prepared.get("data"))
        agent.conductor = Conductor(
            agent, self.job_id, plan, lambda: OutStream(self._folder, files), None
        )
        agent.act(agent.node.start(agent.now, nonce()))

    @property
    def about(self) -> dict[str, Any]:
        """For the result."""
        return {"data": self.prepared.get("data"), "settings": self.prepared.get("settings")}

    def close(self) -> None:
        """Leave nothing behind."""
        child, self._child = self._child, None
        if child is not None:
            self.agent.children.end(child)
        clear = partial(remove, self._base)
        self.agent.children.once_gone(lambda: self.agent.loop.background(clear, lambda: None))
