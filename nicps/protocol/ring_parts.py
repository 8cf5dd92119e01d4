# SPDX-License-Identifier: Apache-2.0
"""The parts of a ring, and what others ask of them: also for rings of several channels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from nicps import wire
from nicps.protocol.actions import Action
from nicps.protocol.announcer import Announcer
from nicps.protocol.carried import Carried
from nicps.protocol.control import Control
from nicps.protocol.exchange import exchanger_of
from nicps.protocol.kernel import KernelState, Receiver
from nicps.protocol.phase import AdaptiveTimeout, Phase, Timings
from nicps.protocol.signals import Late
from nicps.protocol.step import Step
from nicps.protocol.timers import FailureDetector, MarkTimer, Retransmission, Want
from nicps.protocol.token import TokenState
from nicps.protocol.view import View


class RingParts:
    """Everything that one member's part in the ring of a phase consists of; `Ring` has its events.

    `carried` is from the view before, where the phase goes on; `step` is for phases with channels.

    Attributes: `holding`, this member has the token; `parked`, its holder keeps it; `turns`, how often it got it.
    """

    def __init__(
        self,
        phase: Phase,
        view: View,
        number: int,
        receiver: Receiver,
        timings: Timings,
        timeout: AdaptiveTimeout,
        carried: Carried | None = None,
        now: float = 0.0,
        step: Step | None = None,
    ) -> None:
        self.number = number
        self.holding = False
        self.parked = False
        self.turns = 0
        exchange = exchanger_of(phase, view, number, receiver, timings, now)
        carried = carried or Carried.at_the_start(phase)
        self._control = Control(phase, view, number, exchange, carried, step)
        self._exchange, self._view = exchange, view
        self._others = len(view.live) > 1
        self._timings = timings
        self._key = (phase.generation, 0)  # newest token that this machine has handled or sent
        self._seen = self._key  # newest that the kernel has seen
        self._retransmission = Retransmission(timings)
        self._want = Want(timings)
        self._marks = MarkTimer(timings)
        self._announcer = Announcer(self._control, view, self._marks)
        waits = exchange.kind.token_waits
        self._detector = FailureDetector(timings, timeout, now, token_waits=waits)

    # ---- what others ask

    @property
    def phase(self) -> Phase:
        """Whose rounds these are."""
        return self._control.phase

    @property
    def round(self) -> int:
        """The open one."""
        return self._control.round

    @property
    def token(self) -> TokenState | None:
        """The latest that was seen."""
        return self._control.token

    @property
    def offered(self) -> frozenset[int]:
        """The members that have broadcast their offers to the open round."""
        return self._control.offers.members(self.round)

    @property
    def complete(self) -> bool:
        """This member has all that the open round's closed list comes to, and has said so."""
        return self._control.complete

    @property
    def rounds(self) -> tuple[int, ...]:
        """The open round of each channel."""
        return (self.round,)

    @property
    def completes(self) -> tuple[bool, ...]:
        """The same of `complete`."""
        return (self.complete,)

    @property
    def between_steps(self) -> bool:
        """What the lead decides now, it decides between two steps."""
        return True

    def awaits_decision(self, rounds: Sequence[int]) -> bool:
        """Whether the lead's program has to say that training goes on, where these rounds are open."""
        return rounds[0] > self.phase.first_round

    @property
    def frozen(self) -> bool:
        """Another phase or view is about to come."""
        return self._control.frozen

    @property
    def awaits_lanes(self) -> bool:
        """Others wait for lanes that this host's training program has not converted yet."""
        return self._exchange.awaits_lanes or self._control.waits_to_enter

    @property
    def asks_switch(self) -> bool:
        """Sums are made by a Linux switch, and it is asked for those that lack."""
        return 0 in self._exchange.aggregators

    def find_late(self) -> Mapping[int, Late]:
        """Whose contributions or sums the open round lacks here, if it can be told; 0 is a Linux switch."""
        return self._exchange.find_late()

    @property
    def waits_for_kernel(self) -> bool:
        """`deadline` depends on what the kernel has taken by now."""
        return False

    @property
    def has_sums(self) -> bool:
        """Sums of several contributions have come in an open round."""
        return self._exchange.has_sums

    @property
    def kernel(self) -> KernelState:
        """What the XDP program must know now."""
        return self._control.kernel(self.holding)

    def batch(self, channel: int) -> int:
        """As many frames of that channel may wait in this host's queues; 0: any number."""
        return 0

    # ---- from view to view

    def freeze(self) -> None:
        """Another phase or view is coming: contribute and close nothing more, but keep forwarding the token."""
        self._control.freeze()

    def carry(self) -> Carried:
        """What goes along into the next view."""
        return self._control.carry()

    def settle(self, rounds: Sequence[int]) -> list[Action]:
        """These rounds are open in the next view: a member that is one behind, and has it whole, commits it (R18)."""
        behind = self.round == rounds[0] - 1 and self.complete
        return self._control.settle() if behind else []

    @property
    def saved_before(self) -> bool:
        """The lead writes a checkpoint of the state after the round before the open one."""
        return self._control.saves(self.round - 1)

    @property
    def saves_open(self) -> bool:
        """The lead has said that it writes one of the state after the open round."""
        return self._control.lead_saves

    def hear_saves(self, round_: int) -> None:
        """That round is open at the lead, which writes a checkpoint of the state after the round before."""
        if self.round == round_ - 1:
            self._control.hear_mark(self._view.lead, wire.Mark.COMPLETE | wire.Mark.SAVES)

    def catch_up(self, rounds: Sequence[int]) -> list[Action]:
        """The lead has decided, with these rounds open in channels 1 and up: there are none here."""
        return []

    def enter(self) -> list[Action]:
        """This view is in force here: what the training program must know of the open round."""
        return []

    def unit_of(self, round_: int) -> int:
        """log2 of the unit of the open round, or of the next one."""
        return self._control.unit_of(round_)
