# SPDX-License-Identifier: Apache-2.0
"""Which memory of the kernel's a job uses: accumulators, and where the exchange has stripes, room for these."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from nicps import wire
from nicps.job.actions import (
    BeginTask,
    DropAccumulators,
    RenewAccumulators,
    ReserveAccumulators,
    UseAccumulators,
)
from nicps.job.node_info import NodeInfo
from nicps.job.orders import Orders
from nicps.job.tasks import Tasks
from nicps.protocol import Phase


@dataclass(frozen=True, slots=True)
class Memory:
    """What there is in each of two banks, and the how manieth of its kind it is: a program must map what is new.

    `blocks` of accumulators; `room`, fragments of own lanes and sums; `places`, blocks of the own stripe.
    """

    blocks: int = 0
    room: int = 0
    places: int = 0
    made: tuple[int, int, int] = (0, 0, 0)

    def since(self, shown: tuple[int, int, int]) -> Memory:
        """What of it is new to who has been shown those."""
        return Memory(
            self.blocks if self.made[0] != shown[0] else 0,
            self.room if self.made[1] != shown[1] else 0,
            self.places if self.made[2] != shown[2] else 0,
        )


class Accumulators:
    """Those that are in use.

    A hand-out has its own, also where those of training have the size: a training program may still be reading the
    last sum there, or the disk the last window, when the next phase writes to that bank.

    Attributes: `memory`, what there is.
    """

    def __init__(self, node: NodeInfo, tasks: Tasks, owner: object) -> None:
        self._node, self._tasks, self._owner = node, tasks, owner
        self.memory = Memory()
        self._of_hand_out = False

    def fit(self, phase: Phase) -> bool:
        """Whether the phase can use them."""
        return not phase.blocks or not any(self._lacks(phase))

    def reserve(self, phase: Phase, then: Callable[[float, int], Orders]) -> BeginTask:
        """Make what lacks for the phase; `then` takes its number."""
        blocks, room, _ = self._lacks(phase)
        return self._tasks.begin(self._owner, ReserveAccumulators(blocks, room), then)

    def use(self, phase: Phase, number: int) -> Orders:
        """What was reserved comes into use."""
        _, _, places = self._change(phase)
        return [UseAccumulators(number, places)]

    def drop(self, number: int) -> Orders:
        """The phase that they were reserved for does not come."""
        return [DropAccumulators(number)]

    def renew(self, phase: Phase) -> Orders:
        """The phase goes on at once: others, where these do not fit."""
        return [] if self.fit(phase) else [RenewAccumulators(*self._change(phase))]

    def _lacks(self, phase: Phase) -> tuple[int, int, int]:
        """Blocks, room and places that must be made; 0 for what is there."""
        hands_out, there = phase.kind is wire.PhaseKind.HANDOUT, self.memory
        fragments = max(phase.fragments, phase.last_fragments)
        aggregators = len(phase.aggregators(self._node.view.live))
        # Stripes need no accumulators, but for the test rounds in between.
        blocks = 1 if phase.exchange.absolute else phase.blocks
        if (there.blocks, self._of_hand_out) == (blocks, hands_out):
            blocks = 0
        if not aggregators:
            return blocks, 0, 0
        room = fragments if fragments != there.room else 0
        longest = fragments // aggregators + 1
        places = -(-longest // phase.per_block)
        return blocks, room, places if room or places != there.places else 0

    def _change(self, phase: Phase) -> tuple[int, int, int]:
        """From now on there is what lacked; it."""
        new, there = self._lacks(phase), self.memory
        if new[0]:
            self._of_hand_out = phase.kind is wire.PhaseKind.HANDOUT
        sizes = (there.blocks, there.room, there.places)
        blocks, room, places = (n or old for n, old in zip(new, sizes, strict=True))
        first, second, third = (made + bool(n) for made, n in zip(there.made, new, strict=True))
        self.memory = Memory(blocks, room, places, (first, second, third))
        return new
