# SPDX-License-Identifier: Apache-2.0
"""What the XDP program does with stripes, in Python: written from docs/stripes.md, not from the C."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from nicps import wire
from nicps.dataplane.doorbell import Bell
from nicps.wire import Flag, FrameType
from tests.model import DROP, PASS, TX, Outcome
from tests.stripes import (
    GROUP,
    I64,
    LANES,
    MACS,
    NATIVE,
    PER_BLOCK,
    Window,
    bit_of,
    bound,
    doubt,
    mac_of,
    rounded,
    shifted,
    signed,
)


@dataclass
class Gather:
    """A fragment's place in the own stripe."""

    tag: int
    members: int
    index: int
    fragments: int
    width: int
    unit: int
    total: I64
    seen: int = 0
    not_finite: bool = False


@dataclass
class Stored:
    """A sum; `rest`: the tag, if it was made here."""

    tag: int
    exponent: int
    lanes: bytes
    rest: int = 0


@dataclass
class Own:
    """This member's lanes of a fragment."""

    conversion: int
    exponent: int
    lanes: bytes


@dataclass
class StripesModel:
    """One member's program, in one channel.

    `ranks` by member number, 0 for who is no aggregator; `width` of a lane; of the open round, the first of `rounds`,
    and of later ones. Number 0 is a switch; whether there is one says `switch`. `rest` by parity: view, and so many
    rounds before.
    """

    number: int
    live: frozenset[int]
    ranks: tuple[dict[int, int], dict[int, int]]
    width: tuple[int, int]
    room: int
    blocks: int
    view: int
    rounds: tuple[int, int]
    key: bytes = b""
    offered: list[int] = field(default_factory=lambda: [0, 0])
    own: dict[tuple[int, int], Own] = field(default_factory=dict)
    gathers: dict[tuple[int, int], Gather] = field(default_factory=dict)
    sums: dict[tuple[int, int], Stored] = field(default_factory=dict)
    count: dict[int, tuple[int, int]] = field(default_factory=dict)  # bank -> tag, sums
    windows: dict[int, Window] = field(default_factory=dict)
    answers: int = 0  # the last number that was given to one
    clock: int = 0
    announced: list[int] = field(default_factory=lambda: [0, 0])
    # (bank, aggregator) -> the round, and the fragment to send next
    sent: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)
    bells: list[Bell] = field(default_factory=list)
    switch: bool = True
    rest: list[tuple[int, int]] = field(default_factory=lambda: [(0, 0), (0, 0)])
    channel: int = 0
    # (bank, aggregator) -> so many sums that come send nothing
    swallow: dict[tuple[int, int], int] = field(default_factory=dict)

    def ranks_in(self, round_: int) -> dict[int, int]:
        """Of the aggregators in that round."""
        return self.ranks[round_ > self.rounds[0]]

    def aggregators(self, round_: int) -> int:
        """How many there are; 0: it is not striped."""
        return sum(rank > 0 for rank in self.ranks_in(round_).values())

    def run(self, frame: bytes) -> Outcome:
        """One frame from its Ethernet header on, of this network, and of a type of stripes."""
        ours = frame[wire.ETHERNET_BYTES :]
        header = wire.Header(*wire.Layout.of(wire.Header).struct.unpack_from(ours))
        sender = header.sender
        if header.view != self.view:
            return Outcome(DROP, ("view",))
        if sender == self.number:
            return Outcome(DROP, ("echo",))
        if wire.channel_of(header.flags) != self.channel:
            return Outcome(DROP, ("mode",))
        known = (
            self.switch and self.ranks_in(header.round).get(0)
            if not sender
            else sender in self.live
        )
        if not known or frame[6:12] != mac_of(sender):
            return Outcome(DROP, ("stranger",))
        length = wire.CONTRIBUTION_HEADER_BYTES + wire.PAYLOAD_BYTES
        if len(ours) < length or header.length != length:
            return Outcome(DROP, ("truncated",))
        if not self.rounds[0] <= header.round <= self.rounds[1]:
            return Outcome(DROP, ("round",))
        if not self.aggregators(header.round):
            return Outcome(DROP, ("mode",))
        if header.type != FrameType.SUM and frame[:6] != MACS[self.number - 1]:
            return Outcome(DROP, ("astray",))
        if reason := doubt(self.windows, self.key, ours, header):
            return Outcome(DROP, (reason,))
        values = wire.Layout.of(wire.Contribution).struct.unpack_from(ours, wire.HEADER_BYTES)
        body = wire.Contribution(*values)
        payload = ours[wire.CONTRIBUTION_HEADER_BYTES : header.length]
        if header.type == FrameType.CONTRIBUTION:
            return self._gather(header, body, payload)
        if header.type == FrameType.SUM:
            return self._store(header, body, payload)
        if header.type == FrameType.ASK:
            return self._answer(header, body, payload)
        return Outcome(PASS, ("control",))

    def stripe(self, number: int, header: wire.Header, body: wire.Contribution) -> range:
        """That member's, in the round."""
        rank, n = self.ranks_in(header.round).get(number, 0), self.aggregators(header.round)
        if not rank:
            return range(0)
        return range(bound(body.fragments, rank - 1, n), bound(body.fragments, rank, n))

    def _gather(self, header: wire.Header, body: wire.Contribution, payload: bytes) -> Outcome:
        width, bit, mine = body.width, 1 << header.sender - 1, 1 << self.number - 1 & body.members
        live = sum(1 << number - 1 for number in self.live)
        wrong = width != self.width[header.round > self.rounds[0]] or width not in NATIVE
        if not body.members & bit or body.members & ~live or wrong:
            return Outcome(DROP, ("malformed",))
        finite = body.exponent != wire.NOT_FINITE
        if finite and body.exponent - body.unit > wire.MAX_SHIFT[width]:
            return Outcome(DROP, ("shift",))
        stripe = self.stripe(self.number, header, body)
        if body.index not in stripe or body.index >= self.room:
            return Outcome(DROP, ("range",))
        local = body.index - stripe.start
        if local // PER_BLOCK[width] >= self.blocks:
            return Outcome(DROP, ("range",))
        bank, tag = header.round & 1, header.view << 32 | header.round
        place = self.gathers.get((bank, local))
        fresh = place is None or place.tag != tag
        own = self.own.get((bank, body.index), Own(0, 0, b""))
        if not fresh:
            assert place is not None
            told = (body.members, body.unit, body.fragments, width, body.index)
            if told != (place.members, place.unit, place.fragments, place.width, place.index):
                return Outcome(DROP, ("malformed",))
            if place.seen & bit:
                return Outcome(DROP, ("duplicate",))
        elif place is not None and place.tag > tag:
            return Outcome(DROP, ("round",))
        last = (0 if fresh or place is None else place.seen) | bit | mine == body.members
        if last:
            good = own.exponent == wire.NOT_FINITE
            good |= own.exponent - body.unit <= wire.MAX_SHIFT[width]
            if mine and not (self._is_offered(bank, own) and good):
                return Outcome(DROP, ("unready",))
            stored = self.sums.get((bank, body.index))
            if stored is not None and stored.tag >= tag:
                return Outcome(DROP, ("round",))
            if self.count.get(bank, (0, 0))[0] > tag:
                return Outcome(DROP, ("round",))
        lanes = np.frombuffer(payload, NATIVE[width]).astype(np.int64)
        by = min(body.exponent - body.unit, wire.MAX_SHIFT[width])
        if fresh or place is None:
            unit, empty = body.unit, np.zeros(LANES[width], np.int64)
            place = Gather(tag, body.members, body.index, body.fragments, width, unit, empty)
            self.gathers[bank, local] = place
        place.total = place.total + shifted(lanes, by)
        place.seen |= bit
        place.not_finite |= not finite
        if tag > self.announced[bank]:
            self.announced[bank] = tag
            bell = Bell(tag, body.members, 0, body.fragments, body.unit, self.channel)
            self.bells.append(bell)
        if not last:
            return Outcome(DROP, ("gathered",), heard=True)
        if mine:
            lanes = np.frombuffer(own.lanes, NATIVE[width]).astype(np.int64)
            by = min(own.exponent - body.unit, wire.MAX_SHIFT[width])
            place.total = place.total + shifted(lanes, by)
            place.seen |= mine
            place.not_finite |= own.exponent == wire.NOT_FINITE
        lanes, exponent, place.total = rounded(place.total, width, body.unit, place.not_finite)
        made = lanes.astype(NATIVE[width]).tobytes()
        self.sums[bank, body.index] = Stored(tag, exponent, made, rest=tag)
        self._counted(bank, tag, body.fragments)
        out = self._send(header, replace(body, exponent=exponent), FrameType.SUM, made, GROUP)
        return Outcome(TX, ("summed",), out, heard=True)

    def _is_offered(self, bank: int, own: Own) -> bool:
        return own.conversion != 0 and own.conversion == self.offered[bank]

    def _counted(self, bank: int, tag: int, fragments: int) -> None:
        before = self.count.get(bank, (0, 0))
        count = before[1] + 1 if before[0] == tag else 1
        self.count[bank] = (tag, count)
        left = fragments - count
        step = min(self.clock, max(4, self.clock // 16)) if left < self.clock else self.clock
        if not left or (step and count % step == 0):
            self.bells.append(Bell(tag, 0, count, fragments, 0, self.channel))

    def _store(self, header: wire.Header, body: wire.Contribution, payload: bytes) -> Outcome:
        alone = header.sender and body.members == bit_of(header.sender)
        if not alone and body.index not in self.stripe(header.sender, header, body):
            return Outcome(DROP, ("range",))
        if body.index >= min(body.fragments, self.room):
            return Outcome(DROP, ("range",))
        bank, tag = header.round & 1, header.view << 32 | header.round
        stored = self.sums.get((bank, body.index))
        if stored is not None and stored.tag >= tag:
            return Outcome(DROP, ("duplicate" if stored.tag == tag else "round",))
        if self.count.get(bank, (0, 0))[0] > tag:
            return Outcome(DROP, ("round",))
        self.sums[bank, body.index] = Stored(tag, body.exponent, payload)
        self._counted(bank, tag, body.fragments)
        out = self._send_next(header, body)
        if out is None:
            return Outcome(DROP, ("stored",), heard=True)
        return Outcome(TX, ("stored", "clocked"), out, heard=True)

    def _send_next(self, header: wire.Header, body: wire.Contribution) -> bytes | None:
        """The contribution that goes out as a sum of the same stripe has come."""
        bank, width = header.round & 1, self.width[header.round > self.rounds[0]]
        round_, index = self.sent.get((bank, header.sender), (0, 0))
        stripe = self.stripe(header.sender, header, body)
        own = self.own.get((bank, index))
        if not body.members >> self.number - 1 & 1 or body.width != width:
            return None
        if self.swallow.get((bank, header.sender)):
            self.swallow[bank, header.sender] -= 1
            return None
        if round_ != header.round or index >= min(stripe.stop, self.room):
            return None
        if own is None or not self._is_offered(bank, own):
            return None
        self.sent[bank, header.sender] = (round_, index + 1)
        finite = own.exponent != wire.NOT_FINITE
        if finite and own.exponent - body.unit > wire.MAX_SHIFT[width]:
            return None
        view, behind = (0, 0) if header.sender else self.rest[bank]
        body = replace(body, index=index, number=view, behind=behind, exponent=own.exponent)
        to = mac_of(header.sender)
        return self._send(header, body, FrameType.CONTRIBUTION, own.lanes, to)

    def _answer(self, header: wire.Header, body: wire.Contribution, payload: bytes) -> Outcome:
        mine = 1 << self.number - 1
        alone, stripe = body.members == mine, self.stripe(self.number, header, body)
        if not alone and body.index not in stripe:
            return Outcome(DROP, ("range",))
        local = 0 if alone else body.index - stripe.start
        out = body.index >= min(body.fragments, self.room) or local >= self.blocks * 8
        if out:
            return Outcome(DROP, ("range",))
        if not self.windows.setdefault(header.sender, Window()).answers_to(body.number):
            return Outcome(DROP, ("replayed",))
        bank, tag = header.round & 1, header.view << 32 | header.round
        own = self.own.get((bank, body.index), Own(0, 0, bytes(wire.PAYLOAD_BYTES)))
        stored = self.sums.get((bank, body.index))
        ready = self._is_offered(bank, own)
        if alone and ready:
            body, payload = replace(body, exponent=own.exponent), own.lanes
        elif not alone and stored is not None and stored.tag == tag:
            body, payload = replace(body, exponent=stored.exponent), stored.lanes
        else:
            place = self.gathers.get((bank, local))
            most = wire.MAX_SHIFT.get(body.width, 0)
            fits = own.exponent == wire.NOT_FINITE or own.exponent - body.unit <= most
            lacking = body.members & ~(mine if ready and fits else 0)
            if not alone and place and (place.tag, place.index) == (tag, body.index):
                lacking &= ~place.seen
            return self._answered(
                header, replace(body, members=lacking), FrameType.LACKING, payload
            )
        return self._answered(header, body, FrameType.SUM, payload)

    def _answered(
        self, header: wire.Header, body: wire.Contribution, kind: FrameType, payload: bytes
    ) -> Outcome:
        out = self._send(header, body, kind, payload, MACS[header.sender - 1])
        return Outcome(TX, ("answered",), out)

    def _send(
        self, header: wire.Header, body: Any, kind: FrameType, payload: bytes, to: bytes
    ) -> bytes:
        sequence = 0
        if self.key:
            self.answers += 1
            sequence = self.answers
        flags = Flag.ANSWER | wire.channel_flags(self.channel)
        own = replace(header, flags=flags, sender=self.number, sequence=sequence, tag=0)
        return signed(self.number, kind, own, body, payload, to, self.key)


class ChannelsModel:
    """One member's program, in all channels of a phase: only its answers are numbered in common.

    Args:
        channels: the model of each, with its number; view, members, ranks and key are the same in all.
    """

    def __init__(self, channels: Sequence[StripesModel]) -> None:
        self.channels = tuple(channels)
        assert [model.channel for model in self.channels] == list(range(len(self.channels)))
        self.bells = self.first.bells
        for model in self.channels:
            model.bells = self.bells

    @property
    def first(self) -> StripesModel:
        """Of channel 0."""
        return self.channels[0]

    def run(self, frame: bytes) -> Outcome:
        """`StripesModel.run` of the frame's channel."""
        flags = int.from_bytes(frame[wire.ETHERNET_BYTES + 2 :][:2], "big")
        channel = wire.channel_of(flags)
        model = self.channels[channel] if channel < len(self.channels) else self.first
        outcome = model.run(frame)
        for other in self.channels:
            other.answers = model.answers
        return outcome
