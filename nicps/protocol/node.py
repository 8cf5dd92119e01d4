# SPDX-License-Identifier: Apache-2.0
"""One host as a state machine: forming, views, decisions, and the ring of the phase in force.

Every method takes `now` (seconds, any steady clock) and returns the actions to carry out, in order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum

from nicps import wire
from nicps.errors import WireError
from nicps.protocol.actions import (
    Action,
    Answered,
    Failed,
    Installed,
    Joiner,
    PhaseAgreed,
    Prepare,
    Ready,
    Receiver,
    Send,
    SendFragments,
    Struck,
)
from nicps.protocol.decision import Ballot, acknowledgement
from nicps.protocol.formation import Formation
from nicps.protocol.phase import ROUND_KINDS, Member, Patience, Phase, Timings
from nicps.protocol.ring import Carried, KernelState, Ring
from nicps.protocol.succession import Installation, Standing, Succession
from nicps.protocol.view import Successor, View, safe_name

_ENDED = 2  # in a vote's `complete`: the job has ended here
_MOST_VIEWS = 1 << 31  # a larger number is not one that a network can have come to


class NodeState(Enum):
    """What `nicps status` says of this host."""

    STANDBY = "standby"
    FORMING = "forming"
    MEMBER = "member"


@dataclass(frozen=True, slots=True)
class _Heard:
    """A decision that waits for its turn: the open round it belongs to must be reached first."""

    phase: Phase
    round: int


@dataclass(slots=True)
class _Farewell:
    """A FAIL or LEAVE that is told until it has had its effect."""

    body: wire.Fail | wire.Leave
    reason: str
    next_send: float


class Node:
    """One member (docs/protocol.md).

    Args:
        receiver: what has arrived (the kernel's maps).
        nonce: fresh random 64-bit numbers, never 0.
        stage: how much this host has of a job, by the job's name (R20).

    Attributes: `busy`, about to start a network of its own: answers no calls. `calls`, at the lead: the job's name
    while it calls standby hosts back.
    """

    def __init__(
        self,
        mac: bytes,
        name: str,
        network: str,
        receiver: Receiver,
        nonce: Callable[[], int],
        timings: Timings | None = None,
        stage: Callable[[str], wire.Stage] = lambda job: wire.Stage.NOTHING,
    ) -> None:
        self.mac = mac
        self.name = safe_name(name, mac)
        self.network = wire.network_id(network)
        self.timings = timings or Timings()
        self.patience = Patience(self.timings)
        self.state = NodeState.STANDBY
        self.busy = False
        self.calls = ""
        self.view = View()
        self.number = 0
        self.phase: Phase | None = None  # in force, or being prepared
        self.ring: Ring | None = None
        self.learners: frozenset[int] = frozenset()  # who came back and has not been counted since
        self._next_ring: Ring | None = None
        self._receiver = receiver
        self._nonce = nonce
        self._fresh = nonce()
        self._stage = stage
        self._actions: list[Action] = []
        self._sequence = 0
        self._round = 0  # the open one, while no ring is in force
        self._formation = Formation(
            mac, self.name, self.timings, self._header_without_view, self._actions.append
        )
        self._succession: Succession | None = None
        self._installation: Installation | None = None  # of the view in force; told to who asks
        self._telling = False  # this member sees to it that everybody installs it
        self._ready = False  # the lead: everybody has
        self._ballot: Ballot | None = None
        self._balloted: Phase | None = None
        self._decided = 0  # highest decision heard (members) or made (the lead)
        self._generation = 0
        self._waiting: _Heard | None = None
        self._acked: tuple[int, bool, bytes] = (0, True, b"")
        self._farewell: _Farewell | None = None
        self._leavers: dict[int, int] = {}  # number -> how often it has said so
        self._heard = 0.0  # the lead, last
        self._beacon_at = 0.0
        self._call_at = 0.0
        self._ended = False  # the view's job has ended here (STOP)

    # ---- what others look at

    @property
    def members(self) -> tuple[Member, ...]:
        """The list; who has left is still in it."""
        return self.view.members

    @property
    def leads(self) -> bool:
        """This host acts as node 1 (R22)."""
        return self.state is NodeState.MEMBER and self.view.lead == self.number

    @property
    def ended(self) -> bool:
        """This host stands by because the job has ended."""
        return self._ended

    @property
    def open_round(self) -> int:
        """The round that is open here; 0 before any."""
        return self.ring.round if self.ring is not None else self._round

    @property
    def kernel(self) -> KernelState | None:
        """What the XDP program must know, or None while it is to take nothing."""
        if self._succession is None or self._succession.under_way:
            return None
        if self.ring is None:
            return self._next_ring.kernel if self._next_ring is not None else None
        state = self.ring.kernel
        if self._next_ring is not None:
            state = replace(state, round_high=self._next_ring.round, bounce=False)
        return state

    # ---- commands

    def start(self, now: float, nonce: int) -> list[Action]:
        """R1: this host starts the network. `nonce` is a random 64-bit number."""
        assert self.state is not NodeState.MEMBER
        self.state = NodeState.FORMING
        self._formation.start(now, nonce, self.view.number)
        return self._take(now)

    def decide(self, now: float, phase: Phase) -> list[Action]:
        """The lead only: open `phase`; its number and generation are filled in here.

        Raises:
            WireError: its settings are too long for a frame; nothing has changed.
        """
        assert self.leads
        if len(phase.pack()) > wire.MAX_FRAME_BYTES - 100:
            raise WireError(f"a decision of {len(phase.pack())} bytes does not fit a frame")
        if self._succession is None or self._succession.under_way:
            return self._take(now)  # whoever leads the next view decides again
        self._decided += 1
        self._generation += 1
        phase = replace(phase, number=self._decided, generation=self._generation)
        body = wire.Decision(phase.number, phase.generation, phase.kind)
        round_ = self.open_round
        tail = phase.pack()
        self._balloted = phase
        self._ballot = Ballot(
            phase.number,
            lambda: wire.pack(self.header(0, round_), body, tail=tail),
            self.view.order,
            self.timings,
            self._actions.append,
        )
        self._ballot.start(now)
        self._acked = (phase.number, False, b"")
        self._hear(now, _Heard(phase, round_))
        return self._take(now)

    def prepared(self, now: float, number: int, answer: bytes = b"") -> list[Action]:
        """This host is ready for the decision of that number; `answer` (JSON) goes to the lead."""
        if self.phase is None or self.phase.number != number or self._acked[:2] == (number, True):
            return self._take(now)
        if self.state is not NodeState.MEMBER or self._acked[0] != number:
            return self._take(now)
        phase = self.phase
        if phase.kind in ROUND_KINDS:
            self._next_ring = self._new_ring(phase, now)
        self._acked = (number, True, answer)
        if self._ballot is not None:
            self._ballot.acknowledge(now, self.number, True, answer)
        else:
            self._acknowledge()
        if phase.kind is wire.PhaseKind.STOP and not self.leads:
            self._stand_by(ended=True)
        return self._take(now)

    def fail(self, now: float, reason: str) -> list[Action]:
        """The job cannot go on here, and so nowhere; the lead stops it."""
        if self.leads:
            self._actions.append(Failed(reason))
        elif self.state is NodeState.MEMBER and self._farewell is None:
            self._farewell = _Farewell(wire.Fail(), reason, now)
        return self._take(now)

    def leave(self, now: float, reason: str) -> list[Action]:
        """R17: this host departs; the others go on without it. Where there are none, nothing does."""
        if self.state is NodeState.MEMBER and (
            self._farewell is None or isinstance(self._farewell.body, wire.Fail)
        ):
            self._farewell = _Farewell(wire.Leave(), reason, now)
        return self._take(now)

    def strike(self, now: float, numbers: frozenset[int]) -> list[Action]:
        """These must go: they differ from the others."""
        if self._succession is not None and numbers:
            self._succession.strike(now, numbers)
        return self._take(now)

    def rebuild(self, now: float, joiners: tuple[Joiner, ...]) -> list[Action]:
        """R20, the lead: take hosts back into the view, or new ones. No phase goes on; decide again once `Ready`."""
        if self._succession is not None:
            self._succession.rebuild(now, joiners)
        return self._take(now)

    # ---- the trainer's (or the hand-out's) side of the ring

    def offer(self, now: float, round_: int, samples: int, unit: int | None = None) -> list[Action]:
        """A contribution is ready (`Ring.offer`)."""
        ring = self._ring_of(round_)
        if ring is not None:
            ring.offer(now, round_, samples, unit)
        return self._take(now)

    def progress(self, now: float, round_: int, samples: int) -> list[Action]:
        """Samples done so far (`Ring.progress`)."""
        ring = self._ring_of(round_)
        if ring is not None and not self.changing:
            ring.progress(now, round_, samples)
        return self._take(now)

    def read(self, now: float, round_: int, digest: int = 0) -> list[Action]:
        """The sum of that round has been read out and applied (`Ring.read`)."""
        if self.ring is not None:
            self.ring.read(now, round_, digest)
        return self._take(now)

    def sent(self, now: float, action: SendFragments) -> list[Action]:
        """This is with the kernel (`Ring.sent`)."""
        if self.ring is not None and (action.view, action.generation) == (
            self.view.number,
            self.ring.phase.generation,
        ):
            self.ring.sent(now)
        return self._take(now)

    def go_on(self, now: float) -> list[Action]:
        """The lead has decided to train on after the last round (`Ring.go_on`)."""
        if self.ring is not None:
            self.ring.go_on(now)
        return self._take(now)

    # ---- what comes from the kernel and the clock

    def kernel_saw(
        self, now: float, seen: tuple[int, int], heard: float, bounced: bytes | None
    ) -> None:
        """State of the XDP program, before `on_frame` of what it passed up (`Ring.kernel_saw`)."""
        if self.ring is not None and not self.changing:
            if bounced is not None:
                self.ring.bounced(heard, wire.unpack(bounced))
            self.ring.kernel_saw(seen, heard)

    def on_frame(self, now: float, source: bytes, data: bytes) -> list[Action]:
        """A frame of ours that came up, from its version byte on.

        Raises:
            WireError: it is malformed; nothing has changed.
        """
        frame = wire.unpack(data)
        header, body = frame.header, frame.body
        if header.network != self.network or source == self.mac:
            return []
        if isinstance(body, wire.Call):
            self._on_call(now, source, frame)
        elif isinstance(body, wire.Answer):
            self._on_answer(now, source, frame)
        elif isinstance(body, wire.View) and body.step == wire.ViewStep.INSTALL:
            self._on_install(now, source, frame)
        elif (
            header.view == self.view.number
            and header.sender in self.view.live
            and self.view.members[header.sender - 1].mac == source
        ):
            leads = header.sender == self.view.lead
            self._on_member_frame(now, source, frame)
            if leads:  # only now: what is malformed is no sign of life
                self._heard = now
        elif isinstance(body, wire.View) and header.view < self.view.number:
            self._tell(self.view.number_of(source), body.nonce)
        return self._take(now)

    def tick(self, now: float) -> list[Action]:
        """Time has passed; call at `deadline` at the latest."""
        closed = self._formation.tick(now)
        if closed is not None:
            successor = Successor(
                closed.members,
                frozenset(m.number for m in closed.members),
                lead=1,
                follows=0,
                phase=0,
                round=0,
                unit=0,
                seed=self._seed(),
            )
            self._put_in_force(now, closed.view, 0, successor, 0, dict(closed.fresh))
        self._tick_view(now)
        if self._ballot is not None:
            self._ballot.tick(now)
            self._tick_silent_voters(now)
        if self.ring is not None and not self.changing:
            self.ring.tick(now)
        farewell = self._farewell
        if farewell is not None and len(self.view.live) == 1:
            self._farewell = None
            self._actions.append(Failed(farewell.reason))
        elif farewell is not None and now >= farewell.next_send:
            farewell.next_send = now + 3 * self.timings.decision_s
            tail = farewell.reason.encode()[:1000]
            header = self.header(0, self.open_round)
            self._actions.append(Send(wire.pack(header, farewell.body, tail=tail)))
        if self._waits_for_lead and now >= self._lead_silent_at():
            assert self._succession is not None
            self._succession.suspect(now, self.view.lead)
        if self._beacons and now >= self._beacon_at:
            self._beacon_at = now + self.timings.beacon_s
            self._actions.append(
                Send(wire.pack(self.header(0, self.open_round), wire.Want(0, self.open_round)))
            )
        if self._calls_back and now >= self._call_at:
            self._call_at = now + self.timings.call_back_s
            body = wire.Call(self._nonce(), self.view.number, self.view.ballot)
            header = self._header_without_view(0, 0)
            self._actions.append(Send(wire.pack(header, body, tail=self.calls.encode())))
        return self._take(now)

    def deadline(self) -> float | None:
        """When `tick` must be called next, or None."""
        telling = self._installation if self._telling else None
        times = [
            self._formation.deadline(),
            self._succession.deadline() if self._succession is not None else None,
            telling.deadline() if telling is not None else None,
            self._ballot.deadline() if self._ballot is not None else None,
            self.ring.deadline() if self.ring is not None and not self.changing else None,
            self._farewell.next_send if self._farewell is not None else None,
            self._lead_silent_at() if self._waits_for_lead else None,
            self._beacon_at if self._beacons else None,
            self._call_at if self._calls_back else None,
        ]
        return min((t for t in times if t is not None), default=None)

    # ---- forming, and coming back

    def _on_call(self, now: float, source: bytes, frame: wire.Frame) -> None:
        call = frame.body
        assert isinstance(call, wire.Call)
        if not call.view:
            if self.state is NodeState.MEMBER or (self.busy and self._formation.starting is None):
                return
            if not self._formation.on_call(source):
                return
            self.state = NodeState.STANDBY
            stage = wire.Stage.NOTHING
        elif (self.state is NodeState.STANDBY and not self.busy) or (
            call.view == self.view.number and self.number in self.learners
        ):
            stage = self._stage(frame.tail.decode(errors="replace"))
        elif self.state is NodeState.MEMBER and self._precedes(call.view, call.ballot, source):
            stage = wire.Stage.NOTHING  # it will tell us that we have been struck off (R19)
        else:
            return
        self._formation.answer(call.nonce, self._fresh, self.view.number, stage)

    def _on_answer(self, now: float, source: bytes, frame: wire.Frame) -> None:
        answer = frame.body
        assert isinstance(answer, wire.Answer)
        self._formation.on_answer(now, source, frame)
        number = self.view.number_of(source)
        here = answer.view == self.view.number and number in self.view.live
        if 0 < answer.view <= self.view.number and not here and (self.leads or self._ended):
            self._tell(number, answer.fresh)  # perhaps it does not know yet
        if not (self.leads and self._ready and self.calls) or answer.stage not in list(wire.Stage):
            return
        if number in self.view.live and number not in self.learners:
            return
        name = safe_name(frame.tail.decode(errors="replace"), source)
        joiner = Joiner(source, name, answer.fresh)
        self._actions.append(Answered(joiner, number, wire.Stage(answer.stage)))

    def _precedes(self, view: int, ballot: int, source: bytes) -> bool:
        """Whether our view is behind another's (the same number: only where one of two may go on alone)."""
        lead = self.view.members[self.view.lead - 1].mac
        return (self.view.number, self.view.ballot, lead) < (view, ballot, source)

    # ---- views

    @property
    def changing(self) -> bool:
        """The view is about to end: nothing may be completed or committed in it."""
        return self._succession is not None and self._succession.under_way

    def _standing(self) -> Standing:
        """Where this member stands, for its promise."""
        ring = self.ring
        decided = max(self._decided, self.phase.number if self.phase is not None else 0)
        if ring is None:
            return Standing(0, self._round, False, decided)
        return Standing(ring.phase.number, ring.round, ring.complete, decided)

    def _freeze(self) -> None:
        for ring in (self.ring, self._next_ring):
            if ring is not None:
                ring.freeze()
        self._ballot = None

    def _phase_of(self, number: int) -> Phase | None:
        ring = self._ring_of_phase(number)
        return ring.phase if ring is not None else None

    def _ring_of_phase(self, number: int) -> Ring | None:
        for ring in (self.ring, self._next_ring):
            if ring is not None and number and ring.phase.number == number:
                return ring
        return None

    def _unit_of(self, round_: int) -> int:
        rings = [ring for ring in (self._next_ring, self.ring) if ring is not None]
        fitting = (ring for ring in rings if ring.round <= round_ <= ring.round + 1)
        ring = next(fitting, None)
        return ring.unit_of(round_) if ring is not None else 0

    def _chosen(self, now: float, successor: Successor, ballot: int) -> None:
        """This member's proposal has been agreed on: put it in force."""
        assert self._succession is not None
        nonces = dict(self._succession.nonces)
        number, base = self.view.number + 1, self.view.number
        self._put_in_force(now, number, base, successor, ballot, nonces)

    def _put_in_force(
        self,
        now: float,
        number: int,
        base: int,
        successor: Successor,
        ballot: int,
        nonces: dict[int, int],
    ) -> None:
        me = next(m.number for m in successor.members if m.mac == self.mac)
        installation = Installation(
            successor.view(number, ballot),
            base,
            successor,
            {me},
            nonces,
            self.timings,
            self._header_without_view,
            self._actions.append,
        )
        if me in successor.live:
            self._install(now, me, successor, installation)
            self._telling = True
        else:
            installation.tick(now)  # the others can do without us: they have the list now
            self._struck("the others have other weights")

    def _on_install(self, now: float, source: bytes, frame: wire.Frame) -> None:
        """R3, R18: a list is in force; R19: or this host has been struck off."""
        body = frame.body
        assert isinstance(body, wire.View)
        successor = Successor.of(frame)
        number = body.addressee
        if (
            successor is None
            or not 0 < number <= len(successor.members)
            or successor.members[number - 1].mac != self.mac
            or body.number >= _MOST_VIEWS
        ):
            return
        view = successor.view(body.number, body.ballot)
        current = (self.view.number, self.view.seed)
        if self.state is NodeState.MEMBER and current == (view.number, view.seed):
            self._say_installed()
            return
        if body.nonce != self._fresh:
            return
        lead = view.members[view.lead - 1].mac
        if self.view.number and not self._precedes(view.number, view.ballot, lead):
            return
        if number not in view.live:
            if self.state is NodeState.MEMBER:
                self._struck("it was not heard, and the others have gone on without it")
            return
        if self.state is NodeState.MEMBER and body.base != self.view.number:
            self._struck("the others have gone on without it")
        if self.state is not NodeState.MEMBER and self.busy:
            return
        installation = Installation(
            view,
            body.base,
            successor,
            {number},
            dict.fromkeys(view.live, 0),  # those who have it too answer without a nonce
            self.timings,
            self._header_without_view,
            self._actions.append,
        )
        self._install(now, number, successor, installation)
        self._say_installed()

    def _install(
        self, now: float, number: int, successor: Successor, installation: Installation
    ) -> None:
        """From here on the view is in force at this host; the phase that goes on, goes on."""
        view, before = installation.view, self.view
        member = self.state is NodeState.MEMBER and installation.view.number != 0
        ring = self._ring_of_phase(successor.follows) if member else None
        old = ring or self.ring
        if member and old is not None and old.round == successor.round - 1 and old.complete:
            old.settle()
        carried = again = None
        if member and successor.follows:
            if ring is None or ring.round != successor.round:
                self._struck("it has missed what the others have decided")
                return
            carried = ring.carry()
            again = self.phase is not None and self.phase.number > ring.phase.number
            if again:  # its training program has left the round, and will offer again
                carried = replace(carried, offer=None, passes=False, ready=0)
            leads = view.lead == number
            undecided = leads and (carried.undecided or before.lead != number)
            carried = replace(carried, unit=successor.unit, undecided=undecided)
        joined = view.live - before.live if member else frozenset[int]()
        self.learners = (self.learners | joined) & view.live if member else frozenset()
        if not member and successor.round:
            self.learners = frozenset({number})  # of itself it knows
        if member and self._succession is not None and not before.live - view.live and not joined:
            self.patience.was_wrong()
        self.state, self.view, self.number = NodeState.MEMBER, view, number
        self._fresh = self._nonce()
        self._installation, self._telling, self._ready = installation, False, False
        self._next_ring = self._waiting = self._ballot = self._balloted = None
        self._decided, self._generation = successor.phase, 1
        self._acked = (successor.phase, True, b"")
        self._round = successor.round
        self._leavers = {}
        self._ended = False
        self._heard = self._beacon_at = self._call_at = now
        self._succession = Succession(
            view,
            number,
            self._fresh,
            self.timings,
            self.header,
            self._actions.append,
            self._freeze,
            self._standing,
            self._phase_of,
            self._unit_of,
            lambda: self.learners,
            self._seed,
            self._chosen,
            self._ask,
        )
        if not member:
            self._farewell = None
        self.ring = None
        phase = None
        if ring is not None and carried is not None and successor.follows:
            phase = ring.phase.among(view.live, successor.phase)
            self.ring = self._new_ring(phase, now, carried)
        self.phase = phase
        self._actions.append(Installed(view, number, phase, bool(again)))
        if view.lead == number:
            self._telling = True

    def _new_ring(self, phase: Phase, now: float, carried: Carried | None = None) -> Ring:
        return Ring(
            phase,
            self.view,
            self.number,
            self._receiver,
            self.timings,
            self.patience,
            self.header,
            self._actions.append,
            self._on_silent,
            carried,
            now,
        )

    def _on_silent(self, now: float, number: int) -> None:
        """R17: whoever has the token is not heard."""
        if self._succession is not None:
            self._succession.suspect(now, number)

    def _say_installed(self) -> None:
        body = wire.Vote(
            nonce=self._fresh,
            ballot=self.view.ballot,
            phase=0,
            round=self.open_round,
            decided=self._decided,
            mac=bytes(6),
            step=wire.ViewStep.INSTALL,
            complete=0,
        )
        self._actions.append(Send(wire.pack(self.header(0, self.open_round), body)))

    def _ask(self) -> None:
        """Whoever knows of a later view answers with it (R19)."""
        self._formation.answer(0, self._fresh, self.view.number, wire.Stage.NOTHING)

    def _seed(self) -> bytes:
        return b"".join(self._nonce().to_bytes(8, "big") for _ in range(2))

    def _tell(self, number: int, nonce: int) -> None:
        """Somebody is still in an older view: tell it of ours."""
        current = self.state is NodeState.MEMBER or self._ended
        if number and self._installation is not None and current:
            self._installation.tell(number, nonce)

    def _tick_view(self, now: float) -> None:
        if self._succession is not None and (self.state is NodeState.MEMBER):
            self._succession.tick(now)
        installation = self._installation
        if installation is None or not self._telling or self.state is not NodeState.MEMBER:
            return
        installation.tick(now)
        silent = installation.silent(now, max(4 * self.timings.silence_s, self.patience.seconds))
        if silent and self._succession is not None:
            self._succession.suspect(now, silent)

    def _struck(self, reason: str) -> None:
        """R19: stand by; number, model and data stay."""
        self._stand_by(ended=False)
        self._actions.append(Struck(reason))

    # ---- frames of members

    def _on_member_frame(self, now: float, source: bytes, frame: wire.Frame) -> None:
        body, header = frame.body, frame.header
        if self.state is not NodeState.MEMBER or self._succession is None:
            self._on_frame_standing_by(source, frame)
        elif isinstance(body, wire.View):
            self._succession.on_view(now, source, header.sender, frame)
        elif isinstance(body, wire.Vote):
            if body.step == wire.ViewStep.INSTALL:
                if self._installation is not None:
                    self._installation.told.add(header.sender)
            elif body.complete & _ENDED:
                self._stand_by(ended=True)
                self._actions.append(Struck("the job has ended"))
            else:
                self._succession.on_vote(now, header.sender, frame)
        elif isinstance(body, wire.Leave):
            self._on_leave(now, header.sender)
        elif self.changing:
            return
        elif isinstance(body, wire.Decision):
            self._on_decision(now, frame)
        elif isinstance(body, wire.Ack):
            if self._ballot is not None and body.number == self._ballot.number:
                self._ballot.acknowledge(now, header.sender, bool(body.prepared), frame.tail)
        elif isinstance(body, wire.Token):
            if self._next_ring is not None and body.generation == self._next_ring.phase.generation:
                self._enter_next()
            if self.ring is not None:
                self.ring.on_token(now, frame)
        elif isinstance(body, wire.Fragment):
            if self.ring is not None and header.round == self.ring.round:
                self.ring.on_completion(now)
        elif isinstance(body, wire.Want):
            if self.ring is not None:
                self.ring.on_want(now, frame)
        elif isinstance(body, wire.Fail):
            if self.leads:
                name = self.members[header.sender - 1].name
                self._actions.append(Failed(f"{name}: {frame.tail.decode(errors='replace')}"))

    def _on_frame_standing_by(self, source: bytes, frame: wire.Frame) -> None:
        """Late repeats of the end; and who has missed it and would go on."""
        body = frame.body
        if isinstance(body, wire.Decision):
            if body.number == self._acked[0]:
                self._acknowledge()
        elif isinstance(body, wire.View) and self._ended:
            vote = wire.Vote(0, body.ballot, 0, 0, 0, source, body.step, _ENDED)
            self._actions.append(Send(wire.pack(self.header(0, 0), vote)))

    def _on_leave(self, now: float, number: int) -> None:
        """The lowest of those who stay acts at once, the others if it does not."""
        assert self._succession is not None
        told = self._leavers[number] = self._leavers.get(number, 0) + 1
        staying = [k for k in self.view.order if k != number]
        if number in self.view.live and told > staying.index(self.number):
            self._succession.strike(now, frozenset({number}))

    # ---- deciding

    def _on_decision(self, now: float, frame: wire.Frame) -> None:
        body, header = frame.body, frame.header
        assert isinstance(body, wire.Decision)
        if header.sender != self.view.lead:
            return
        if body.number > self._decided:
            phase = Phase.unpack(body, frame.tail, len(self.members))  # before anything changes
            self._decided = body.number
            self._acked = (body.number, False, b"")
            self._acknowledge()
            self._hear(now, _Heard(phase, header.round))
        else:
            self._acknowledge()

    def _hear(self, now: float, heard: _Heard) -> None:
        self._heard = now
        for ring in (self.ring, self._next_ring):
            if ring is not None:  # the phase to come may be in force already, though not here
                ring.freeze()
        self._waiting = heard

    def _acknowledge(self) -> None:
        number, prepared, answer = self._acked
        frame = acknowledgement(self.header(0, self.open_round), number, prepared, answer)
        self._actions.append(Send(frame))

    def _tick_silent_voters(self, now: float) -> None:
        """A member does not answer a decision: go on without it; if it was the stop itself, stop without it."""
        ballot = self._ballot
        assert ballot is not None
        if self._balloted is not None and self._balloted.kind is wire.PhaseKind.STOP:
            silent = ballot.silent(now, self.timings.stop_s)
            if silent:
                ballot.answers.setdefault(silent, b"")
            return
        silent = ballot.silent(now, max(4 * self.timings.silence_s, self.patience.seconds))
        if silent and silent != self.number and self._succession is not None:
            self._succession.suspect(now, silent)

    def _stand_by(self, *, ended: bool) -> None:
        self.state = NodeState.STANDBY
        self._round = self.open_round
        self.ring = self._next_ring = self._waiting = self._ballot = None
        self._farewell = None
        self._ended = ended
        self._telling = self._ready = False
        if not ended:
            self._succession = None

    # ---- after every event

    def _take(self, now: float) -> list[Action]:
        """Let waiting things take their turn, then hand the actions over."""
        installation = self._installation
        if self.leads and not self._ready and installation is not None and not installation.missing:
            self._ready = True
            if not self.changing:
                self._actions.append(Ready(self.view))
                if self.ring is not None:
                    self.ring.create(now)
        waiting = self._waiting
        if waiting is not None and self._reached(waiting) and not self.changing:
            self._waiting = None
            self.phase = waiting.phase
            if waiting.phase.kind is wire.PhaseKind.STOP:
                self._farewell = None
            self._actions.append(Prepare(waiting.phase))
        ballot = self._ballot
        if ballot is not None and ballot.agreed:
            self._ballot = None
            self._agreed(now, ballot)
        actions = self._actions[:]
        self._actions.clear()
        return actions

    def _reached(self, waiting: _Heard) -> bool:
        """What was committed before the decision must be committed here too."""
        if waiting.phase.kind is wire.PhaseKind.STOP or self.ring is None:
            return True
        return self.ring.round >= waiting.round

    def _agreed(self, now: float, ballot: Ballot) -> None:
        phase = self._balloted
        assert phase is not None and phase.number == ballot.number
        self._actions.append(PhaseAgreed(phase, dict(ballot.answers)))
        if phase.kind is wire.PhaseKind.STOP:
            self._stand_by(ended=True)
        elif phase.kind in ROUND_KINDS:
            self._enter_next()
            self.ring.create(now)  # type: ignore[union-attr]

    def _enter_next(self) -> None:
        """The next phase is in force; who has a share in it is a full member."""
        assert self._next_ring is not None
        self.ring, self._next_ring = self._next_ring, None
        shares = self.ring.phase.shares
        if self.ring.phase.kind is wire.PhaseKind.TRAIN:
            self.learners = frozenset(k for k in self.learners if not shares[k - 1])

    # ---- who must be heard, and who says so

    @property
    def _waits_for_lead(self) -> bool:
        """Between phases the lead must be heard; in a ring, whoever has the token (`Ring`)."""
        return (
            self.state is NodeState.MEMBER
            and not self.leads
            and (self.ring is None or self.ring.frozen)
            and not self.changing
        )

    def _lead_silent_at(self) -> float:
        rank = self.view.rank_after(self.view.lead, self.number)
        return self._heard + 2 * rank * self.patience.seconds

    @property
    def _beacons(self) -> bool:
        """Between phases the lead lets itself be heard."""
        return self.leads and (self.ring is None or self.ring.frozen) and not self.changing

    @property
    def _calls_back(self) -> bool:
        return bool(self.calls) and self.leads and self._ready and not self.changing

    def _ring_of(self, round_: int) -> Ring | None:
        """The ring that a contribution to `round_` belongs to: perhaps that of the phase to come."""
        if self._next_ring is not None and round_ >= self._next_ring.round:
            return self._next_ring
        return self.ring

    # ---- headers

    def header(self, flags: int, round_: int) -> wire.Header:
        """This node's next frame header."""
        self.take_sequence(1)
        return wire.Header(
            flags=flags,
            network=self.network,
            view=self.view.number,
            round=round_,
            sender=self.number,
            sequence=self._sequence,
        )

    def take_sequence(self, count: int) -> int:
        """Reserve `count` sequence numbers; the first of them."""
        first = self._sequence + 1
        self._sequence = (self._sequence + count) & 0xFFFFFFFF
        return first & 0xFFFFFFFF

    def _header_without_view(self, flags: int, round_: int) -> wire.Header:
        return replace(self.header(flags, round_), view=0, sender=0)


__all__ = ["Node", "NodeState", "WireError"]
