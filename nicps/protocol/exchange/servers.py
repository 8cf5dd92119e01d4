# SPDX-License-Identifier: Apache-2.0
"""With parameter servers: workers contribute to a synchronisation, and push and pull beside it (docs/servers.md)."""

from __future__ import annotations

import math
from typing import NamedTuple

from nicps import wire
from nicps.protocol.actions import Action, Pulled, Stepped
from nicps.protocol.exchange.base import Exchanger
from nicps.protocol.exchange.steps import Source, Steps, Versions
from nicps.protocol.kernel import ServedReceiver
from nicps.protocol.partners import Pairing
from nicps.protocol.serving import PULLED_WIDTH
from nicps.protocol.signals import Lacks
from nicps.protocol.token import TokenState


class Begun(NamedTuple):
    """A worker's push or pull that is not whole yet.

    `sources`: of a pull, the members that are asked. `versions`: of a push that has begun, those of the parameters that
    it was computed from.
    """

    type: wire.FrameType
    number: int
    sources: tuple[Source, ...] = ()
    versions: Versions | None = None


class ServersExchanger(Exchanger):
    """The contributions of the closed list go to the servers, whose kernels add them. No sum is sent to anybody.

    A worker is complete when the servers have acknowledged its whole contribution, a server when its part is made.

    Attributes:
        goes_on: the newest round whose GO is known here (`nicps.protocol.served`).
        begun: the push or the pull under way, until it is whole.
        lacks_server: one has left. Nothing begins before a phase in which another member has its part.
    """

    def _begin(self, now: float) -> None:
        assert self._phase.serving is not None
        assert isinstance(self._receiver, ServedReceiver)
        self._serving, self._kernel = self._phase.serving, self._receiver
        self.aggregators = self._serving.servers
        pairing = Pairing.of(self._phase, self._view.live, self._number)
        self.partner = pairing.partner if pairing is not None else 0
        whose = self._phase, self._view.number, self._number
        self._steps = Steps(*whose, self._kernel, self._timings, pairing)
        self.clock = self._steps.clock
        self.lacks_server = not self._view.live.issuperset(self.aggregators)
        self.goes_on = self._round = 0
        self.begun: Begun | None = None
        self._contributes = False
        self._pushed = 0  # the number of a step whose answers may have brought all parameters

    # ---- what the control tells

    def open(self, round_: int) -> None:
        """Nobody has contributed to it yet."""
        super().open(round_)
        self._round = round_
        self._contributes = False
        self._pushed = 0

    def send_listed(self, token: TokenState) -> list[Action]:
        """Nothing: servers must know the whole list first."""
        return []

    def on_closed(self, now: float, token: TokenState) -> list[Action]:
        """The list has all that it will have."""
        return self.on_token(now, token)

    def on_token(self, now: float, token: TokenState) -> list[Action]:
        """Begin the contribution, if it says that the list is closed."""
        if token.state != wire.TokenState.CLOSING or token.round != self._round:
            return []
        return self.on_list(now, token.listed, token.unit)

    def on_list(self, now: float, members: int, unit: int) -> list[Action]:
        """Begin the contribution, unless it was begun."""
        mine = members >> (self._number - 1) & 1
        if self._contributes or not mine or not self.conversion:
            return []
        if self._dropped or self.lacks_server:
            return []
        self._contributes = True
        return [*self._steps.contribute(now, self.conversion, self._round, members)]

    def advance(self, now: float) -> list[Action]:
        """Send what there is room for, and again what is lost; tell the training program what is whole."""
        if self._stands:
            return []
        actions: list[Action] = [*self._steps.advance(now)]
        begun = self.begun
        if begun is None or not self._steps.whole:
            return actions
        self.begun = None
        if begun.type is wire.FrameType.PULL:
            return [*actions, Pulled(self._round, begun.number)]
        if self._phase.width == PULLED_WIDTH:
            self._pushed = begun.number
        answers = [self._kernel.answered(server)[:2] for server in self.aggregators]
        staleness = tuple(s for number, s in answers if number == begun.number and s)
        return [*actions, Stepped(self._round, begun.number, self.version, staleness)]

    def deadline(self) -> float:
        """When the next answer has not come for too long."""
        return math.inf if self._stands else self._steps.deadline()

    @property
    def _stands(self) -> bool:
        """Nothing goes on where a server lacks, and no step where the round is dropped. A pull does: it is of the last
        round, and a decision waits until all have read that.
        """
        pulls = self.begun is not None and self.begun.type is wire.FrameType.PULL
        return self.lacks_server or (self._dropped and not pulls)

    # ---- pushes and pulls

    def push(self, now: float, begun: Begun) -> list[Action]:
        """A step goes to all servers, for itself; `Stepped` follows."""
        versions = begun.versions
        if versions is None:
            versions = self._steps.versions(self._round)
        self.begun = begun._replace(versions=versions)
        sent = self._steps.push(now, begun.number, self._round, versions)
        return [*sent, *self.advance(now)]

    def pull(self, now: float, begun: Begun) -> list[Action]:
        """All parameters come; `Pulled` follows: at once where the answers to the last step have brought them."""
        pushed, self._pushed = self._pushed, 0
        if pushed and not begun.sources and self._steps.has_brought(pushed):
            return [Pulled(self._round, begun.number)]
        self.begun = begun
        return [
            *self._steps.pull(now, begun.number, self._round, begun.sources),
            *self.advance(now),
        ]

    def hear_refusal(self, now: float, member: int, number: int) -> None:
        """That member has answered that it cannot do something yet."""
        self._steps.hear_refusal(now, member, number)

    @property
    def version(self) -> int:
        """The largest that a server has told of the open round, with this member's own step; 0: none has."""
        found = (self._kernel.answered(server)[2:] for server in self.aggregators)
        return max((version + 1 for round_, version in found if round_ == self._round), default=0)

    @property
    def is_due(self) -> bool:
        """The next step is one for the synchronisation, as far as this member's own steps tell."""
        every = self._serving.every
        return every == 1 or (every > 1 and self.version >= every - 1)

    # ---- what the control asks

    def may_enter(self) -> bool:
        """Before GO nobody offers."""
        return not self.lacks_server and self._round <= self.goes_on

    def wants_token(self, token: TokenState) -> bool:
        """To mark itself, or to commit."""
        return self.is_complete(token)

    def serve(self, now: float, token: TokenState) -> tuple[bool, list[Action]]:
        """Nothing waits for the token."""
        return False, []

    def is_complete(self, token: TokenState) -> bool:
        """What the list comes to is made in the own part, and what this member contributes is added everywhere."""
        listed = sum(1 << k for k, line in enumerate(token.lines) if line.contributed)
        if not listed:
            return True
        if listed >> (self._number - 1) & 1 and not self._has_contributed:
            return False
        if self._number not in self.aggregators:
            return True
        rank = self.aggregators.index(self._number)
        homes = len(self._serving.part(rank, self._phase.fragments))
        return self._kernel.made(token.round, self._view.number) >= homes

    @property
    def _has_contributed(self) -> bool:
        """All of what this member gives to the open round is added."""
        steps = self._steps
        return self._contributes and steps.whole and steps.number == self.conversion

    def ask(self, now: float, token: TokenState) -> bool:
        """Nothing: a sender learns from the answers which fragments are missing."""
        return False

    def take_report(self, now: float, token: TokenState) -> Lacks:
        """The servers that do not answer, if a report is due."""
        return self._steps.take_report(now)

    def owns_ready(self, token: TokenState) -> bool:
        """`ready` counts samples throughout."""
        return False
