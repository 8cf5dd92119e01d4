# SPDX-License-Identifier: Apache-2.0
"""Members and phases: what the list and a decision fix for everybody."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from nicps import wire
from nicps.errors import WireError
from nicps.exchange import Exchange
from nicps.protocol import plan
from nicps.protocol.plan import ChannelPlan
from nicps.protocol.serving import Serving

#: The committed round whose remainders a Linux switch adds next: its view and number; zeros: none.
Rest: TypeAlias = tuple[int, int]
NO_REST: Rest = (0, 0)

#: Phases that are series of rounds.
ROUND_KINDS = (wire.PhaseKind.HANDOUT, wire.PhaseKind.TRAIN, wire.PhaseKind.TEST)


@dataclass(frozen=True, slots=True)
class Member:
    """A host in the list; `number` counts from 1 (R2)."""

    number: int
    mac: bytes
    name: str


@dataclass(frozen=True, slots=True)
class Timings:
    """Waiting times in seconds. Repeats back off, up to ten times their first value.

    Forming (R3): `call_s` between calls, `quiet_s` without an answer ends it; a starter keeps still for `yield_s` where
    another one calls. Decisions are repeated after
    `decision_s`. R16: `repeat_s`. A want (the token is parked) is repeated after `want_s`.

    R17: the n-th member after a silent one waits n times `silence_s` before it proposes to go on without it, or longer
    where answers have been slow (`AdaptiveTimeout`), up to `silence_most_s`; so everybody gives a sign of life three
    times in `silence_s`. A proposer waits two thirds of that time for promises, a tenth of it for the suspect's own.
    Members that all have no state wait `state_s` for one that has it before they go on without: the job ends then.
    Without a majority for `cut_s` the user is told. The lead calls standby hosts every `call_back_s` (R20). The job's
    end waits `stop_s` for who does not answer. A switch that adds may make no sum for `sums_s` (and some turns).

    `alone`: one of two hosts goes on without the other, whichever it is. Cut apart, both do; healed, the one with
    the lower view, ballot or MAC address takes the other's state.

    `urgent_share`: of the time, that rounds of one channel may take while less urgent ones are under way, where no step
    binds them together (`Restraint`).
    """

    call_s: float = 0.1
    quiet_s: float = 0.7
    yield_s: float = 2.5
    decision_s: float = 0.03
    repeat_s: float = 0.008
    want_s: float = 0.004
    silence_s: float = 0.3
    silence_most_s: float = 3.0
    state_s: float = 10.0
    cut_s: float = 2.0
    call_back_s: float = 0.5
    stop_s: float = 3.0
    sums_s: float = 0.5
    alone: bool = False
    urgent_share: float = 0.9

    @property
    def beacon_s(self) -> float:
        """Between two signs of life of who has nothing else to say."""
        return self.silence_s / 3


class AdaptiveTimeout:
    """How long the next in line waits before it takes silence for death: a slow host is not a dead one (R17).

    As TCP does it with round trips (RFC 6298): the mean of the gaps between signs of life and four times their mean
    deviation, within the settings' limits.
    """

    def __init__(self, timings: Timings) -> None:
        self._least, self._most = timings.silence_s, timings.silence_most_s
        self._mean = 0.0
        self._deviation = 0.0

    def add_gap(self, gap_s: float) -> None:
        """A sign of life came after so long."""
        gap_s = min(gap_s, self._most)
        self._deviation += (abs(gap_s - self._mean) - self._deviation) / 4
        self._mean += (gap_s - self._mean) / 8

    def back_off(self) -> None:
        """A suspect has answered after all."""
        self._deviation = max(self._deviation, self.seconds / 2)

    @property
    def seconds(self) -> float:
        """The time t of R17."""
        return min(max(self._mean + 4 * self._deviation, self._least), self._most)

    @property
    def vote_s(self) -> float:
        """How long a proposer waits for promises."""
        return self.seconds * 2 / 3

    @property
    def grace_s(self) -> float:
        """How long, if nobody but suspects has still to promise."""
        return self.seconds / 10


@dataclass(frozen=True, slots=True)
class Phase:
    """A series of rounds under one setting, as node 1 decided it.

    `rounds` is how many there are (0: until the next decision). Every contribution of a round has `fragments`
    fragments, the last round's `last_fragments`. `shares[k-1]` is member k's part of the batch in samples, 0 for who
    only receives. `quorum` is in samples (R13). `unit` is the log2 of the accumulators' lowest bit. `exchange`: how the
    contributions of a round become one sum. `rest`: the committed round whose remainders a Linux switch adds first, as
    the lead knew it. `feedback`: what rounding leaves over goes into later rounds. `sized`: every round has a size of
    its own, at most `fragments`, which its offers name in `samples` (`wire.size_of`), and its list has all members that
    have a share. `serving`: which members are servers, where there are any; those that have a share are workers.
    `channels`: the plan of each channel, where the phase has several, or several rounds a step; `fragments` and
    `last_fragments` are the room of channel 0 then. `opened`: the rounds that were open at the lead as it decided, of
    channels 1 and up.
    """

    number: int
    generation: int
    kind: wire.PhaseKind
    first_round: int = 0
    rounds: int = 0
    fragments: int = 0
    last_fragments: int = 0
    width: int = 0
    shares: tuple[int, ...] = ()
    quorum: int = 0
    unit: int = 0
    settings: Mapping[str, Any] = field(default_factory=dict)
    exchange: Exchange = Exchange.BROADCAST
    rest: Rest = NO_REST
    feedback: bool = True
    sized: bool = False
    serving: Serving | None = None
    channels: tuple[ChannelPlan, ...] = ()
    opened: tuple[int, ...] = ()

    @property
    def ending(self) -> wire.Ending:
        """What becomes of the job with this STOP."""
        return wire.Ending.DONE if self.settings.get("ok") else wire.Ending.ENDED

    def among(self, live: Collection[int], number: int, unit: int) -> Phase:
        """The phase as it goes on in the next view: who is left, a quorum in proportion, the open round's unit."""
        shares = tuple(s if k in live else 0 for k, s in enumerate(self.shares, 1))
        total, left = sum(self.shares), sum(shares)
        return replace(
            self,
            number=number,
            generation=1,
            shares=shares,
            quorum=-(-self.quorum * left // total) if total else 0,
            unit=unit,
        )

    def fragments_in(self, round_: int, channel: int = 0) -> int:
        """Fragments of one contribution in that round of that channel; at most, if rounds have sizes of their own."""
        if self.channels:
            of = self.channels[channel]
            return of.rounds[self.place_of(round_, channel)] if of.rounds else of.room
        if self.rounds and round_ >= self.last_round:
            return self.last_fragments
        return self.fragments

    @property
    def keeps_exchange(self) -> bool:
        """No other exchange can take the place of its own: rounds have sizes of their own, or a step has a plan."""
        return self.sized or bool(self.channels)

    @property
    def channel_count(self) -> int:
        """How many channels it has."""
        return len(self.channels) or 1

    @property
    def planned(self) -> bool:
        """A step has a fixed list of rounds, and binds the channels together."""
        return bool(self.channels) and not self.sized

    def rounds_per_step(self, channel: int = 0) -> int:
        """Rounds of that channel in a step; 1 where no step binds the channels together."""
        return self.channels[channel].rounds_per_step if self.channels else 1

    def step_of(self, round_: int, channel: int = 0) -> int:
        """The step of that round of that channel: steps count from 0 within the phase."""
        return (round_ - self.first_round) // self.rounds_per_step(channel)

    def place_of(self, round_: int, channel: int = 0) -> int:
        """Which round of its channel that one is in its step, from 0."""
        return (round_ - self.first_round) % self.rounds_per_step(channel)

    def first_of(self, step: int, channel: int = 0) -> int:
        """The first round of that step in that channel."""
        return self.first_round + step * self.rounds_per_step(channel)

    @property
    def last_round(self) -> int:
        """Number of the last round; only where `rounds` is not 0."""
        return self.first_round + self.rounds - 1

    def aggregators(self, live: Collection[int]) -> tuple[int, ...]:
        """Whose the stripes are among the live members, in order of rank, where the exchange has any; 0 is a switch.

        Servers hold the parts that the phase gives them. A phase ends with the view in which one of them is missing.
        """
        if self.serving is not None:
            return self.serving.servers
        if not self.exchange.absolute:
            return ()
        return (0,) if self.exchange.central else self.sharing(live)

    def sharing(self, live: Collection[int]) -> tuple[int, ...]:
        """The live members with a share of the batch, in order."""
        return tuple(k for k, share in enumerate(self.shares, 1) if share and k in live)

    @property
    def per_block(self) -> int:
        """Fragments that share one block of accumulators."""
        return wire.fragments_per_block(self.width)

    @property
    def blocks(self) -> int:
        """Blocks that one bank needs."""
        most = max(self.fragments, self.last_fragments)
        return -(-most // self.per_block)

    def pack(self) -> bytes:
        """The decision's tail: JSON of all but what the frame's own fields say."""
        values: dict[str, Any] = {}
        if self.rest != NO_REST:
            values["rest"] = self.rest
        if not self.feedback:
            values["feedback"] = False
        if self.sized:
            values["sized"] = True
        if self.serving is not None:
            values["serving"] = self.serving.to_json()
        if self.channels:
            values["channels"] = [channel.to_json() for channel in self.channels]
        if self.opened:
            values["open"] = self.opened
        return json.dumps(
            values
            | {
                "first_round": self.first_round,
                "rounds": self.rounds,
                "fragments": self.fragments,
                "last_fragments": self.last_fragments,
                "width": self.width,
                "shares": self.shares,
                "quorum": self.quorum,
                "unit": self.unit,
                "adding": self.exchange.to_json(),
                "exchange": self.exchange.name,
                "settings": dict(self.settings),
            },
            separators=(",", ":"),
            ensure_ascii=False,
        ).encode()

    @classmethod
    def unpack(cls, decision: wire.Decision, tail: bytes, members: int) -> Phase:
        """A phase from a decision's body and tail, in a view of so many members.

        Raises:
            WireError: the tail is not what `pack` wrote, or cannot be meant.
        """
        try:
            values = json.loads(tail)
            settings, shares = values.pop("settings"), tuple(values.pop("shares"))
            adding, exchange = values.pop("adding"), Exchange.named(values.pop("exchange"))
            view, round_ = rest = tuple(values.pop("rest", NO_REST))
            opened = tuple(values.pop("open", ()))
            flags = feedback, sized = values.pop("feedback", True), values.pop("sized", False)
            serving = Serving.from_json(values.pop("serving")) if "serving" in values else None
            channels = tuple(map(ChannelPlan.from_json, values.pop("channels", ())))
            kind = wire.PhaseKind(decision.phase)
            numbers = [*values.values(), *shares, *opened, view, round_]
            whole = all(type(number) is int for number in numbers)
            typed = isinstance(settings, dict) and all(isinstance(flag, bool) for flag in flags)
            if not whole or not typed or adding is not exchange.to_json():
                raise ValueError("a value of the wrong type")
            phase = cls(
                decision.number,
                decision.generation,
                kind,
                shares=shares,
                settings=settings,
                exchange=exchange,
                rest=rest,
                feedback=feedback,
                sized=sized,
                serving=serving,
                channels=channels,
                opened=opened,
                **values,
            )
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise WireError(f"decision {decision.number} cannot be read: {error}") from None
        phase.check(members)
        return phase

    def check(self, members: int) -> None:
        """Refuse what no node 1 can mean.

        Raises:
            WireError: naming what is wrong.
        """
        if self.kind not in ROUND_KINDS:
            return
        if self.exchange.served is not (self.serving is not None):
            raise WireError(f"decision {self.number}: servers go with the exchange of that name")
        if self.serving is not None and not self.serving.fits(members, self.fragments, self.width):
            raise WireError(
                f"decision {self.number}: {self.serving} does not fit {members} members"
            )
        limit = 1 << 26  # fragments: 96 GB of raw bytes
        if self.channels:
            self._check_channels(wire.MOST_SIZED if self.sized else limit)
        sizes = (self.fragments, self.last_fragments)
        numbers = (self.first_round, self.rounds, self.quorum, *self.shares, *self.rest)
        numbers += self.opened
        if len(self.shares) != members or self.width not in wire.MAX_SHIFT:
            raise WireError(
                f"decision {self.number}: {len(self.shares)} shares of width {self.width}"
            )
        fits = (
            len(self.opened) < wire.MAX_CHANNELS
            and all(0 <= n < 1 << 31 for n in numbers)
            and all(0 <= n < limit for n in sizes)
        )
        if not fits or not -100 <= self.unit <= 100:
            raise WireError(f"decision {self.number}: a number is out of range")
        if self.exchange.includes_own and not self.width:
            raise WireError(f"decision {self.number}: nobody makes sums of raw bytes")
        exchange = self.exchange
        has_sizes = exchange.absolute and not (exchange.central or exchange.served)
        if self.sized and not (has_sizes and self.fragments <= wire.MOST_SIZED):
            raise WireError(f"decision {self.number}: rounds cannot have sizes of their own in it")
        if not self.fragments or not self.last_fragments or not self.first_round:
            raise WireError(f"decision {self.number}: a phase without fragments or rounds")

    def _check_channels(self, limit: int) -> None:
        """Refuse channels that no node 1 can mean.

        Raises:
            WireError: naming what is wrong with them.
        """
        name, room = f"decision {self.number}", self.channels[0].room
        exchange = self.exchange
        if not exchange.broadcasts_marks or exchange.central or exchange.served:
            raise WireError(f"{name}: the exchange {exchange.name} has one channel")
        if self.kind is not wire.PhaseKind.TRAIN or self.rounds:
            raise WireError(f"{name}: only training until the next decision has channels")
        if not plan.fits(self.channels, limit, sized=self.sized):
            raise WireError(f"{name}: the channels {self.channels} cannot be meant")
        if (self.fragments, self.last_fragments) != (room, room):
            raise WireError(f"{name}: {self.fragments} fragments are not the room of channel 0")


def equal_shares(batch: int, members: int, counted: Collection[int]) -> tuple[int, ...]:
    """The batch in samples by member number, dealt out to those counted as evenly as it goes."""
    n, ranks = len(counted), {number: rank for rank, number in enumerate(sorted(counted))}
    return tuple(
        batch * (ranks[k] + 1) // n - batch * ranks[k] // n if k in ranks else 0
        for k in range(1, members + 1)
    )
