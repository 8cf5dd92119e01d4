# SPDX-License-Identifier: Apache-2.0
"""The lead decides, everybody prepares (R5 to R7, R14): one member's part in it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from nicps import wire
from nicps.protocol.actions import Send
from nicps.protocol.decision import PendingDecision
from nicps.protocol.local_host import LocalHost
from nicps.protocol.phase import ROUND_KINDS, AdaptiveTimeout, Phase, Timings
from nicps.protocol.rings import Rings
from nicps.protocol.signals import Silent, Steps


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A decision that waits for its turn: the open round it belongs to must be reached first."""

    phase: Phase
    round: int


class Decisions:
    """Decisions: heard, waited for their turn, prepared, agreed on.

    Attributes: `phase`, in force, or being prepared; `pending`, at the lead, what is not agreed on yet; `last`, at the
    lead, what it has decided last in this view.
    """

    def __init__(
        self, host: LocalHost, rings: Rings, timings: Timings, timeout: AdaptiveTimeout
    ) -> None:
        self.phase: Phase | None = None
        self.pending: PendingDecision | None = None
        self.last: Phase | None = None
        self._host = host
        self._rings = rings
        self._timings = timings
        self._timeout = timeout
        self._highest = 0  # heard (members) or made (the lead)
        self._generation = 0
        self._waiting: _Waiting | None = None
        self._acked: tuple[int, bool, bytes] = (0, True, b"")

    @property
    def prepared_for(self) -> int:
        """The phase that is in force or being prepared, by its number."""
        return self.phase.number if self.phase is not None else 0

    @property
    def highest(self) -> int:
        """The highest decision that has been heard or made in this view."""
        return self._highest

    def enter_view(self, phase: Phase | None, number: int) -> None:
        """Another view is in force; `number` is that of the phase that goes on in it, if one does."""
        self.pending = self.last = self._waiting = None
        self._highest, self._generation = number, 1
        self._acked = (number, True, b"")
        self.phase = phase

    def withdraw(self) -> None:
        """The view is about to end, and with it what is not agreed on yet."""
        self.pending = None

    def close(self) -> None:
        """This host stands by."""
        self._waiting = self.pending = None

    # ---- the lead

    def decide(self, now: float, phase: Phase) -> Steps:
        """Open `phase`; its number and generation are filled in here."""
        self._highest += 1
        self._generation += 1
        opened = self._rings.opened
        phase = replace(phase, number=self._highest, generation=self._generation, opened=opened)
        body = wire.Decision(phase.number, phase.generation, phase.kind)
        round_, host, ring = self._rings.open_round, self._host, self._rings.current
        stops = phase.kind is wire.PhaseKind.STOP
        flags = wire.Flag.SAVES if stops and ring is not None and ring.saved_before else 0
        header = host.view.header(host.number, round_, flags)
        frame = wire.Frame(header, body, tail=phase.pack())
        self.last = phase
        self.pending = PendingDecision(phase, frame, host.view.order, self._timings)
        sent = self.pending.start(now)
        self._acked = (phase.number, False, b"")
        self._wait(phase, round_)
        return sent

    def hear_acknowledgement(self, now: float, sender: int, ack: wire.Ack, answer: bytes) -> None:
        """A member has heard the decision, or is prepared for it."""
        if self.pending is not None and ack.number == self.pending.phase.number:
            self.pending.acknowledge(now, sender, bool(ack.prepared), answer)

    def take_agreed(self) -> PendingDecision | None:
        """What everybody is prepared for, once."""
        pending = self.pending
        if pending is None or not pending.agreed:
            return None
        self.pending = None
        return pending

    def tick(self, now: float) -> Steps:
        """Repeat what is pending; a member that does not answer is given up, or the stop goes on without it."""
        pending = self.pending
        if pending is None:
            return []
        steps = pending.tick(now)
        if pending.phase.kind is wire.PhaseKind.STOP:
            silent = pending.silent(now, self._timings.stop_s)
            if silent:
                pending.answers.setdefault(silent, b"")
            return steps
        silent = pending.silent(now, max(4 * self._timings.silence_s, self._timeout.seconds))
        if silent and silent != self._host.number:
            steps.append(Silent(silent))
        return steps

    def deadline(self) -> float:
        """When `tick` wants to be called next."""
        return self.pending.deadline() if self.pending is not None else math.inf

    # ---- every member

    def hear(self, frame: wire.Frame) -> Steps:
        """The lead has decided.

        Raises:
            WireError: what it has decided cannot be read; nothing has changed.
        """
        body = frame.body
        assert isinstance(body, wire.Decision)
        if frame.header.sender != self._host.view.lead:
            return []
        if body.number <= self._highest:
            return [self.acknowledge()]
        phase = Phase.unpack(body, frame.tail, len(self._host.view.members))
        self._rings.check(phase)
        self._highest = body.number
        self._acked = (body.number, False, b"")
        acknowledged = self.acknowledge()
        self._wait(phase, frame.header.round)
        ring = self._rings.current
        # The rounds that it names may be those of the phase to come, which is in force at the lead already.
        if ring is None or self._rings.coming is not None:
            return [acknowledged]
        caught_up = ring.catch_up(phase.opened)
        if phase.kind is wire.PhaseKind.STOP:
            # Nobody waits for its turn. But the lead is past the round that is whole here: all members have it.
            if frame.header.flags & wire.Flag.SAVES:
                ring.hear_saves(frame.header.round)
            caught_up += ring.settle((frame.header.round,))
        return [acknowledged, *caught_up]

    def acknowledge_again(self, number: int) -> Steps:
        """A late repeat of the end: this host stands by already."""
        return [self.acknowledge()] if number == self._acked[0] else []

    @property
    def waits(self) -> bool:
        """A decision has yet to be prepared for."""
        return self._waiting is not None

    def take_turn(self) -> Phase | None:
        """What is to be prepared now: its turn has come, as what was committed before is committed here too."""
        waiting = self._waiting
        if waiting is None or not self._reached(waiting):
            return None
        self._waiting = None
        self.phase = waiting.phase
        return waiting.phase

    def awaits(self, number: int) -> Phase | None:
        """The phase of that number, if this host is preparing for it."""
        phase = self.phase
        if phase is None or phase.number != number or self._acked[:2] != (number, False):
            return None
        return phase

    def prepared(self, now: float, phase: Phase, answer: bytes) -> Steps:
        """This host is ready for the phase that it was preparing for."""
        if phase.kind in ROUND_KINDS:
            self._rings.prepare(now, phase)
        self._acked = (phase.number, True, answer)
        if self.pending is None:
            return [self.acknowledge()]
        self.pending.acknowledge(now, self._host.number, True, answer)
        return []

    def acknowledge(self) -> Send:
        """A member's frame for the lead."""
        number, prepared, answer = self._acked
        header = self._host.header(self._rings.open_round)
        return Send(wire.Frame(header, wire.Ack(number, int(prepared)), tail=answer))

    def _wait(self, phase: Phase, round_: int) -> None:
        self._rings.freeze()
        self._waiting = _Waiting(phase, round_)

    def _reached(self, waiting: _Waiting) -> bool:
        """What was committed before the decision must be committed here too, and the phase before be in force.

        It is in force at the lead if one of its rounds is open there: its first token comes. A view that this member
        proposes goes on with that phase.
        """
        coming = self._rings.coming
        if waiting.phase.kind is wire.PhaseKind.STOP:
            return True
        if coming is not None and waiting.round >= coming.phase.first_round:
            return False
        if self._rings.current is None:
            return True
        needed = (waiting.round, *waiting.phase.opened)
        rounds = self._rings.current.rounds
        return all(there >= least for there, least in zip(rounds, needed, strict=False))
