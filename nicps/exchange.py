# SPDX-License-Identifier: Apache-2.0
"""The exchanges: how the contributions of a round become one sum at every member.

| exchange | who sends what to whom | the sum is made |
| --- | --- | --- |
| `Exchange.BROADCAST` | the holder broadcasts its contribution (R10, R11) | by every member's kernel |
| `Exchange.STRIPES` | all send their parts to the aggregators (docs/stripes.md) | by the aggregators' kernels |
| `Exchange.SWITCH` | all send their contributions to the switch | by the switch |
| `Exchange.LINUX_SWITCH` | as stripes, with one aggregator (docs/linux-switch.md) | by a Linux box between the hosts |
| `Exchange.SERVERS` | workers push to servers, and pull (docs/servers.md) | by the servers' kernels |

A phase has one of them (`nicps.protocol.phase.Phase.exchange`). This file says in what they differ for whoever converts
gradients, reads sums, queues frames or counts fragments. `nicps.protocol.exchange` is what the members of a ring do.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import ClassVar

from nicps import wire


@dataclass(frozen=True, slots=True, eq=False)  # there is one of each kind
class Exchange:
    """One kind of exchange.

    Attributes:
        name: for people.
        includes_own: a sum holds the reader's own contribution too. Otherwise the reader adds its own lanes to it.
        shared_step: all lanes of a round are multiples of the token's unit, and none is larger than a lane divided by
            the number of members. So the unit follows the gradients up and down. Otherwise every fragment has a shift
            of its own, and the unit only grows.
        needs_trust: a host takes part only if its user has told it to believe the sums of others.
        absolute: lanes and sums have exponents of their own, whatever the unit is. No number is too large for a round.
        central: one aggregator makes all sums, and is no member: a Linux switch, as number 0. It adds remainders, too.
        works_alone: a lone member keeps it.
        served: servers hold the parameters. A sum stays where it is made, and each worker pulls it.
        broadcasts_marks: a member that has all of a round broadcasts its mark, as well as setting it in the token. A
            member that has the marks of all commits.
        token_waits: a token leaves a host after the fragments that were queued before it. So a fragment that has not
            come when the token comes is lost.
        flag: of every fragment.
        lost: what did not come where fragments are sent again, if the user must hear of it.
        fallback: the exchange that takes its place in a job whose network does not do what this one needs.
        fails: what the user is told then.
    """

    BROADCAST: ClassVar[Exchange]
    STRIPES: ClassVar[Exchange]
    SWITCH: ClassVar[Exchange]
    LINUX_SWITCH: ClassVar[Exchange]
    SERVERS: ClassVar[Exchange]

    name: str
    includes_own: bool
    shared_step: bool
    needs_trust: bool
    token_waits: bool
    absolute: bool = False
    central: bool = False
    served: bool = False
    works_alone: bool = True
    broadcasts_marks: bool = False
    flag: int = 0
    lost: str = ""
    fallback: Exchange | None = None
    fails: str = ""

    def __reduce__(self) -> tuple[Callable[[str], Exchange], tuple[str]]:
        """In another process it is that one's."""
        return Exchange.named, (self.name,)

    def among(self, live: int) -> Exchange:
        """The exchange in a view of so many live members: a lone one adds for itself where this one needs others."""
        return self if live > 1 or self.works_alone else Exchange.BROADCAST

    def streams(self, counted: Collection[int], number: int) -> int:
        """How many members' worth of fragments the kernel of that member takes in a round.

        Args:
            counted: the members whose contributions are in the sum.
        """
        if self.absolute and set(counted) == {number}:
            return 0
        if self.includes_own:
            return int(bool(counted))
        return len(set(counted) - {number})

    @classmethod
    def named(cls, name: str) -> Exchange:
        """The exchange of that name.

        Raises:
            ValueError: there is none.
        """
        kinds = cls.BROADCAST, cls.STRIPES, cls.SWITCH, cls.LINUX_SWITCH, cls.SERVERS
        by_name = {exchange.name: exchange for exchange in kinds}
        if name not in by_name:
            raise ValueError(f"{name!r} is not an exchange; there are {', '.join(by_name)}")
        return by_name[name]

    def to_json(self) -> bool:
        """The value of the keys `adding` (of a decision and a phase) and `added` (of a commit)."""
        return self == Exchange.SWITCH

    @classmethod
    def from_json(cls, adding: bool) -> Exchange:
        """The exchange that the value of such a key means."""
        return Exchange.SWITCH if adding else Exchange.BROADCAST


Exchange.BROADCAST = Exchange(
    "broadcast",
    includes_own=False,
    shared_step=False,
    needs_trust=False,
    token_waits=True,
)
Exchange.STRIPES = Exchange(
    "stripes",
    includes_own=True,
    shared_step=False,
    needs_trust=False,
    token_waits=False,
    absolute=True,
    broadcasts_marks=True,
    fallback=Exchange.BROADCAST,
    fails="the sums of stripes do not come: every host adds for itself from now on (exchange broadcast)",
)
Exchange.SWITCH = Exchange(
    "switch",
    includes_own=True,
    shared_step=True,
    needs_trust=True,
    token_waits=True,
    works_alone=False,
    flag=wire.Flag.ADD,
    lost="sums of the switch",
    fallback=Exchange.BROADCAST,
    fails="the switch does not add what it is sent: the hosts do it from now on",
)
Exchange.LINUX_SWITCH = Exchange(
    "linux-switch",
    includes_own=True,
    shared_step=False,
    needs_trust=True,
    token_waits=False,
    absolute=True,
    central=True,
    broadcasts_marks=True,
    fallback=Exchange.STRIPES,
    fails="the sums of the switch do not come: the hosts add from now on (exchange stripes)",
)
Exchange.SERVERS = Exchange(
    "servers",
    includes_own=True,
    shared_step=False,
    needs_trust=False,
    token_waits=False,
    absolute=True,
    served=True,
    broadcasts_marks=True,
)
