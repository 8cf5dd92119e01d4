# SPDX-License-Identifier: Apache-2.0
"""How a training program's vectors are converted and sums are read: one reducer for each representation of lanes.

A session calls the reducer of its phase. It does not check which exchange the phase has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from nicps.barrier import barrier
from nicps.errors import JobFailed
from nicps.exchange import Exchange
from nicps.session import shared_form
from nicps.session.arena import Arena
from nicps.session.lanes import F32, LaneFormat, Residual
from nicps.session.loops import loops_for
from nicps.session.offers import Offers
from nicps.session.phases import Commit
from nicps.session.planned import MemberRounds
from nicps.session.sized import ChannelRounds, is_short
from nicps.session.stripes import stripe
from nicps.session.sums import Sums
from nicps.session.whole import Whole


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


def prepare(format: LaneFormat, numbers: int, settings: Mapping[str, Any]) -> None:
    """Compile what a job's vectors need, before the other members wait for this one, unless it cannot be needed.

    A job that leaves its exchange open may have stripes, and one that asks for a switch a Linux switch, or stripes.

    Args:
        format: of a step's longest round.
        numbers: of the gradient. A step brings all of them, but for factors of low rank (`rank`), which are shorter.
    """
    if settings.get("exchange", "auto") == Exchange.BROADCAST.name:
        return
    if settings.get("system", "R") == "R":
        loops_for(format if settings.get("rank") else replace(format, lanes=numbers))


class Reducer(Protocol):
    """Converts vectors, float32 (lanes,), and reads sums."""

    @property
    def members(self) -> int:
        """The number of members whose lanes a switch adds; 0 if the kernel adds."""

    @property
    def is_short(self) -> bool:
        """Whether a vector is converted before its offer is sent (`nicps.session.sized.is_short`); else after it."""

    def enter(self, unit: int, members: int, exchange: Exchange) -> None:
        """A phase begins with so many members, and with that unit of its first round."""

    def change_view(self, standing: Standing) -> None:
        """Another view is in force, or the phase that was entered last."""

    def offer(self, round_: int, vector: F32, samples: int, *, finite: bool) -> shared_form.Offer:
        """The offer of a vector, the sum over so many samples, before that is converted.

        Args:
            finite: the vector must be finite, also where it need not be in order to be sent.

        Raises:
            NonFinite: the vector holds NaN or infinity, and must not.
            JobFailed: this member has no share of the round.
        """

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

    is_short = False

    def __init__(
        self, format: LaneFormat, residual: Residual, arena: Arena, doorbell: int, number: int
    ) -> None:
        self.offers = Offers(format, residual, arena, doorbell)
        self.sums = Sums(format, number)
        self._exchange = Exchange.BROADCAST
        self._standing = Standing(number, 0, frozenset(), ())
        self._own = self.offers.own(0)  # of the round that is expected
        self._counted = (
            0  # the last round of whose sum this member's vector is a part, as it was read
        )

    @property
    def members(self) -> int:
        """As `Reducer`."""
        return self.offers.members

    def map(self, message: shared_form.Phase | shared_form.View, fds: Iterator[int]) -> None:
        """Map the accumulators that come with a message."""
        if isinstance(message, shared_form.Phase) and message.blocks:
            self.sums.map(next(fds), next(fds), message.blocks)

    def forget(self) -> None:
        """As `StripedReducer.forget`."""
        self._counted = 0

    def enter(self, unit: int, members: int, exchange: Exchange) -> None:
        """As `Reducer`."""
        self._exchange = exchange
        self.offers.enter(unit, members, exchange)

    def change_view(self, standing: Standing) -> None:
        """Discard what was summed early: it may be retransmitted."""
        self._standing = standing
        self.sums.forget()
        self.sums.exchange = self._exchange.among(len(standing.live))

    def offer(self, round_: int, vector: F32, samples: int, *, finite: bool) -> shared_form.Offer:
        """As `Reducer`: with the unit that the next round should have, if that is another one.

        Raises:
            NonFinite: the vector holds NaN or infinity, which lanes cannot hold.
        """
        unit, skip = self.offers.wanted(vector)
        if not skip:
            self.offers.begin(round_)
        return shared_form.Offer(round_, samples, unit, skip)

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
        # The sum may be read again. By then the residual is that of this round.
        if self._standing.number in commit.counted and commit.round != self._counted:
            self.offers.counted()
            self._counted = commit.round

    def finish(self, commit: Commit) -> None:
        """Nothing is left."""


@dataclass(slots=True)
class _Early:
    """A round's sums in one view, as far as they are in `out`: all but `unread`, a part of each stripe."""

    round: int
    view: int
    out: F32
    unread: list[range]


class StripedReducer:
    """Lanes with absolute exponents, whose sums are made by the aggregators of stripes, or by a Linux switch.

    A switch keeps what rounding its sums leaves over, and adds it to later ones. No member has a stripe then.

    Args:
        rounds: with one channel.
    """

    members = 0

    def __init__(
        self, format: LaneFormat, residual: Residual, rounds: MemberRounds, number: int
    ) -> None:
        self.vector = Whole(format, residual)
        self._format, self._all = format, rounds
        self._standing = Standing(number, 0, frozenset(), ())
        self._round = 0  # for which the vector was taken
        self._settled = 0  # the last one
        self._early: _Early | None = None
        self._central = False  # a switch makes all sums

    @property
    def is_short(self) -> bool:
        """As `Reducer`."""
        return is_short(self.vector)

    @property
    def rounds(self) -> ChannelRounds:
        """The memory of a round, and what is done in it."""
        return self._all.of(0)

    def map(self, message: shared_form.Phase | shared_form.View) -> None:
        """With a message new memory may have come: what was read early is not there."""
        if isinstance(message, shared_form.Phase) and message.room:
            self._early = None

    def forget(self) -> None:
        """Another member's state was loaded: the round that was settled last may be run again, as another round."""
        self._settled = 0

    def enter(self, unit: int, members: int, exchange: Exchange) -> None:
        """Nothing depends on the unit."""
        self._central = exchange.central
        self.vector.compile()

    def change_view(self, standing: Standing) -> None:
        """What is converted stays valid. What was read early belongs to its view."""
        self._standing = standing

    def offer(self, round_: int, vector: F32, samples: int, *, finite: bool) -> shared_form.Offer:
        """As `Reducer`: with an upper bound of the vector's exponent; no vector is too large."""
        if self._standing.number not in self._standing.due:
            raise JobFailed(
                f"round {round_}: this member has no share of it, and can offer nothing"
            )
        self.vector.take(vector, finite=finite)
        self._round = round_
        return self.rounds.begin(round_, self.vector, samples, sized=False)

    def convert(self, round_: int, vector: F32) -> None:
        """As `Reducer`."""
        due = () if self._central else self._standing.due
        batch = self.vector.own_batch
        self.rounds.convert(round_, self.vector, due, batch, rings=not self.is_short)

    def expect(self, round_: int, out: F32) -> bool:
        """As `Reducer`."""
        count = 1 if self._central else max(len(self._standing.due), 1)
        parts = [stripe(self._format.fragments, rank, count) for rank in range(count)]
        self._early = _Early(round_, self._standing.view, out, parts)
        return True

    def ahead(self, stop: Callable[[], bool]) -> None:
        """As `Reducer`: of each stripe what is there without a gap."""
        early, batch, rounds = self._early, self._format.batch, self.rounds
        assert early is not None, "no sums are expected"
        sums, own = rounds.sums(early.round, self.vector), rounds.own(self._round, self.vector)
        tags, tag = rounds.tags(early.round, self.vector), early.view << 32 | early.round
        moved = True
        while moved:
            moved = False
            for rank, unread in enumerate(early.unread):
                now = unread[:batch]
                if not now or not (tags[now.start : now.stop] == tag).all():
                    continue
                if stop():
                    return
                barrier()  # the kernel writes lanes, then the tag
                self.vector.read(sums, now, early.out)
                early.unread[rank], moved = unread[batch:], True
                if rounds.sent(self._round):
                    self.vector.keep_early(sums, now, own)

    def drop(self) -> None:
        """As `Reducer`."""
        if self.vector.is_open:
            self.vector.drop(self.rounds.own(self._round, self.vector))

    def settle(self, message: shared_form.Committed) -> bool:
        """No vector is too large."""
        return False

    def sum(self, commit: Commit, out: F32) -> None:
        """As `Reducer`; if this member alone contributed, the sum is its contribution."""
        early, self._early = self._early, None
        if not commit.counted:
            out[:] = 0.0
            self.drop()
            return
        unread = [range(self._format.fragments)]
        if early is not None and (early.round, early.view) == (commit.round, commit.view):
            if early.out is out and set(commit.counted) != {self._standing.number}:
                unread = early.unread
        self.vector.expect(out, unread)
        self._settle(commit)

    def finish(self, commit: Commit) -> None:
        """As `Reducer`: what rounding has left over is the residual, also where no sum was read."""
        if not commit.counted:
            self.drop()
        elif commit.round != self._settled:
            self._settle(commit)

    def _settle(self, commit: Commit) -> None:
        """What rounding has left over becomes the residual once a round: this member's own, and that of its stripe."""
        self.vector.feedback = commit.round != self._settled
        self.rounds.settle(commit, self.vector)
        self._settled = commit.round
