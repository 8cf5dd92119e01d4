# SPDX-License-Identifier: Apache-2.0
"""How a group takes in programs that come late, or come back: docs/collective.md, "Hosts that come late".

All members call it, so all know the same at every step: a step is one round, or is begun again by all.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np

from nicps.collective.errors import MemberLost
from nicps.collective.rounds import Attempt, Ranks
from nicps.wire import MAX_MEMBERS, NAME_BYTES

R = TypeVar("R")
_NAME_WORDS = -(-NAME_BYTES // 4)
_TABLE_BYTES = 4096  # 64 members' numbers and names, as JSON
_MEMBER, _LATE = 1, 2


@dataclass(frozen=True, slots=True)
class Admission:
    """What came of an `admit`.

    `ranks`: of the members that came in; `sources`: of those that were members before, in order. `late`: this member
    has come in.
    """

    ranks: tuple[int, ...]
    sources: tuple[int, ...]
    late: bool


@dataclass(frozen=True, slots=True)
class Place:
    """What a member says of itself. `rank`: of one that comes in, the rank that it wants; -1: none."""

    late: bool
    rank: int
    name: str


@dataclass(frozen=True, slots=True)
class Table:
    """What the members from before tell those that come in. `world`: the size that the group has begun with."""

    ranks: Ranks
    world: int

    def pack(self) -> bytes:
        """As it travels."""
        whole = [self.world, self.ranks.numbers, self.ranks.names]
        return json.dumps(whole).encode().ljust(_TABLE_BYTES, b" ")

    @classmethod
    def unpack(cls, data: bytes) -> Table:
        """What `pack` has made."""
        world, numbers, names = json.loads(data)
        return cls(Ranks(tuple(numbers), tuple(names)), world)


class Member(Protocol):
    """What is needed of a link."""

    number: int
    admits: bool


class Attempts(Protocol):
    """How a step is carried out: begun again as members leave in its middle."""

    def __call__(self, carry_out: Callable[[Attempt], R], text: str) -> R:
        """The text is the same at all members."""


def admit(
    link: Member, attempt: Attempts, place: Place, ranks: Ranks, world: int
) -> tuple[Admission, Table, frozenset[int]]:
    """Take in who waits.

    Args:
        ranks, world: before; of no interest at a member that comes in.

    Returns:
        What came of it, the ranks from now on, and the numbers of the members that are there.

    Raises:
        MemberLost: nobody is left of those that were members before.
    """
    if not place.late:
        link.admits = True
        attempt(lambda each: each.add_words(np.zeros(1, np.int32)), "admit")
    places = attempt(lambda each: introduce(each, link.number, place), "admit: who is there")
    late = {number: each for number, each in places.items() if each.late}
    here = frozenset(places)
    table = Table(ranks, world)
    if late:
        if not place.late:
            table = Table(deal_out(ranks, here - late.keys(), late), world)
        before = sorted(here - late.keys(), key=lambda number: places[number].rank)
        table, here = _tell(link, attempt, table, before)
    of = table.ranks.of
    admission = Admission(of(here & late.keys()), of(here - late.keys()), place.late)
    return admission, table, here


def introduce(attempt: Attempt, number: int, place: Place) -> dict[int, Place]:
    """What each member says of itself, by number."""
    words = np.zeros((MAX_MEMBERS, 2 + _NAME_WORDS), np.int32)
    mine = words[number - 1]
    mine[:2] = _LATE if place.late else _MEMBER, place.rank + 1
    name = place.name.encode()[:NAME_BYTES]
    mine[2:].view(np.uint8)[: len(name)] = np.frombuffer(name, np.uint8)
    found, _ = attempt.add_words(words.reshape(-1))
    rows = found.reshape(words.shape)
    places = {}
    for each in sorted(attempt.members):
        row = rows[each - 1]
        said = row[2:].tobytes().rstrip(b"\0").decode(errors="replace")
        places[each] = Place(bool(row[0] == _LATE), int(row[1]) - 1, said)
    return places


def deal_out(ranks: Ranks, members: frozenset[int], late: Mapping[int, Place]) -> Ranks:
    """The ranks with those that come in.

    Args:
        members: numbers of those that were members before, and are left.
        late: those that come in, by number.
    """
    numbers, names = list(ranks.numbers), list(ranks.names)
    new = [number for number in sorted(late) if number not in numbers]
    free = [rank for rank, k in enumerate(numbers) if k not in members and k not in late]
    for number in sorted(new, key=lambda number: (late[number].rank not in free, number)):
        wanted = late[number].rank
        if not free:
            free = [len(numbers)]
            numbers.append(0)
            names.append("")
        rank = wanted if wanted in free else free[0]
        free.remove(rank)
        numbers[rank], names[rank] = number, late[number].name
    return Ranks(tuple(numbers), tuple(names))


def _tell(
    link: Member, attempt: Attempts, table: Table, before: list[int]
) -> tuple[Table, frozenset[int]]:
    """The table of the first of these members that is not lost meanwhile, and which members have it."""
    for root in before:
        mine = np.zeros(_TABLE_BYTES, np.uint8)
        if link.number == root:
            mine[:] = np.frombuffer(table.pack(), np.uint8)

        def say(
            each: Attempt, mine: np.typing.NDArray[np.uint8] = mine
        ) -> tuple[bytes, frozenset[int]]:
            found, _ = each.add_words(mine.view(np.int32))
            return found.tobytes(), each.members

        data, here = attempt(say, "admit: the ranks")
        if root in here:
            return Table.unpack(data), here
    raise MemberLost("nobody is left of the members that this host was to join: it has no state")
