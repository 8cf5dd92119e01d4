# SPDX-License-Identifier: Apache-2.0
"""Everybody sends at once, each fragment to the member that adds it up, whose kernel sends the sum to all.

Or all of them to a Linux switch (docs/linux-switch.md), which is number 0 and the only aggregator.

The stripe of rank r of n aggregators is the fragments F r // n to F (r + 1) // n (docs/stripes.md).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from nicps import wire
from nicps.protocol.actions import Action, Narrow, Striped
from nicps.protocol.exchange import windows
from nicps.protocol.exchange.base import Exchanger
from nicps.protocol.exchange.giving_way import GivingWay, LineFigures
from nicps.protocol.exchange.late_sums import LateSums
from nicps.protocol.exchange.windows import RoundTrip, Window
from nicps.protocol.progress import BEHIND, Progress
from nicps.protocol.signals import Lacks, Late
from nicps.protocol.token import TokenState

#: The agent looks after so many sums at a time, with the largest window: what was lost, and where the kernel could not
#: go on sending. At least as often in a round as the second says.
_CLOCK, _LOOKS = 256, 32
#: Sums that are looked at in one go by who does not send, and so does not know how far they can have come.
_GLANCE = 4096
#: Rounds before the open one that a frame can name.
_FARTHEST = 255

LEAST_UNIT = -120


class StripesExchanger(Exchanger):
    """Contributions go out as soon as the list is known, at most a window of them to an aggregator ahead of its sums.

    Whoever lacks a sum asks its aggregator; who has not contributed to it sends that again, if it is the one that asks.
    """

    def _begin(self, now: float) -> None:
        self.aggregators = self._phase.aggregators(self._view.live)
        others = max(1, len(self.aggregators) - 1)
        self._window = windows.share_of(2 * others)
        self._way = GivingWay(self._window)
        self._round_trip = RoundTrip(self._timings.repeat_s)
        self._progress = Progress(self._timings)
        whose = self._receiver, self._view.number, self._number
        self._late = LateSums(*whose, central=self.kind.central)
        self._striped: Striped | None = None
        self._stripes: list[Window] = []
        self.open(0)

    # ---- what the control tells

    def open(self, round_: int) -> None:
        """Nothing of it has been sent or has come, and its list is not known."""
        super().open(round_)
        self._note_losses()
        self._round = round_
        self._striped = None
        self._stripes = []
        self._awaits_lanes = False
        #: A conversion, and how many records of it in the own stripe were seen.
        self._entering = 0, 0
        self._late.open(round_)
        self._progress.open()
        self._round_trip.open()
        self._way.open()
        self._set_clock(round_)

    def _note_losses(self) -> None:
        """The round is over: what was lost of it tells how large the next windows are."""
        if self._is_listed and self._striped and self._striped.type is wire.FrameType.CONTRIBUTION:
            others = [s for s in self._stripes if s.owner != self._number and s.first < s.end]
            self._way.note_losses(others)

    def _set_clock(self, round_: int) -> None:
        """In a smaller window fewer losses stop a stripe, and as many windows have come after fewer sums."""
        looks = self._fragments_in(round_) // _LOOKS
        most = max(1, _CLOCK * self._way.size // self._window)
        self.clock = min(most, max(1, self._way.size // 2, looks))

    def agree_on(self, window: int) -> None:
        """If none is known, the one of the round before is this round's."""
        self._way.agree_on(window)

    def send_listed(self, token: TokenState) -> list[Action]:
        """Nothing: aggregators must know the whole list first."""
        return []

    def on_closed(self, now: float, token: TokenState) -> list[Action]:
        """The list has come to its unit."""
        self._take_size(token)
        largest = max((line.unit for line in token.lines if line.contributed), default=LEAST_UNIT)
        token.unit = max(LEAST_UNIT, largest - wire.MAX_SHIFT[self.width or self._phase.width])
        return self.on_token(now, token)

    def on_token(self, now: float, token: TokenState) -> list[Action]:
        """Begin, if it says that the list is closed."""
        if token.state != wire.TokenState.CLOSING or token.round != self._round:
            return []
        if self._phase.sized and not token.agrees:
            return []  # there is nothing to add: the training programs are told
        self._take_size(token)
        return self.on_list(now, token.listed, token.unit)

    def _take_size(self, token: TokenState) -> None:
        """A member without a share has offered nothing: it has the round's size from the closed list."""
        if self._phase.sized and not self.sized and token.agrees:
            self.sized = next((line.samples for line in token.lines if line.contributed), 0)

    def on_list(self, now: float, members: int, unit: int) -> list[Action]:
        """Begin, unless it was known."""
        if self._striped is not None or self._dropped or not members:
            return []
        alone = members.bit_count() == 1
        kind = wire.FrameType.SUM if alone else wire.FrameType.CONTRIBUTION
        remainders = self._remainders(alone)
        own = self.size, self.width
        self._way.begin(now)
        self._striped = Striped(kind, members, unit, self.aggregators, *remainders, *own)
        self._set_clock(self._round)
        total = self._fragments_in(self._round)
        if alone:
            self._stripes = [Window.begin(members.bit_length(), 0, total)]
            if members == 1 << (self._number - 1):
                self._stripes[0].here = total
        else:
            owners = self._owners_in_turn()
            self._stripes = [Window.begin(owner, *self._bounds(owner)) for owner in owners]
        for stripe in self._stripes:
            stripe.due, stripe.begun_at = now + self._round_trip.timeout_s(1), now
        return self.advance(now)

    def on_lacking(self, now: float, lacking: wire.Lacking) -> list[Action]:
        """Send again what it is this member's to send; remember whose the rest is."""
        striped, index = self._striped, lacking.index
        if striped is None or self._dropped or lacking.members & ~striped.members:
            return []
        self._late.note_answer(index, lacking.members)
        mine = lacking.members >> (self._number - 1) & 1
        stripe = next((s for s in self._stripes if s.first <= index < s.end), None)
        if stripe is not None:
            stripe.unanswered = 0
        if not mine or stripe is None:
            return []
        self._note_sent(stripe)
        if not stripe.here <= index < stripe.sent:
            return []
        return self._frames(striped, [(index, 1)], repair=True)

    def advance(self, now: float) -> list[Action]:
        """Send what there is room for, and ask for what has not come."""
        striped = self._striped
        if striped is None or self._dropped:
            return []
        fresh: list[tuple[int, int]] = []
        asks: list[tuple[int, int]] = []
        listed = self._is_listed
        self._awaits_lanes = False
        self._way.find_urgent()
        narrowed: list[tuple[int, int]] = []
        for stripe in self._stripes:
            if stripe.owner == self._number:
                self._watch(now, stripe)
            else:
                self._note_sent(stripe)
                self._note_sums(now, stripe, listed)
                asks += self._ask_for(now, stripe)
                sums = self._way.swallow(stripe) if listed else None
                narrowed += [] if sums is None else [(stripe.owner, sums)]
            if listed:
                fresh += self._next_of(now, stripe)
        if self._way.measures and not self.under_way:
            others = [stripe for stripe in self._stripes if stripe.owner != self._number]
            frames = sum(stripe.end - stripe.first for stripe in others) if listed else 0
            shortest_s = self._round_trip.shortest_s
            self._way.note_whole(now, self._channel, frames / max(1, len(others)), shortest_s)
        actions: list[Action] = []
        if narrowed:
            whose = self._view.number, self._round, self._channel
            actions.append(Narrow(*whose, tuple(narrowed)))
        actions += self._frames(striped, fresh, repair=False) if fresh else []
        if not asks:
            return actions
        self._note_vain(now, max(windows.PROBES, sum(n for _, n in asks)))  # no less than `_watch`
        asked = replace(striped, type=wire.FrameType.ASK)
        return actions + self._send(self._round, 0, tuple(asks), repair=True, striped=asked)

    def give_way_to(self, ahead: Sequence[Exchanger], line: LineFigures) -> None:
        """Its windows are small while rounds of these are open."""
        self._way = GivingWay(self._window, ahead, line)

    def note_urgent(self, now: float, behind: bool) -> None:
        """Its time counts a tenth, as long as that is so."""
        if behind is self._progress.behind:
            return
        self._progress.behind = behind
        self._round_trip.stretch = 1 / BEHIND if behind else 1.0
        for stripe in self._stripes:
            left = max(0.0, stripe.due - now)
            stripe.due = now + (left / BEHIND if behind else left * BEHIND)

    def deadline(self) -> float:
        """When the next sum has not come for too long."""
        if self._dropped:
            return math.inf
        due = math.inf
        for stripe in self._stripes:
            if stripe.here < stripe.end and stripe.due < due:
                due = stripe.due
        return due

    # ---- what others ask, where there are several channels

    @property
    def knows_list(self) -> bool:
        """The list of the open round is known here."""
        return self._striped is not None and not self._dropped

    @property
    def under_way(self) -> bool:
        """Also, sums of it lack here."""
        if self._striped is None or self._dropped:
            return False
        if self._striped.members == 1 << (self._number - 1):  # it reads its own lanes
            return any(stripe.sent < stripe.end for stripe in self._stripes)
        have = self._receiver.count(self._round, self._view.number, 0)
        return have < self._fragments_in(self._round)

    @property
    def has_sums(self) -> bool:
        """Sums of another aggregator: contributions have come to one host, and its kernel sends what it makes of them.

        Those of the own stripe show the former only.
        """
        if self._striped is None or self._striped.type is not wire.FrameType.CONTRIBUTION:
            return False
        others = (s for s in self._stripes if s.owner != self._number and s.first < s.end)
        return any(self._missing(s.first, s.end, 1) != [(s.first, s.end - s.first)] for s in others)

    def on_the_way(self, owner: int) -> int:
        """Contributions of the open round on their way to that aggregator, at most."""
        stripe = next((each for each in self._stripes if each.owner == owner), None)
        if stripe is None or not self._is_listed:
            return 0
        return min(self._way.window(owner), stripe.end - stripe.here)

    @property
    def batch(self) -> int:
        """Its windows; 0 where nothing more urgent is open."""
        self._way.find_urgent()
        if not self._way.waits:
            return 0
        return sum(self._way.window(owner) for owner in self.aggregators if owner != self._number)

    @property
    def last_took(self) -> tuple[float, float]:
        """How long the last round took from its closed list to its sums, and when they were here."""
        return self._way.took_s, self._way.whole_at

    def find_late(self) -> Mapping[int, Late]:
        """By `LateSums`, of the open round."""
        if self._striped is None or self._dropped:
            return {}
        return self._late.find(self._stripes, self._striped.members)

    # ---- what the control asks

    def may_enter(self) -> bool:
        """The own stripe of this view is converted: the kernel adds it with the last contribution.

        Where a switch adds there is none. But a lone member commits what it enters, and reads its own lanes.
        """
        if self._number in self.aggregators:
            first, end = self._bounds(self._number)
        elif len(self._view.live) == 1:
            first, end = 0, self._fragments_in(self._round)
        else:
            return True
        conversion, seen = self._entering
        seen = seen if conversion == self.conversion else 0
        if first + seen < end:
            seen += self._converted(first + seen, end)
        self._entering = self.conversion, seen
        return first + seen == end

    def wants_token(self, token: TokenState) -> bool:
        """To mark itself, or to commit."""
        return self.is_complete(token)

    @property
    def proposed_window(self) -> int:
        """The one that it has found best, or tries."""
        return self._way.proposed

    @property
    def awaits_lanes(self) -> bool:
        """There is room to send what is not converted yet."""
        return self._awaits_lanes

    def serve(self, now: float, token: TokenState) -> tuple[bool, list[Action]]:
        """Nothing waits for the token."""
        return False, []

    def is_complete(self, token: TokenState) -> bool:
        """This member has all sums. The lead waits until all others have: until then it may decide otherwise."""
        lines = token.lines
        if self._number == self._view.lead:
            others = (k for k in self._view.order if k != self._number)
            if not all(lines[k - 1].complete for k in others):
                return False
        listed = [k for k, line in enumerate(lines, 1) if line.marks & wire.Mark.CONTRIBUTED]
        if not listed:
            return True
        if listed == [self._number]:  # it reads its own lanes
            return all(stripe.sent == stripe.end for stripe in self._stripes)
        if self._phase.sized and not token.agrees:
            return True
        total = self._fragments_in(token.round)
        return self._receiver.count(token.round, self._view.number, 0) >= total

    def ask(self, now: float, token: TokenState) -> bool:
        """Sums are asked for without the token."""
        return False

    def take_report(self, now: float, token: TokenState) -> Lacks:
        """By `LateSums`, of the sums that are asked for and do not come."""
        if not self._progress.take_report(now) or self._striped is None:
            return {}
        return self._late.count(self._stripes, self._striped.members)

    def owns_ready(self, token: TokenState) -> bool:
        """`ready` counts samples throughout."""
        return False

    # ---- the stripes

    @property
    def _is_listed(self) -> bool:
        """This member contributes to the open round."""
        striped = self._striped
        return striped is not None and bool(striped.members >> (self._number - 1) & 1)

    def _remainders(self, alone: bool) -> tuple[int, int]:
        """The view of the round whose remainders a switch adds to the open one, and how many rounds before it was."""
        (view, round_), adds = self.rest, self.kind.central and self._phase.feedback and not alone
        behind = self._round - round_
        return (view, behind) if adds and view and 0 < behind <= _FARTHEST else (0, 0)

    def _owners_in_turn(self) -> tuple[int, ...]:
        """This member's own stripe first, and those after it in order: so not all begin with the same one."""
        at = next((r for r, k in enumerate(self.aggregators) if k >= self._number), 0)
        return self.aggregators[at:] + self.aggregators[:at]

    def _bounds(self, owner: int) -> tuple[int, int]:
        """First fragment of its stripe in the open round, and one past the last."""
        total, n = self._fragments_in(self._round), len(self.aggregators)
        rank = self.aggregators.index(owner)
        return total * rank // n, total * (rank + 1) // n

    def _converted(self, first: int, end: int) -> int:
        if not self.conversion:
            return 0
        return self._receiver.converted(self._round, self.conversion, first, end)

    def _missing(self, first: int, end: int, limit: int) -> list[tuple[int, int]]:
        view = self._view.number
        return self._receiver.missing_sums(self._round, view, first, end, limit)

    def _note_sent(self, stripe: Window) -> None:
        """The kernel has sent a contribution for each sum that came."""
        sent = self._receiver.next_to_send(self._round, stripe.owner)
        stripe.sent = max(stripe.sent, min(sent, stripe.end))

    def _note_sums(self, now: float, stripe: Window, listed: bool) -> None:
        """How far its sums have come."""
        if stripe.here == stripe.end:
            return
        end = min(stripe.end, stripe.sent if listed else stripe.here + _GLANCE)
        here, beyond = self._receiver.reached(self._round, self._view.number, stripe.here, end)
        stripe.note_come(now, here, beyond, self._round_trip)

    def _next_of(self, now: float, stripe: Window) -> list[tuple[int, int]]:
        """The contributions that there is room for, and lanes."""
        assert self._striped is not None
        sums = self._striped.type is wire.FrameType.SUM
        if stripe.owner == self._number and not sums:
            return []
        room = stripe.end if sums else self._way.room(stripe)
        if room <= stripe.sent:
            return []
        count = self._converted(stripe.sent, room)
        self._awaits_lanes |= count < room - stripe.sent
        if not count:
            return []
        return [stripe.take(now, count)]

    def _ask_for(self, now: float, stripe: Window) -> list[tuple[int, int]]:
        """The sums to ask for.

        The window that the agent sends waits in the host's queue. What the kernel sends by XDP_TX, as sums come, does
        not: so nearly a window may overtake one that is not lost. Nobody has contributed to what is behind a window.
        """
        overtake, probes = self._way.size - 1, min(windows.PROBES, self._way.window(stripe.owner))
        return stripe.find_lost(now, self._round_trip, overtake, self._missing, probes)

    def _watch(self, now: float, stripe: Window) -> None:
        """The own stripe: whoever has not contributed asks for its sums, and hears so."""
        if now < stripe.due or stripe.here == stripe.end:
            return
        self._note_sums(now, stripe, listed=False)
        if stripe.here < stripe.end:
            stripe.asks += 1
            stripe.due = now + self._round_trip.timeout_s(stripe.asks)
            self._note_vain(now, windows.PROBES)

    def _note_vain(self, now: float, asks: int) -> None:
        have = self._receiver.count(self._round, self._view.number, 0)
        self._progress.note(now, have, asks)

    def _frames(
        self, striped: Striped, ranges: list[tuple[int, int]], *, repair: bool
    ) -> list[Action]:
        return self._send(self._round, 1, tuple(ranges), repair=repair, striped=striped)
