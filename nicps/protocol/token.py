# SPDX-License-Identifier: Apache-2.0
"""The token as its holder works on it: a mutable copy of the frame's fields."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from nicps import wire
from nicps.exchange import Exchange
from nicps.protocol.phase import Phase

_SETTLED = wire.Mark.CONTRIBUTED | wire.Mark.SKIPPED
_NO_UNIT = -128  # nobody asks for one

#: Hops after which the lead asks for a new view. As many are left: six hours, with 100,000 a second.
MOST_HOPS = 1 << 31


@dataclass(slots=True)
class Line:
    """One member's entry (`wire.Entry`)."""

    samples_before: int = 0
    samples: int = 0
    ready: int = 0
    digest: int = 0
    read: int = 0
    marks: int = 0
    unit: int = _NO_UNIT

    @property
    def contributed(self) -> bool:
        """Its gradient is in the open round's list."""
        return bool(self.marks & wire.Mark.CONTRIBUTED)

    @property
    def complete(self) -> bool:
        """It has every fragment of the list."""
        return bool(self.marks & wire.Mark.COMPLETE)

    @property
    def settled(self) -> bool:
        """It has contributed, or has said that it will not."""
        return bool(self.marks & _SETTLED)

    def copy(self) -> Line:
        """The same, to be changed by itself."""
        said = self.samples_before, self.samples, self.ready, self.digest
        return Line(*said, self.read, self.marks, self.unit)

    def commit(self) -> None:
        """The open round is committed: the next one begins."""
        self.samples_before, self.samples, self.ready = self.samples, 0, 0
        self.marks = wire.Mark.SAVED if self.marks & wire.Mark.SAVES else 0
        self.unit = _NO_UNIT


@dataclass(slots=True)
class TokenState:
    """Everything that a token frame says.

    `lines[k-1]` is member k's; `ranges` are (sender, first, count), of sums (who lacks them, first, count).
    """

    generation: int
    hop: int
    owner: int
    round: int
    unit: int
    unit_before: int
    lines: list[Line]
    state: int = wire.TokenState.OPEN
    idle: int = 0
    sent: int = 0
    settled: int = 0
    ranges: list[tuple[int, int, int]] = field(default_factory=list)

    @classmethod
    def create(cls, generation: int, owner: int, round_: int, unit: int, lines: list[Line]) -> Self:
        """R9: the first token of a phase (or of a view in which the phase goes on), owned by the lead."""
        return cls(generation, 0, owner, round_, unit, unit, lines)

    @classmethod
    def of(cls, frame: wire.Frame) -> Self:
        """The state that a token frame carries."""
        body = frame.body
        assert isinstance(body, wire.Token)
        entries: Sequence[Any] = frame.items[0]
        ranges: Sequence[Any] = frame.items[1]
        round_ = frame.header.round
        return cls(
            body.generation,
            body.hop,
            body.owner,
            round_,
            body.unit,
            body.unit_before,
            [
                Line(
                    e.samples_before,
                    e.samples,
                    e.ready,
                    e.digest,
                    round_ - (round_ - e.read & 0xFFFF),
                    e.marks,
                    e.unit,
                )
                for e in entries
            ],
            body.state,
            body.idle,
            body.sent,
            body.settled,
            [(r.sender, r.first, r.count) for r in ranges],
        )

    def frame(self, header: wire.Header) -> wire.Frame:
        """As it is sent; the header's round is this token's."""
        entries = tuple(
            [
                wire.Entry(
                    line.samples_before,
                    line.samples,
                    line.ready,
                    line.digest,
                    line.read & 0xFFFF,
                    line.marks,
                    line.unit,
                )
                for line in self.lines
            ]
        )
        ranges = tuple(wire.Range(first, count, sender) for sender, first, count in self.ranges)
        body = wire.Token(
            generation=self.generation,
            hop=self.hop,
            owner=self.owner,
            state=self.state,
            members=len(entries),
            idle=self.idle,
            ranges=len(ranges),
            sent=self.sent,
            unit=self.unit,
            unit_before=self.unit_before,
            listed=self.listed,
            settled=self.settled,
        )
        return wire.Frame(header, body, (entries, ranges))

    @property
    def key(self) -> tuple[int, int]:
        """(generation, hop): nobody accepts one that is not greater than the last seen."""
        return self.generation, self.hop

    @property
    def counted(self) -> int:
        """Samples of the gradients in the open round's list."""
        return sum([line.samples for line in self.lines])

    @property
    def listed(self) -> int:
        """The closed list, for who follows the token without its entries: a bit a member."""
        if self.state != wire.TokenState.CLOSING:
            return 0
        listed, bit, contributed = 0, 1, int(wire.Mark.CONTRIBUTED)
        for line in self.lines:
            if line.marks & contributed:
                listed |= bit
            bit <<= 1
        return listed

    @property
    def saved(self) -> bool:
        """The lead writes a checkpoint of the state after the round committed last."""
        return any(line.marks & wire.Mark.SAVED for line in self.lines)

    def quorum_reached(self, phase: Phase) -> bool:
        """R13: enough has been counted, or nobody is left who could contribute.

        Never where nobody has a share: those who had have left, and the lead decides anew.
        """
        lines = [line for line, share in zip(self.lines, phase.shares, strict=True) if share]
        enough = self.counted >= phase.quorum and not phase.sized
        return bool(lines) and (enough or all(line.settled for line in lines))

    @property
    def agrees(self) -> bool:
        """In a sized round: all contributions in the list have the same size, and are of the same call."""
        return len({line.samples for line in self.lines if line.contributed}) <= 1

    def next_unit(self, exchange: Exchange) -> int:
        """log2 of the next round's unit: the largest that anybody asks for, or that it was before.

        Where all lanes are multiples of it (`Exchange.shared_step`) it follows the gradients down too.
        """
        wanted = max(line.unit for line in self.lines)
        if wanted == _NO_UNIT or exchange.absolute:
            return self.unit
        return wanted if exchange.shared_step else max(self.unit, wanted)

    def commit(self, exchange: Exchange) -> None:
        """Close the open round for good and open the next one."""
        self.unit_before, self.unit = self.unit, self.next_unit(exchange)
        for line in self.lines:
            line.commit()
        self.round += 1
        self.state = wire.TokenState.OPEN
        self.sent = self.settled = 0
        self.ranges = []
