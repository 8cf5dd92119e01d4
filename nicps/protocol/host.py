# SPDX-License-Identifier: Apache-2.0
"""What a host is, between its events: its place in the network, and the frames that it makes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial

from nicps import wire
from nicps.protocol.actions import (
    Action,
    Receiver,
)
from nicps.protocol.decision import Ballot
from nicps.protocol.formation import Formation
from nicps.protocol.installation import Installation
from nicps.protocol.phase import Member, Patience, Phase, Timings
from nicps.protocol.returns import Returns
from nicps.protocol.ring import Carried, KernelState, Ring
from nicps.protocol.succession import Succession
from nicps.protocol.view import View, safe_name


class NodeState(Enum):
    """What `nicps status` says of this host."""

    STANDBY = "standby"
    FORMING = "forming"
    MEMBER = "member"


@dataclass(frozen=True, slots=True)
class Heard:
    """A decision that waits for its turn: the open round it belongs to must be reached first."""

    phase: Phase
    round: int


@dataclass(slots=True)
class Farewell:
    """A FAIL or LEAVE that is told until it has had its effect. `declines`: this host will not come back."""

    body: wire.Fail | wire.Leave
    reason: str
    next_send: float
    declines: bool = False
    said: int = 0  # times


class Host:
    """State that deciding, membership and the node itself share (`Node`)."""

    def __init__(
        self,
        mac: bytes,
        name: str,
        network: str,
        receiver: Receiver,
        nonce: Callable[[], int],
        timings: Timings | None = None,
        stage: Callable[[str], wire.Stage | None] = lambda job: wire.Stage.NOTHING,
    ) -> None:
        self.mac = mac
        self.name = safe_name(name, mac)
        self.network = wire.network_id(network)
        self.timings = timings or Timings()
        self.patience = Patience(self.timings)
        self.state = NodeState.STANDBY
        self.busy = False
        self.calls = ""
        self.view = View()
        self.number = 0
        self.phase: Phase | None = None  # in force, or being prepared
        self.ring: Ring | None = None
        self.learners: frozenset[int] = frozenset()  # who came back and has not been counted since
        self._next_ring: Ring | None = None
        self._receiver = receiver
        self._nonce = nonce
        self._fresh = nonce()
        self._stage = stage
        self._actions: list[Action] = []
        self._sequence = 0
        self._round = 0  # the open one, while no ring is in force
        self._formation = Formation(
            mac, self.name, self.timings, self._header_without_view, self._actions.append
        )
        self._succession: Succession | None = None
        self._installation_of = partial(
            Installation,
            timings=self.timings,
            header=self._header_without_view,
            emit=self._actions.append,
        )
        self._installation: Installation | None = None  # of the view in force; told to who asks
        self._last: Installation | None = None  # of the job before, which has ended
        self._telling = False  # this member sees to it that everybody installs it
        self._ready = False  # the lead: everybody has
        self._ballot: Ballot | None = None
        self._balloted: Phase | None = None
        self._decided = 0  # highest decision heard (members) or made (the lead)
        self._generation = 0
        self._waiting: Heard | None = None
        self._acked: tuple[int, bool, bytes] = (0, True, b"")
        self._farewell: Farewell | None = None
        self._returns = Returns(self.timings.call_back_s)
        self._leavers: dict[int, int] = {}  # number -> how often it has said so
        self._heard = 0.0  # the lead, last
        self._beacon_at = 0.0
        self._call_at = 0.0
        self._called: tuple[int, ...] = ()  # the nonces of the last two calls
        self._ending = wire.Ending.NONE  # what became of the view's job (STOP)
        self._declined = ""  # why this host has no part in the job any more
        self._asked = 0.0  # when this host, on standby, last asked or was called

    # ---- what others look at

    @property
    def members(self) -> tuple[Member, ...]:
        """The list; who has left is still in it."""
        return self.view.members

    @property
    def leads(self) -> bool:
        """This host acts as node 1 (R22)."""
        return self.state is NodeState.MEMBER and self.view.lead == self.number

    @property
    def ended(self) -> bool:
        """This host stands by because the job has ended."""
        return self._ending is not wire.Ending.NONE

    @property
    def leaving(self) -> bool:
        """This host has said that it departs; the others have not agreed on it yet."""
        return self._farewell is not None and isinstance(self._farewell.body, wire.Leave)

    @property
    def open_round(self) -> int:
        """The round that is open here; 0 before any."""
        return self.ring.round if self.ring is not None else self._round

    @property
    def changing(self) -> bool:
        """The view is about to end: nothing may be completed or committed in it."""
        return self._succession is not None and self._succession.under_way

    @property
    def kernel(self) -> KernelState | None:
        """What the XDP program must know, or None while it is to take nothing."""
        if self._succession is None or self._succession.under_way:
            return None
        if self.ring is None:
            return self._next_ring.kernel if self._next_ring is not None else None
        state = self.ring.kernel
        if self._next_ring is not None:
            coming = self._next_ring
            state = replace(
                state, round_high=coming.round, bounce=False, sums_next=coming.kernel.sums
            )
        return state

    # ---- rings

    def _new_ring(self, phase: Phase, now: float, carried: Carried | None = None) -> Ring:
        return Ring(
            phase,
            self.view,
            self.number,
            self._receiver,
            self.timings,
            self.patience,
            self.header,
            self._actions.append,
            self._on_silent,
            carried,
            now,
        )

    def _ring_of(self, round_: int) -> Ring | None:
        """The ring that a contribution to `round_` belongs to: perhaps that of the phase to come."""
        if self._next_ring is not None and round_ >= self._next_ring.round:
            return self._next_ring
        return self.ring

    def _ring_of_phase(self, number: int) -> Ring | None:
        for ring in (self.ring, self._next_ring):
            if ring is not None and number and ring.phase.number == number:
                return ring
        return None

    def _on_silent(self, now: float, number: int) -> None:
        """R17: whoever has the token is not heard."""
        if self._succession is not None:
            self._succession.suspect(now, number)

    def _enter_next(self) -> None:
        """The next phase is in force; who has a share in it is a full member."""
        assert self._next_ring is not None
        self.ring, self._next_ring = self._next_ring, None
        self._count_learners(self.ring.phase)

    def _count_learners(self, phase: Phase) -> None:
        if phase.kind is wire.PhaseKind.TRAIN:
            self.learners = frozenset(k for k in self.learners if not phase.shares[k - 1])

    def _stand_by(self, ending: wire.Ending = wire.Ending.NONE) -> None:
        self.state = NodeState.STANDBY
        self._round = self.open_round
        self.ring = self._next_ring = self._waiting = self._ballot = None
        self._farewell = None
        self._ending = ending
        if self._installation is not None:
            self._installation.ending = ending
        self._telling = self._ready = False
        self._succession = None

    # ---- headers

    def header(self, flags: int, round_: int) -> wire.Header:
        """This node's next frame header."""
        self.take_sequence(1)
        return wire.Header(
            flags=flags,
            network=self.network,
            view=self.view.number,
            round=round_,
            sender=self.number,
            sequence=self._sequence,
        )

    def take_sequence(self, count: int) -> int:
        """Reserve `count` sequence numbers; the first of them."""
        first = self._sequence + 1
        self._sequence = (self._sequence + count) & 0xFFFFFFFF
        return first & 0xFFFFFFFF

    def _header_without_view(self, flags: int, round_: int) -> wire.Header:
        return replace(self.header(flags, round_), view=0, sender=0)
