# SPDX-License-Identifier: Apache-2.0
"""Parameter servers: which members hold which part of the parameters (docs/servers.md)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, TypeAlias

from nicps import wire

#: Bits of the lanes in which parameters are pulled, whatever is pushed.
PULLED_WIDTH = 32

#: Push fragments, and the channel of their frames.
Shares: TypeAlias = list[tuple[range, int]]


@dataclass(frozen=True, slots=True)
class Serving:
    """What a phase with servers fixes for everybody.

    Attributes:
        servers: member numbers, in order of the ranks of their parts.
        every: a synchronisation is due after so many pushes at a server; 1: each step is one; 0: none is due.
        staleness: a push counts 1 / staleness; otherwise all pushes count alike.
        sets: the first parameter fragment of set 2, where workers have partners; 0: they have none.
        channels: P2: how many channels the parameters are dealt out to, in the order in which the forward pass needs
            them; 0: frames have no order among them, and are all on channel 0.
    """

    servers: tuple[int, ...]
    every: int
    staleness: bool = True
    sets: int = 0
    channels: int = 0

    def to_json(self) -> dict[str, Any]:
        """As it lies in a decision's settings."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Serving:
        """From what `to_json` made.

        Raises:
            ValueError, TypeError, KeyError, AttributeError: it is not that.
        """
        if values.keys() != {field.name for field in fields(cls)}:
            raise ValueError("not the settings of servers")
        found = cls(**{**values, "servers": tuple(values["servers"])})
        numbers = (*found.servers, found.every, found.sets, found.channels)
        if any(type(number) is not int for number in numbers) or type(found.staleness) is not bool:
            raise ValueError("a setting of servers of the wrong type")
        return found

    def fits(self, members: int, fragments: int, width: int) -> bool:
        """Whether it can be meant in a view of so many members, for vectors of `fragments` fragments."""
        known = range(1, members + 1)
        distinct = len(set(self.servers)) == len(self.servers) > 0
        return (
            distinct
            and all(number in known for number in self.servers)
            and 0 <= self.every < 1 << 31
            and 0 <= self.sets <= pulled_fragments(fragments, width)
            and 0 <= self.channels <= wire.MAX_CHANNELS
        )

    def part(self, rank: int, fragments: int) -> range:
        """The push fragments of the server of that rank, from 0, of a vector of `fragments`."""
        n = len(self.servers)
        return range(fragments * rank // n, fragments * (rank + 1) // n)

    def part_of(self, number: int, fragments: int) -> range:
        """That member's part; empty if it does not serve."""
        if number not in self.servers:
            return range(0)
        return self.part(self.servers.index(number), fragments)

    def shares(self, fragments: int, width: int) -> Shares:
        """Push fragments and their channel, of a vector of `fragments`: first those that the forward pass needs first.

        Shares are of equal size (P2), in each of the sets by itself. The front ones have the highest channel.
        """
        n = self.channels
        if not n:
            return [(range(fragments), 0)]
        second = -(-self.sets // per_push(width))
        sets = (range(second), range(second, fragments))
        cut = (
            (range(s.start + len(s) * k // n, s.start + len(s) * (k + 1) // n), n - 1 - k)
            for s in sets
            for k in range(n)
        )
        return sorted((one for one in cut if one[0]), key=lambda one: -one[1])


def per_push(width: int) -> int:
    """Parameter fragments in a push fragment with lanes of `width` bits: 1, 2, 4 for 32, 16, 8."""
    return PULLED_WIDTH // width if width else 0


def pulled_fragments(fragments: int, width: int) -> int:
    """Parameter fragments of a vector of `fragments` push fragments; in the last one what is behind its end is 0."""
    return fragments * per_push(width)
