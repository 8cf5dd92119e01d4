# SPDX-License-Identifier: Apache-2.0
"""What comes in: which part of the node a frame is for, and whether it is taken now."""

from __future__ import annotations

from nicps import wire
from nicps.protocol.actions import Cancelled, Failed, PhaseAgreed, Send
from nicps.protocol.admission import Admission
from nicps.protocol.deciding import Decisions
from nicps.protocol.lead import LeadWatch
from nicps.protocol.local_host import LocalHost
from nicps.protocol.membership import Membership
from nicps.protocol.rings import Rings
from nicps.protocol.signals import Steps
from nicps.protocol.standing import DONE, ENDED
from nicps.protocol.switch_link import SwitchLink


class Inbox:
    """Frames of this network that are not this host's own."""

    def __init__(
        self,
        host: LocalHost,
        admission: Admission,
        membership: Membership,
        decisions: Decisions,
        rings: Rings,
        lead: LeadWatch,
        switch: SwitchLink,
    ) -> None:
        self._host = host
        self._admission = admission
        self._membership = membership
        self._decisions = decisions
        self._rings = rings
        self._lead = lead
        self._switch = switch

    def on_frame(self, now: float, source: bytes, frame: wire.Frame) -> Steps:
        """A frame that came up from that address.

        Raises:
            WireError: it cannot be meant; nothing has changed.
        """
        header, body, view = frame.header, frame.body, self._host.view
        if isinstance(body, wire.Call):
            return self._admission.on_call(now, source, frame)
        if isinstance(body, wire.Answer):
            return self._admission.on_answer(now, source, frame)
        if isinstance(body, wire.View):
            if body.step == wire.ViewStep.INSTALL:
                return self._membership.on_install(now, source, frame)
            if body.step == wire.ViewStep.ASK:
                return self._membership.on_ask(now, body.nonce)
        if (
            header.view == view.number
            and header.sender in view.live
            and view.members[header.sender - 1].mac == source
        ):
            steps = self._on_member_frame(now, source, frame)
            if header.sender == view.lead:  # only now: what is malformed is no sign of life
                self._lead.hear(now)
            return steps
        if source == wire.SWITCH and not header.sender:
            return self._on_switch_frame(now, frame)
        if isinstance(body, wire.View) and header.view < view.number:
            return self._membership.send_view(view.number_of(source), body.nonce)
        return []

    def _on_switch_frame(self, now: float, frame: wire.Frame) -> Steps:
        """A Linux switch says something, or answers a question of this member; or a P4 switch has made the last sum."""
        header, body, ring = frame.header, frame.body, self._rings.current
        if isinstance(body, wire.Switch):
            return self._switch.on_frame(now, body)
        if ring is None or (header.view, header.round) != (self._host.view.number, ring.round):
            return []
        if isinstance(body, wire.Fragment):
            return ring.on_completion(now)
        if isinstance(body, wire.Lacking) and ring.asks_switch and not self._membership.changing:
            return ring.on_lacking(now, frame)
        return []

    def _on_member_frame(self, now: float, source: bytes, frame: wire.Frame) -> Steps:
        body, header, ring = frame.body, frame.header, self._rings.current
        if not self._host.is_member or self._membership.view_change is None:
            return self._on_frame_standing_by(source, frame)
        if isinstance(body, wire.Token):
            return self._on_token(now, frame, body) if not self._membership.changing else []
        if isinstance(body, wire.View):
            return self._membership.on_view(now, source, header.sender, frame)
        if isinstance(body, wire.Vote):
            return self._on_vote(now, header.sender, frame, body)
        if isinstance(body, wire.Leave):
            return self._membership.on_leave(now, header.sender)
        if self._membership.changing:
            return []
        if isinstance(body, wire.Decision):
            return self._decisions.hear(frame)
        if isinstance(body, wire.Ack):
            self._decisions.hear_acknowledgement(now, header.sender, body, frame.tail)
        elif isinstance(body, wire.Fragment):
            if ring is not None and header.round == ring.round:
                return ring.on_completion(now)
        elif isinstance(body, wire.Lacking):
            return ring.on_lacking(now, frame) if ring is not None else []
        elif isinstance(body, wire.Want):
            return ring.on_want(now, frame) if ring is not None else []
        elif isinstance(body, wire.Fail) and self._host.leads:
            name = self._host.view.members[header.sender - 1].name
            if body.cancels:
                return [Cancelled(name)]
            return [Failed(f"{name}: {frame.tail.decode(errors='replace')}")]
        return []

    def _on_token(self, now: float, frame: wire.Frame, token: wire.Token) -> Steps:
        """The first token of a phase says that the phase is in force."""
        ring, coming = self._rings.current, self._rings.coming
        if coming is not None and token.generation == coming.phase.generation:
            ring = self._membership.enter_phase()
        return ring.on_token(now, frame) if ring is not None else []

    def _on_vote(self, now: float, sender: int, frame: wire.Frame, vote: wire.Vote) -> Steps:
        if vote.step == wire.ViewStep.INSTALL:
            self._membership.on_installed(sender, vote)
            return []
        if vote.complete & ENDED:
            done = vote.complete & DONE
            return self._on_ended(wire.Ending.DONE if done else wire.Ending.ENDED)
        return self._membership.on_vote(now, sender, frame)

    def _on_ended(self, ending: wire.Ending) -> Steps:
        """A member has stood by after the end. The lead that has decided it knows how the job has ended."""
        stop, pending = self._decisions.last, self._decisions.pending
        if not self._host.leads or stop is None or stop.kind is not wire.PhaseKind.STOP:
            return self._membership.stand_by_after_end(ending, self._host.view)
        answers = dict(pending.answers) if pending is not None else {}
        self._membership.stand_by(stop.ending)
        return [PhaseAgreed(stop, answers)]

    def _on_frame_standing_by(self, source: bytes, frame: wire.Frame) -> Steps:
        """Late repeats of the end; and who has missed it and would go on."""
        body, installation = frame.body, self._membership.installation
        if isinstance(body, wire.Decision):
            return self._decisions.acknowledge_again(body.number)
        if not isinstance(body, wire.View):
            return []
        if self._host.ended:
            how = ENDED | DONE * (self._host.ending is wire.Ending.DONE)
            vote = wire.Vote(0, body.ballot, 0, 0, 0, source, body.step, how)
            return [Send(wire.Frame(self._host.header(0), vote, ((), ())))]
        if installation is not None and installation.view.number > self._host.view.number:
            return [
                installation.send_to(frame.header.sender, body.nonce)
            ]  # by which we were evicted
        return []
