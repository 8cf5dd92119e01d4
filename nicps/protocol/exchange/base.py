# SPDX-License-Identifier: Apache-2.0
"""What the control of a round asks of an exchange."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

from nicps import wire
from nicps.exchange import Exchange
from nicps.protocol.actions import Action, SendFragments, Striped
from nicps.protocol.kernel import Receiver
from nicps.protocol.phase import Phase
from nicps.protocol.signals import Lacks
from nicps.protocol.token import TokenState
from nicps.protocol.view import View


class Exchanger(ABC):
    """One member's part in the exchange of one ring.

    The control keeps the list of contributors, and knows no fragment. It calls `open`, then `send_listed` and
    `on_closed` as the list grows and is closed, and whenever this member has the token `serve`, `is_complete` and
    `ask`. Of a token the exchange writes `sent`, `settled` and `ranges`, the entries' `ready` while `owns_ready`, and
    as it closes the list, `unit`. The ring tells it of what else happens.

    Attributes:
        kind: what is so of this exchange for everybody.
        own_sent: fragments of its own that this member has announced in the token's `sent`.
        conversion: of this member's lanes for the open round; 0: it has offered none.
        aggregators: whose stripes there are, in order of rank.
        clock: the kernel tells of so many sums at a time.
    """

    aggregators: tuple[int, ...] = ()
    clock = 0

    def __init__(
        self, kind: Exchange, phase: Phase, view: View, number: int, receiver: Receiver
    ) -> None:
        self.kind = kind
        self.own_sent = self.conversion = 0
        self._phase = phase
        self._view = view
        self._number = number
        self._receiver = receiver
        self._sending = 0  # SendFragments that the kernel has not taken yet

    # ---- what the control tells

    def open(self, round_: int) -> None:
        """That round is open: nothing of it has been sent or has come."""
        self.own_sent = self.conversion = 0

    @abstractmethod
    def send_listed(self, token: TokenState) -> list[Action]:
        """This member's contribution has entered the list: what it sends at once."""

    def on_closed(self, now: float, token: TokenState) -> list[Action]:
        """This member has closed the list: what it sends at once."""
        return []

    def on_token(self, now: float, token: TokenState) -> list[Action]:
        """A token came, which may be another's, and perhaps says that the list is closed."""
        return []

    def on_list(self, now: float, members: int, unit: int) -> list[Action]:
        """A contribution came, which says what list was closed, and with which unit."""
        return []

    def on_lacking(self, now: float, lacking: wire.Lacking) -> list[Action]:
        """The aggregator has not got these members' contributions."""
        return []

    def advance(self, now: float) -> list[Action]:
        """Sums came, or lanes of this member's were converted, or time has passed."""
        return []

    def deadline(self) -> float:
        """When `advance` must be called next; infinity where nothing is waited for."""
        return math.inf

    def on_dropped(self) -> None:  # noqa: B027
        """The open round will not be committed in this ring: another phase or view is coming."""

    def on_sent(self) -> None:
        """The kernel has taken the fragments of one `SendFragments`."""
        self._sending -= 1

    # ---- what the control asks

    def may_enter(self) -> bool:
        """Whether what this member has offered can enter the list now."""
        return True

    def wants_token(self, token: TokenState) -> bool:
        """Whether this member would do something with the token while the list is closed, and it is not marked yet."""
        return True

    @property
    def awaits_lanes(self) -> bool:
        """Whether others wait for lanes that this host's training program has not converted yet."""
        return False

    # ---- what the control asks, having the token

    @abstractmethod
    def serve(self, now: float, token: TokenState) -> tuple[bool, list[Action]]:
        """Send what others lack, and what there is room for; whether that changed the token."""

    @abstractmethod
    def is_complete(self, token: TokenState) -> bool:
        """Whether this member has all that the list comes to."""

    @abstractmethod
    def ask(self, now: float, token: TokenState) -> bool:
        """Write into the token what this member lacks; whether that is more than the token had."""

    def take_report(self, now: float, token: TokenState) -> Lacks:
        """What this member lacks and does not get, however often it is sent again, if it is time to report it."""
        return {}

    @abstractmethod
    def owns_ready(self, token: TokenState) -> bool:
        """Whether the entries' `ready` counts what the exchange has achieved, and no samples."""

    @property
    def delays_token(self) -> bool:
        """Whether a token that was forwarded still waits here, behind fragments that were queued before it."""
        return self._sending > 0 and self.kind.token_waits

    # ---- for the parts of this room

    def _send(
        self,
        round_: int,
        samples: int,
        ranges: tuple[tuple[int, int], ...],
        *,
        repair: bool,
        striped: Striped | None = None,
    ) -> list[Action]:
        """Fragments of that round, if there is anybody to send them to."""
        if len(self._view.live) == 1:
            return []
        self._sending += 1
        whose = self._view.number, self._phase.generation, round_
        return [SendFragments(*whose, samples, ranges, repair, self.kind, striped)]
