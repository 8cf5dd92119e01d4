# SPDX-License-Identifier: Apache-2.0
"""The control of a round at one member: the list of contributors, its closing, the marks, the commit (R11 to R13).

It knows no fragment: how contributions become a sum is the exchange's (`nicps.protocol.exchange`).
"""

from __future__ import annotations

from dataclasses import replace

from nicps import wire
from nicps.exchange import Exchange
from nicps.protocol.actions import Action, Closed, Committed, Need
from nicps.protocol.carried import Carried, Offer
from nicps.protocol.digests import Digests
from nicps.protocol.exchange import Exchanger
from nicps.protocol.kernel import KernelState
from nicps.protocol.offers import Offers
from nicps.protocol.phase import Phase
from nicps.protocol.token import Line, TokenState
from nicps.protocol.view import View

_NO_LINE = Line()


class Control:
    """The open round at member `number`.

    Attributes:
        round: the open one.
        unit: log2 of its unit.
        token: the latest that was seen; None before the ring's first one.
        complete: this member has all that the closed list comes to, and has marked itself so.
        frozen: another phase or view is coming: it contributes, closes and marks nothing more, but forwards the token.
        offers: what members have broadcast.
    """

    def __init__(
        self, phase: Phase, view: View, number: int, exchange: Exchanger, carried: Carried
    ) -> None:
        self.phase = phase
        self.number = number
        self.exchange = exchange
        self.round = carried.round
        self.unit = carried.unit
        self.token: TokenState | None = None
        self.complete = False
        self.frozen = False
        self._view = view
        self._digests = Digests(phase, view)
        self._offer = carried.offer
        self._held = carried.offer  # what this member has to give to the open round, or has given
        self._passes = carried.passes
        self._ready = carried.ready
        self._ready_of: dict[int, int] = {}  # from WANT frames
        self._read = carried.read
        self._digest = carried.digest
        self._closed = 0  # round whose closing without this member has been reported
        self._undecided = carried.undecided
        self._need = 0
        self._forward = 0  # the round that was committed last by broadcast marks
        self._saves = False  # the lead: it writes a checkpoint of the state after the open round
        self._saved = False  # the lead does so after the round committed last
        self.offers = Offers(phase, view, broadcast=exchange.kind.broadcasts_marks)
        exchange.open(carried.round)
        exchange.rest = carried.rest
        if carried.offer is not None:
            self._give(carried.offer)

    def _give(self, offer: Offer) -> None:
        """The exchange knows what this member contributes."""
        self.exchange.conversion = offer.conversion
        self.exchange.sized = offer.samples if self.phase.sized else 0

    def line(self) -> Line:
        """This member's entry in the token."""
        return self.token.lines[self.number - 1] if self.token is not None else _NO_LINE

    def want(self, lacks: int) -> wire.Want:
        """What a WANT frame says of this member; entries for what it `lacks` follow."""
        return wire.Want(self._ready, self._read, self._digest, lacks=lacks)

    @property
    def waits_to_enter(self) -> bool:
        """What this member has offered cannot enter the list yet: the rest of it must be converted first."""
        offer = self._offer
        if offer is None or offer.skip or self.line().settled or self.exchange.kind.served:
            return False
        return not self.exchange.may_enter()

    @property
    def last_read(self) -> int:
        """The last round that this member's training program has read."""
        return self._read

    # ---- from view to view

    def carry(self) -> Carried:
        """What goes along into the next view. Nothing is counted that the next one does not count again."""
        passes = self._closed == self.round and self._held is None
        return Carried(
            self.round,
            self.unit,
            self._read,
            self._digest,
            self._held,
            self._ready,
            passes or self._passes,
            rest=self.exchange.rest,
        )

    def unit_of(self, round_: int) -> int:
        """log2 of the unit of the open round, or of the next one, which follows from the closed list."""
        if round_ <= self.round or self.token is None:
            return self.unit
        return self.token.next_unit(self.phase.exchange)

    def settle(self) -> list[Action]:
        """The survivors of a view all have the open round: it is committed (R18)."""
        assert self.token is not None and self.complete
        self.token.commit(self.phase.exchange)
        return self._commit(self.token)

    def freeze(self) -> None:
        """Another phase or view is coming."""
        self.frozen = True
        self.exchange.on_dropped()

    # ---- what the agent reports

    def offer(self, offer: Offer) -> bool:
        """A gradient is ready; whether it can still be listed."""
        if (
            offer.round != self.round
            or self.line().settled
            or self.has_offered
            or not self.phase.shares[self.number - 1]
        ):
            return False
        self._offer = self._held = offer
        self._give(offer)
        self._passes = False
        self._ready = offer.samples
        return True

    def progress(self, round_: int, samples: int) -> bool:
        """So many samples are worked; whether others must hear of it, as somebody has contributed."""
        if round_ != self.round or self.line().settled:
            return False
        self._ready = samples
        return self.token is not None and self.token.counted > 0

    def read(self, round_: int, digest: int) -> bool:
        """A sum has been read out; whether others wait for that bank."""
        if round_ < self._read:
            return False
        self._read, self._digest = round_, digest
        return self.token is not None and self._read_waits

    def go_on(self, *, saves: bool) -> None:
        """The lead has decided that training goes on: only now it may mark itself complete in the next round (R14).

        Args:
            saves: it writes a checkpoint of the state after that round, which all members must know (R22).
        """
        self._undecided, self._saves = False, self._saves or saves

    # ---- what others report

    def create(self) -> TokenState:
        """R9: the ring's first token.

        Each member tells in its first turn what it has read out; until then all that is known is what the round's
        being open says.
        """
        known = self.round - 3 if self.round > self.phase.first_round else self.round - 1
        lines = [Line(read=known) for _ in self._view.members]
        generation = self.phase.generation
        self.token = TokenState.create(generation, self.number, self.round, self.unit, lines)
        return self.token

    def learn(self, now: float, token: TokenState) -> list[Action]:
        """Take over what a newer token says."""
        actions: list[Action] = []
        if token.round == self.round + 1:
            actions += self._commit(token)
        self._enter_marks(token)
        self.token = token
        actions += self._digests.compare(token, self.round)
        actions += self.close_offered(now)
        token = self.token
        if token.state == wire.TokenState.CLOSING and not self.line().settled:
            actions += self._close_without_us()
        actions += self.exchange.on_token(now, token)
        return actions + self._publish_need()

    def take_bounced(self, now: float, token: TokenState) -> None:
        """The kernel has forwarded an open token, for which this member had no use then."""
        if token.round != self.round and not self.bring_forward(token):
            return
        self.token = token
        if self.offers.listed:
            self.close_offered(now)  # what is sent for that has been begun

    def hear_ready(self, sender: int, want: wire.Want) -> list[Action]:
        """A member has so many samples ready."""
        if want.ready <= self._ready_of.get(sender, 0):
            return []
        self._ready_of[sender] = want.ready
        return self._publish_need()

    def hear_read(self, sender: int, want: wire.Want) -> list[Action]:
        """What a member has read out, to the holder of a parked token, or broadcast to all."""
        token = self.token
        assert token is not None
        line = token.lines[sender - 1]
        if want.read <= line.read:
            return []
        line.read, line.digest = want.read, want.digest
        return self._digests.compare(token, self.round)

    def saves(self, round_: int) -> bool:
        """Whether this member knows that the lead writes a checkpoint after that round: the open one or the one before.

        Of the open one only the lead does.
        """
        return self._saves if round_ == self.round else self._saved

    def hear_mark(self, sender: int, marks: int) -> None:
        """A member has all of the open round."""
        self.offers.marks[sender] = marks
        if self.token is not None:
            self._enter_marks(self.token)

    # ---- broadcast offers and marks (`Exchange.broadcasts_marks`)

    @property
    def has_offered(self) -> bool:
        """This member has broadcast its offer to the open round. In this view it cannot change it any more."""
        return self.offers.said(self.round, self.number) is not None

    def broadcast_offer(self) -> bool:
        """Offer without the token, if all members must be listed; then it must say so."""
        offer, token = self._offer, self.token
        if offer is None or offer.skip or offer.unit is None or self._passes or self.frozen:
            return False
        if token is None or self.line().settled or not self.offers.takes(self.number):
            return False
        if self.has_offered or not self.exchange.may_enter():
            return False
        self.offers.hear(self.round, self.number, offer.samples, offer.unit)
        return True

    def announcement(self) -> tuple[int, wire.Want]:
        """What this member broadcasts of the open round: the flags, and its offer."""
        said = self.offers.said(self.round, self.number)
        flags = wire.Flag.COMPLETE * self.complete
        if said is None:
            return flags, self.want(0)
        return flags | wire.Flag.OFFERED, replace(self.want(0), ready=said[0], unit=said[1])

    def close_offered(self, now: float) -> list[Action]:
        """Close the list without the token, once all members that it must have are known to offer.

        Nobody can close another one: the quorum is not reached without each of them, and what they have broadcast they
        enter into the token too.
        """
        token = self.token
        if token is None or token.round != self.round or token.state != wire.TokenState.OPEN:
            return []
        if not self.offers.closes(self.round) or (self.frozen and not self.offers.listed):
            return []
        self.offers.listed = True
        self.token = token = self.offers.close(token)
        self._enter_marks(token)
        self._offer = None
        return self.exchange.on_closed(now, token)

    def mark(self) -> bool:
        """Mark this member complete without the token, if it is; then it must say so."""
        token = self.token
        if token is None or token.state != wire.TokenState.CLOSING or self.complete:
            return False
        if self.held_back or not self.exchange.is_complete(token):
            return False
        self.complete = True
        self.hear_mark(self.number, wire.Mark.COMPLETE | wire.Mark.SAVES * self._saves)
        return True

    @property
    def all_marked(self) -> bool:
        """The closed list is known here, and all members have all that it comes to: the round can be committed."""
        token = self.token
        return (
            token is not None
            and token.state == wire.TokenState.CLOSING
            and token.round == self.round
            and self.complete
            and not self.frozen
            and all(token.lines[k - 1].complete for k in self._view.order)
        )

    def commit_marked(self) -> list[Action]:
        """Commit the round without the token. That goes on, and is brought forward where it comes (`bring_forward`)."""
        assert self.token is not None
        token = replace(self.token, lines=[replace(line) for line in self.token.lines])
        self.token = token
        token.commit(self.phase.exchange)
        self._forward = self.round
        return self._commit(token)

    def bring_forward(self, token: TokenState) -> bool:
        """Bring a token of an earlier round up to the open one, if the round before was committed here without it.

        Returns whether it is such a one. It may have missed several rounds.
        """
        known = self.token
        if known is None or self._forward != self.round - 1 or token.round >= self.round:
            return False
        for line, ours in zip(token.lines, known.lines, strict=True):
            line.samples_before, line.samples, line.ready = ours.samples_before, 0, 0
            line.marks, line.unit = ours.marks & wire.Mark.SAVED, ours.unit
        token.lines[self._view.lead - 1].marks |= wire.Mark.SAVED * self._saved
        token.unit_before, token.unit = known.unit_before, self.unit
        token.round, token.state = self.round, wire.TokenState.OPEN
        token.sent = token.settled = 0
        token.ranges = []
        return True

    def _enter_marks(self, token: TokenState) -> None:
        if (token.round, token.state) == (self.round, wire.TokenState.CLOSING):
            for number, marks in self.offers.marks.items():
                token.lines[number - 1].marks |= marks

    # ---- with the token in hand

    def take_turn(self, now: float) -> tuple[bool, list[Action]]:
        """Once through all that this member can do with the token; whether that changed anything."""
        token = self.token
        assert token is not None
        line = token.lines[self.number - 1]
        changed, actions = self.exchange.serve(now, token)
        if token.state == wire.TokenState.OPEN and not self.frozen:
            contributed, sent = self._contribute(token, line)
            actions += sent
            changed |= contributed
            if token.quorum_reached(self.phase) and not self.offers.awaits(token):
                token.state = wire.TokenState.CLOSING
                changed = True
                if not line.settled:
                    actions += self._close_without_us()
                actions += self.exchange.on_closed(now, token)
        if not self.exchange.owns_ready(token):
            self._enter_ready(token)
        if line.read != self._read:
            line.read, line.digest = self._read, self._digest
            changed = True
            actions += self._digests.compare(token, self.round)
        complete = False
        if not self.frozen:  # the open round of a frozen ring is dropped
            complete = self.exchange.is_complete(token)
            changed |= not complete and self.exchange.ask(now, token)
        if token.state == wire.TokenState.CLOSING and complete and not self.held_back:
            if not line.complete:
                line.marks |= wire.Mark.COMPLETE | wire.Mark.SAVES * self._saves
                self.complete = changed = True
            if all(token.lines[k - 1].complete for k in self._view.order):
                token.commit(self.phase.exchange)
                actions += self._commit(token)
                changed = True
        return changed, actions + self._publish_need()

    def wants_token(self) -> bool:
        """Whether this member would do something with the token."""
        token = self.token
        if token is None:
            return self._offer is not None
        line = self.line()
        if self._read_waits and self._read > line.read:
            return True
        if token.state == wire.TokenState.OPEN:
            if line.settled or self.frozen:
                return False
            offers = self._offer is not None and self.exchange.may_enter()
            offers = offers and (self.offers.unheard or not self.has_offered)
            return self._passes or (offers and self._bank_free(token))
        return not line.complete and not self.held_back and self.exchange.wants_token(token)

    @property
    def _read_waits(self) -> bool:
        """Others wait to hear that this member has read a bank, and it broadcasts no offer that tells them."""
        skips = self._passes or (self._offer is not None and self._offer.skip)
        tells = self.offers.takes(self.number) and not (self.offers.unheard or skips)
        return not tells and self.round - self.line().read >= 2

    def kernel(self, holding: bool) -> KernelState:
        """What the XDP program must know now."""
        token, line, exchange = self.token, self.line(), self.exchange
        sums = exchange.kind == Exchange.SWITCH
        width = (exchange.width or self.phase.width) if exchange.aggregators else 0
        quiet = (
            token is not None
            and not holding
            and token.state == wire.TokenState.OPEN
            and self._offer is None
            and not self._passes
            and line.read == self._read
            and (line.ready == self._ready or line.settled or not token.counted)
        )
        return KernelState(
            round=self.round,
            round_low=self.round,
            round_high=self.round + (1 if self.complete else 0),
            sent_seen=token.sent if token is not None else 0,
            own_sent=exchange.own_sent,
            bounce=quiet and not self.frozen,
            sums=sums,
            sums_next=sums,
            aggregators=exchange.aggregators,
            aggregators_next=exchange.aggregators,
            width=width,
            width_next=width,
            offered=(0, exchange.conversion) if self.round & 1 else (exchange.conversion, 0),
            clock=exchange.clock,
            partner=exchange.partner,
        )

    # ---- the list, and what closes it

    def _contribute(self, token: TokenState, line: Line) -> tuple[bool, list[Action]]:
        """Enter the list (R10), unless somebody has yet to read the bank that the round goes to."""
        offer = self._offer
        if self._passes and not line.settled:
            line.marks |= wire.Mark.SKIPPED
            line.ready = 0
            return True, []
        if offer is None or line.settled or not self._bank_free(token):
            return False, []
        if not self.exchange.may_enter():
            return False, []
        self._offer = None
        line.ready = 0
        if offer.unit is not None:
            line.unit = offer.unit
        if offer.skip:
            line.marks |= wire.Mark.SKIPPED
            return True, []
        line.samples = offer.samples
        line.marks |= wire.Mark.CONTRIBUTED
        return True, self.exchange.send_listed(token)

    def _enter_ready(self, token: TokenState) -> None:
        """Samples that are ready and not listed: this member's, and those that others have told of."""
        line = self.line()
        if not line.settled:
            line.ready = self._ready
        for number, ready in self._ready_of.items():
            other = token.lines[number - 1]
            if not other.settled:
                other.ready = max(other.ready, ready)

    def _bank_free(self, token: TokenState) -> bool:
        return all(token.lines[k - 1].read >= self.round - 2 for k in self._view.order)

    @property
    def held_back(self) -> bool:
        """This member marks nothing: it leads and has not decided on the round before, or something else is coming."""
        return self._undecided or self.frozen

    def _close_without_us(self) -> list[Action]:
        self._offer = self._held = None
        if self._closed == self.round:
            return []
        self._closed = self.round
        return [Closed(self.round)]

    def _commit(self, token: TokenState) -> list[Action]:
        counted = {k: e.samples_before for k, e in enumerate(token.lines, 1) if e.samples_before}
        committed = Committed(
            self.phase,
            self.round,
            counted,
            token.unit_before,
            token.unit,
            self.exchange.kind,
            self._view.number,
            self.exchange.aggregators,
            token.saved,
        )
        self.exchange.rest = committed.rest_after(self.exchange.rest)
        self._saved, self._saves = token.saved, False
        self.round = token.round
        self.unit = token.unit
        self._offer = self._held = None
        self._passes = False
        self.exchange.open(self.round)
        self._ready = 0
        self._ready_of = {}
        self.complete = False
        self._need = 0
        self.offers.open(self.round)
        # R14: before the lead has decided on a round, the next one must not be committed, whatever comes in first.
        lead = self.number == self._view.lead
        self._undecided = lead and self.phase.kind is wire.PhaseKind.TRAIN
        return [committed]

    def _publish_need(self) -> list[Action]:
        """Tell the trainer how many samples are still enough (R13)."""
        token = self.token
        if token is None or self.line().settled or self.exchange.owns_ready(token):
            return []
        if self.phase.sized:  # no samples are counted
            return []
        counted = token.counted
        if not counted:
            return []
        others = sum(
            max(line.ready, self._ready_of.get(number, 0))
            for number, line in enumerate(token.lines, 1)
            if number != self.number and not line.settled
        )
        need = self.phase.quorum - counted - others
        if need == self._need:
            return []
        self._need = need
        return [Need(self.round, need)]
