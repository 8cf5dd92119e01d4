# SPDX-License-Identifier: Apache-2.0
"""How a job ends at a host, and who is told: the submitter, the watchers, the alarm's hook (R14, R22)."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from nicps import wire
from nicps.agent.conductor import Conductor
from nicps.errors import Alarm, JobFailed, NicpsError
from nicps.protocol import Phase
from nicps.session.messages import Error, LastJob, Result

if TYPE_CHECKING:
    from nicps.agent.agent import Agent
    from nicps.agent.control import Peer


class Endings:
    """The ends that a job can come to at this host."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent

    def over(self, settings: Mapping[str, Any], said: str, lead: str) -> None:
        """The job has ended, led by another host. `settings` are those of the STOP, as far as they are known."""
        agent = self._agent
        agent.log(said)
        agent.trouble = ""
        submission, agent.submission = agent.submission, None
        if settings.get("alarm"):
            self.run_hook(said)
        if submission is None:
            return
        submission.close()
        agent.node.busy = False
        result, error = {}, None
        if settings.get("ok"):  # the one that leads now has collected it
            result = {"job_id": submission.job_id, "lead": lead}
        else:
            error = said
        agent.last_job = LastJob(submission.job_id, error, result)
        if error is None:
            agent.publish(Result(result))
        else:
            self._tell_end(error, settings)

    def unheard(self, ending: wire.Ending, lead: str, crash: str = "") -> None:
        """It ended while this host was not heard. `crash`: what ended the last training program here."""
        done = ending is wire.Ending.DONE
        how = "is done" if done else "was stopped"
        said = f"the job {how} while this host was not heard; {lead} led it"
        self.over({"ok": done}, f"{crash}; {said}" if crash and not done else said, lead)

    def submission_failed(self, reason: str, code: int = JobFailed.exit_code) -> None:
        """A job that was submitted here has not come into the network. `code`: for the submitter to end with."""
        agent = self._agent
        submission, agent.submission = agent.submission, None
        agent.conductor = None
        agent.node.busy = False
        if submission is not None:
            submission.close()
            agent.last_job = LastJob(submission.job_id, reason, {})
            agent.log(f"job stopped: {reason}")
            agent.publish(Error(reason, code))

    def lead_over(self, conductor: Conductor, phase: Phase) -> None:
        """The lead: everybody stands by. Tell how it went."""
        agent = self._agent
        agent.conductor = None
        submission, agent.submission = agent.submission, None
        job, ok = agent.job, bool(phase.settings.get("ok"))
        about = submission.about if submission is not None else {}
        names = [agent.node.name, *job.handout.collected] if job is not None else []
        message = str(phase.settings.get("message", ""))
        alarmed = job if phase.settings.get("alarm") else None
        if alarmed is not None:
            alarmed.note("alarm", why=message)
        agent.end_job("the job is done" if ok else message, alarmed is not None)
        agent.node.busy = False
        if submission is not None:
            submission.close()
        waiting = [peer for peer in agent.control.peers if peer.watches]  # not for the next job

        def tell(result: Mapping[str, Any], reason: str | None) -> None:
            agent.last_job = LastJob(conductor.job_id, reason, result)
            if reason is None:
                agent.log(f"job {conductor.job_id} done: {result.get('report')}")
                agent.publish(Result(result), waiting)
            else:
                agent.log(f"job stopped: {reason}")
                if phase.settings.get("alarm"):
                    self.run_hook(reason)
                self._tell_end(reason, phase.settings, waiting)

        def summarised(result: Mapping[str, Any], error: str) -> None:
            if error:
                tell({}, error)
            else:
                conductor.report(entry, lambda: tell(result, None))

        if ok and job is not None:
            entry = job.entry
            conductor.result(names, about, summarised)
            return
        if alarmed is not None:  # its records are kept once its processes are gone
            draws = alarmed.entry
            agent.children.once_gone(lambda: conductor.report(draws, lambda: None))
        reason = message
        if phase.settings.get("saved") and conductor.saved:  # by this host, not by a lead before it
            reason += f"; {conductor.saved}: `nicps resume` goes on from there"
        tell({}, None if ok else reason)

    def _tell_end(
        self,
        reason: str,
        settings: Mapping[str, Any] | None = None,
        waiting: Collection[Peer] | None = None,
    ) -> None:
        """`settings` are those of the STOP that has ended the job; `waiting`: who has submitted it."""
        agent = self._agent
        saved = settings is not None and settings.get("alarm") and settings.get("saved")
        code = (Alarm if saved else JobFailed).exit_code
        agent.publish(Error(reason, code), waiting)

    def run_hook(self, reason: str) -> None:
        """R18, R22: tell the user in the way that the user wants it."""
        agent = self._agent
        if agent.settings.alarm_hook:
            log = agent.settings.runs / "alarm.log"
            try:
                agent.settings.runs.mkdir(parents=True, exist_ok=True)
                argv = ["/bin/sh", "-c", agent.settings.alarm_hook, "nicps", reason]
                agent.children.spawn(
                    argv,
                    agent.settings.runs,
                    log,
                    lambda code: agent.log(f"the alarm's hook ended with {code}") if code else None,
                    as_owner=True,
                    network_access=True,
                )
            except (OSError, NicpsError) as error:
                agent.log(f"the alarm's hook cannot be run: {error}")
