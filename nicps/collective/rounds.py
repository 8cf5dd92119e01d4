# SPDX-License-Identifier: Apache-2.0
"""Vectors of any length, in as many rounds as they take, all of which have the same list of members."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, TypeVar

import numpy as np

from nicps.collective.errors import MemberLost
from nicps.collective.feedback import Form
from nicps.collective.kinds import Array, as_bytes
from nicps.collective.lanes import I32, PER_FRAGMENT, Floats, Words, fragments_of
from nicps.errors import UsageProblem
from nicps.session.absolute import BOOL
from nicps.session.direct import MOST_BYTES
from nicps.session.lanes import F32, U8, LaneFormat
from nicps.session.sized import Round, Vector
from nicps.wire import PAYLOAD_BYTES

N = TypeVar("N", F32, I32)
#: Frames that a direct call puts into a port of the switch, at most: 42 KB, which the usual queues have room for.
_MOST_FRAMES = 28


DirectGather: TypeAlias = Callable[[bytes, int, frozenset[int], float], dict[int, bytes] | None]


class Changed(Exception):
    """A member has left in the middle of a call: it is begun again, with those who are left."""


class Differs(Exception):
    """The members have called different things; the round's offers tell which members have called alike."""


def is_small(size: int, members: int) -> bool:
    """Whether so many bytes of each member are gathered and folded in rank order, in a direct call or in a round.

    It is the same way of adding on both: so a result has the same bits.
    """
    frames = max(1, -(-size // PAYLOAD_BYTES))
    return size <= MOST_BYTES and max(1, members - 1) * frames <= _MOST_FRAMES


class Exchange(Protocol):
    """What is needed of a link's channel."""

    @property
    def number(self) -> int:
        """This member's."""

    @property
    def room(self) -> int:
        """Fragments of a round at most, with lanes of 32 bits."""

    def exchange(self, vector: Vector, call: int, deadline: float) -> Round:
        """As `nicps.collective.link.LinkChannel`."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """Which member has which rank: `numbers` of the members by rank, `names` of their hosts."""

    numbers: tuple[int, ...]
    names: tuple[str, ...]

    @property
    def size(self) -> int:
        """The members that the group has begun with."""
        return len(self.numbers)

    def of(self, members: frozenset[int]) -> tuple[int, ...]:
        """Their ranks, in order."""
        return tuple(rank for rank, number in enumerate(self.numbers) if number in members)


class Attempt:
    """One attempt at a call: rounds with one list.

    Args:
        text: what is called, the same at all members.
        ranks: None before the members have ranks: then their numbers serve.
        direct: makes a direct call, as `LinkChannel.gather`; None: there are none.

    Attributes: `members`, whose contributions are in the sums, by number; empty before the first round. `began`, on the
    monotonic clock; `seconds_listed`, how long of the time since then not all others had offered.
    """

    def __init__(
        self,
        link: Exchange,
        text: str,
        ranks: Ranks,
        deadline: float,
        direct: DirectGather | None = None,
    ) -> None:
        self._link, self._text, self._ranks, self._deadline = link, text, ranks, deadline
        self._direct = direct
        self._rounds = 0
        self.members: frozenset[int] = frozenset()
        self.began, self.seconds_listed = time.monotonic(), 0.0

    @property
    def counted(self) -> tuple[int, ...]:
        """The ranks whose contributions are in the sums."""
        return self._ranks.of(self.members)

    # ---- sums

    def add_floats(self, vector: F32) -> tuple[F32, BOOL]:
        """The sum of float32 (n,), and which fragments of it are NaN as a number or the sum is not finite."""
        return self._add(vector, np.empty_like(vector), Floats)

    def add_words(self, words: I32) -> tuple[I32, BOOL]:
        """The sum of int32 (n,), and in which fragments it is not exact, as it may not fit."""
        return self._add(words, np.empty_like(words), Words)

    def _add(self, vector: N, out: N, form: Callable[[N, N, BOOL], Vector]) -> tuple[N, BOOL]:
        marred = np.zeros(fragments_of(len(vector)), np.bool_)
        step = self._link.room * PER_FRAGMENT
        for at in range(0, max(len(vector), 1), step):
            here = slice(at, at + step)
            first = at // PER_FRAGMENT
            part = marred[first : first + self._link.room]
            self._round(form(vector[here], out[here], part))
        return out, marred

    def average(self, vector: Any, residual: Any, width: int, form: Form) -> None:
        """The mean of (n,), in place, with error feedback.

        The list may change from round to round: each part of the vector is the mean over those counted in its round.

        Raises:
            UsageProblem: the channel has no room for a fragment of such lanes.
        """
        per, room = LaneFormat(1, width).per_fragment, self._link.room
        step = room * width // 32 * per
        if not step:
            raise UsageProblem(
                f"rounds of lanes of {width} bits need a channel with room for {per:,} numbers, and this one has room"
                f" for {room * PER_FRAGMENT:,}: plan it with more"
            )
        for at in range(0, max(len(vector), 1), step):
            here = slice(at, at + step)
            self._exchange(form(vector[here], residual[here], width))

    def _round(self, vector: Vector) -> None:
        self._check(self.members, self._exchange(vector))

    def _check(self, before: frozenset[int], now: frozenset[int]) -> None:
        """One list holds for the whole attempt."""
        if before and before != now:
            raise Changed

    @property
    def _call(self) -> int:
        return zlib.crc32(f"{self._text} {self._rounds}".encode())

    def _exchange(self, vector: Vector) -> frozenset[int]:
        """A round; its members."""
        self._rounds += 1
        round_ = self._link.exchange(vector, self._call, self._deadline)
        if not round_.agrees:
            raise Differs
        self.members = frozenset(round_.offers)
        self.seconds_listed += round_.seconds_listed
        return self.members

    # ---- what each member has

    def number_of(self, rank: int) -> int:
        """The member of that rank."""
        return self._ranks.numbers[rank]

    def is_small(self, size: int) -> bool:
        """Whether so many bytes of each member are gathered and folded (`is_small`)."""
        return is_small(size, len(self._ranks.numbers))

    def give(self, data: bytes) -> dict[int, bytes] | None:
        """What each member gives, by number, in a direct call; None: it takes a round."""
        if self._direct is None or not self.is_small(len(data)):
            return None
        self._rounds += 1
        among = frozenset(self._ranks.numbers)
        found = self._direct(data, self._call, among, self._deadline)
        if found is None:
            self._rounds -= 1
            return None
        before, self.members = self.members, frozenset(found)
        self._check(before, self.members)
        return found

    def gather(self, vector: Array) -> Array:
        """Of all members, by rank: (size, n) as the vector is; zeros for who is not in `counted`.

        Every member has a place of its own in one sum, in which the others have zeros.
        """
        own = as_bytes(vector)
        shape = self._ranks.size, *vector.shape
        if (given := self.give(own.tobytes())) is not None:
            whole = np.zeros((self._ranks.size, len(own)), np.uint8)
            for rank, number in enumerate(self._ranks.numbers):
                if number in given:
                    whole[rank] = np.frombuffer(given[number], np.uint8)
            return whole.view(vector.dtype).reshape(shape)
        words = -(-len(own) // 4)
        places = np.zeros((self._ranks.size, words), np.int32)
        mine = self._ranks.numbers.index(self._link.number)
        places[mine].view(np.uint8)[: len(own)] = own
        found, _ = self.add_words(places.reshape(-1))
        rows: U8 = found.view(np.uint8).reshape(self._ranks.size, words * 4)[:, : len(own)]
        return np.ascontiguousarray(rows).view(vector.dtype).reshape(shape)

    def gather_counted(self, vector: Array) -> Array:
        """The same of who is in `counted` only."""
        rows = self.gather(vector)
        return rows[list(self.counted)]

    def require(self, ranks: tuple[int, ...], what: str) -> None:
        """These have contributed.

        Raises:
            MemberLost: one of them has left.
        """
        lost = [self._ranks.names[rank] for rank in ranks if rank not in self.counted]
        if lost:
            raise MemberLost(
                f"{what} needs what {', '.join(lost)} would have given, and left before"
            )
