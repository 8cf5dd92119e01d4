# SPDX-License-Identifier: Apache-2.0
"""How a training program's vectors go out and sums come back: one reducer for each way in which an exchange does that.

A session asks the reducer of its phase, and does not ask which exchange it has.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from nicps.errors import JobFailed
from nicps.exchange import Exchange
from nicps.session import shared_form
from nicps.session.arena import Arena
from nicps.session.lanes import F32, LaneFormat, Residual
from nicps.session.offers import Offers
from nicps.session.phases import Commit
from nicps.session.stripes import Remainders, StripedOffers, StripedSums, stripe
from nicps.session.sums import Sums
from nicps.wire import NOT_FINITE


@dataclass(frozen=True, slots=True)
class Standing:
    """Who is in a phase, in the view in force: `number` is this member's, `shares` are samples of a round by member."""

    number: int
    view: int
    live: frozenset[int]
    shares: tuple[int, ...]

    @property
    def due(self) -> tuple[int, ...]:
        """Who is to contribute to a round, in order; of stripes, the aggregators."""
        return tuple(k for k, share in enumerate(self.shares, 1) if share and k in self.live)


class Reducer(Protocol):
    """Converts vectors, float32 (lanes,), and reads sums."""

    @property
    def members(self) -> int:
        """Of so many a switch adds the lanes; 0 if the kernel adds."""

    def enter(self, unit: int, members: int, exchange: Exchange) -> None:
        """A phase begins with so many members, and with that unit of its first round."""

    def change_view(self, standing: Standing) -> None:
        """Another view is in force, or the phase that was entered last."""

    def wanted(self, vector: F32, *, finite: bool) -> tuple[int | None, bool]:
        """What an offer says of the vector: its `unit`, and whether to `skip` it.

        Args:
            finite: the vector must be finite, also where it need not be in order to be sent.

        Raises:
            NonFinite: the vector holds NaN or infinity, and must not.
        """

    def begin(self, round_: int) -> int:
        """Nothing of the round's vector is there yet; before the agent is told of it. The offer's conversion, or 0."""

    def convert(self, round_: int, vector: F32) -> None:
        """Convert the whole vector."""

    def expect(self, round_: int, out: F32) -> bool:
        """A round's sum will be read into `out`, float32 (lanes,); whether there is anything to read from already."""

    def ahead(self, stop: Callable[[], bool]) -> None:
        """Read what is known of that sum by now, until `stop`."""

    def settle(self, message: shared_form.Committed) -> bool:
        """A round was committed; whether a vector was left out of it as too large."""

    def sum(self, commit: Commit, out: F32) -> None:
        """Read the exact sum into `out`, float32 (lanes,); zeros if nobody was counted."""

    def finish(self, commit: Commit) -> None:
        """The sum was read, or is not wanted: what is left to do before the memory is used for another round."""


class AddingReducer:
    """Lanes in multiples of the round's unit, which every member's kernel adds, or a switch.

    Attributes: `offers`, `sums`.
    """

    def __init__(
        self, format: LaneFormat, residual: Residual, arena: Arena, doorbell: int, number: int
    ) -> None:
        self.offers = Offers(format, residual, arena, doorbell)
        self.sums = Sums(format, number)
        self._exchange = Exchange.BROADCAST
        self._standing = Standing(number, 0, frozenset(), ())
        self._own = self.offers.own(0)  # of the round that is expected

    @property
    def members(self) -> int:
        """As `Reducer`."""
        return self.offers.members

    def enter(self, unit: int, members: int, exchange: Exchange) -> None:
        """As `Reducer`."""
        self._exchange = exchange
        self.offers.enter(unit, members, exchange)

    def change_view(self, standing: Standing) -> None:
        """What was summed early may be sent again."""
        self._standing = standing
        self.sums.forget()
        self.sums.exchange = self._exchange.among(len(standing.live))

    def wanted(self, vector: F32, *, finite: bool) -> tuple[int | None, bool]:
        """The unit that is asked for in the next round, if it should be another; whether this one's is too fine.

        Raises:
            NonFinite: the vector holds NaN or infinity, which no lane can be.
        """
        return self.offers.wanted(vector)

    def begin(self, round_: int) -> int:
        """As `Reducer`; there is no conversion."""
        self.offers.begin(round_)
        return 0

    def convert(self, round_: int, vector: F32) -> None:
        """As `Reducer`."""
        self.offers.convert(round_, vector)

    def expect(self, round_: int, out: F32) -> bool:
        """As `Reducer`."""
        self._own = self.offers.own(round_)
        return self.sums.begin(round_, frozenset(self._standing.due), out)

    def ahead(self, stop: Callable[[], bool]) -> None:
        """As `Reducer`: what every other member has sent."""
        self.sums.ahead(self._standing.view, self.offers.unit, self._own, stop)

    def settle(self, message: shared_form.Committed) -> bool:
        """The next round's unit is known; a much larger one is that of somebody who was left out."""
        self.offers.unit = message.next_unit
        return message.next_unit > message.unit + self.offers.coarser

    def sum(self, commit: Commit, out: F32) -> None:
        """As `Reducer`; what rounding has left over of this member's part goes into its next one."""
        sums = self.sums
        if sums.exchange != commit.exchange:  # the view has changed with the commit
            sums.forget()
            sums.exchange = commit.exchange
        own = self.offers.own(commit.round)
        sums.total(commit.round, commit.counted, commit.unit, own, out)
        if self._standing.number in commit.counted:
            self.offers.counted()

    def finish(self, commit: Commit) -> None:
        """Nothing is left."""


class StripedReducer:
    """Lanes with absolute exponents, whose sums are made by the aggregators of stripes."""

    members = 0

    def __init__(
        self, format: LaneFormat, residual: Residual, arena: Arena, doorbell: int, number: int
    ) -> None:
        self.offers = StripedOffers(format, residual, arena, doorbell)
        self.sums = StripedSums(format)
        self.remainders = Remainders(format)
        self._fragments = format.fragments
        self._standing = Standing(number, 0, frozenset(), ())
        self._finished = 0  # the last round

    def forget(self) -> None:
        """Another member's state was taken over: the round finished last may come once more, and is another one."""
        self._finished = 0

    def enter(self, unit: int, members: int, exchange: Exchange) -> None:
        """Nothing hangs on the unit."""

    def change_view(self, standing: Standing) -> None:
        """What is converted stays valid; what was read early is of its view."""
        self._standing = standing

    def wanted(self, vector: F32, *, finite: bool) -> tuple[int | None, bool]:
        """The vector's exponent, or a bit more; no vector is too large."""
        return self.offers.bound(vector, finite=finite), False

    def begin(self, round_: int) -> int:
        """As `Reducer`.

        Raises:
            JobFailed: this member is no aggregator.
        """
        if self._standing.number not in self._standing.due:
            raise JobFailed(
                f"round {round_}: this member has no share of it, and can offer nothing"
            )
        return self.offers.begin(round_)

    def convert(self, round_: int, vector: F32) -> None:
        """Convert the own stripe first, and then those after it."""
        due = self._standing.due
        rank = due.index(self._standing.number)
        self.offers.convert(round_, vector, stripe(self._fragments, rank, len(due)).start)

    def expect(self, round_: int, out: F32) -> bool:
        """As `Reducer`."""
        self.sums.begin(round_, self._standing.view, len(self._standing.due), out)
        return True

    def ahead(self, stop: Callable[[], bool]) -> None:
        """As `Reducer`."""
        self.sums.ahead(stop)

    def settle(self, message: shared_form.Committed) -> bool:
        """No vector is too large."""
        return False

    def sum(self, commit: Commit, out: F32) -> None:
        """As `Reducer`; the sum of this member's part alone is that part."""
        if not commit.counted:
            out[:] = 0.0
        elif set(commit.counted) == {self._standing.number}:
            self.sums.alone(commit.round, self.offers.own, out)
        else:
            self.sums.total(commit.round, commit.view, out)

    def finish(self, commit: Commit) -> None:
        """What rounding has left over goes into the next vector: of this member's part, and of its stripe's sums.

        Once a round.
        """
        number, bank = self._standing.number, commit.round & 1
        if commit.round == self._finished or not commit.counted:
            return
        self._finished = commit.round
        alone = set(commit.counted) == {number}
        exponents = (self.offers.own if alone else self.sums.records).exponents[bank]
        finite = exponents != NOT_FINITE
        if number in commit.counted:
            self.offers.counted(~finite)
        if len(commit.counted) > 1 and number in commit.aggregators:
            rank = commit.aggregators.index(number)
            own = stripe(self._fragments, rank, len(commit.aggregators))
            here = slice(own.start, own.stop)
            rests = self.sums.records["rest"][bank, here]
            used = finite[here] & (rests == np.uint64(commit.view << 32 | commit.round))
            remainders = self.remainders.of(commit.round, commit.view, len(own))
            self.offers.add_remainders(own.start, remainders, exponents[here], used, commit.unit)
