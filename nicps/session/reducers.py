# SPDX-License-Identifier: Apache-2.0
"""How a training program's vectors are converted and sums are read: one reducer for each representation of lanes.

A session calls the reducer of its phase. It does not check which exchange the phase has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from nicps.errors import JobFailed
from nicps.exchange import Exchange
from nicps.session import shared_form
from nicps.session.absolute import BOOL
from nicps.session.arena import Arena
from nicps.session.lanes import F32, LaneFormat, Residual
from nicps.session.loops import loops_for
from nicps.session.offers import Offers
from nicps.session.phases import Commit
from nicps.session.stripes import Remainders, StripedOffers, StripedSums, stripe
from nicps.session.sums import Sums
from nicps.wire import NOT_FINITE


@dataclass(frozen=True, slots=True)
class Standing:
    """A phase's members, in the view in force: `number` is this member's, `shares` are samples of a round by member."""

    number: int
    view: int
    live: frozenset[int]
    shares: tuple[int, ...]

    @property
    def due(self) -> tuple[int, ...]:
        """The members that contribute to a round, in order; with stripes these are the aggregators."""
        return tuple(k for k, share in enumerate(self.shares, 1) if share and k in self.live)


def prepare(format: LaneFormat, settings: Mapping[str, Any]) -> None:
    """Compile what a job's vectors need, before the other members wait for this one, unless it cannot be needed.

    A job that leaves its exchange open may have stripes. With factors of low rank (`rank`) vectors are short.

    Args:
        format: of all numbers that a step brings, in however many rounds.
    """
    asked = settings.get("exchange", "auto") in ("auto", Exchange.STRIPES.name)
    if asked and settings.get("system", "R") == "R" and not settings.get("rank"):
        loops_for(format)


class Reducer(Protocol):
    """Converts vectors, float32 (lanes,), and reads sums."""

    @property
    def members(self) -> int:
        """The number of members whose lanes a switch adds; 0 if the kernel adds."""

    def enter(self, unit: int, members: int, exchange: Exchange) -> None:
        """A phase begins with so many members, and with that unit of its first round."""

    def change_view(self, standing: Standing) -> None:
        """Another view is in force, or the phase that was entered last."""

    def wanted(self, vector: F32, *, finite: bool) -> tuple[int | None, bool]:
        """The fields `unit` and `skip` of an offer of the vector.

        Args:
            finite: the vector must be finite, also where it need not be in order to be sent.

        Raises:
            NonFinite: the vector holds NaN or infinity, and must not.
        """

    def begin(self, round_: int) -> int:
        """No part of the vector is converted yet. Call it before the offer is sent. Returns its conversion, or 0."""

    def convert(self, round_: int, vector: F32) -> None:
        """Convert the whole vector."""

    def expect(self, round_: int, out: F32) -> bool:
        """The round's sum will be read into `out`, float32 (lanes,). Returns whether `ahead` can read already."""

    def ahead(self, stop: Callable[[], bool]) -> None:
        """Read the parts of that sum that are here already, until `stop` returns true."""

    def drop(self) -> None:
        """The vector converted last is not counted, or not yet. It must not have changed."""

    def settle(self, message: shared_form.Committed) -> bool:
        """A round was committed. Returns whether a vector was left out because it was too large."""

    def sum(self, commit: Commit, out: F32) -> None:
        """Read the exact sum into `out`, float32 (lanes,); zeros if nobody was counted."""

    def finish(self, commit: Commit) -> None:
        """The sum was read, or is not needed. Do what must be done before another round uses the memory."""


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

    def map(self, message: shared_form.Phase | shared_form.View, fds: Iterator[int]) -> None:
        """Map the accumulators that come with a message."""
        if isinstance(message, shared_form.Phase) and message.blocks:
            self.sums.map(next(fds), next(fds), message.blocks)

    def enter(self, unit: int, members: int, exchange: Exchange) -> None:
        """As `Reducer`."""
        self._exchange = exchange
        self.offers.enter(unit, members, exchange)

    def change_view(self, standing: Standing) -> None:
        """Discard what was summed early: it may be retransmitted."""
        self._standing = standing
        self.sums.forget()
        self.sums.exchange = self._exchange.among(len(standing.live))

    def wanted(self, vector: F32, *, finite: bool) -> tuple[int | None, bool]:
        """The unit that the next round should have, if that is another one; whether this round's unit is too fine.

        Raises:
            NonFinite: the vector holds NaN or infinity, which lanes cannot hold.
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

    def drop(self) -> None:
        """Nothing has to be taken back."""

    def settle(self, message: shared_form.Committed) -> bool:
        """The next round's unit is known; a much larger one shows that a member was left out."""
        self.offers.unit = message.next_unit
        return message.next_unit > message.unit + self.offers.coarser

    def sum(self, commit: Commit, out: F32) -> None:
        """As `Reducer`; the rounding error of this member's contribution goes into its next one."""
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
    """Lanes with absolute exponents, whose sums are made by the aggregators of stripes, or by a Linux switch.

    A switch keeps what rounding its sums leaves over, and adds it to later ones. No member has a stripe then.
    """

    members = 0

    def __init__(
        self, format: LaneFormat, residual: Residual, arena: Arena, doorbell: int, number: int
    ) -> None:
        self.offers = StripedOffers(format, residual, arena, doorbell)
        self.sums = StripedSums(format)
        self.remainders = Remainders(format)
        self._fragments = format.fragments
        self._standing = Standing(number, 0, frozenset(), ())
        self._kept = self._finished = 0  # the last rounds
        self._central = False  # a switch makes all sums

    def map(self, message: shared_form.Phase | shared_form.View, fds: Iterator[int]) -> None:
        """Map what comes with a message, but for accumulators."""
        if isinstance(message, shared_form.Phase) and message.room:
            self.offers.map(next(fds), message.room)
            self.sums.map(next(fds), message.room)
        if message.places:
            self.remainders.map(next(fds), message.places, message.view)

    def forget(self) -> None:
        """Another member's state was loaded: the round that was finished last may be run again, as another round."""
        self._kept = self._finished = 0

    def enter(self, unit: int, members: int, exchange: Exchange) -> None:
        """Nothing depends on the unit."""
        self._central = exchange.central

    def change_view(self, standing: Standing) -> None:
        """What is converted stays valid. What was read early belongs to its view."""
        self._standing = standing

    def wanted(self, vector: F32, *, finite: bool) -> tuple[int | None, bool]:
        """An upper bound of the vector's exponent; no vector is too large."""
        return self.offers.bound(vector, finite=finite), False

    def begin(self, round_: int) -> int:
        """As `Reducer`.

        Raises:
            JobFailed: this member has no share of the round.
        """
        if self._standing.number not in self._standing.due:
            raise JobFailed(
                f"round {round_}: this member has no share of it, and can offer nothing"
            )
        return self.offers.begin(round_)

    def convert(self, round_: int, vector: F32) -> None:
        """Convert the own stripe first, then a batch of each other stripe in turn; for a switch, in order."""
        due = self._standing.due
        if self._central:
            self.offers.convert(round_, vector, 0, 1, stays=False)
            return
        self.offers.convert(round_, vector, due.index(self._standing.number), len(due))

    def expect(self, round_: int, out: F32) -> bool:
        """As `Reducer`."""
        parts = 1 if self._central else len(self._standing.due)
        self.sums.begin(round_, self._standing.view, parts, out)
        return True

    def ahead(self, stop: Callable[[], bool]) -> None:
        """As `Reducer`."""
        for part, lost in self.sums.ahead(stop):
            self.offers.sum_came(part, lost)

    def drop(self) -> None:
        """As `Reducer`."""
        self.offers.drop()

    def settle(self, message: shared_form.Committed) -> bool:
        """No vector is too large."""
        return False

    def sum(self, commit: Commit, out: F32) -> None:
        """As `Reducer`; if this member alone contributed, the sum is its contribution."""
        if not commit.counted:
            out[:] = 0.0
        elif self._alone(commit):
            self.sums.alone(commit.round, self.offers.own, out)
        else:
            self.sums.total(commit.round, commit.view, out)
        self._keep(commit)

    def finish(self, commit: Commit) -> None:
        """Add the remainders of this member's stripe to the residual; a switch adds those of its sums itself.

        This is done once a round, after the rounding error of its own contribution has become the residual.
        """
        if commit.round == self._finished:
            return
        self._keep(commit)
        if not commit.counted:
            return
        self._finished = commit.round
        number, bank = self._standing.number, commit.round & 1
        if self._alone(commit) or number not in commit.aggregators:
            return
        rank = commit.aggregators.index(number)
        own = stripe(self._fragments, rank, len(commit.aggregators))
        here = slice(own.start, own.stop)
        used = self.sums.records.usable_rests(commit.round, commit.view, here)
        remainders = self.remainders.of(commit.round, commit.view, len(own))
        exponents = self.sums.records.exponents[bank, here]
        self.offers.add_remainders(own.start, remainders, exponents, used, commit.unit)

    def _keep(self, commit: Commit) -> None:
        """The rounding error of this member's contribution, if it counted, becomes the residual, once a round."""
        if self._standing.number not in commit.counted:
            self.offers.drop()
        elif commit.round not in (self._kept, self._finished):
            self._kept = commit.round
            self.offers.counted(~self._finite(commit))

    def _alone(self, commit: Commit) -> bool:
        return set(commit.counted) == {self._standing.number}

    def _finite(self, commit: Commit) -> BOOL:
        """(fragments,): whether the sums are."""
        records = self.offers.own if self._alone(commit) else self.sums.records
        finite: BOOL = records.exponents[commit.round & 1] != NOT_FINITE
        return finite
