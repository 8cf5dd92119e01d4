# SPDX-License-Identifier: Apache-2.0
"""What the control of a round asks of an exchange."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

from nicps import wire
from nicps.exchange import Exchange
from nicps.protocol.actions import Action, SendFragments, Striped
from nicps.protocol.exchange.giving_way import LineFigures
from nicps.protocol.kernel import Receiver
from nicps.protocol.phase import NO_REST, Phase, Timings
from nicps.protocol.signals import Lacks, Late
from nicps.protocol.token import TokenState
from nicps.protocol.view import View


class Exchanger(ABC):
    """One member's part in the exchange of one ring.

    The control keeps the list of contributors, and knows no fragment. It calls `open`, then `send_listed` and
    `on_closed` as the list grows and is closed, and whenever this member has the token `serve`, `is_complete` and
    `ask`. Of a token the exchange writes `sent`, `settled` and `ranges`, the entries' `ready` while `owns_ready`, and
    as it closes the list, `unit`. The ring calls it for other events.

    Attributes:
        kind: the properties of this exchange that all hosts share.
        own_sent: fragments of this member that it has announced in the token's `sent`.
        conversion: number of the conversion of this member's lanes for the open round; 0: it has offered none.
        sized: the `samples` of this member's offer to the open round, or of the closed list where it offers nothing, if
            rounds have sizes of their own; otherwise 0.
        aggregators: the members that have a stripe, in order of rank; 0 is a Linux switch.
        rest: the committed round whose remainders such a switch adds to the open one.
        clock: the kernel wakes the agent each time this many sums have come.
        partner: the member that gives this one parameters beside the servers, or 0.
    """

    aggregators: tuple[int, ...] = ()
    clock = partner = 0

    def __init__(
        self,
        kind: Exchange,
        phase: Phase,
        view: View,
        number: int,
        receiver: Receiver,
        timings: Timings,
        now: float,
        channel: int = 0,
    ) -> None:
        self.kind = kind
        self._channel = channel
        self.own_sent = self.conversion = self.sized = 0
        self.rest = NO_REST
        self._phase = phase
        self._view = view
        self._number = number
        self._receiver = receiver
        self._timings = timings
        self._sending = 0  # SendFragments that the kernel has not taken yet
        self._dropped = False  # the open round will not be committed in this ring
        self._begin(now)

    @property
    def size(self) -> int:
        """Fragments of a contribution to the open round, if rounds have sizes of their own; otherwise 0."""
        return wire.size_of(self.sized)

    @property
    def width(self) -> int:
        """Bits of its lanes, likewise."""
        return wire.width_of(self.sized) if self.sized else 0

    def _begin(self, now: float) -> None:  # noqa: B027
        """Set up what only this kind of exchange keeps, for the time of the ring."""

    # ---- what the control tells

    def open(self, round_: int) -> None:
        """That round is open. Nothing of it has been sent or received yet."""
        self.own_sent = self.conversion = self.sized = 0

    def agree_on(self, window: int) -> None:  # noqa: B027
        """The least `proposed_window` of all that have offered to the open round, before its list is closed; 0: any."""

    @abstractmethod
    def send_listed(self, token: TokenState) -> list[Action]:
        """This member's contribution has entered the list. Returns what it sends at once."""

    def on_closed(self, now: float, token: TokenState) -> list[Action]:
        """This member has closed the list. Returns what it sends at once."""
        return []

    def on_token(self, now: float, token: TokenState) -> list[Action]:
        """A token came. It may belong to another member, and its list may be closed."""
        return []

    def on_forwarded(self, now: float) -> list[Action]:
        """This member forwards the token: what it sends behind it."""
        return []

    def on_list(self, now: float, members: int, unit: int) -> list[Action]:
        """A contribution came. It contains the closed list and the unit of the round."""
        return []

    def on_lacking(self, now: float, lacking: wire.Lacking) -> list[Action]:
        """The aggregator has not received the contributions of these members."""
        return []

    def advance(self, now: float) -> list[Action]:
        """Sums came, or lanes of this member were converted, or `deadline` has passed."""
        return []

    def deadline(self) -> float:
        """When `advance` must be called next; infinity if the exchange waits for nothing."""
        return math.inf

    def give_way_to(self, ahead: Sequence[Exchanger], line: LineFigures) -> None:  # noqa: B027
        """These exchanges are of channels of higher urgency; `line` is shared by all channels."""

    def note_urgent(self, now: float, behind: bool) -> None:  # noqa: B027
        """Whether a round of a higher urgency is on its way here: what is sent waits for that."""

    def on_dropped(self) -> None:
        """The open round will not be committed in this ring: another phase or view is coming."""
        self._dropped = True

    def on_sent(self) -> None:
        """The kernel has taken the fragments of one `SendFragments`."""
        self._sending -= 1

    # ---- what others ask, where there are several channels

    @property
    def knows_list(self) -> bool:
        """The list of the open round is known here."""
        return False

    @property
    def under_way(self) -> bool:
        """Also, sums of it lack here."""
        return False

    @property
    def has_sums(self) -> bool:
        """Sums of it are here that aggregators have made of several contributions."""
        return False

    def on_the_way(self, owner: int) -> int:
        """Contributions of the open round on their way to that aggregator, at most."""
        return 0

    @property
    def batch(self) -> int:
        """As many frames of it may wait in this host's queues; 0: any number, as nothing more urgent is open."""
        return 0

    @property
    def last_took(self) -> tuple[float, float]:
        """How long the last round took from its closed list to its sums, and when they were here."""
        return 0.0, -math.inf

    def find_late(self) -> Mapping[int, Late]:
        """Whose contributions or sums the open round lacks here, if it can be told; 0 is a Linux switch."""
        return {}

    # ---- what the control asks

    def may_enter(self) -> bool:
        """Whether what this member has offered can enter the list now."""
        return True

    def wants_token(self, token: TokenState) -> bool:
        """Whether this member has a use for the token while the list is closed and the member is not marked yet."""
        return True

    @property
    def proposed_window(self) -> int:
        """Fragments that this member would have on their way to an aggregator in the open round, at most; 0: any."""
        return 0

    @property
    def awaits_lanes(self) -> bool:
        """Whether others wait for lanes that this host's training program has not converted yet."""
        return False

    # ---- what the control asks, having the token

    @abstractmethod
    def serve(self, now: float, token: TokenState) -> tuple[bool, list[Action]]:
        """Retransmit what others lack, and send what there is room for. Returns whether that changed the token."""

    @abstractmethod
    def is_complete(self, token: TokenState) -> bool:
        """Whether this member has all sums or contributions of the closed list."""

    @abstractmethod
    def ask(self, now: float, token: TokenState) -> bool:
        """Write into the token what this member lacks. Returns whether that is more than the token had."""

    def take_report(self, now: float, token: TokenState) -> Lacks:
        """What this member lacks in spite of retransmissions, if a report is due."""
        return {}

    @abstractmethod
    def owns_ready(self, token: TokenState) -> bool:
        """Whether the entries' `ready` counts sums that the members have, instead of samples."""

    @property
    def delays_token(self) -> bool:
        """Whether a forwarded token still waits at this host, behind fragments that were queued before it."""
        return self._sending > 0 and self.kind.token_waits

    # ---- for the parts of this room

    def _fragments_in(self, round_: int) -> int:
        """Fragments of a contribution to that round; of the open one, if rounds have sizes of their own."""
        return self.size or self._phase.fragments_in(round_, self._channel)

    def _send(
        self,
        round_: int,
        samples: int,
        ranges: tuple[tuple[int, int], ...],
        *,
        repair: bool,
        striped: Striped | None = None,
    ) -> list[Action]:
        """Fragments of that round; nothing if this member is alone in its view."""
        if len(self._view.live) == 1:
            return []
        self._sending += 1
        whose = self._view.number, self._phase.generation, round_
        whole = SendFragments(*whose, samples, ranges, repair, self.kind, striped, self._channel)
        return [whole]
