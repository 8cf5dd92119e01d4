# SPDX-License-Identifier: Apache-2.0
"""One host as a state machine: forming, views, decisions, and the ring of the phase in force.

Every method takes `now` (seconds, any steady clock) and returns the actions to carry out, in order. The parts hold one
another in one direction; what they report to the part above is among the steps that they return
(`nicps.protocol.signals`).
"""

from __future__ import annotations

from collections.abc import Sequence

from nicps import wire
from nicps.errors import WireError
from nicps.protocol.actions import (
    Action,
    Cancelled,
    Committed,
    Failed,
    Installed,
    Joiner,
    PhaseAgreed,
    Prepare,
    Ready,
    Send,
    SendFragments,
)
from nicps.protocol.carried import Offer
from nicps.protocol.early_lists import ToldList
from nicps.protocol.exchange.steps import Source
from nicps.protocol.formation import Group
from nicps.protocol.local_host import NodeState
from nicps.protocol.parts import NodeParts
from nicps.protocol.phase import ROUND_KINDS, Phase
from nicps.protocol.served_ring import ServedRing
from nicps.protocol.signals import (
    AskForLaterView,
    Chosen,
    Formed,
    Freeze,
    Lacking,
    Renew,
    Silent,
    Steps,
    WithoutSelf,
)
from nicps.protocol.token import MOST_HOPS
from nicps.protocol.view import numbered


class Node(NodeParts):
    """One member (docs/protocol.md): its events. `NodeParts` has what it is made with, and what others ask."""

    def header(self, flags: int, round_: int) -> wire.Header:
        """The next header of a frame that this member makes outside the node."""
        header = self._host.view.header(self._host.number, round_, flags)
        return self._numbered(header)

    def take_sequence(self, count: int) -> int:
        """Reserve `count` sequence numbers; the first of them."""
        first = self._sequence + 1
        self._sequence = (self._sequence + count) & 0xFFFFFFFF
        return first & 0xFFFFFFFF

    def _numbered(self, header: wire.Header) -> wire.Header:
        return numbered(header, self.network, self.take_sequence(1))

    # ---- commands

    def join(self, now: float) -> None:
        """This host has begun: it asks whether a job is under way (`NotAdmitted`)."""
        self._bystander.begin(now)
        self._note_change()

    def start(self, now: float, nonce: int, group: Group | None = None) -> list[Action]:
        """R1: this host starts the network, perhaps a group's. `nonce` is a random 64-bit number."""
        assert not self._host.is_member
        self._host.state = NodeState.FORMING
        return self._take(now, self._formation.start(now, nonce, self.view.number, group))

    def wait_for(self, group: Group | None) -> None:
        """A program on this host waits for that group, or (None) no more."""
        self._formation.waits = group
        self._note_change()

    def abandon(self) -> tuple[str, ...]:
        """This host forms no network any more; the hosts that have answered, this one included."""
        found, self._formation.starting = self._formation.found, None
        if self._host.state is NodeState.FORMING:
            self._host.state = NodeState.STANDBY
        self._note_change()
        return found

    def decide(self, now: float, phase: Phase) -> list[Action]:
        """The lead only: open `phase`; its number and generation are filled in here.

        Nothing comes of it before all have the view, nor in the middle of a step (`between_steps`), but for a STOP.

        Raises:
            WireError: its settings are too long for a frame, or no member would take it; nothing has changed.
        """
        assert self.leads
        phase.check(len(self.view.members))
        self.rings.check(phase)
        if len(phase.pack()) > wire.MAX_FRAME_BYTES - 100:
            raise WireError(f"a decision of {len(phase.pack())} bytes does not fit a frame")
        stops = phase.kind is wire.PhaseKind.STOP
        if not self._may_decide or not (stops or self.between_steps):
            return self._take(now, [])
        self._lead.hear(now)
        return self._take(now, self._decisions.decide(now, phase))

    def prepared(self, now: float, number: int, answer: bytes = b"") -> list[Action]:
        """This host is ready for the decision of that number; `answer` (JSON) goes to the lead."""
        phase = self._decisions.awaits(number)
        if phase is None or not self._host.is_member:
            return self._take(now, [])
        steps = self._decisions.prepared(now, phase, answer)
        if phase.kind is wire.PhaseKind.STOP and not self.leads:
            self.membership.stand_by(phase.ending)
        return self._take(now, steps)

    def fail(self, now: float, reason: str) -> list[Action]:
        """The job cannot go on here, and so nowhere: the lead stops it. But who has only come to it declines."""
        steps: Steps = []
        if self.state is NodeState.STANDBY:
            steps += self._departure.decline(reason)
        elif self.leaving or (self.number in self.learners and not self.leads):
            self._departure.leave_for_good(now, reason)
        elif self.leads:
            steps.append(Failed(reason))
        elif self._host.is_member:
            self._departure.fail(now, reason)
        return self._take(now, steps)

    def cancel(self, now: float) -> list[Action]:
        """The user cancels the job: `Cancelled` follows at the lead, as often as it is told."""
        if self._host.is_member and not self.leads:
            self._departure.cancel(now)
        return self._take(now, [Cancelled(self.name)] if self.leads else [])

    def leave(self, now: float, reason: str, *, agreed: bool = True) -> list[Action]:
        """R17: this host departs; the others go on without it. Where there are none, nothing does.

        Args:
            agreed: once the others agree. Without a majority they never do; then it leaves as if it had been killed.
        """
        steps: Steps = []
        if self._host.is_member and agreed:
            self._departure.leave(now, reason)
        elif self._host.is_member:
            steps += self.membership.leave_view(reason)
        return self._take(now, steps)

    def evict(self, now: float, numbers: frozenset[int]) -> list[Action]:
        """These must go: they differ from the others."""
        return self._take(now, self.membership.evict(now, numbers))

    def rebuild(self, now: float, joiners: tuple[Joiner, ...]) -> list[Action]:
        """R20, the lead: take hosts back into the view, or new ones. No phase goes on; decide again once `Ready`.

        With nobody to take in it is a view of the same members, for its keys, and the phase goes on. In the middle of a
        step nobody is taken in.
        """
        if joiners and not self.between_steps:
            return self._take(now, [])
        return self._take(now, self.membership.rebuild(now, joiners))

    def renew(self, now: float, *, key_is_spent: bool) -> list[Action]:
        """Go on in a view of the same members before a number runs out: those of the key, or the token's hops.

        Call it often. The lead looks after the hops: the token comes to it once in a turn.
        """
        ring = self.rings.current
        token = ring.token if ring is not None else None
        is_worn = token is not None and token.hop >= MOST_HOPS and self._host.leads
        return self.rebuild(now, ()) if (key_is_spent or is_worn) and not self.changing else []

    def call_hosts(self, job: str, *, calls: bool, closed: bool) -> None:
        """The lead of a job: call hosts on standby from now on, or no more; `closed`: it admits no new ones."""
        self._readmission.job, self._readmission.calls = job, calls
        self._readmission.closed = closed
        self._note_change()

    def note_run(self, told: str) -> None:
        """A script of `nicps run` is under way here, of which strangers are told this; or (empty) none any more."""
        self._readmission.run = told
        self._note_change()

    def need_room(self, now: float, fragments: int, width: int) -> list[Action]:
        """The size of this job's vectors is known: a Linux switch is to have room for them."""
        steps = self.switch.need_room(now, fragments, width)
        self._note_change()
        return self._take(now, steps) if steps else []

    # ---- the trainer's (or the hand-out's) side of the ring

    def offer(self, now: float, offer: Offer) -> list[Action]:
        """A contribution is ready (`Ring.offer`)."""
        ring = self.rings.of_round(offer.round)
        return self._take(now, ring.offer(now, offer) if ring is not None else [])

    def step(self, now: float, offer: Offer) -> list[Action]:
        """With servers: a step is ready. `Stepped` or a commit follows (`ServedRing.step`)."""
        ring = self.rings.of_round(offer.round)
        return self._take(now, ring.step(now, offer) if isinstance(ring, ServedRing) else [])

    def pull(self, now: float, round_: int, sources: tuple[Source, ...] = ()) -> list[Action]:
        """With servers: the training program needs all parameters, in that round (`ServedRing.pull`)."""
        ring = self.rings.of_round(round_)
        return self._take(now, ring.pull(now, sources) if isinstance(ring, ServedRing) else [])

    def refused(self, now: float, member: int, number: int) -> None:
        """With servers: that member cannot do yet what it was asked with that number; `deadline` is soon."""
        if isinstance(self.ring, ServedRing):
            self.ring.refused(now, member, number)
            self._note_change()

    def progress(self, now: float, round_: int, samples: int) -> list[Action]:
        """Samples done so far (`Ring.progress`)."""
        ring = self.rings.of_round(round_)
        reports = ring is not None and not self.changing
        return self._take(now, ring.progress(now, round_, samples) if ring and reports else [])

    def read(self, now: float, round_: int, digest: int = 0, channel: int = 0) -> list[Action]:
        """The sum of that round has been read out and applied (`Ring.read`)."""
        self.rings.note_read(round_)
        return self._take(now, self.ring.read(now, round_, digest, channel) if self.ring else [])

    def sent(self, now: float, action: SendFragments) -> list[Action]:
        """This is with the kernel (`Ring.sent`)."""
        if self.ring is not None and (action.view, action.generation) == (
            self.view.number,
            self.ring.phase.generation,
        ):
            self.ring.sent(now, action.channel)
        return self._take(now, [])

    def is_over(self, action: SendFragments) -> bool:
        """Whether nobody waits for these fragments any more: the round is committed, or will not be in this ring."""
        ring, channel = self.rings.current, action.channel
        if ring is None or ring.frozen or channel >= len(ring.rounds):
            return True
        whose = self.view.number, ring.phase.generation
        return (action.view, action.generation) != whose or action.round < ring.rounds[channel]

    def go_on(self, now: float, *, saves: bool = False, channel: int = 0) -> list[Action]:
        """The lead has decided to train on after the last round (`OpenRound.go_on`)."""
        decided = self.ring is not None and self._may_decide
        if self.ring is None or not decided:
            return self._take(now, [])
        return self._take(now, self.ring.go_on(now, saves=saves, channel=channel))

    def advance(self, now: float) -> list[Action]:
        """Sums of stripes came, or lanes were converted (`Ring.advance`)."""
        ring = self.rings.current
        if ring is None or self.changing:
            return []
        return self._take(now, ring.advance(now))

    @property
    def awaits_lanes(self) -> bool:
        """Others wait for lanes that this host's training program has not converted yet."""
        return self.ring is not None and not self.changing and self.ring.awaits_lanes

    # ---- what comes from the kernel and the clock

    def on_list(
        self, now: float, view: int, round_: int, members: int, unit: int, channel: int = 0
    ) -> list[Action]:
        """The first contribution to a round of stripes came to this host's kernel (`Ring.on_list`).

        It may come before the round before is committed here: then it counts as soon as that is.
        """
        told, ring = ToldList(view, round_, members, unit, channel), self.rings.current
        if ring is None or self.changing:
            return []
        if not self._early.take(self.view.number, ring.rounds, told):
            return []
        return self._take(now, ring.on_list(now, members, unit, channel))

    def _hear_early_lists(self, now: float) -> list[Action]:
        """Rounds have been committed, perhaps: lists of those that are open now count."""
        ring, actions = self.rings.current, list[Action]()
        rounds = ring.rounds if ring is not None and not self.changing else ()
        for told in self._early.take_kept(self.view.number, rounds):
            assert ring is not None
            steps = ring.on_list(now, told.members, told.unit, told.channel)
            actions += self._carry_out(now, steps)
        return actions

    def kernel_saw(
        self,
        now: float,
        seen: tuple[int, int],
        token_at: float,
        frame_at: float,
        bounced: bytes | None,
    ) -> None:
        """State of the XDP program, before `on_frame` of what it passed up (`Ring.kernel_saw`)."""
        ring = self.rings.current
        if ring is not None and not self.membership.changing:
            if bounced is not None:
                ring.bounced(token_at, wire.unpack(bounced))
            if ring.kernel_saw(seen, token_at, frame_at) or bounced is not None:
                self._note_change()

    def on_frame(self, now: float, source: bytes, data: bytes) -> list[Action]:
        """A frame of ours that came up, from its version byte on.

        Raises:
            WireError: it is malformed; nothing has changed.
        """
        frame = wire.unpack(data)
        if frame.header.network != self.network or source == self.mac:
            return []
        return self._take(now, self._inbox.on_frame(now, source, frame))

    def tick(self, now: float) -> list[Action]:
        """Time has passed; call at `deadline` at the latest."""
        actions = self._carry_out(now, self._formation.tick(now))
        actions += self._carry_out(now, self.membership.tick(now))
        actions += self._carry_out(now, self._decisions.tick(now))
        ring = self.rings.current
        if ring is not None and not self.membership.changing:
            actions += self._carry_out(now, ring.tick(now))
        actions += self._carry_out(now, self._departure.tick(now))
        if self._lead_is_watched and self._host.follows and now >= self._lead.silent_at():
            actions += self._carry_out(now, self.membership.suspect(now, self.view.lead))
        steps = [*self._admission.tick(now), *self.switch.tick(now)]
        if self._lead_is_watched and self._host.leads and now >= self._lead.beacon_due():
            steps.append(self._lead.beacon(now, self.open_round))
        if self._admission.calls and now >= self._readmission.call_due():
            steps.append(self._readmission.make_call(now))
        return self._take(now, steps, actions)

    def deadline(self) -> float:
        """When `tick` must be called next; infinity where nothing is waited for."""
        if (due := self._due) is not None:
            return due
        due, ring = self._find_deadline(), self.rings.current
        if ring is None or not ring.waits_for_kernel:
            self._due = due
        return due

    def _find_deadline(self) -> float:
        due = min(
            self._formation.deadline(),
            self.membership.deadline(),
            self._decisions.deadline(),
            self._departure.deadline(),
            self._admission.deadline(),
            self.switch.deadline(),
        )
        if self.membership.changing:
            return due
        if self._admission.calls:
            due = min(due, self._readmission.call_due())
        if self.rings.between_phases:
            due = min(due, self._lead.deadline())
        ring = self.rings.current
        return min(due, ring.deadline()) if ring is not None else due

    @property
    def _may_decide(self) -> bool:
        """Everybody has the view. Until then its lead does not know who is left; once they have, it decides again."""
        membership = self.membership
        return membership.view_change is not None and not self.changing and membership.ready

    @property
    def _lead_is_watched(self) -> bool:
        """Between phases the lead must be heard; in a ring, whoever has the token (`Ring`)."""
        return self.rings.between_phases and not self.membership.changing

    # ---- after every event

    def _take(self, now: float, steps: Steps, done: Sequence[Action] = ()) -> list[Action]:
        """Carry the steps out after what is `done`, and let waiting things take their turn."""
        self._note_change()
        actions = [*done, *self._carry_out(now, steps)] if steps or done else []
        membership, decisions = self.membership, self._decisions
        installation = membership.installation
        if not membership.ready and self._host.leads and installation and not installation.missing:
            membership.ready = True
            if not self.changing:
                actions.append(Ready(self.view))
                if self.ring is not None and self.ring.token is None:  # no phase begun meanwhile
                    actions += self._carry_out(now, self.ring.create(now))
        phase = decisions.take_turn() if decisions.waits and not membership.changing else None
        if phase is not None:
            if phase.kind is wire.PhaseKind.STOP:
                self._departure.close()
            actions.append(Prepare(phase))
        agreed = decisions.take_agreed()
        if agreed is not None:
            actions += self._agreed(now, agreed.phase, agreed.answers)
        if self._early:
            actions += self._hear_early_lists(now)
        entered = False
        for action in actions:
            if isinstance(action, Committed):
                self.rings.note_committed(action)
                self._readmission.note_counted(action)
                self._faults.note_counted(action)
            entered |= isinstance(action, Installed)
        return actions + (self._carry_out(now, self.switch.enter_view(now)) if entered else [])

    def _agreed(self, now: float, phase: Phase, answers: dict[int, bytes]) -> list[Action]:
        """The lead: everybody is prepared."""
        agreed: list[Action] = [PhaseAgreed(phase, dict(answers))]
        if phase.kind is wire.PhaseKind.STOP:
            self.membership.stand_by(phase.ending)
        elif phase.kind in ROUND_KINDS:
            agreed += self._carry_out(now, self.membership.enter_phase().create(now))
        return agreed

    def _carry_out(self, now: float, steps: Steps) -> list[Action]:
        """What the parts ask of one another is done here, at its place; the rest goes to whoever drives this node."""
        actions: list[Action] = []
        for step in steps:
            if isinstance(step, Silent):
                actions += self._carry_out(now, self.membership.suspect(now, step.number))
            elif isinstance(step, WithoutSelf):
                own = frozenset({self._host.number})
                actions += self._carry_out(now, self.membership.evict(now, own))
            elif isinstance(step, AskForLaterView):
                actions += self._carry_out(now, [self._admission.ask()])
            elif isinstance(step, Formed):
                actions += self._carry_out(now, self.membership.form(now, step))
            elif isinstance(step, Lacking):
                actions += self._carry_out(now, self._faults.hear(now, step))
            elif isinstance(step, Renew):
                actions += self._carry_out(now, self.membership.renew(now))
            elif isinstance(step, Send):
                frame = step.frame
                header = self._numbered(frame.header)
                actions.append(Send(wire.Frame(header, frame.body, frame.items, frame.tail)))
            elif not isinstance(step, Freeze | Chosen):  # which the membership has carried out
                actions.append(step)
        return actions


__all__ = ["Node", "NodeState", "WireError"]
