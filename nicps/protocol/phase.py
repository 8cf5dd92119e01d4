# SPDX-License-Identifier: Apache-2.0
"""Members and phases: what the list and a decision fix for everybody."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nicps import wire
from nicps.errors import WireError

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

    `quiet_s` ends the forming (R3); `repeat_s` is R16's; a want (the token is parked) is repeated after `want_s`; a
    parked token is announced every `beacon_s`; the job fails when whoever should be heard has been silent for
    `silent_s`, and its end waits `stop_s` for who does not answer.
    """

    call_s: float = 0.1
    quiet_s: float = 0.7
    decision_s: float = 0.03
    repeat_s: float = 0.008
    want_s: float = 0.004
    beacon_s: float = 0.5
    silent_s: float = 15.0
    stop_s: float = 3.0


@dataclass(frozen=True, slots=True)
class Phase:
    """A series of rounds under one setting, as node 1 decided it.

    `rounds` is how many there are (0: until the next decision). Every contribution of a round has `fragments`
    fragments, the last round's `last_fragments`. `shares[k-1]` is member k's part of the batch in samples, 0 for who
    only receives. `quorum` is in samples (R13). `unit` is the log2 of the accumulators' lowest bit.
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

    def fragments_in(self, round_: int) -> int:
        """Fragments of one contribution in that round."""
        if self.rounds and round_ >= self.last_round:
            return self.last_fragments
        return self.fragments

    @property
    def last_round(self) -> int:
        """Number of the last round; only where `rounds` is not 0."""
        return self.first_round + self.rounds - 1

    @property
    def per_block(self) -> int:
        """Fragments that share one block of accumulators."""
        return fragments_per_block(self.width)

    @property
    def blocks(self) -> int:
        """Blocks that one bank needs."""
        most = max(self.fragments, self.last_fragments)
        return -(-most // self.per_block)

    def pack(self) -> bytes:
        """The decision's tail: JSON of all but what the frame's own fields say."""
        return json.dumps(
            {
                "first_round": self.first_round,
                "rounds": self.rounds,
                "fragments": self.fragments,
                "last_fragments": self.last_fragments,
                "width": self.width,
                "shares": self.shares,
                "quorum": self.quorum,
                "unit": self.unit,
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
            kind = wire.PhaseKind(decision.phase)
            numbers = [*values.values(), *shares]
            if not all(type(number) is int for number in numbers) or not isinstance(settings, dict):
                raise ValueError("a value of the wrong type")
            phase = cls(
                decision.number,
                decision.generation,
                kind,
                shares=shares,
                settings=settings,
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
        limit = 1 << 26  # fragments: 96 GB of raw bytes
        sizes = (self.fragments, self.last_fragments)
        numbers = (self.first_round, self.rounds, self.quorum, *self.shares)
        if len(self.shares) != members or self.width not in wire.MAX_SHIFT:
            raise WireError(
                f"decision {self.number}: {len(self.shares)} shares of width {self.width}"
            )
        fits = all(0 <= n < 1 << 31 for n in numbers) and all(0 <= n < limit for n in sizes)
        if not fits or not -100 <= self.unit <= 100:
            raise WireError(f"decision {self.number}: a number is out of range")
        if not self.fragments or not self.last_fragments or not self.first_round:
            raise WireError(f"decision {self.number}: a phase without fragments or rounds")


def fragments_per_block(width: int) -> int:
    """Fragments in a block of `wire.BLOCK_LANES` 64-bit accumulators: 1, 2, 4 for lanes of 8, 16, 32 bits, 8 if raw."""
    return {8: 1, 16: 2, 32: 4, 0: 8}[width]


def lanes_per_fragment(width: int) -> int:
    """Lanes (raw: bytes) in one fragment."""
    return wire.PAYLOAD_BYTES if width == 0 else wire.PAYLOAD_BYTES * 8 // width


def equal_shares(batch: int, members: Sequence[object]) -> tuple[int, ...]:
    """The batch in samples, dealt out as evenly as it goes."""
    n = len(members)
    return tuple(batch * k // n - batch * (k - 1) // n for k in range(1, n + 1))
