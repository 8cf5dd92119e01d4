# SPDX-License-Identifier: Apache-2.0
"""One host as a state machine: forming, views, decisions, and the ring of the phase in force.

Every method takes `now` (seconds, any steady clock) and returns the actions to carry out, in order. The parts hold one
another in one direction; what they report to the part above is among the steps that they return
(`nicps.protocol.signals`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from nicps import wire
from nicps.errors import WireError
from nicps.protocol.actions import (
    Action,
    Cancelled,
    Committed,
    Failed,
    Installed,
    Joiner,
    NoProgress,
    NotAdded,
    PhaseAgreed,
    Prepare,
    Ready,
    Send,
    SendFragments,
)
from nicps.protocol.admission import Admission
from nicps.protocol.bystander import Bystander
from nicps.protocol.carried import Offer
from nicps.protocol.deciding import Decisions
from nicps.protocol.departure import Departure
from nicps.protocol.exchange.steps import Source
from nicps.protocol.formation import Formation, Group
from nicps.protocol.inbox import Inbox
from nicps.protocol.kernel import KernelState, Receiver
from nicps.protocol.lead import LeadWatch
from nicps.protocol.local_host import LocalHost, NodeState
from nicps.protocol.membership import Membership
from nicps.protocol.phase import ROUND_KINDS, AdaptiveTimeout, Member, Phase, Timings
from nicps.protocol.progress import Standstill
from nicps.protocol.readmission import Readmission
from nicps.protocol.ring import Ring
from nicps.protocol.rings import Rings
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
)
from nicps.protocol.switch_link import SwitchLink
from nicps.protocol.token import MOST_HOPS
from nicps.protocol.view import View, numbered, safe_name


class Node:
    """One member (docs/protocol.md).

    Args:
        receiver: what has arrived (the kernel's maps).
        nonce: fresh random 64-bit numbers, never 0.
        stage: how much this host has of a job, by the job's name (R20); None if it wants no part in it.
        believes_switch: the user has said that a Linux switch that adds is believed.

    Attributes: `membership`, this host's part in views; `rings`, that of the phase in force and of the one to come;
    `switch`, what is known of a Linux switch that adds.
    """

    def __init__(
        self,
        mac: bytes,
        name: str,
        network: str,
        receiver: Receiver,
        nonce: Callable[[], int],
        timings: Timings | None = None,
        stage: Callable[[str], wire.Stage | None] = lambda job: wire.Stage.NOTHING,
        *,
        believes_switch: bool = False,
    ) -> None:
        self.network = wire.network_id(network)
        self.timings = timings = timings or Timings()
        self.timeout = AdaptiveTimeout(timings)
        self._sequence = 0
        self._host = host = LocalHost(mac, safe_name(name, mac))
        self._formation = Formation(mac, host.name, timings)
        self._lead = LeadWatch(host, timings, self.timeout)
        self._readmission = Readmission(host, timings, nonce)
        self._bystander = Bystander(host, timings)
        self.rings = Rings(host, receiver, timings, self.timeout)
        self._decisions = Decisions(host, self.rings, timings, self.timeout)
        self._departure = Departure(host, self.rings, timings)
        self.membership = Membership(
            host,
            self.rings,
            self._decisions,
            self._departure,
            self._readmission,
            self._lead,
            self._formation,
            timings,
            self.timeout,
            nonce,
        )
        self._admission = Admission(
            host,
            self.membership,
            self._formation,
            self._readmission,
            self._departure,
            self._lead,
            timings,
            stage,
            self._bystander,
        )
        self._standstill = Standstill(host, timings)
        self.switch = SwitchLink(host, believes=believes_switch)
        self._inbox = Inbox(
            host,
            self._admission,
            self.membership,
            self._decisions,
            self.rings,
            self._lead,
            self.switch,
        )

    # ---- what others ask

    @property
    def mac(self) -> bytes:
        """This host's address."""
        return self._host.mac

    @property
    def name(self) -> str:
        """As it is in the list."""
        return self._host.name

    @property
    def state(self) -> NodeState:
        """What `nicps status` says of this host."""
        return self._host.state

    @property
    def view(self) -> View:
        """The view in force, or the last one."""
        return self._host.view

    @property
    def number(self) -> int:
        """This member's."""
        return self._host.number

    @property
    def members(self) -> tuple[Member, ...]:
        """The list; who has left is still in it."""
        return self._host.view.members

    @property
    def learners(self) -> frozenset[int]:
        """Members that came back and have not been counted since."""
        return self.membership.learners

    @property
    def phase(self) -> Phase | None:
        """In force, or being prepared."""
        return self._decisions.phase

    @property
    def phase_in_force(self) -> Phase | None:
        """In force: its first token has been seen."""
        return self.rings.current.phase if self.rings.current is not None else None

    @property
    def ring(self) -> Ring | None:
        """That of the phase in force."""
        return self.rings.current

    @property
    def open_round(self) -> int:
        """The round that is open here; 0 before any."""
        return self.rings.open_round

    @property
    def leads(self) -> bool:
        """This host acts as node 1 (R22)."""
        return self._host.leads

    @property
    def ended(self) -> bool:
        """This host stands by because the job has ended."""
        return self._host.ended

    @property
    def leaving(self) -> bool:
        """This host has said that it departs; the others have not agreed on it yet."""
        return self._departure.leaving

    @property
    def changing(self) -> bool:
        """The view is about to end: nothing may be completed or committed in it."""
        return self.membership.changing

    @property
    def asks(self) -> bool:
        """This host was evicted, and asks whoever may know what has become of the job."""
        return self._admission.asks

    @property
    def busy(self) -> bool:
        """This host is about to start a network of its own: it answers no calls."""
        return self.membership.busy

    @busy.setter
    def busy(self, busy: bool) -> None:
        self.membership.busy = busy

    @property
    def kernel(self) -> KernelState | None:
        """What the XDP program must know, or None while it is to take nothing."""
        if self.membership.view_change is None or self.membership.changing:
            return None
        return self.rings.kernel

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

    def start(self, now: float, nonce: int, group: Group | None = None) -> list[Action]:
        """R1: this host starts the network, perhaps a group's. `nonce` is a random 64-bit number."""
        assert not self._host.is_member
        self._host.state = NodeState.FORMING
        return self._take(now, self._formation.start(now, nonce, self.view.number, group))

    def wait_for(self, group: Group | None) -> None:
        """A program on this host waits for that group, or (None) no more."""
        self._formation.waits = group

    def abandon(self) -> tuple[str, ...]:
        """This host forms no network any more; the hosts that have answered, this one included."""
        found, self._formation.starting = self._formation.found, None
        if self._host.state is NodeState.FORMING:
            self._host.state = NodeState.STANDBY
        return found

    def decide(self, now: float, phase: Phase) -> list[Action]:
        """The lead only: open `phase`; its number and generation are filled in here.

        Raises:
            WireError: its settings are too long for a frame, or no member would take it; nothing has changed.
        """
        assert self.leads
        phase.check(len(self.view.members))
        if len(phase.pack()) > wire.MAX_FRAME_BYTES - 100:
            raise WireError(f"a decision of {len(phase.pack())} bytes does not fit a frame")
        if not self._may_decide:
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

        With nobody to take in it is a view of the same members, for its keys, and the phase goes on.
        """
        return self._take(now, self.membership.rebuild(now, joiners))

    def renew(self, now: float, *, key_is_spent: bool) -> list[Action]:
        """Go on in a view of the same members before a number runs out: those of the key, or the token's hops.

        Call it often. The lead looks after the hops: the token comes to it once in a turn.
        """
        ring = self.rings.current
        token = ring.token if ring is not None and self._host.leads else None
        is_worn = token is not None and token.hop >= MOST_HOPS
        return self.rebuild(now, ()) if (key_is_spent or is_worn) and not self.changing else []

    def call_hosts(self, job: str, *, calls: bool, closed: bool) -> None:
        """The lead of a job: call hosts on standby from now on, or no more; `closed`: it admits no new ones."""
        self._readmission.job, self._readmission.calls = job, calls
        self._readmission.closed = closed

    def need_room(self, now: float, fragments: int, width: int) -> list[Action]:
        """The size of this job's vectors is known: a Linux switch is to have room for them."""
        steps = self.switch.need_room(now, fragments, width)
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

    def refused(self, now: float, member: int) -> None:
        """With servers: that member has answered that it cannot do something yet; `deadline` is soon."""
        if isinstance(self.ring, ServedRing):
            self.ring.refused(now, member)

    def progress(self, now: float, round_: int, samples: int) -> list[Action]:
        """Samples done so far (`Ring.progress`)."""
        ring = self.rings.of_round(round_)
        reports = ring is not None and not self.changing
        return self._take(now, ring.progress(now, round_, samples) if ring and reports else [])

    def read(self, now: float, round_: int, digest: int = 0) -> list[Action]:
        """The sum of that round has been read out and applied (`Ring.read`)."""
        return self._take(now, self.ring.read(now, round_, digest) if self.ring else [])

    def sent(self, now: float, action: SendFragments) -> list[Action]:
        """This is with the kernel (`Ring.sent`)."""
        if self.ring is not None and (action.view, action.generation) == (
            self.view.number,
            self.ring.phase.generation,
        ):
            self.ring.sent(now)
        return self._take(now, [])

    def go_on(self, now: float, *, saves: bool = False) -> list[Action]:
        """The lead has decided to train on after the last round (`Control.go_on`)."""
        decided = self.ring is not None and self._may_decide
        return self._take(now, self.ring.go_on(now, saves=saves) if self.ring and decided else [])

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

    def on_list(self, now: float, view: int, round_: int, members: int, unit: int) -> list[Action]:
        """The first contribution to a round of stripes came to this host's kernel (`Ring.on_list`)."""
        ring = self.rings.current
        if ring is None or self.changing or (view, round_) != (self.view.number, ring.round):
            return []
        return self._take(now, ring.on_list(now, members, unit))

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
            ring.kernel_saw(seen, token_at, frame_at)

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
        entered = False
        for action in actions:
            if isinstance(action, Committed):
                self._readmission.note_counted(action)
                self._standstill.note_counted(action)
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
            elif isinstance(step, AskForLaterView):
                actions += self._carry_out(now, [self._admission.ask()])
            elif isinstance(step, Formed):
                actions += self._carry_out(now, self.membership.form(now, step))
            elif isinstance(step, Lacking):
                actions += self._carry_out(now, self._hear_lacking(now, step))
            elif isinstance(step, Renew):
                actions += self._carry_out(now, self.membership.renew(now))
            elif isinstance(step, Send):
                frame = step.frame
                header = self._numbered(frame.header)
                actions.append(Send(wire.Frame(header, frame.body, frame.items, frame.tail)))
            elif not isinstance(step, Freeze | Chosen):  # which the membership has carried out
                actions.append(step)
        return actions

    def _hear_lacking(self, now: float, lacking: Lacking) -> Steps:
        """R16: what a member lacks of members; or of a switch, which is number 0. Nobody is evicted for that."""
        if 0 in lacking.lacks:
            self._standstill.excuse(lacking.round)
            return self._give_up(lacking.round)
        phase = self.phase_in_force
        return self._find_fault(now, self._standstill.hear(now, lacking, self.learners, phase))

    def _give_up(self, round_: int) -> Steps:
        """The lead is told that the exchange makes no sums, unless it has marked the round: others may commit it."""
        ring = self.rings.current
        if ring is None or ring.complete or not self._host.leads:
            return []
        return [NotAdded(round_, ring.phase.exchange)]

    def _find_fault(self, now: float, found: list[NoProgress]) -> Steps:
        """R16: of the full members that stay, the lowest proposes to go on without the one at fault.

        If it may be the network, the lead is told instead.
        """
        evicted = frozenset(one.evicted for one in found if one.evicted)
        phase = self.phase_in_force
        if evicted and phase is not None and self._standstill.blames_network(phase):
            told = [one for one in found if not one.evicted]
            return [*told, *self._give_up(found[-1].round)]
        lowest = min(self.view.live - self.learners - evicted, default=0)
        return [*found, *(self.membership.evict(now, evicted) if lowest == self.number else [])]


__all__ = ["Node", "NodeState", "WireError"]
