# SPDX-License-Identifier: Apache-2.0
"""One host as a state machine: forming, deciding, and the ring of the phase in force.

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
    Failed,
    Formed,
    PhaseAgreed,
    Prepare,
    Receiver,
    Send,
    SendFragments,
)
from nicps.protocol.decision import Ballot, acknowledgement
from nicps.protocol.formation import Formation, pack_list, safe_name, unpack_list
from nicps.protocol.phase import ROUND_KINDS, Member, Phase, Timings
from nicps.protocol.ring import KernelState, Ring

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


class Node:
    """One member (docs/protocol.md)."""

    def __init__(
        self,
        mac: bytes,
        name: str,
        network: str,
        receiver: Receiver,
        timings: Timings | None = None,
    ) -> None:
        self.mac = mac
        self.name = safe_name(name, mac)
        self.network = wire.network_id(network)
        self.timings = timings or Timings()
        self.state = NodeState.STANDBY
        self.busy = False  # about to start a network of its own: answers no calls
        self.view = 0
        self.number = 0
        self.members: tuple[Member, ...] = ()
        self.phase: Phase | None = None  # in force, or being prepared
        self.ring: Ring | None = None
        self._next_ring: Ring | None = None
        self._receiver = receiver
        self._actions: list[Action] = []
        self._sequence = 0
        self._formation = Formation(
            mac, self.name, self.timings, self._header_without_view, self._actions.append
        )
        self._ballot: Ballot | None = None
        self._balloted: Phase | None = None
        self._decided = 0  # highest decision heard (members) or made (node 1)
        self._generation = 0
        self._waiting: _Heard | None = None
        self._acked: tuple[int, bool, bytes] = (0, True, b"")
        self._failure: str | None = None
        self._fail_at = 0.0  # when to tell it again
        self._failed_at = 0.0
        self._heard = 0.0

    # ---- commands

    def start(self, now: float, nonce: int) -> list[Action]:
        """R1: this host starts the network. `nonce` is a random 64-bit number."""
        assert self.state is not NodeState.MEMBER
        self.state = NodeState.FORMING
        self._formation.start(now, nonce, self.view)
        return self._take(now)

    def decide(self, now: float, phase: Phase) -> list[Action]:
        """Node 1 only: open `phase`; its number and generation are filled in here.

        Raises:
            WireError: its settings are too long for a frame; nothing has changed.
        """
        assert self.number == 1
        if len(phase.pack()) > wire.MAX_FRAME_BYTES - 100:
            raise WireError(f"a decision of {len(phase.pack())} bytes does not fit a frame")
        self._decided += 1
        self._generation += 1
        phase = replace(phase, number=self._decided, generation=self._generation)
        body = wire.Decision(phase.number, phase.generation, phase.kind)
        round_ = self.open_round
        tail = phase.pack()
        self._balloted = phase
        self._ballot = self._begin_ballot(
            phase.number, lambda: wire.pack(self.header(0, round_), body, tail=tail)
        )
        self._ballot.start(now)
        self._hear(now, _Heard(phase, round_))
        return self._take(now)

    def prepared(self, now: float, number: int, answer: bytes = b"") -> list[Action]:
        """This host is ready for the decision of that number; `answer` (JSON) goes to node 1."""
        if self.phase is None or self.phase.number != number or self._acked[:2] == (number, True):
            return self._take(now)
        phase = self.phase
        if phase.kind in ROUND_KINDS:
            self._next_ring = Ring(
                phase,
                self.view,
                self.number,
                self.members,
                self._receiver,
                self.timings,
                self.header,
                self._actions.append,
                self._on_silent,
            )
        self._acked = (number, True, answer)
        if self._ballot is not None:
            self._ballot.acknowledge(now, self.number, True, answer)
        else:
            self._acknowledge()
        if phase.kind is wire.PhaseKind.STOP and self.number != 1:
            self._stand_by()
        return self._take(now)

    def fail(self, now: float, reason: str) -> list[Action]:
        """The job cannot go on here; node 1 stops it everywhere."""
        if self.number == 1:
            self._actions.append(Failed(reason))
        elif self.state is NodeState.MEMBER and self._failure is None:
            self._failure, self._fail_at, self._failed_at = reason, now, now
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
        if ring is not None:
            ring.progress(now, round_, samples)
        return self._take(now)

    def read(self, now: float, round_: int) -> list[Action]:
        """The sum of that round has been read out (`Ring.read`)."""
        if self.ring is not None:
            self.ring.read(now, round_)
        return self._take(now)

    def sent(self, now: float, action: SendFragments) -> list[Action]:
        """This is with the kernel (`Ring.sent`)."""
        if self.ring is not None and self.ring.phase.generation == action.generation:
            self.ring.sent(now)
        return self._take(now)

    def go_on(self, now: float) -> list[Action]:
        """Node 1 has decided to train on after the last round (`Ring.go_on`)."""
        if self.ring is not None:
            self.ring.go_on(now)
        return self._take(now)

    # ---- what comes from the kernel and the clock

    def kernel_saw(
        self, now: float, seen: tuple[int, int], heard: float, bounced: bytes | None
    ) -> None:
        """State of the XDP program, before `on_frame` of what it passed up (`Ring.kernel_saw`)."""
        self._heard = max(self._heard, heard)
        if self.ring is not None:
            if bounced is not None:
                self.ring.bounced(heard, wire.unpack(bounced))
            self.ring.kernel_saw(seen, heard)

    def on_frame(self, now: float, source: bytes, data: bytes) -> list[Action]:
        """A frame of ours that came up, from its version byte on.

        Raises:
            WireError: it is malformed; nothing has changed.
        """
        frame = wire.unpack(data)
        if frame.header.network != self.network or source == self.mac:
            return []
        if isinstance(frame.body, wire.Call | wire.Answer | wire.Formed):
            self._on_forming(now, source, frame)
        elif (
            frame.header.view == self.view
            and 0 < frame.header.sender <= len(self.members)
            and self.members[frame.header.sender - 1].mac == source
        ):
            self._heard = max(self._heard, now)
            self._on_member_frame(now, frame)
        return self._take(now)

    def tick(self, now: float) -> list[Action]:
        """Time has passed; call at `deadline` at the latest."""
        formed = self._formation.tick(now)
        if formed is not None:
            self._form(now, *formed)
        if self._ballot is not None:
            self._ballot.tick(now)
            stopping = self._balloted is not None and self._balloted.kind is wire.PhaseKind.STOP
            patience_s = self.timings.stop_s if stopping else self.timings.silent_s
            silent = self._ballot.silent(now, patience_s)
            if silent is not None:
                self._give_up(silent)
        if self.ring is not None:
            self.ring.tick(now)
        if self._failure is not None and now >= self._fail_at:
            self._fail_at = now + 10 * self.timings.decision_s
            header = self.header(0, self.open_round)
            self._actions.append(
                Send(wire.pack(header, wire.Fail(), tail=self._failure.encode()[:1000]))
            )
        if self._waits_for_node_1 and now > self._heard + self.timings.silent_s:
            self._on_silent(now, self.members[0])
        if self._failure is not None and now > self._failed_at + self.timings.silent_s:
            self._actions.append(Failed(f"{self._failure}, and node 1 does not answer"))
            self._stand_by()
        return self._take(now)

    def deadline(self) -> float | None:
        """When `tick` must be called next, or None."""
        times = [
            self._formation.deadline(),
            self._ballot.deadline() if self._ballot is not None else None,
            self.ring.deadline() if self.ring is not None else None,
            self._fail_at if self._failure is not None else None,
            self._heard + self.timings.silent_s + 0.1 if self._waits_for_node_1 else None,
        ]
        return min((t for t in times if t is not None), default=None)

    # ---- what others look at

    @property
    def open_round(self) -> int:
        """The round that is open here; 0 outside a phase with rounds."""
        return self.ring.round if self.ring is not None else 0

    @property
    def kernel(self) -> KernelState | None:
        """What the XDP program must know, or None while no rounds are under way."""
        if self.ring is None:
            return self._next_ring.kernel if self._next_ring is not None else None
        state = self.ring.kernel
        if self._next_ring is not None:
            state = replace(state, round_high=self._next_ring.round, bounce=False)
        return state

    # ---- forming

    def _on_forming(self, now: float, source: bytes, frame: wire.Frame) -> None:
        body = frame.body
        idle = self.state is not NodeState.MEMBER
        if isinstance(body, wire.Call):
            if idle and not (self.busy and self._formation.starting is None):
                self._formation.on_call(source, body.nonce, self.view)
                if self._formation.starting is None:
                    self.state = NodeState.STANDBY
        elif isinstance(body, wire.Answer):
            self._formation.on_answer(now, source, frame)
        elif isinstance(body, wire.Formed):
            if frame.header.view == self.view:
                self._acknowledge()  # ours was lost
            elif (
                idle
                and not self.busy
                and body.nonce in self._formation.answered
                and self.view < frame.header.view < _MOST_VIEWS
                and 0 < body.members <= wire.MAX_MEMBERS
            ):
                members = unpack_list(frame)
                mine = [m.number for m in members if m.mac == self.mac]
                if mine and members[0].mac == source:
                    self._enter(now, frame.header.view, mine[0], members)
                    self._acknowledge()

    def _form(self, now: float, nonce: int, view: int, members: tuple[Member, ...]) -> None:
        """R3: close the list, and tell everybody until all have acknowledged."""
        self._enter(now, view, 1, members)
        self._ballot = self._begin_ballot(
            0, lambda: pack_list(self.header(0, 0), nonce, self.members)
        )
        self._ballot.start(now)
        self._ballot.acknowledge(now, 1, True, b"")

    def _enter(self, now: float, view: int, number: int, members: tuple[Member, ...]) -> None:
        self.state = NodeState.MEMBER
        self._formation.answered.clear()
        self._balloted = None
        self.view, self.number, self.members = view, number, members
        self.phase = self.ring = self._next_ring = self._waiting = None
        self._decided = self._generation = 0
        self._acked = (0, True, b"")
        self._failure = None
        self._heard = now
        if number != 1:
            self._actions.append(Formed(view, number, members))

    # ---- deciding

    def _begin_ballot(self, number: int, frame: Callable[[], bytes]) -> Ballot:
        return Ballot(number, frame, self.members, self.timings, self._actions.append)

    def _on_member_frame(self, now: float, frame: wire.Frame) -> None:
        body, header = frame.body, frame.header
        if isinstance(body, wire.Decision):
            if header.sender != 1 or self.state is not NodeState.MEMBER:
                if body.number == self._acked[0]:
                    self._acknowledge()
            elif body.number > self._decided:
                phase = Phase.unpack(body, frame.tail, len(self.members))  # before anything changes
                self._decided = body.number
                self._acked = (body.number, False, b"")
                self._acknowledge()
                self._hear(now, _Heard(phase, header.round))
            else:
                self._acknowledge()
        elif isinstance(body, wire.Ack):
            if self._ballot is not None and body.number == self._ballot.number:
                self._ballot.acknowledge(now, header.sender, bool(body.prepared), frame.tail)
        elif isinstance(body, wire.Token):
            if self._next_ring is not None and body.generation == self._next_ring.phase.generation:
                self.ring, self._next_ring = self._next_ring, None
            if self.ring is not None:
                self.ring.on_token(now, frame)
        elif isinstance(body, wire.Fragment):
            if self.ring is not None and header.round == self.ring.round:
                self.ring.on_completion(now)
        elif isinstance(body, wire.Want):
            if self.ring is not None:
                self.ring.on_want(now, frame)
        elif isinstance(body, wire.Fail):
            if self.number == 1 and self.state is NodeState.MEMBER:
                name = self.members[header.sender - 1].name
                self._actions.append(Failed(f"{name}: {frame.tail.decode(errors='replace')}"))

    def _hear(self, now: float, heard: _Heard) -> None:
        if self.ring is not None:
            self.ring.freeze()
        self._next_ring = None
        self._waiting = heard

    def _acknowledge(self) -> None:
        number, prepared, answer = self._acked
        frame = acknowledgement(self.header(0, self.open_round), number, prepared, answer)
        self._actions.append(Send(frame))

    def _give_up(self, silent: Member) -> None:
        """A member does not answer: fail the job; if that was the stop itself, stop without it."""
        assert self._ballot is not None
        if self._balloted is not None and self._balloted.kind is wire.PhaseKind.STOP:
            self._ballot.answers.setdefault(silent.number, b"")
            return
        self._ballot = None
        self._actions.append(
            Failed(
                f"{silent.name} ({wire.mac_text(silent.mac)}) has not answered for "
                f"{self.timings.silent_s:g} s"
            )
        )

    def _on_silent(self, now: float, member: Member) -> None:
        """Whoever should be heard is not: the job cannot go on (yet, see docs/protocol.md)."""
        mac, silent_s = wire.mac_text(member.mac), self.timings.silent_s
        reason = f"{member.name} ({mac}) has not been heard for {silent_s:g} s"
        if self.number == 1:
            self._actions.append(Failed(reason))
        elif member.number == 1:
            self._actions.append(Failed(reason))
            self._stand_by()
        elif self._failure is None:
            self._failure, self._fail_at, self._failed_at = reason, now, now

    def _stand_by(self) -> None:
        self.state = NodeState.STANDBY
        self.ring = self._next_ring = self._waiting = self._ballot = None
        self._failure = None

    # ---- after every event

    def _take(self, now: float) -> list[Action]:
        """Let waiting things take their turn, then hand the actions over."""
        waiting = self._waiting
        if waiting is not None and self._reached(waiting):
            self._waiting = None
            self.phase = waiting.phase
            if waiting.phase.kind is wire.PhaseKind.STOP:
                self._failure = None
            self._actions.append(Prepare(waiting.phase))
        ballot = self._ballot
        if ballot is not None and ballot.agreed:
            self._ballot = None
            if ballot.number == 0:
                self._actions.append(Formed(self.view, self.number, self.members))
            else:
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
            self._stand_by()
        elif self._next_ring is not None:
            self.ring, self._next_ring = self._next_ring, None
            self.ring.create(now)

    @property
    def _waits_for_node_1(self) -> bool:
        """Between phases node 1 must be heard; in a ring, whoever has the token (`Ring`)."""
        return self.state is NodeState.MEMBER and self.number != 1 and self.ring is None

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
            view=self.view,
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
