# SPDX-License-Identifier: Apache-2.0
"""One host as a state machine: forming, views, decisions, and the ring of the phase in force.

Every method takes `now` (seconds, any steady clock) and returns the actions to carry out, in order.
"""

from __future__ import annotations

from dataclasses import replace

from nicps import wire
from nicps.errors import WireError
from nicps.protocol.actions import (
    Action,
    Committed,
    Failed,
    Joiner,
    PhaseAgreed,
    Prepare,
    Ready,
    Send,
    SendFragments,
)
from nicps.protocol.decision import Ballot
from nicps.protocol.host import Farewell, Heard, NodeState
from nicps.protocol.membership import Membership
from nicps.protocol.phase import ROUND_KINDS, Phase
from nicps.protocol.succession import DONE, ENDED
from nicps.protocol.view import Successor

_HEARD_BY_NOW = 5  # repeats of a farewell


class Node(Membership):
    """One member (docs/protocol.md).

    Args:
        receiver: what has arrived (the kernel's maps).
        nonce: fresh random 64-bit numbers, never 0.
        stage: how much this host has of a job, by the job's name (R20); None if it wants no part in it.

    Attributes: `busy`, about to start a network of its own: answers no calls. `calls`, at the lead: the job's name
    while it calls standby hosts back.
    """

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
        if self._succession is None or self._succession.under_way or not self._ready:
            return self._take(now)  # once everybody has the view, its lead decides again
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
        self._hear(now, Heard(phase, round_))
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
            self._stand_by(phase.ending)
        return self._take(now)

    def fail(self, now: float, reason: str) -> list[Action]:
        """The job cannot go on here, and so nowhere: the lead stops it. But who has only come to it declines."""
        learns = self.number in self.learners and not self.leads
        if self.state is NodeState.STANDBY:
            self._decline(reason)
        elif self.leaving or learns:
            self._farewell = Farewell(wire.Leave(), reason, now, declines=True)
        elif self.leads:
            self._actions.append(Failed(reason))
        elif self.state is NodeState.MEMBER and self._farewell is None:
            self._farewell = Farewell(wire.Fail(), reason, now)
        return self._take(now)

    def leave(self, now: float, reason: str) -> list[Action]:
        """R17: this host departs; the others go on without it. Where there are none, nothing does."""
        if self.state is NodeState.MEMBER and (
            self._farewell is None or isinstance(self._farewell.body, wire.Fail)
        ):
            self._farewell = Farewell(wire.Leave(), reason, now)
        return self._take(now)

    def strike(self, now: float, numbers: frozenset[int]) -> list[Action]:
        """These must go: they differ from the others."""
        if self._succession is not None and numbers:
            self._succession.strike(now, numbers)
        return self._take(now)

    def rebuild(self, now: float, joiners: tuple[Joiner, ...]) -> list[Action]:
        """R20, the lead: take hosts back into the view, or new ones. No phase goes on; decide again once `Ready`.

        With nobody to take in it is a view of the same members, for its keys, and the phase goes on.
        """
        if self._succession is not None and self.state is NodeState.MEMBER:
            self._succession.rebuild(now, joiners)
        return self._take(now)

    # ---- the trainer's (or the hand-out's) side of the ring

    def offer(
        self, now: float, round_: int, samples: int, unit: int | None = None, skip: bool = False
    ) -> list[Action]:
        """A contribution is ready (`Ring.offer`)."""
        ring = self._ring_of(round_)
        if ring is not None:
            ring.offer(now, round_, samples, unit, skip)
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
        elif isinstance(body, wire.View) and body.step == wire.ViewStep.ASK:
            self._on_ask(now, body.nonce)
        elif (
            header.view == self.view.number
            and header.sender in self.view.live
            and self.view.members[header.sender - 1].mac == source
        ):
            leads = header.sender == self.view.lead
            self._on_member_frame(now, source, frame)
            if leads:  # only now: what is malformed is no sign of life
                self._heard = now
        elif isinstance(body, wire.Fragment) and not header.sender:
            if self.ring is not None and (header.view, header.round) == (
                self.view.number,
                self.ring.round,
            ):
                self.ring.on_completion(now)  # the last of a switch's sums
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
            farewell.said += 1
            if farewell.said > _HEARD_BY_NOW:  # perhaps the others are in a later view
                self._ask()
        if self._waits_for_lead and now >= self._lead_silent_at():
            assert self._succession is not None
            self._succession.suspect(now, self.view.lead)
        if self._asks and now >= self._ask_at():
            self._asked = now
            self._ask()
        if self._beacons and now >= self._beacon_at:
            self._beacon_at = now + self.timings.beacon_s
            self._actions.append(
                Send(wire.pack(self.header(0, self.open_round), wire.Want(0, self.open_round)))
            )
        if self._calls_back and now >= self._call_at:
            self._call_at = now + self.timings.call_back_s
            self._called = (self._nonce(), *self._called[:1])
            body = wire.Call(self._called[0], self.view.number, self.view.ballot)
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
            self._ask_at() if self._asks else None,
        ]
        return min((t for t in times if t is not None), default=None)

    # ---- frames of members

    def _on_member_frame(self, now: float, source: bytes, frame: wire.Frame) -> None:
        body, header = frame.body, frame.header
        if self.state is not NodeState.MEMBER or self._succession is None:
            self._on_frame_standing_by(source, frame)
        elif isinstance(body, wire.View):
            self._succession.on_view(now, source, header.sender, frame)
        elif isinstance(body, wire.Vote):
            if body.step == wire.ViewStep.INSTALL:
                self._on_installed(header.sender, body)
            elif body.complete & ENDED:
                self._on_ended(wire.Ending.DONE if body.complete & DONE else wire.Ending.ENDED)
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

    def _on_ended(self, ending: wire.Ending) -> None:
        """A member has stood by after the end. The lead that has decided it knows how the job has ended."""
        stop, ballot = self._balloted, self._ballot
        if self.leads and stop is not None and stop.kind is wire.PhaseKind.STOP:
            answers = dict(ballot.answers) if ballot is not None else {}
            self._actions.append(PhaseAgreed(stop, answers))
            self._stand_by(stop.ending)
        else:
            self._learn_of_the_end(ending, self.view)

    def _on_frame_standing_by(self, source: bytes, frame: wire.Frame) -> None:
        """Late repeats of the end; and who has missed it and would go on."""
        body = frame.body
        if isinstance(body, wire.Decision):
            if body.number == self._acked[0]:
                self._acknowledge()
        elif isinstance(body, wire.View) and self.ended:
            how = ENDED | DONE * (self._ending is wire.Ending.DONE)
            vote = wire.Vote(0, body.ballot, 0, 0, 0, source, body.step, how)
            self._actions.append(Send(wire.pack(self.header(0, 0), vote)))
        elif isinstance(body, wire.View) and self._installation is not None:
            if self._installation.view.number > self.view.number:  # by which we were struck off
                self._installation.tell(frame.header.sender, body.nonce)

    # ---- after every event

    def _take(self, now: float) -> list[Action]:
        """Let waiting things take their turn, then hand the actions over."""
        installation = self._installation
        if self.leads and not self._ready and installation is not None and not installation.missing:
            self._ready = True
            if not self.changing:
                self._actions.append(Ready(self.view))
                if self.ring is not None and self.ring.token is None:  # no phase begun meanwhile
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
        if self._returns:
            for commit in (a for a in self._actions if isinstance(a, Committed)):
                for number in commit.counted:
                    self._returns.counted(self.members[number - 1].mac)
        actions = self._actions[:]
        self._actions.clear()
        return actions


__all__ = ["Node", "NodeState", "WireError"]
