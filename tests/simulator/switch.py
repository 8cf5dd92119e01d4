# SPDX-License-Identifier: Apache-2.0
"""A switch that adds (docs/switch.md), as a model: it follows the tokens that pass, and keeps a window of sums."""

from __future__ import annotations

from dataclasses import dataclass, field

from nicps import wire

#: Fragments in a turn: few, so that small gradients need many windows.
QUANTUM = 3


@dataclass
class Sum:
    """What is in a slot: of which fragment (view, round, index), whose, and the sum."""

    of: tuple[int, int, int]
    seen: int = 0
    value: int = 0


@dataclass
class Switch:
    """Its registers. `adds`: it does what it is there for; else fragments for it are lost."""

    adds: bool = True
    view: int = 0
    position: tuple[int, int] = (0, 0)
    owner: int = 0
    round: int = 0
    listed: int = 0
    settled: int = 0
    sums: dict[int, Sum] = field(default_factory=dict)

    def forget(self) -> None:
        """It is started again."""
        self.__init__(self.adds)  # type: ignore[misc]

    def follow(self, header: wire.Header, token: wire.Token) -> None:
        """A token passes."""
        position = token.generation, token.hop
        if (header.view, *position) > (self.view, *self.position):
            self.view, self.position, self.owner = header.view, position, token.owner
            self.round, self.listed, self.settled = header.round, token.listed, token.settled

    def add(
        self, view: int, round_: int, sender: int, index: int, value: int
    ) -> tuple[int, bool] | None:
        """A fragment comes; the sum that goes out, if one does, and whether only to its sender."""
        in_turn = (view, round_, sender) == (self.view, self.round, self.owner)
        room = self.settled <= index < self.settled + 2 * QUANTUM
        if not self.adds or not in_turn or not self.listed or not room:
            return None
        slot = self.sums.get(index % (2 * QUANTUM))
        if slot is None or slot.of != (view, round_, index):
            slot = Sum((view, round_, index))
        if slot.seen == self.listed:
            return slot.value, True
        bit = 1 << sender - 1
        if not bit & self.listed or bit & slot.seen:
            return None
        slot.seen, slot.value = slot.seen | bit, slot.value + value
        self.sums[index % (2 * QUANTUM)] = slot
        return (slot.value, False) if slot.seen == self.listed else None
