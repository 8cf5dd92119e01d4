# SPDX-License-Identifier: Apache-2.0
"""The view: who is in the network, under a number; and what a change of it settles (R3, R17 to R20)."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from nicps import wire
from nicps.errors import WireError
from nicps.protocol.phase import Member

NO_BALLOT = (0, b"")
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]")
#: A value in a frame: itself, its list, the open rounds of channels 1 and up.
SuccessorItems: TypeAlias = tuple[
    tuple[wire.ViewValue, ...], tuple[wire.ViewMember, ...], tuple[wire.ViewChannel, ...]
]


@dataclass(frozen=True, slots=True)
class View:
    """A member list in force. Numbers stay: who has left keeps its own (R19), and is not in `live`.

    `lead` acts as node 1 (R22). `ballot` is the number under which the list was agreed; `seed` is
    what the view's keys are made of.
    """

    number: int = 0
    members: tuple[Member, ...] = ()
    live: frozenset[int] = frozenset()
    lead: int = 0
    ballot: int = 0
    seed: bytes = bytes(16)
    order: tuple[int, ...] = field(init=False, default=())

    def __post_init__(self) -> None:
        object.__setattr__(self, "order", tuple(sorted(self.live)))

    def header(self, sender: int, round_: int, flags: int = 0) -> wire.Header:
        """Of a frame of that member; the node fills in what is the same for all its frames."""
        return wire.Header(flags=flags, view=self.number, round=round_, sender=sender)

    def next_after(self, number: int) -> int:
        """Whose turn it is after that member: the next live one."""
        return self.order[bisect_right(self.order, number) % len(self.order)]

    def rank_after(self, number: int, other: int) -> int:
        """How many live members after `number` the live member `other` comes, from 1 (R17)."""
        places = bisect_left(self.order, other) - bisect_right(self.order, number)
        return places % len(self.order) + 1

    def agreed(self, numbers: Collection[int], *, alone: bool = False) -> bool:
        """Whether these may decide for the view: more than half of it, or the half with the lowest member (R18).

        Args:
            alone: one of two hosts may go on without the other. Both may then do so: documented as a risk.
        """
        votes = len(self.live.intersection(numbers))
        if alone and len(self.live) == 2:
            return votes >= 1
        return 2 * votes > len(self.live) or (
            2 * votes == len(self.live) and self.order[0] in numbers
        )

    def number_of(self, mac: bytes) -> int:
        """A member's number by its MAC address, live or not; 0 for a stranger."""
        return next((m.number for m in self.members if m.mac == mac), 0)

    def name_of(self, mac: bytes) -> str:
        """A member's name by its MAC address, live or not; empty for a stranger."""
        return next((m.name for m in self.members if m.mac == mac), "")

    def grows_into(self, later: View, number: int) -> bool:
        """Whether that member of this list has its number in the other one, too, behind the same members.

        So it is in all later lists of a network, which grow at their end. A list that another starter has made is not.
        """
        ours, theirs = ([m.mac for m in view.members[:number]] for view in (self, later))
        return ours == theirs

    def names(self, numbers: Iterable[int]) -> str:
        """`h2, h3` for people."""
        return ", ".join(self.members[k - 1].name for k in sorted(numbers))


@dataclass(frozen=True, slots=True)
class Successor:
    """What is agreed on about the view that follows another: the list, and where the job goes on in it.

    `follows` is the phase that goes on, by its number in the old view, or 0; `phase` is its number in the new one.
    `round` is the open round: who is still in the one before has it whole, and commits it. `seed` is what the view's
    keys are made of; it is agreed on too, so that the view has one key whoever puts it in force. `others`: the same as
    `round` of channels 1 and up. `saves`: the lead writes a checkpoint of the state after the round before `round`.
    """

    members: tuple[Member, ...]
    live: frozenset[int]
    lead: int
    follows: int
    phase: int
    round: int
    unit: int
    seed: bytes
    others: tuple[int, ...] = ()
    saves: bool = False

    @property
    def rounds(self) -> tuple[int, ...]:
        """The open round of each channel."""
        return (self.round, *self.others)

    def items(self) -> SuccessorItems:
        """As it lies in a frame."""
        value = wire.ViewValue(
            mask(self.live),
            self.seed,
            self.follows,
            self.phase,
            self.round,
            self.lead,
            self.unit,
            int(self.saves),
        )
        entries = tuple(
            wire.ViewMember(m.mac, m.name.encode()[: wire.NAME_BYTES].ljust(wire.NAME_BYTES, b"\0"))
            for m in self.members
        )
        channels = tuple(wire.ViewChannel.at(c, r) for c, r in enumerate(self.others, 1))
        return (value,), entries, channels

    @classmethod
    def of(cls, frame: wire.Frame) -> Successor | None:
        """Out of a VIEW or VOTE frame, None if it has no value.

        Raises:
            WireError: the value cannot be meant.
        """
        values, entries, channels = frame.items[:3]
        if not values:
            return None
        value = values[0]
        assert isinstance(value, wire.ViewValue)
        members = tuple(
            Member(k, e.mac, safe_name(e.name.rstrip(b"\0").decode(errors="replace"), e.mac))
            for k, e in enumerate(entries, 1)
            if isinstance(e, wire.ViewMember)
        )
        live = numbers(value.live)
        others = rounds_of(channels)
        fits = (
            0 < len(members) <= wire.MAX_MEMBERS
            and value.lead in live
            and max(live) <= len(members)
            and len({m.mac for m in members}) == len(members)
            and max(value.follows, value.phase, value.round, *others) < 1 << 31
        )
        if not fits:
            raise WireError(f"a view of {len(members)} members cannot be {value}")
        return cls(
            members,
            live,
            value.lead,
            value.follows,
            value.phase,
            value.round,
            value.unit,
            value.seed,
            others,
            bool(value.saves),
        )

    def view(self, number: int, ballot: int) -> View:
        """The view that it becomes."""
        return View(number, self.members, self.live, self.lead, ballot, self.seed)


def rounds_of(standings: Sequence[wire.Item]) -> tuple[int, ...]:
    """The rounds that they name, of channels 1 and up in order.

    Raises:
        WireError: they are of other channels.
    """
    found = [standing for standing in standings if isinstance(standing, wire.Standing)]
    if [standing.channel for standing in found] != list(range(1, len(found) + 1)):
        raise WireError(f"standings of the channels {[s.channel for s in found]}")
    if len(found) >= wire.MAX_CHANNELS:
        raise WireError(f"standings of {len(found) + 1} channels")
    return tuple(standing.round for standing in found)


def numbered(h: wire.Header, network: int, sequence: int) -> wire.Header:
    """A frame's header with what the node fills in."""
    whose = (network, h.view, h.round, h.sender)
    return wire.Header(h.version, h.type, h.flags, *whose, h.length, sequence, h.tag)


def mask(members: Iterable[int]) -> int:
    """Bit k - 1 for member k."""
    return sum([1 << (k - 1) for k in members])


def numbers(bits: int) -> frozenset[int]:
    """The members of such a mask."""
    found, bits = [], bits & (1 << wire.MAX_MEMBERS) - 1
    while bits:
        lowest = bits & -bits
        found.append(lowest.bit_length())
        bits ^= lowest
    return frozenset(found)


def safe_name(name: str, mac: bytes) -> str:
    """A name that fits the list and can name a folder; where nothing is left of it, one made of the MAC."""
    kept = _UNSAFE.sub("-", name)[: wire.NAME_BYTES].lstrip(".-")
    return kept or "m" + mac.hex()


def distinct_name(name: str, number: int, mac: bytes, taken: Collection[str]) -> str:
    """A member's name that no other one has: where its own is taken, with its number, `h1-2`."""
    if name not in taken:
        return name
    ending = f"-{number}"
    longer = name[: wire.NAME_BYTES - len(ending)].rstrip(".-") + ending
    return longer if longer not in taken else safe_name("", mac)


def with_joiners(
    members: tuple[Member, ...], joiners: Iterable[Member]
) -> tuple[tuple[Member, ...], frozenset[int]]:
    """The list with those who come back or are new, and their numbers: an old one by the MAC address, or the next."""
    listed = list(members)
    joined = set()
    for joiner in joiners:
        number = next((m.number for m in listed if m.mac == joiner.mac), 0)
        if not number:
            if len(listed) >= wire.MAX_MEMBERS:
                continue
            number = len(listed) + 1
            taken = [m.name for m in listed]
            name = distinct_name(joiner.name, number, joiner.mac, taken)
            listed.append(replace(joiner, number=number, name=name))
        joined.add(number)
    return tuple(listed), frozenset(joined)
