# SPDX-License-Identifier: Apache-2.0
"""A switch that adds (docs/switch.md), as a model: it follows the tokens that pass, and keeps a window of sums."""

from __future__ import annotations

from dataclasses import dataclass, field

from nicps import wire

#: Fragments by which a member may be ahead of its sums: few, so that small gradients need many windows.
QUANTUM = 3
#: As many also where there are many members: so no slot is free for longer than it must be.
LEAST_WINDOW = QUANTUM

#: A fragment of which sum: view, round, index.
Of = tuple[int, int, int]


@dataclass
class Sum:
    """What is in a slot: of which fragment, whose, and the sum."""

    of: Of
    seen: int = 0
    value: int = 0


@dataclass
class Switch:
    """Its registers. `adds`: it does what it is there for; else fragments for it are lost. `slots`: its room."""

    adds: bool = True
    slots: int = 2 * QUANTUM
    view: int = 0
    position: tuple[int, int] = (0, 0)
    round: int = 0
    listed: int = 0
    settled: int = 0
    sums: dict[int, Sum] = field(default_factory=dict)

    def forget(self) -> None:
        """It is started again."""
        self.__init__(self.adds, self.slots)  # type: ignore[misc]

    def follow(self, header: wire.Header, token: wire.Token) -> None:
        """A token passes."""
        position = token.generation, token.hop
        if (header.view, *position) > (self.view, *self.position):
            self.view, self.position = header.view, position
            self.round, self.listed, self.settled = header.round, token.listed, token.settled

    def add(
        self, view: int, round_: int, sender: int, index: int, value: int
    ) -> tuple[int, bool] | None:
        """A fragment comes; the sum that goes out, if one does, and whether only to its sender."""
        if not self.adds or (view, round_) != (self.view, self.round) or not self.listed:
            return None
        if not self._has_room(index):
            return None
        slot = self.sums.get(index % self.slots)
        if slot is None or slot.of != (view, round_, index):
            slot = Sum((view, round_, index))
        if slot.seen == self.listed:
            return slot.value, True
        bit = 1 << sender - 1
        if not bit & self.listed or bit & slot.seen:
            return None
        slot.seen, slot.value = slot.seen | bit, slot.value + value
        self.sums[index % self.slots] = slot
        return (slot.value, False) if slot.seen == self.listed else None

    def _has_room(self, index: int) -> bool:
        """Whether the slot is that fragment's, or that of an earlier one that nobody lacks any more."""
        if index < self.settled:
            return False
        if self.slots < 2 * QUANTUM:  # members do not see to it: they know of no smaller switch
            return index < self.settled + self.slots
        slot = self.sums.get(index % self.slots)
        later = slot is not None and slot.of[:2] == (self.view, self.round) and slot.of[2] > index
        return not later
