# SPDX-License-Identifier: Apache-2.0
"""The open round at one member, without a token: offers, the list, its closing, marks, commit (R11 to R13).

It knows no fragment: how contributions become a sum is the exchange's (`nicps.protocol.exchange`). Where members
broadcast offers and marks (`Exchange.broadcasts_marks`) this is all that a round needs; with a token the same state is
in the token (`nicps.protocol.control`).
"""

from __future__ import annotations

from dataclasses import replace

from nicps import wire
from nicps.protocol.actions import Action, Closed, Committed
from nicps.protocol.carried import Carried, Held, Offer
from nicps.protocol.exchange import Exchanger
from nicps.protocol.offers import ListOfStep, Offers
from nicps.protocol.phase import Phase
from nicps.protocol.step import Step, Word
from nicps.protocol.token import Line, TokenState
from nicps.protocol.view import View

_NO_LINE = Line()


class OpenRound:
    """The open round at member `number`.

    Attributes:
        round: the open one.
        unit: log2 of its unit.
        token: list and marks, as the latest token has them that was seen; None before the ring's first one.
        complete: this member has all that the closed list comes to, and has marked itself so.
        frozen: another phase or view is coming: it contributes, closes and marks nothing more, but forwards the token.
        offers: what members have broadcast.
        channel: whose round it is.
        step: the step that it belongs to, in a planned phase.
        word: what the lead's program has said of it, or of the step.
    """

    def __init__(
        self,
        phase: Phase,
        view: View,
        number: int,
        exchange: Exchanger,
        carried: Carried,
        channel: int = 0,
        step: Step | None = None,
    ) -> None:
        self.phase = phase
        self.number = number
        self.exchange = exchange
        self.round = carried.round
        self.unit = carried.unit
        self.token: TokenState | None = None
        self.complete = False
        self.frozen = False
        self.channel = channel
        self.step = step
        self._view = view
        self._offer = carried.offer
        self._held = Held(carried.offer, carried.ahead)
        self._passes = carried.passes
        self._ready = carried.ready
        self._read = carried.read
        self._digest = carried.digest
        self._closed = 0  # round whose closing without this member has been reported
        self.word = step if step is not None else Word(carried.undecided)
        self._saved = False  # the lead saves the state after the round committed last
        self.offers = Offers(phase, view, broadcast=exchange.kind.broadcasts_marks)
        self.offers.open(carried.round, self._list_of_step)
        exchange.open(carried.round)
        exchange.rest = carried.rest
        if carried.offer is not None:
            self._give(carried.offer)

    def _give(self, offer: Offer) -> None:
        """The exchange knows what this member contributes."""
        self.exchange.conversion = offer.conversion
        self.exchange.sized = offer.samples if self.phase.sized else 0

    @property
    def _list_of_step(self) -> ListOfStep | None:
        """Where the open round inherits its list: that of its step."""
        step, channel, round_ = self.step, self.channel, self.round
        if step is None or not step.inherits(channel, round_):
            return None
        return lambda: step.listed if step.has_begun(channel, round_) else None

    @property
    def has_begun(self) -> bool:
        """The step of the open round has begun: nothing of the steps before is left to commit here."""
        return self.step is None or self.step.has_begun(self.channel, self.round)

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
        passes = self._closed == self.round and self._held.open is None
        return Carried(
            self.round,
            self.unit,
            self._read,
            self._digest,
            self._held.open,
            self._ready,
            passes or self._passes,
            rest=self.exchange.rest,
            ahead=self._held.ahead,
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
        """A gradient is ready; whether it can still be listed.

        One for the round after the open one is kept until that is open.
        """
        if not self.phase.shares[self.number - 1] or not self._takes_part:
            return False
        if self._is_ahead(offer):
            self._held.ahead = offer
            return False
        if (
            offer.round != self.round
            or self.line().settled
            or self.has_offered
            or (offer.skip and self._list_of_step is not None)  # it owes what its step's list says
        ):
            return False
        self._take(offer)
        return True

    def _take(self, offer: Offer) -> None:
        self._offer = self._held.open = offer
        self._give(offer)
        self._passes = False
        self._ready = offer.samples

    def _is_ahead(self, offer: Offer) -> bool:
        """It is for the round after the open one, in the same step: the training program is a round ahead."""
        step = self.step
        if step is None or offer.skip or offer.round != self.round + 1:
            return False
        return not step.ends_with(self.channel, self.round)

    def _take_ahead(self) -> None:
        """The round that this member has offered to ahead is open."""
        ahead, self._held.ahead = self._held.ahead, None
        if ahead is not None and ahead.round == self.round and self._takes_part:
            self._take(ahead)

    @property
    def _takes_part(self) -> bool:
        """This member may offer to the open round, as far as the step has a say in it."""
        step = self.step
        return step is None or (self.has_begun and not step.excludes(self.number))

    def drop_offer(self) -> None:
        """The step's list is known, and this member is not in it."""
        self._offer, self._held = None, Held()

    def read(self, round_: int, digest: int) -> bool:
        """A sum has been read out; whether others wait for that bank. Above channel 0 nobody does."""
        if round_ >= self._read:
            self._read, self._digest = round_, digest
        return False

    def go_on(self, *, saves: bool) -> None:
        """The lead has decided that training goes on: only now it may mark itself complete in the next round (R14).

        Args:
            saves: it writes a checkpoint of the state after that round, which all members must know (R22).
        """
        self.word.undecided, self.word.saves = False, self.word.saves or saves

    # ---- what others report

    def hear_read(self, sender: int, want: wire.Want) -> list[Action]:
        """What a member has read out."""
        return []

    def hear_mark(self, sender: int, marks: int) -> None:
        """A member has all of the open round."""
        self.offers.marks[sender] = marks
        if self.token is not None:
            self._enter_marks(self.token)

    def saves(self, round_: int) -> bool:
        """Whether this member knows that the lead writes a checkpoint after that round: the open one or the one before.

        Of the open one only the lead does.
        """
        return self._saves_with(round_) if round_ == self.round else self._saved

    @property
    def lead_saves(self) -> bool:
        """The lead's mark of the open round, as it is known here, says that it writes a checkpoint after it."""
        token = self.token
        if token is None or token.round != self.round:
            return False
        return bool(token.lines[self._view.lead - 1].marks & wire.Mark.SAVES)

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
        offered = offer.samples, offer.unit, self.exchange.proposed_window
        self.offers.hear(self.round, self.number, *offered)
        return True

    def announcement(self) -> tuple[int, wire.Want]:
        """What this member broadcasts of the open round: the flags, and its offer."""
        said = self.offers.said(self.round, self.number)
        flags = wire.Flag.COMPLETE * self.complete
        if said is None:
            return flags, self.want(0)
        return flags | wire.Flag.OFFERED, replace(
            self.want(0), ready=said[0], unit=said[1], window=said[2]
        )

    def close_offered(self, now: float) -> list[Action]:
        """Close the list without the token, once all members that it must have are known to offer.

        Nobody can close another one: the quorum is not reached without each of them, and what they have broadcast they
        enter into the token too.
        """
        token = self.token
        if token is None or token.round != self.round or token.state != wire.TokenState.OPEN:
            return []
        if not self.has_begun:
            return []
        if not self.offers.closes(self.round) or (self.frozen and not self.offers.listed):
            return []
        self.offers.listed = True
        self.exchange.agree_on(self.offers.window(self.round))
        self.token = token = self.offers.close(token)
        self._enter_marks(token)
        self._offer = None
        return self.exchange.on_closed(now, token)

    def mark(self) -> bool:
        """Mark this member complete without the token, if it is; then it must say so."""
        token = self.token
        if self.complete or token is None or token.state != wire.TokenState.CLOSING:
            return False
        if self.held_back or not self.exchange.is_complete(token):
            return False
        self.complete = True
        saves = self._saves_with(self.round)
        self.hear_mark(self.number, wire.Mark.COMPLETE | wire.Mark.SAVES * saves)
        return True

    @property
    def held_back(self) -> bool:
        """This member marks nothing: it leads and has not decided on the round before, or something else is coming.

        Or rounds of the step before are not committed; or its program has yet to read the round before, where the marks
        say so.
        """
        if self.frozen or not self.has_begun:
            return True
        return self.word.undecided or (self._marks_tell_read and self._read < self.round - 1)

    @property
    def _marks_tell_read(self) -> bool:
        """A member's mark of a round says that it has read the round before: so the next one may use its bank.

        That is so in all rounds of a planned phase, as members outside the list do not offer, and above channel 0. A
        member without a share reads nothing.
        """
        return bool((self.step or self.channel) and self.phase.shares[self.number - 1])

    def _saves_with(self, round_: int) -> bool:
        """This member, the lead, writes a checkpoint after that round, which is open; in a step, after its last one."""
        last = self.step is None or (not self.channel and self.step.ends_with(0, round_))
        return last and self.word.saves

    @property
    def all_marked(self) -> bool:
        """The closed list is known here, and all members have all that it comes to: the round can be committed."""
        token = self.token
        return (
            self.complete
            and token is not None
            and token.state == wire.TokenState.CLOSING
            and token.round == self.round
            and not self.frozen
            and all(token.lines[k - 1].complete for k in self._view.order)
        )

    def commit_marked(self) -> list[Action]:
        """Commit the round without the token."""
        assert self.token is not None
        token = replace(self.token, lines=[line.copy() for line in self.token.lines])
        self.token = token
        token.commit(self.phase.exchange)
        return self._commit(token)

    def _enter_marks(self, token: TokenState) -> None:
        if (token.round, token.state) == (self.round, wire.TokenState.CLOSING):
            for number, marks in self.offers.marks.items():
                token.lines[number - 1].marks |= marks

    # ---- the list closes without this member, and the round is committed

    def _close_without_us(self) -> list[Action]:
        self._offer = self._held.open = None
        if self._closed == self.round:
            return []
        if self._list_of_step is not None:
            return []  # it was told so of the step's first round
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
            self.channel,
        )
        self.exchange.rest = committed.rest_after(self.exchange.rest)
        self._saved = token.saved
        # R14: before the lead has decided on a round, or a step, the next must not be committed, whatever comes first.
        lead = self.number == self._view.lead and self.phase.kind is wire.PhaseKind.TRAIN
        if self.step is not None:
            self.step.note_committed(self.channel, counted)
        else:
            self.word.undecided, self.word.saves = lead, False
        self.round = token.round
        self.unit = token.unit
        self._offer = self._held.open = None
        self._passes = False
        self.exchange.open(self.round)
        self._ready = 0
        self.complete = False
        self.offers.open(self.round, self._list_of_step)
        self._take_ahead()
        return [committed]
