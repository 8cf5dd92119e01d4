# SPDX-License-Identifier: Apache-2.0
"""A host's way into a phase: the kernel's room for it, and the training program that takes part in it."""

from __future__ import annotations

import json
from functools import partial

from nicps import wire
from nicps.job.accumulators import Accumulators
from nicps.job.actions import ShowNeed
from nicps.job.handed_job import HandedJob
from nicps.job.handout import HandOut
from nicps.job.node_info import NodeInfo
from nicps.job.orders import Acknowledge, Depart, Fail, Orders
from nicps.job.plan import REFUSED
from nicps.job.program import Program
from nicps.job.programs import Programs
from nicps.job.served import ServedMemory
from nicps.job.text import one_line
from nicps.protocol import Offer, Phase


class Entry:
    """Handles one phase after the other.

    Attributes: `phase`, the one that this host is in or prepares for; `waiting`, the one that waits for the training
    program to be ready, or to have the state.
    """

    def __init__(
        self,
        node: NodeInfo,
        job: HandedJob,
        programs: Programs,
        hand_out: HandOut,
        accumulators: Accumulators,
        served: ServedMemory,
    ) -> None:
        self._node, self._job, self._programs = node, job, programs
        self._hand_out, self._accumulators, self._served = hand_out, accumulators, served
        self.phase: Phase | None = None
        self.waiting: Phase | None = None

    def go_on(self, now: float, phase: Phase, *, again: bool) -> Orders:
        """The phase goes on in another view.

        Args:
            again: the training program was told of a phase that does not come now.
        """
        if self._accumulators.refuses(phase) and not self._node.leads:
            # The former lead knew that this host takes no stripes; this lead learns it when the host comes back.
            return [Depart(f"no stripes here: {one_line(self._accumulators.refused)}")]
        # It was preparing for another phase, or stripes are longer now.
        orders: Orders = self._accumulators.renew(phase, self._show_places)
        program = self._program_in(phase)
        if program is None:
            return orders  # a program that was in no phase yet comes into a later one
        # The samples that make the quorum in this view are other ones.
        memory = self._accumulators.memory
        shown = program.show_view(now, self._node, phase, memory)
        orders += [ShowNeed(program.number, 0, 0), *shown]
        if again:
            rounds = self._node.rounds if phase.channels else ()
            orders += self._send_in(now, program, phase, self._node.open_round, rounds)
        return orders

    def _send_in(
        self,
        now: float,
        program: Program,
        phase: Phase,
        first_round: int,
        rounds: tuple[int, ...] = (),
    ) -> Orders:
        """The training program goes into the phase."""
        memory, serves = self._accumulators.memory, None
        if phase.exchange.served:
            serves = self._served.message(phase, program.number)
        return program.enter(now, phase, first_round, memory, self._node, serves, rounds)

    def _show_places(self, now: float) -> Orders:
        """The own stripe has places again."""
        program = self._program_in(self.phase)
        if program is None:
            return []
        program.note_movement(now)  # without places the program could do nothing
        return program.show_view(now, self._node, self.phase, self._accumulators.memory)

    def _program_in(self, phase: Phase | None) -> Program | None:
        """The training program, if it takes part in that phase."""
        program = self._programs.current
        if phase is None or phase.kind is wire.PhaseKind.HANDOUT or not self.has_share(phase):
            return None
        if self._accumulators.refuses(phase):
            return None  # the lead decides on another phase
        return program if program is not None and program.holds_state else None

    def has_share(self, phase: Phase) -> bool:
        """This host takes part in it: it trains, or it serves."""
        return bool(phase.shares[self._node.number - 1]) or self._served.serves(phase)

    def make_room(self, phase: Phase, entering: Program | None, now: float) -> Orders:
        """Make the accumulators that the phase needs, and use them unless there is another phase by that time.

        Args:
            entering: the training program that enters the phase.
        """
        if phase is not self.phase:
            return []
        if phase.exchange.served and not self._served.fits(phase):
            again = partial(self.make_room, phase, entering)
            return [self._served.reserve(phase, again, partial(self._refuse, phase))]
        if self._accumulators.fit(phase):
            return self._use_room(phase, entering, now)
        then = partial(self._reserved, phase, entering)
        return [self._accumulators.reserve(phase, then, partial(self._refuse_stripes, phase))]

    def _reserved(self, phase: Phase, entering: Program | None, now: float, number: int) -> Orders:
        if phase is not self.phase:
            return self._accumulators.drop(number)
        used = self._accumulators.use(phase, number)
        return [*used, *self._use_room(phase, entering, now)]

    def _refuse_stripes(self, phase: Phase) -> Orders:
        return self._refuse(phase, 0.0, self._accumulators.refused)

    def _refuse(self, phase: Phase, _: float, reason: str) -> Orders:
        """The kernel takes no frames of the phase's exchange: the lead is told, which decides on another phase."""
        if phase is not self.phase:
            return []
        return [Acknowledge(phase.number, json.dumps({REFUSED: one_line(reason)}).encode())]

    def _use_room(self, phase: Phase, entering: Program | None, now: float) -> Orders:
        if phase.kind is wire.PhaseKind.HANDOUT:
            mine = self._hand_out.is_source(phase)
            offer: Orders = [Offer(phase.first_round, 1)] if mine else []
            return [Acknowledge(phase.number), *offer]
        fills = self._served.needs_filling(phase)
        begins: Orders = [self._served.begin(phase)] if phase.exchange.served and not fills else []
        if entering is None:
            return [*begins, Acknowledge(phase.number)]
        if entering is not self._programs.current or entering.ended:
            return []  # it has been lost meanwhile
        return [*begins, *self._send_in(now, entering, phase, phase.first_round)]

    def acknowledge(self, phase: Phase) -> Orders:
        """The training program is in the phase: so is this host, once its part is filled."""
        done = Acknowledge(phase.number)
        if not self._served.needs_filling(phase):
            return [done]
        return [
            self._served.fill(
                phase,
                lambda: phase is self.phase,
                lambda _: [self._served.begin(phase), done],
            )
        ]

    def enter_training(self, now: float) -> Orders:
        """Bring the training program into the phase that waits for it, if both are there."""
        phase, program, node = self.waiting, self._programs.current, self._node
        if phase is None or program is None or not program.ready:
            return []
        if program.ended:  # the end was decided, and the lead of this phase does not know it
            return self._programs.fail(
                "the training program has saved and ended, and cannot train on"
            )
        same_files = phase.settings.get("handout") == self._job.digest
        trains = phase.kind is wire.PhaseKind.TRAIN
        # Where there are channels, the program looks at their plan.
        same_size = not trains or phase.channels or phase.fragments == program.fragments
        same_state = program.digest == str(phase.settings.get("model", ""))
        learns = node.number in node.learners
        if same_files and learns and not same_state and self._job.has_state:
            # Let the program load the state of the hand-out (R20); once it is loaded the program comes here again.
            loads = program.duty == "load"
            return [] if loads else program.change_state(now, "load", node)
        fresh = not (same_state or program.holds_state)
        if fresh and not learns and self._programs.is_blank(program):
            return []  # this host departs, as its program was lost, and returns with the state
        self.waiting = None
        if not same_files:
            return [Fail("what was handed out has arrived damaged")]
        if learns and not same_state and same_size:
            return [Depart("the state that was handed out is not that of the others: once more")]
        if not same_size or fresh:
            reason = (
                "the model built here differs from the lead's: the same job.py and the same "
                "versions of Python and PyTorch are needed on every host"
            )
            return [Fail(reason)]
        # If the state differs after rounds of training, all judge it after the next round.
        self.phase = phase
        return self.make_room(phase, program, now)
