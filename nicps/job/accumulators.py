# SPDX-License-Identifier: Apache-2.0
"""The kernel's memory that a job uses: accumulators, and for the exchange `stripes` its lanes, sums and places."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeAlias

from nicps import wire
from nicps.job.actions import (
    BeginTask,
    DropAccumulators,
    RenewAccumulators,
    RetirePlaces,
    UseAccumulators,
)
from nicps.job.node_info import NodeInfo
from nicps.job.orders import Orders
from nicps.job.slow_work import ReserveAccumulators, StripesRefused
from nicps.job.tasks import Tasks
from nicps.protocol import Phase

_ByChannel: TypeAlias = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Sizes:
    """What must be made; 0 or nothing for what exists. Fragments and places are by channel."""

    blocks: int = 0
    rooms: _ByChannel = ()
    places: _ByChannel = ()


@dataclass(frozen=True, slots=True)
class Memory:
    """The memory in each of two banks, each kind with a serial number: a program must map new memory.

    `blocks` of accumulators; `room`, fragments of own lanes and sums; `places`, blocks of the own stripe. `rooms` and
    `stripes` are the last two by channel.
    """

    blocks: int = 0
    room: int = 0
    places: int = 0
    made: tuple[int, int, int] = (0, 0, 0)
    rooms: _ByChannel = ()
    stripes: _ByChannel = ()

    def since(self, shown: tuple[int, int, int]) -> Memory:
        """The kinds of it that are new to a program that has mapped those."""
        return Memory(
            self.blocks if self.made[0] != shown[0] else 0,
            self.room if self.made[1] != shown[1] else 0,
            self.places if self.made[2] != shown[2] else 0,
            rooms=self.rooms,
            stripes=self.stripes,
        )


class Accumulators:
    """The memory that is in use.

    A hand-out has memory of its own, also where that of training has the size: a training program may still be reading
    the last sum there, or the disk the last window, when the next phase writes to that bank.

    Attributes: `memory`, the memory that exists. `refused`: why this host's kernel takes no frames of stripes; else
    empty.
    """

    def __init__(self, node: NodeInfo, tasks: Tasks, owner: object) -> None:
        self._node, self._tasks, self._owner = node, tasks, owner
        self.memory = Memory()
        self.refused = ""
        self._of_hand_out = False
        self._reserved: dict[int, _Sizes] = {}  # memory that is made, and not in use yet, by number
        self._awaited = 0  # the serial number of the places that the own stripe waits for

    @property
    def lacks_places(self) -> bool:
        """Whether the own stripe waits for its places. The list then waits for this host, and its training program
        is not to blame.
        """
        return bool(self.memory.room and not self.memory.places)

    def refuses(self, phase: Phase) -> bool:
        """Whether the phase has stripes, and this host's kernel takes none."""
        return bool(self.refused) and phase.exchange.absolute

    def fit(self, phase: Phase) -> bool:
        """Whether the phase can use this memory."""
        return not phase.blocks or self._lacks(phase) == _Sizes()

    def reserve(
        self, phase: Phase, then: Callable[[float, int], Orders], refuse: Callable[[], Orders]
    ) -> BeginTask:
        """Make the memory that the phase lacks; `then` takes its number, `refuse` follows if the kernel takes no
        stripes.
        """
        sizes = self._lacks(phase)

        def made(now: float, outcome: int | StripesRefused) -> Orders:
            if isinstance(outcome, StripesRefused):
                self.refused = outcome.reason
                return refuse()
            self._reserved[outcome] = sizes
            return then(now, outcome)

        return self._tasks.begin(self._owner, _reserve(sizes), made)

    def use(self, phase: Phase, number: int) -> Orders:
        """Use the memory that was reserved."""
        self._change(phase, self._reserved.pop(number))
        return [UseAccumulators(number)]

    def drop(self, number: int) -> Orders:
        """Drop a reservation: its phase does not come."""
        self._reserved.pop(number, None)
        return [DropAccumulators(number)]

    def renew(self, phase: Phase, then: Callable[[float], Orders]) -> Orders:
        """The phase goes on at once, in another view: make other memory if the present one does not fit.

        The places of an own stripe take long. They are made meanwhile; contributions to the stripe are dropped, and
        members ask for its sums again. `then` follows as the places come into use.
        """
        if self.fit(phase) or self.refuses(phase):
            return []
        lacks = self._lacks(phase)
        blocks, rooms, places = lacks.blocks, lacks.rooms, lacks.places
        several = rooms if len(rooms) > 1 else ()
        renew = RenewAccumulators(blocks, sum(rooms), several)
        orders: Orders = [renew] if blocks or rooms else []
        self._change(phase, _Sizes(blocks, rooms))
        return [*orders, *self._renew_places(phase, places, then)] if places else orders

    def _renew_places(
        self, phase: Phase, places: _ByChannel, then: Callable[[float], Orders]
    ) -> Orders:
        self.memory = replace(self.memory, places=0, stripes=())
        self._awaited += 1
        awaited = self._awaited

        def made(now: float, number: int) -> Orders:
            if awaited != self._awaited:  # another view has come, or another phase
                return [DropAccumulators(number)]
            self._change(phase, _Sizes(places=places))
            return [UseAccumulators(number), *then(now)]

        task = _reserve(_Sizes(places=places))
        return [RetirePlaces(), self._tasks.begin(self._owner, task, made)]

    def _lacks(self, phase: Phase) -> _Sizes:
        """What must be made."""
        hands_out, there = phase.kind is wire.PhaseKind.HANDOUT, self.memory
        fragments = max(phase.fragments, phase.last_fragments)
        aggregators = phase.aggregators(self._node.view.live)
        # Stripes need no accumulators, except for the test rounds in between.
        blocks = 1 if phase.exchange.absolute else phase.blocks
        if (there.blocks, self._of_hand_out) == (blocks, hands_out):
            blocks = 0
        if not aggregators or phase.exchange.served:
            return _Sizes(blocks)
        rooms = tuple(plan.room for plan in phase.channels) or (fragments,)
        n, central = len(aggregators), phase.exchange.central
        longest = [1 if central else room // n + 1 for room in rooms]
        # One block, even without an own stripe.
        places = tuple(-(-each // phase.per_block) for each in longest)
        if rooms != there.rooms:
            return _Sizes(blocks, rooms, places)
        return _Sizes(blocks, (), places if places != there.stripes else ())

    def _change(self, phase: Phase, new: _Sizes) -> None:
        """Note that this memory exists from now on."""
        there = self.memory
        if new.blocks:
            self._of_hand_out = phase.kind is wire.PhaseKind.HANDOUT
        if new.places:
            self._awaited += 1  # those that are being made are no longer needed
        blocks = new.blocks or there.blocks
        rooms, places = new.rooms or there.rooms, new.places or there.stripes
        parts = zip(there.made, (new.blocks, new.rooms, new.places), strict=True)
        first, second, third = (made + bool(n) for made, n in parts)
        made = first, second, third
        self.memory = Memory(blocks, sum(rooms), sum(places), made, rooms, places)


def _reserve(sizes: _Sizes) -> ReserveAccumulators:
    """The task that makes them."""
    rooms, places = sizes.rooms, sizes.places
    several = [each if len(each) > 1 else () for each in (rooms, places)]
    return ReserveAccumulators(sizes.blocks, sum(rooms), sum(places), *several)
