# SPDX-License-Identifier: Apache-2.0
"""Which hosts the missing sums of stripes wait for: contributors, or the aggregator (docs/stripes.md)."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence

from nicps.protocol.exchange import windows
from nicps.protocol.exchange.windows import Window
from nicps.protocol.kernel import Receiver
from nicps.protocol.signals import Lacks, Late
from nicps.protocol.view import numbers

#: Sums that are read in one go.
_PEEK = 64
#: After so many requests without an answer the aggregator's earlier answers no longer count. A member repeats a request
#: every 0.2 s at least (`windows.RoundTrip`), so that takes less than a second.
_UNANSWERED = 4


class LateSums:
    """A member's view of the contributions that are missing: of its own stripe from the kernel, of the other stripes by
    asking their aggregators.

    Args:
        central: a switch makes all sums.
        view: in which they are made.
        number: of this member.
    """

    def __init__(self, receiver: Receiver, view: int, number: int, *, central: bool) -> None:
        self._receiver, self._view, self._number = receiver, view, number
        self._central = central
        self.open(0)

    def open(self, round_: int) -> None:
        """Forget the round before; of this one nothing is known yet."""
        self._round = round_
        #: Fragment to a bitmap of the members whose contributions its aggregator was missing.
        self._absent: dict[int, int] = {}
        #: By aggregator: all sums of its stripe before that one have come.
        self._come: dict[int, int] = {}

    def note_answer(self, index: int, members: int) -> None:
        """The aggregator is missing the contributions of these members (a bitmap) to that fragment."""
        self._absent[index] = members

    def find(self, stripes: Sequence[Window], members: int) -> Mapping[int, Late]:
        """Find the hosts that hold the round up.

        A stripe is late if it alone is incomplete here, or if none of its sums has arrived for longer than an answer
        takes. The late hosts are the contributors that its aggregator has named, or else the aggregator itself.

        Args:
            members: the list, a bit a member.
        """
        found = [(s, self._come_to(s)) for s in stripes if s.first < s.end]
        lacking = [(stripe, index) for stripe, index in found if index < stripe.end]
        only, late = len(lacking) == 1 < len(found), dict[int, Late]()
        for stripe, index in lacking:
            if only or stripe.asks:
                late |= self._late_in(stripe, index, members, only=only)
        return late

    def count(self, stripes: Sequence[Window], members: int) -> Lacks:
        """Count the sums that this member has requested and not received, by the host that is to blame.

        That is each member whose contribution is missing, or an aggregator that does not answer. Contributions count
        to the first missing sum of a stripe, and to those that later ones have overtaken: every window reaches these,
        however small it is. Members that wait for the first one themselves have not sent what is behind it.

        Args:
            members: the list, a bit a member.
        """
        lacks = Counter[int]()
        for stripe in stripes:
            if stripe.here == stripe.end:
                continue
            if stripe.owner == self._number:
                lacks.update(self._count_here(stripe, members))
            else:
                lacks.update(self._count_there(stripe))
        return dict(+lacks)  # a report names no host with a count of 0

    def _come_to(self, stripe: Window) -> int:
        """The first sum of the stripe that has not come; `stripe.end` if all have.

        `stripe.here` is too old for that in the own stripe. A sum that has come is not read again in the round.
        """
        at, whole = max(stripe.here, self._come.get(stripe.owner, 0)), True
        while whole and at < stripe.end:
            end = min(at + _PEEK, stripe.end)
            at, _ = self._receiver.reached(self._round, self._view, at, end)
            whole = at == end
        self._come[stripe.owner] = at
        return at

    def _answers(self, stripe: Window) -> Mapping[int, int]:
        """The aggregator's answers (`_absent`), or none if it has left the last requests unanswered."""
        return self._absent if stripe.unanswered <= _UNANSWERED else {}

    def _late_in(
        self, stripe: Window, index: int, members: int, *, only: bool
    ) -> Mapping[int, Late]:
        """The hosts that the first missing sum of a stripe waits for.

        An aggregator that is missing the contributions of all other members, also one that this member has sent,
        receives nothing: it is late itself.
        """
        mine = 1 << (self._number - 1)
        if stripe.owner == self._number:
            whose = self._round, self._view, stripe.first, index + 1 - stripe.first, members
            absent = {k for k, count in self._receiver.absent(*whose).items() if count}
            if len(absent) > 1 and absent == set(numbers(members & ~mine)):
                return {self._number: Late.SUMS} if only else {}
            return dict.fromkeys(absent, Late.GRADIENT)
        told = self._answers(stripe).get(index, 0)
        if not told or (told & mine and index < stripe.sent):
            return {stripe.owner: Late.SUMS}
        return dict.fromkeys(numbers(told), Late.GRADIENT)

    def _count_here(self, stripe: Window, members: int) -> Mapping[int, int]:
        """In this member's own stripe: the contributions that are missing, by member."""
        count = stripe.here + 1 - stripe.first
        return self._receiver.absent(self._round, self._view, stripe.first, count, members)

    def _count_there(self, stripe: Window) -> Mapping[int, int]:
        """In another member's stripe: the same, from its answers. All missing sums count as its own if it has given
        none, or stopped answering.

        They count as a switch's own, too, if it does not take what this member sends again.
        """
        whose = self._round, self._view, stripe.here, stripe.end
        missing = self._receiver.missing_sums(*whose, windows.RANGES)
        indices = [index for first, count in missing for index in range(first, first + count)]
        answers, mine = self._answers(stripe), 1 << (self._number - 1)
        front = indices[: bisect_left(indices, max(stripe.beyond, stripe.here + 1))]
        lacks, refused = Counter[int](), 0
        for index in front:
            absent = answers.get(index, 0)
            lacks.update(numbers(absent & ~mine))
            refused += bool(absent & mine) and index < stripe.sent
        if self._central and refused:
            return {stripe.owner: refused}
        # The answers about the first ones may have been lost, where it has given others.
        answered = any(index in answers for index in indices)
        return lacks if answered else {stripe.owner: len(indices)}
