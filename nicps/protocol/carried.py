# SPDX-License-Identifier: Apache-2.0
"""What a member has to give to the open round, and what it takes along from one view to the next."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from nicps.protocol.exchange.servers import Begun
from nicps.protocol.phase import NO_REST, Phase, Rest


@dataclass(frozen=True, slots=True)
class Offer:
    """A member's contribution to `round`, which is ready and waits for the token (`Node.offer`).

    `unit` is what it asks for in the next round, if it does; with absolute exponents, the largest of them.
    `skip`: it does not fit the open round's, and is left out. `conversion`: of its lanes, in stripes. `channel`: whose
    round it is (docs/channels.md).
    """

    round: int
    samples: int
    unit: int | None = None
    skip: bool = False
    conversion: int = 0
    channel: int = 0


@dataclass(slots=True)
class Held:
    """What a member has to give to the `open` round, or has given, and its offer to the round after that, `ahead`."""

    open: Offer | None = None
    ahead: Offer | None = None


@dataclass(frozen=True, slots=True)
class Pending:
    """What a training program has asked a worker's agent for, and has not got yet.

    `step` waits for GO, or for the step before it. `pull` and `push` are under way, or about to be.
    """

    step: Offer | None = None
    begun: Begun | None = None


@dataclass(frozen=True, slots=True)
class Carried:
    """What a member takes along from its ring in one view to that in the next.

    `offer` is its gradient of the open round, counted or not, that it still holds; `passes`: it has dropped it, as the
    round closed without it. `ahead`: what it has offered to the round after that one (docs/channels.md). `read` and
    `digest` are of the last round that its training program has applied. `rest`:
    whose remainders a Linux switch adds to the open round. With servers, `goes_on` is the newest round whose GO is
    known, and `pending` what its training program waits for. With channels, `others` are the same of channels 1 and up;
    `listed` is the list of the step, once a round of it is committed, and `saves`: the lead
    writes a checkpoint after it.
    """

    round: int
    unit: int
    read: int
    digest: int = 0
    offer: Offer | None = None
    ready: int = 0
    passes: bool = False
    undecided: bool = False
    rest: Rest = NO_REST
    goes_on: int = 0
    pending: Pending = Pending()
    others: tuple[Carried, ...] = ()
    listed: Mapping[int, int] | None = None
    saves: bool = False
    ahead: Offer | None = None

    @classmethod
    def at_the_start(cls, phase: Phase, *, behind: bool = False) -> Carried:
        """Of a phase: a training program is prepared only once it has read all rounds before.

        Args:
            behind: with servers it has not, where one was lost. What it pulls in this phase is of the last one, too.
        """
        first, unit = phase.first_round, phase.unit
        other = cls(first, unit, max(0, first - 1 - behind))
        others = (other,) * (phase.channel_count - 1)
        return replace(other, rest=phase.rest, others=others)

    def without_offers(self) -> Carried:
        """Of a member whose training program has left the rounds, and offers again."""
        others = tuple(other.without_offers() for other in self.others)
        left = replace(self, offer=None, ahead=None, passes=False, ready=0, pending=Pending())
        return replace(left, others=others)
