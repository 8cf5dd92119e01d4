# SPDX-License-Identifier: Apache-2.0
"""What a change of the view asks of a host: the kernel, the job and the lead's side follow it (R17 to R20, R22)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nicps.agent.conductor import Conductor
from nicps.agent.program import one_line
from nicps.errors import NicpsError, explain
from nicps.exchange import Exchange
from nicps.protocol import (
    Action,
    Answered,
    Cut,
    Differs,
    Installed,
    NoProgress,
    Ready,
    Struck,
)
from nicps.protocol.course import Found, Plan

if TYPE_CHECKING:
    from nicps.agent.agent import Agent


class Views:
    """Carries out the node's actions about views."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent

    def on(self, action: Action) -> None:
        """One of them."""
        agent = self._agent
        if isinstance(action, Installed):
            self._installed(action)
        elif isinstance(action, Ready):
            if agent.conductor is not None:
                agent.conductor.ready(action.view)
        elif isinstance(action, Answered):
            if agent.conductor is not None:
                agent.conductor.course.answered(action)
        elif isinstance(action, Struck):
            self._struck(action)
        elif isinstance(action, Cut):
            self._cut(agent.node.view.names(action.missing))
        elif isinstance(action, Differs):
            self._differs(action)
        elif isinstance(action, NoProgress):
            agent.warn(action.explain(agent.node.view))

    def _installed(self, action: Installed) -> None:
        """A member list is in force: the kernel follows it, and the job goes on in it."""
        agent = self._agent
        view = action.view
        agent.frames.sender.drop_fragments()  # of the view before
        live = [m.mac if m.number in view.live else None for m in view.members]
        agent.dataplane.enter_view(
            view.number, action.number, live, view.next_after(action.number), agent.keys.enter(view)
        )
        agent.frames.kernel_forgets()
        agent.trouble = ""
        # The network that it was to start is there; struck off, it comes back to it.
        agent.node.busy = False
        agent.log(f"network {agent.settings.network}: view {view.number}, {view.names(view.live)}")
        left = set(range(1, len(view.members) + 1)) - view.live
        if left:
            agent.log(f"not in it: {view.names(left)}")
        if agent.job is not None:
            agent.job.note_view()
            try:
                agent.job.installed(action)
            except (OSError, NicpsError) as error:
                agent.act(agent.node.fail(agent.now, explain("go on with the job here", error)))
        others_stay = agent.node.leaving and len(view.live) > 1
        if not agent.node.leads or others_stay:
            agent.conductor = None
        elif agent.conductor is None:
            self._take_over()

    def _take_over(self) -> None:
        """R22: the lead before us has left; this host acts as node 1 from now on."""
        agent = self._agent
        job, node = agent.job, agent.node
        able = job is not None and bool(job.digest) and node.number not in node.learners
        try:
            if job is None or not able:
                plan = Plan("", 1, 8)
            else:
                believed = agent.settings.believes(job.exchange)
                exchange = job.exchange if believed else Exchange.BROADCAST
                plan = Plan.of(job.id, job.settings, exchange)
        except (NicpsError, ValueError, KeyError, TypeError) as error:
            able, plan = False, Plan("", 1, 8)
            agent.warn(f"the job cannot be led from here: {error}")
        found = Found(
            able=able,
            trained=job is not None and job.train_rounds > 0,
            finishing=job is not None and job.finishing,
            unit=job.unit if job is not None else None,
            exchange=job.unit_of if job is not None else Exchange.BROADCAST,
            crash=one_line(job.crash) if job is not None else "",
        )
        agent.log("this host leads the job from now on")
        agent.conductor = Conductor(agent, plan.job, plan, None, found)

    def lead_with_the_job(self) -> None:
        """All of a hand-out is on the disk: who took the lead over before it had the job can lead from now on."""
        agent = self._agent
        if agent.conductor is None or agent.conductor.course.able:
            return
        waits = agent.conductor.course.waits
        self._take_over()
        if waits:
            agent.conductor.ready(agent.node.view)

    def _struck(self, action: Struck) -> None:
        """R19: the others have gone on without us, or there is nothing to go on with."""
        agent = self._agent
        agent.frames.off()
        agent.conductor = None
        if action.ending:
            crash = agent.job.crash if agent.job is not None else ""
            agent.end_job("the job has ended")
            agent.endings.unheard(action.ending, action.lead, one_line(crash))
            return
        if agent.job is not None:
            agent.job.note("stands by", why=action.reason)
            agent.job.struck()
        self.say_trouble(f"standing by: {action.reason}")

    def _cut(self, silent: str) -> None:
        """R18: nobody may go on here; what there is must not be lost if the others never come back."""
        agent = self._agent
        self.say_trouble(f"{silent} cannot be heard, and there is no majority without: standing by")
        if agent.job is not None:
            agent.job.note("alarm", why=agent.trouble)
            agent.job.checkpoints.cut(agent.trouble)
        else:
            agent.endings.run_hook(agent.trouble)

    def say_trouble(self, what: str) -> None:
        """Why this host stands by in the middle of a job: for the log, the watchers and `nicps status`."""
        agent = self._agent
        agent.trouble = what
        agent.warn(what)

    def _differs(self, action: Differs) -> None:
        """Who holds other weights than most stands by and takes the state again; a tie is for the user."""
        agent = self._agent
        view, node = agent.node.view, agent.node
        if action.numbers:
            names = view.names(action.numbers)
            agent.warn(f"after round {action.round} the weights of {names} differ from the others'")
            if agent.job is not None:
                agent.job.finish.differed += [
                    {"name": view.members[k - 1].name, "round": action.round, "view": view.number}
                    for k in sorted(action.numbers)
                ]
                members = [view.members[k - 1].name for k in sorted(action.numbers)]
                agent.job.note("differs", members=members)
            rest = [k for k in view.order if k not in action.numbers]
            if rest and rest[0] == node.number:
                agent.act(node.strike(agent.now, action.numbers))
        elif agent.conductor is not None:
            agent.conductor.course.alarm(
                f"after round {action.round} the members' weights differ, and no half agrees"
            )

    def depart(self, reason: str) -> None:
        """R17: this host cannot go on now, and comes back. It leads no more, but votes until the others go on."""
        agent = self._agent
        agent.log(reason)
        if agent.job is not None:
            agent.job.note("departs", why=reason)
        if len(agent.node.view.live) > 1:
            agent.conductor = None
        agent.act(agent.node.leave(agent.now, reason))
