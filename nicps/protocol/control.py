# SPDX-License-Identifier: Apache-2.0
"""The control of a round at one member, with the token: who contributes, and what closes the list (R11 to R13)."""

from __future__ import annotations

from nicps import wire
from nicps.exchange import Exchange
from nicps.protocol.actions import Action, Need
from nicps.protocol.carried import Carried
from nicps.protocol.digests import Digests
from nicps.protocol.exchange import Exchanger
from nicps.protocol.kernel import KernelState
from nicps.protocol.open_round import OpenRound
from nicps.protocol.phase import Phase
from nicps.protocol.step import Step
from nicps.protocol.token import Line, TokenState
from nicps.protocol.view import View


class Control(OpenRound):
    """The open round at member `number`, whose list and marks a token carries."""

    def __init__(
        self,
        phase: Phase,
        view: View,
        number: int,
        exchange: Exchanger,
        carried: Carried,
        step: Step | None = None,
    ) -> None:
        super().__init__(phase, view, number, exchange, carried, step=step)
        self._digests = Digests(phase, view)
        self._ready_of: dict[int, int] = {}  # from WANT frames
        self._need = 0
        self._forward = 0  # the round that was committed last by broadcast marks

    @property
    def owner(self) -> int:
        """Who has the token, or will make it."""
        return self.token.owner if self.token is not None else self._view.lead

    # ---- what the agent reports

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

    # ---- what others report

    def create(self) -> TokenState:
        """R9: the ring's first token.

        Each member tells in its first turn what it has read out; until then all that is known is what the round's
        being open says.
        """
        first = self.round == self.phase.first_round and not self.phase.exchange.served
        known = self.round - 1 if first else self.round - 3
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
        if want.read < line.read or not self._says_more(line, want.read, want.digest):
            return []
        line.read, line.digest = want.read, want.digest
        return self._digests.compare(token, self.round)

    def _says_more(self, line: Line, read: int, digest: int) -> bool:
        """Whether the entry does not say so yet. The digest of a step may follow what was read of its last round."""
        follows = self.step is not None and bool(digest) and not line.digest
        return read != line.read or follows

    # ---- committed with the token, and without it

    def commit_marked(self) -> list[Action]:
        """Commit the round without the token. That goes on, and is brought forward where it comes (`bring_forward`)."""
        self._forward = self.round
        return super().commit_marked()

    def _commit(self, token: TokenState) -> list[Action]:
        self._ready_of, self._need = {}, 0
        return super()._commit(token)

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

    # ---- with the token in hand

    def take_turn(self, now: float) -> tuple[bool, list[Action]]:
        """Once through all that this member can do with the token; whether that changed anything."""
        token = self.token
        assert token is not None
        line = token.lines[self.number - 1]
        changed, actions = self.exchange.serve(now, token)
        if token.state == wire.TokenState.OPEN and not self.frozen and self.has_begun:
            contributed, sent = self._contribute(token, line)
            actions += sent
            changed |= contributed
            enough = self._list_of_step is not None or token.quorum_reached(self.phase)
            if enough and not self.offers.awaits(token):
                token.state = wire.TokenState.CLOSING
                changed = True
                if not line.settled:
                    actions += self._close_without_us()
                actions += self.exchange.on_closed(now, token)
        if not self.exchange.owns_ready(token):
            self._enter_ready(token)
        if self._says_more(line, self._read, self._digest):
            line.read, line.digest = self._read, self._digest
            changed = True
            actions += self._digests.compare(token, self.round)
        complete = False
        if not self.frozen:  # the open round of a frozen ring is dropped
            complete = self.exchange.is_complete(token)
            changed |= not complete and self.exchange.ask(now, token)
        if token.state == wire.TokenState.CLOSING and complete and not self.held_back:
            if not line.complete:
                line.marks |= wire.Mark.COMPLETE | wire.Mark.SAVES * self._saves_with(self.round)
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
            if line.settled or self.frozen or not self.has_begun:
                return False
            offers = self._offer is not None and self.exchange.may_enter()
            offers = offers and (self.offers.unheard or not self.has_offered)
            return self._passes or (offers and self._bank_free(token))
        return not line.complete and not self.held_back and self.exchange.wants_token(token)

    @property
    def _read_waits(self) -> bool:
        """Others wait to hear that this member has read a bank, and it broadcasts no offer that tells them."""
        if self.step is not None:  # the marks tell it
            return False
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
        return self.step is not None or all(
            token.lines[k - 1].read >= self.round - 2 for k in self._view.order
        )

    def _publish_need(self) -> list[Action]:
        """Tell the trainer how many samples are still enough (R13)."""
        token = self.token
        if token is None or self.line().settled or self.exchange.owns_ready(token):
            return []
        if self.phase.sized or self._list_of_step is not None:  # no samples are counted
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
