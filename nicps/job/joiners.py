# SPDX-License-Identifier: Apache-2.0
"""The hosts that want to come into a job that is under way, at its lead (R20).

The lead calls them, and notes their answers. A host that has answered is taken into the view between two steps
(`Course`). Then it is a learner until it has the job's files and state.
"""

from __future__ import annotations

from nicps import wire
from nicps.job.node_info import NodeInfo
from nicps.job.orders import CallHosts, Orders, PublishEvent
from nicps.job.plan import Plan
from nicps.protocol import Joiner, View
from nicps.protocol.actions import Answered


class Joiners:
    """Hosts that have answered the call.

    Attributes: `waiting`, the last answer of each, by its address.
    """

    def __init__(self, plan: Plan, node: NodeInfo) -> None:
        self.waiting: dict[bytes, Answered] = {}
        self._refused: set[bytes] = set()  # hosts that cannot come back
        self._plan, self._node = plan, node

    def enter_view(self, view: View) -> None:
        """Only a host that is a learner in this view still waits. Another one answers the call again."""
        learners = self._node.learners
        self.waiting = {
            mac: answer for mac, answer in self.waiting.items() if view.number_of(mac) in learners
        }

    def note_answer(self, answer: Answered) -> Orders:
        """A host on standby wants to come back, or a new one to come in."""
        joiner = answer.joiner
        if not answer.number and not self._admits:
            return []
        if self._plan.redeal or answer.stage is not wire.Stage.NOTHING:
            self.waiting[joiner.mac] = answer
        elif joiner.mac not in self._refused:
            self._refused.add(joiner.mac)
            why = "it has none of the job's files, and nobody has all of them (redeal is off)"
            return [PublishEvent("warning", {"message": f"{joiner.name} is not taken back: {why}"})]
        return []

    def call(self, *, stopping: bool) -> Orders:
        """Call hosts from now on while there is one to be called, and no more once the job is stopping."""
        plan, view = self._plan, self._node.view
        missing = len(view.live) < len(view.members) or bool(self._node.learners) or plan.admit
        # A host is told of a group that is under way if it would form one; of a job, if that admits no host.
        told = plan.group or not self._admits
        return [CallHosts(plan.called(view), missing and not stopping, closed=told)]

    def outside(self) -> tuple[Joiner, ...]:
        """Those that wait outside the view."""
        view = self._node.view
        return tuple(
            answer.joiner
            for mac, answer in self.waiting.items()
            if view.number_of(mac) not in view.live
        )

    def learners(self, stage: wire.Stage) -> frozenset[int]:
        """Members without the state that are at that stage."""
        view = self._node.view
        stages = {view.number_of(mac): answer.stage for mac, answer in self.waiting.items()}
        return frozenset(k for k in self._node.learners if stages.get(k) is stage)

    @property
    def _admits(self) -> bool:
        """Whether hosts that are not in the list may come in."""
        return self._plan.admit and len(self._node.view.members) < wire.MAX_MEMBERS
