# SPDX-License-Identifier: Apache-2.0
"""The open round at one member: what it knows of it, what it takes along, and what a commit changes (R11 to R13)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from nicps import wire
from nicps.protocol.actions import (
    Action,
    Closed,
    Committed,
    Differs,
    Need,
    Receiver,
)
from nicps.protocol.exchange import exchanger_of
from nicps.protocol.phase import Patience, Phase, Timings
from nicps.protocol.token import Line, TokenState
from nicps.protocol.view import View


@dataclass(frozen=True, slots=True)
class Offer:
    """A gradient that waits for the token.

    `unit` is what it asks for in the next round, if it does. `skip`: it does not fit the open round's, and is left out.
    """

    samples: int
    unit: int | None = None
    skip: bool = False


@dataclass(frozen=True, slots=True)
class Carried:
    """What a member takes along from its ring in one view to that in the next.

    `offer` is its gradient of the open round, counted or not, that it still holds; `passes`: it has dropped it, as the
    round closed without it. `read` and `digest` are of the last round that its training program has applied.
    """

    round: int
    unit: int
    read: int
    digest: int = 0
    offer: Offer | None = None
    ready: int = 0
    passes: bool = False
    undecided: bool = False


@dataclass(frozen=True, slots=True)
class KernelState:
    """What the XDP program must know to act for this member (`struct nicps_config`)."""

    round: int
    round_low: int
    round_high: int
    sent_seen: int
    own_sent: int
    bounce: bool
    sums: bool = False
    sums_next: bool = False


class Round:
    """The state machine of one phase at one member.

    Args:
        header: makes this node's next frame header from (flags, round).
        emit: takes an action.
        silent: told, once, the number of a member that should be heard and is not (R17).
        carried: from the view before, where the phase goes on.
    """

    def __init__(
        self,
        phase: Phase,
        view: View,
        number: int,
        receiver: Receiver,
        timings: Timings,
        patience: Patience,
        header: Callable[[int, int], wire.Header],
        emit: Callable[[Action], None],
        silent: Callable[[float, int], None],
        carried: Carried | None = None,
        now: float = 0.0,
    ) -> None:
        carried = carried or Carried(phase.first_round, phase.unit, phase.first_round - 1)
        self.phase = phase
        self.number = number
        self.round = carried.round
        self.unit = carried.unit  # of the open round
        self.token: TokenState | None = None  # the latest that was seen
        self.holding = False
        self.parked = False
        self.turns = 0  # times that this member had the token
        self._view = view
        self._others = len(view.live) > 1
        self.exchange = exchanger_of(phase, view, number, receiver, timings, now)
        self._timings = timings
        self._patience = patience
        self._header = header
        self._emit = emit
        self._silent: Callable[[float, int], None] | None = silent
        self._key = (phase.generation, 0)  # newest token that this machine has handled or sent
        self._seen = self._key  # newest that the kernel has seen
        self._offer = carried.offer
        self._held = carried.offer  # what this member has to give to the open round, or has given
        self._passes = carried.passes
        self._ready = carried.ready
        self._ready_of: dict[int, int] = {}  # from WANT frames
        self._read = carried.read
        self._digest = carried.digest
        self._told: dict[int, dict[int, int]] = {}  # round -> member -> digest, of the last rounds
        self._compared = 0  # latest round whose digests have been found to differ
        self._closed = 0  # round whose closing without us has been told
        self._complete = False
        self._frozen = False
        self._undecided = carried.undecided
        self._last_sent: TokenState | None = None
        self._last_sent_at = 0.0
        self._handed_at = 0.0  # when this member gave the token away
        self._beacon_at = 0.0  # when the parked token was announced last
        self._repeat_s = timings.repeat_s
        self._heard = now
        self._want_at: float | None = None
        self._want_s = timings.want_s
        self._need = 0

    @property
    def complete(self) -> bool:
        """This member has every fragment of the open round's closed list, and has said so."""
        return self._complete

    @property
    def frozen(self) -> bool:
        """A decision has been heard, and the phase is about to end."""
        return self._frozen

    def freeze(self) -> None:
        """A new phase or view is coming: contribute and close nothing more, but keep passing the token."""
        self._frozen = True
        self.exchange.on_dropped()

    def _line(self) -> Line:
        return self.token.lines[self.number - 1] if self.token is not None else _NO_LINE

    @property
    def _owner(self) -> int:
        """Who has the token, or will make it."""
        return self.token.owner if self.token is not None else self._view.lead

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
        )

    def unit_of(self, round_: int) -> int:
        """log2 of the unit of the open round, or of the next one, which follows from the closed list."""
        if round_ <= self.round or self.token is None:
            return self.unit
        return self.token.next_unit(self.phase.exchange)

    def settle(self) -> None:
        """The survivors of a view all have the open round: it is committed (R18)."""
        assert self.token is not None and self._complete
        self.token.commit(self.phase.exchange)
        self._committed(self.token)

    # ---- what the token tells

    def _learn(self, token: TokenState) -> None:
        """Take over what a newer token says."""
        if token.round == self.round + 1:
            self._committed(token)
        self.token = token
        self._compare()
        line = self._line()
        if token.state == wire.TokenState.CLOSING and not line.settled:
            self._close_without_us()
        self._publish_need()

    def _committed(self, token: TokenState) -> None:
        counted = {k: e.samples_before for k, e in enumerate(token.lines, 1) if e.samples_before}
        units = token.unit_before, token.unit
        self._emit(Committed(self.phase, self.round, counted, *units, self.exchange.kind))
        self.round = token.round
        self.unit = token.unit
        self._offer = self._held = None
        self._passes = False
        self.exchange.open()
        self._ready = 0
        self._ready_of = {}
        self._complete = False
        self._need = 0
        # R14: before the lead has decided on a round, the next one must not be committed, whatever comes in first.
        lead = self.number == self._view.lead
        self._undecided = lead and self.phase.kind is wire.PhaseKind.TRAIN

    def _close_without_us(self) -> None:
        self._offer = self._held = None
        if self._closed != self.round:
            self._closed = self.round
            self._emit(Closed(self.round))

    def _compare(self) -> None:
        """Whether all members hold the same weights, round by round: a slow one tells of each later than the others."""
        token = self.token
        assert token is not None
        oldest, fresh = self.round - _ROUNDS_TOLD, set()
        for k in self._view.order:
            line = token.lines[k - 1]
            if line.digest and oldest <= line.read < self.round:
                told = self._told.setdefault(line.read, {})
                if told.get(k) != line.digest:
                    told[k] = line.digest
                    fresh.add(line.read)
        for round_ in sorted(fresh):
            self._judge(round_, self._told[round_])
        if len(self._told) > _ROUNDS_TOLD:
            self._told = {r: told for r, told in self._told.items() if r >= oldest}

    def _judge(self, round_: int, told: dict[int, int]) -> None:
        """Who differs is known once most have told the same, or all have told."""
        digests = sorted(told.values())
        if round_ <= self._compared or digests[0] == digests[-1]:
            return
        voters = told.keys() | {k for k in self._view.order if self.phase.shares[k - 1]}
        most = max(digests, key=digests.count)
        agreed = 2 * digests.count(most) > len(voters)
        if not agreed and len(told) < len(voters):
            return
        self._compared = round_
        different = frozenset(k for k in told if told[k] != most) if agreed else frozenset[int]()
        self._emit(Differs(round_, different))

    def _publish_need(self) -> None:
        """Tell the trainer how many samples are still enough (R13)."""
        token = self.token
        if token is None or self._line().settled or self.exchange.owns_ready(token):
            return
        others = sum(
            max(line.ready, self._ready_of.get(number, 0))
            for number, line in enumerate(token.lines, 1)
            if number != self.number and not line.settled
        )
        need = self.phase.quorum - token.counted - others
        if token.counted and need != self._need:
            self._need = need
            self._emit(Need(self.round, need))

    # ---- for the XDP program

    @property
    def kernel(self) -> KernelState:
        """What the XDP program must know now."""
        token = self.token
        quiet = (
            token is not None
            and not self.holding
            and token.state == wire.TokenState.OPEN
            and self._offer is None
            and not self._passes
            and self._line().read == self._read
            and (not token.counted or self._line().ready == self._ready or self._line().settled)
        )
        return KernelState(
            round=self.round,
            round_low=self.round,
            round_high=self.round + (1 if self._complete else 0),
            sent_seen=token.sent if token is not None else 0,
            own_sent=self.exchange.own_sent,
            bounce=quiet and not self._frozen,
            sums=self.exchange.kind.includes_own,
            sums_next=self.exchange.kind.includes_own,
        )


_NO_LINE = Line()
#: A member is two rounds behind at most: there are two banks of sums.
_ROUNDS_TOLD = 4
