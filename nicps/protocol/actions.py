# SPDX-License-Identifier: Apache-2.0
"""What the state machines ask for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from nicps import wire
from nicps.exchange import Exchange
from nicps.protocol.phase import Phase, Rest
from nicps.protocol.view import View


@dataclass(frozen=True, slots=True)
class Send:
    """Broadcast one frame, after everything asked for before."""

    frame: wire.Frame


@dataclass(frozen=True, slots=True)
class Striped:
    """What frames of stripes say of their round: the closed list (a bit a member), its unit, and what they are.

    A CONTRIBUTION and an ASK go to the fragment's aggregator, of which `aggregators` has the numbers in order of rank,
    or to who alone has contributed; a SUM, of lanes that only this member has contributed, to all. Number 0 is a Linux
    switch, which adds the remainders of the round `behind` rounds before this one, in the view `rest_view`; 0: of none.
    `fragments` and `width` (of lanes, in bits): of the round, if rounds have sizes of their own; otherwise 0.
    """

    type: wire.FrameType
    members: int
    unit: int
    aggregators: tuple[int, ...]
    rest_view: int = 0
    behind: int = 0
    fragments: int = 0
    width: int = 0

    def owner(self, index: int, fragments: int) -> int:
        """The aggregator of that fragment, of so many in the round."""
        return self.aggregators[((index + 1) * len(self.aggregators) - 1) // fragments]


@dataclass(frozen=True, slots=True)
class SendServed:
    """Send fragments of this worker's step, or questions for parameters, to one host (docs/servers.md).

    `ranges` are (first, count): push fragments, of a PULL fragments of parameters. A PUSH names the least `version` of
    what was pulled from that server; a CONTRIBUTION the list, `members`. `repair`: all of it was sent before. `down`:
    of each range the last fragment leaves first. `channel`: of the frames.
    """

    view: int
    round: int
    type: wire.FrameType
    number: int
    to: int
    ranges: tuple[tuple[int, int], ...]
    version: int = 0
    members: int = 0
    repair: bool = False
    channel: int = 0
    down: bool = False


@dataclass(frozen=True, slots=True)
class Stepped:
    """All servers have added this worker's step of that number, for itself.

    `version` is the largest that one of them has told, with this step; `staleness`, what it counted for at each.
    """

    round: int
    number: int
    version: int
    staleness: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Pulled:
    """All parameters of the pull of that number are here."""

    round: int
    number: int


@dataclass(frozen=True, slots=True)
class ReadByAll:
    """The lead only: all workers have read that round. What its training program says of it may be carried out."""

    round: int


@dataclass(frozen=True, slots=True)
class ServerLost:
    """The lead only: a server of the phase is not in the view. `reads`: by live worker, the last round that it read."""

    reads: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class SendFragments:
    """Send fragments of this member's contribution, before anything asked for later.

    `ranges` are (first, count). Without samples there is no contribution: the frames are empty, and only ask for sums.
    The agent answers with `Node.sent` once the kernel has them all.
    """

    view: int
    generation: int
    round: int
    samples: int
    ranges: tuple[tuple[int, int], ...]
    repair: bool
    exchange: Exchange = Exchange.BROADCAST
    striped: Striped | None = None
    channel: int = 0

    @property
    def only_asks(self) -> bool:
        """This member has contributed nothing."""
        return not self.samples

    @property
    def asks(self) -> bool:
        """The frames are questions of stripes."""
        return self.striped is not None and self.striped.type is wire.FrameType.ASK

    @property
    def flags(self) -> int:
        """Of each frame's header."""
        channel = wire.channel_flags(self.channel)
        return wire.Flag.REPAIR * self.repair | self.exchange.flag | channel


@dataclass(frozen=True, slots=True)
class Narrow:
    """Make windows of a round smaller, or as large as before (docs/channels.md, "Order on the wire").

    `swallow` has pairs of an aggregator, and how many sums of its stripe send no contribution.
    """

    view: int
    round: int
    channel: int
    swallow: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Joiner:
    """A host that answered the lead's call (R20); `fresh` is its nonce."""

    mac: bytes
    name: str
    fresh: int


@dataclass(frozen=True, slots=True)
class Installed:
    """A view is in force here (R3, R18).

    `phase` goes on in it, from its `first_round`, which is the open round; None: the lead decides what comes.
    `again`: this host was getting ready for another phase, and must come back to this one. `rounds`: the open round of
    each channel of the phase.
    """

    view: View
    number: int
    phase: Phase | None
    again: bool = False
    rounds: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Ready:
    """The lead only: everybody in the view has installed it."""

    view: View


@dataclass(frozen=True, slots=True)
class Evicted:
    """This host is not in the view that the others have agreed on: it stands by (R19).

    `ending`: or the job has ended, while it was not heard; `lead` is the name of who knows more.
    """

    reason: str
    ending: wire.Ending = wire.Ending.NONE
    lead: str = ""


@dataclass(frozen=True, slots=True)
class Cut:
    """No majority of the view can be heard: nobody may go on here (R18). `missing` are the silent ones' numbers."""

    missing: frozenset[int]


@dataclass(frozen=True, slots=True)
class Answered:
    """The lead only: a host on standby has answered the call (R20)."""

    joiner: Joiner
    number: int  # in the list; 0 if it is new
    stage: wire.Stage


@dataclass(frozen=True, slots=True)
class Called:
    """A lead calls hosts on standby into a job or a group (R20): this host, too, which may have a part of it."""

    job: str


@dataclass(frozen=True, slots=True)
class NotAdmitted:
    """A job is under way that this host has no part in, and that admits nobody; an empty name: it is over."""

    job: str


@dataclass(frozen=True, slots=True)
class Differs:
    """Members hold other weights than the rest after that round; none named: no half agrees."""

    round: int
    numbers: frozenset[int]


@dataclass(frozen=True, slots=True)
class NoProgress:
    """Members lack fragments, and get none however often they are sent again.

    `lacks` maps the members that report it to how many fragments they lack, by the number of their sender. `evicted`:
    the others go on without that member (R18); 0 as long as nobody is named.
    """

    round: int
    lacks: Mapping[int, Mapping[int, int]]
    evicted: int = 0
    channel: int = 0

    @property
    def _where(self) -> str:
        return f"round {self.round}" + (f" of channel {self.channel}" if self.channel else "")

    def explain(self, view: View) -> str:
        """What is lacking and whom it concerns, or who has to go for it; one line for the user."""
        if not self.evicted:
            ((member, lacks),) = self.lacks.items()
            missing = ", ".join(f"{count} of {view.names([k])}" for k, count in lacks.items())
            return (
                f"{self._where}: {view.names([member])} lacks fragments ({missing}), and gets none of them,"
                " however often they are sent again"
            )
        what = f"sends what does not reach {view.names(self.lacks)}"
        if self.evicted in self.lacks:
            what = "takes nothing of what the others send again"
        length = wire.ETHERNET_BYTES + wire.LEAST_MTU
        return (
            f"{self._where}: {view.names([self.evicted])} {what}, and is evicted; do full frames ({length} bytes)"
            " pass on its way?"
        )


@dataclass(frozen=True, slots=True)
class Prepare:
    """A decision was heard and its turn has come: get ready for the phase, then call `Node.prepared`."""

    phase: Phase


@dataclass(frozen=True, slots=True)
class PhaseAgreed:
    """The lead only: everybody has acknowledged; `answers` are the members' JSON tails by number."""

    phase: Phase
    answers: Mapping[int, bytes]


@dataclass(frozen=True, slots=True)
class Need:
    """Samples that are still enough for the quorum, for who has not contributed (R13)."""

    round: int
    samples: int


@dataclass(frozen=True, slots=True)
class Closed:
    """The round's list is closed without this member: drop the rest of the batch.

    Where a step has several rounds it is the step's first one, of channel 0: the member has no part in the step.
    """

    round: int


@dataclass(frozen=True, slots=True)
class Committed:
    """Everybody has everything: weights may change.

    `phase` is the round's. `counted` maps member numbers to samples; members whose gradient is not in the sum are
    missing from it. `exchange` is the one that made the sum: where a lone member adds for itself it is not the phase's.
    `view` is the one in which it was made, and `aggregators` are those of its stripes, in order of rank. `saved`: the
    lead writes a checkpoint of the state after the round (R22), or after its step. `channel`: whose round it is.
    """

    phase: Phase
    round: int
    counted: Mapping[int, int]
    unit: int
    next_unit: int
    exchange: Exchange = Exchange.BROADCAST
    view: int = 0
    aggregators: tuple[int, ...] = ()
    saved: bool = False
    channel: int = 0

    @property
    def has_sum(self) -> bool:
        """In a sized round there is none where members have called different things."""
        return not self.phase.sized or len(set(self.counted.values())) <= 1

    @property
    def fragments(self) -> int:
        """Fragments of each contribution to it."""
        if self.phase.sized and self.has_sum:
            return max((wire.size_of(samples) for samples in self.counted.values()), default=0)
        return 0 if self.phase.sized else self.phase.fragments_in(self.round, self.channel)

    def rest_after(self, before: Rest) -> Rest:
        """Whose remainders a Linux switch adds to later rounds: this one's, if it has left some there."""
        leaves = self.exchange.central and self.phase.feedback and len(self.counted) > 1
        return (self.view, self.round) if leaves else before


@dataclass(frozen=True, slots=True)
class NotAdded:
    """The lead only: all have sent again and again, and no sums of that round come. The network may not do what the
    `exchange` of the phase in force needs."""

    round: int
    exchange: Exchange


@dataclass(frozen=True, slots=True)
class SwitchChanged:
    """A Linux switch that adds comes, goes, or becomes ready (`Node.switch`). `text` is for the operator, if there is
    something new to say; `warns`: for the user too."""

    text: str = ""
    warns: bool = False


@dataclass(frozen=True, slots=True)
class Declined:
    """The job cannot go on here, and the others can: this host stands by, and leaves it to them for good."""

    reason: str


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The lead: the user of that member cancels the job."""

    name: str


@dataclass(frozen=True, slots=True)
class Failed:
    """The job cannot go on; one line for the user."""

    reason: str


Action: TypeAlias = (
    Send
    | SendFragments
    | SendServed
    | Narrow
    | Stepped
    | Pulled
    | ReadByAll
    | ServerLost
    | Installed
    | Ready
    | Evicted
    | Cut
    | Answered
    | Called
    | NotAdmitted
    | Differs
    | NoProgress
    | Prepare
    | PhaseAgreed
    | Need
    | Closed
    | Committed
    | NotAdded
    | SwitchChanged
    | Declined
    | Cancelled
    | Failed
)
