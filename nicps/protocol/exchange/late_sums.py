# SPDX-License-Identifier: Apache-2.0
"""Whom the sums of stripes that lack at one member wait for: a contributor, or their aggregator (docs/stripes.md)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from nicps.protocol.exchange import windows
from nicps.protocol.exchange.windows import Window
from nicps.protocol.kernel import Receiver
from nicps.protocol.signals import Lacks, Late
from nicps.protocol.view import numbers

#: Sums that are read in one go.
_PEEK = 64
#: Questions without any answer, after which what the aggregator has answered before does not count: within a second, as
#: a member asks every 0.2 s at least (`windows.RoundTrip`).
_UNANSWERED = 4


class LateSums:
    """In the own stripe the kernel knows whose contributions lack. Of the others their aggregators tell, if asked.

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
        """Of that round nothing is known."""
        self._round = round_
        self._absent: dict[int, int] = {}  # fragment -> who had not contributed, a bit a member
        #: By aggregator: all sums of its stripe before that one have come.
        self._come: dict[int, int] = {}

    def note_answer(self, index: int, members: int) -> None:
        """The aggregator has not received that fragment of these members."""
        self._absent[index] = members

    def find(self, stripes: Sequence[Window], members: int) -> Mapping[int, Late]:
        """Of the sums that lack here while those of all other stripes are here, or that nothing has come of for longer
        than an answer takes: the contributors that lack, if their aggregator has told, or the aggregator.

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

    def count(self, stripes: Sequence[Window], members: int, probes: int) -> Lacks:
        """By who has not contributed, or by who does not answer, the sums that are asked for and do not come.

        Args:
            members: the list, a bit a member.
            probes: so many are asked for where none of a stripe comes.
        """
        lacks = Counter[int]()
        for stripe in stripes:
            if stripe.here == stripe.end:
                continue
            if stripe.owner == self._number:
                lacks.update(self._count_here(stripe, members, probes))
            else:
                lacks.update(self._count_there(stripe))
        return dict(+lacks)  # who lacks nothing is in no report

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
        """What the stripe's aggregator has answered, as long as it answers: fragment -> who had not contributed."""
        return self._absent if stripe.unanswered <= _UNANSWERED else {}

    def _late_in(
        self, stripe: Window, index: int, members: int, *, only: bool
    ) -> Mapping[int, Late]:
        """Whom the first sum of a stripe that lacks here waits for. An aggregator that lacks the contributions of all
        others, also one that this member has sent, takes none.
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

    def _count_here(self, stripe: Window, members: int, probes: int) -> Mapping[int, int]:
        """In the own stripe: how many contributions are lacking, by whose they are.

        Up to its first sums that are lacking: what is behind a window nobody has sent yet.
        """
        count = min(stripe.here + probes, stripe.end) - stripe.first
        return self._receiver.absent(self._round, self._view, stripe.first, count, members)

    def _count_there(self, stripe: Window) -> Mapping[int, int]:
        """In another's: the same of the sums that it has answered for; if it has not, or no more, it is its own.

        Of a switch it is, too, if it does not take what this member sends again. A member that says so is not at fault.
        """
        whose = self._round, self._view, stripe.here, stripe.end
        missing = self._receiver.missing_sums(*whose, windows.RANGES)
        indices = [index for first, count in missing for index in range(first, first + count)]
        answers, mine = self._answers(stripe), 1 << (self._number - 1)
        lacks, refused = Counter[int](), 0
        for index in indices:
            absent = answers.get(index, 0)
            lacks.update(numbers(absent & ~mine))
            refused += bool(absent & mine) and index < stripe.sent
        if self._central and refused:
            return {stripe.owner: refused}
        answered = any(index in answers for index in indices)
        return lacks if answered else {stripe.owner: len(indices)}
