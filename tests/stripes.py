# SPDX-License-Identifier: Apache-2.0
"""What the XDP program does with stripes, in Python: written from docs/stripes.md, not from the C.

And random sequences for it: contributions of several members, in and out of order, twice, damaged, of old rounds and
of lists that differ, sums of other aggregators, and questions.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nicps import wire
from nicps.dataplane.doorbell import Bell
from nicps.wire import Flag, FrameType
from tests.model import DROP, PASS, REPLAY_WINDOW, TX, Outcome, tag_of

NETWORK = 0x0A0B0C0D
GROUP = bytes.fromhex("036e69637073")
MACS = [bytes((2, 0, 0, 0, 0, number)) for number in range(1, 65)]
NATIVE = {8: ">i1", 16: ">i2", 32: ">i4"}
LANES = {width: wire.lanes_per_fragment(width) for width in NATIVE}
PER_BLOCK = {width: wire.fragments_per_block(width) for width in NATIVE}
KINDS = (FrameType.CONTRIBUTION, FrameType.SUM, FrameType.ASK, FrameType.LACKING)
I64 = NDArray[np.int64]


def mac_of(number: int) -> bytes:
    """A member's address; number 0 is a switch that adds."""
    return MACS[number - 1] if number else wire.SWITCH


def bit_of(number: int) -> int:
    """A member's in a list; a switch has none."""
    return 1 << number - 1 if number else 0


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
class Window:
    """A member's highest numbers by the two ways out, and which of its questions have been answered."""

    highest: int = 0
    answers: int = 0
    newest: int = 0
    asked: set[int] = field(default_factory=lambda: {0})  # numbers begin at 1

    def answers_to(self, number: int) -> bool:
        """Whether this question is answered; then it is not any more."""
        if number <= self.newest and (number in self.asked or number < self.newest - 32):
            return False
        self.newest = max(self.newest, number)
        self.asked.add(number)
        return True


def doubt(windows: dict[int, Window], key: bytes, ours: bytes, header: wire.Header) -> str | None:
    """Why a frame is not believed, from the version byte on; its number counts if it is."""
    if not key:
        return None
    window = windows.setdefault(header.sender, Window())
    way = "answers" if header.flags & Flag.ANSWER else "highest"
    highest = getattr(window, way)
    if header.sequence + REPLAY_WINDOW <= highest:
        return "replayed"
    if header.tag != tag_of(ours, header.length, key):
        return "forged"
    setattr(window, way, max(highest, header.sequence))
    return None


def bound(fragments: int, rank: int, aggregators: int) -> int:
    """Where the stripe of rank + 1 begins."""
    return fragments * rank // aggregators


def shifted(lanes: I64, by: int) -> I64:
    """Lanes in units."""
    return lanes << by if by >= 0 else lanes >> min(-by, 63)


def rounded(total: I64, width: int, unit: int, not_finite: bool) -> tuple[I64, int, I64]:
    """Lanes, their exponent and what is left over."""
    bits = int(np.bitwise_or.reduce(total ^ (total >> 63))).bit_length()
    shift = max(0, bits - (width - 1))
    half = 1 << (shift - 1) if shift else 0
    lanes = np.minimum((total + half) >> shift, (1 << (width - 1)) - 1)
    if not_finite or unit + shift > 126:
        return lanes, wire.NOT_FINITE, np.zeros_like(total)
    return lanes, unit + shift, total - (lanes << shift)


@dataclass
class StripesModel:
    """One member's program.

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

    def ranks_in(self, round_: int) -> dict[int, int]:
        """Of the aggregators in that round."""
        return self.ranks[round_ > self.rounds[0]]

    def aggregators(self, round_: int) -> int:
        """How many there are; 0: it is not striped."""
        return sum(rank > 0 for rank in self.ranks_in(round_).values())

    def run(self, frame: bytes) -> Outcome:
        """One frame from its Ethernet header on, of this network, whole, and of a type of stripes."""
        ours = frame[wire.ETHERNET_BYTES :]
        header = wire.Header(*wire.Layout.of(wire.Header).struct.unpack_from(ours))
        sender = header.sender
        if header.view != self.view:
            return Outcome(DROP, ("view",))
        if sender == self.number:
            return Outcome(DROP, ("echo",))
        known = (
            self.switch and self.ranks_in(header.round).get(0)
            if not sender
            else sender in self.live
        )
        if not known or frame[6:12] != mac_of(sender):
            return Outcome(DROP, ("stranger",))
        if header.length != wire.CONTRIBUTION_HEADER_BYTES + wire.PAYLOAD_BYTES:
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
            self.bells.append(Bell(tag, body.members, 0, body.fragments, body.unit))
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
            self.bells.append(Bell(tag, 0, count, fragments, 0))

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
        own = replace(header, flags=Flag.ANSWER, sender=self.number, sequence=sequence, tag=0)
        return signed(self.number, kind, own, body, payload, to, self.key)


def signed(
    sender: int,
    kind: FrameType,
    header: wire.Header,
    body: wire.Contribution,
    payload: bytes,
    to: bytes,
    key: bytes,
) -> bytes:
    """A frame of stripes, with its tag where there is a key."""
    values = [getattr(body, name) for name in wire.Layout.of(wire.Contribution).names]
    frame = wire.pack(header, wire.FORMATS[kind][0](*values), tail=payload)
    return addressed(frame, sender, to, key)


def addressed(frame: bytes, sender: int, to: bytes, key: bytes) -> bytes:
    """A member's frame on the cable, with its tag where there is a key."""
    if key:
        tag = tag_of(frame, len(frame), key)
        frame = frame[:24] + tag.to_bytes(8, "big") + frame[32:]
    return wire.ethernet(mac_of(sender), frame, to)


class Scene:
    """A member, and what it hears: random, from a seed. `go_on` leads to later rounds and views."""

    def __init__(self, seed: int) -> None:
        rng = self.rng = np.random.default_rng(seed)
        count = int(rng.integers(2, 6))
        self.live = frozenset(range(1, count + 1)) - (
            {int(rng.integers(1, count + 1))} if count > 2 and rng.random() < 0.3 else set()
        )
        self.number = int(rng.choice(sorted(self.live)))
        self.others = sorted(self.live - {self.number})
        self.view, self.round = int(rng.integers(1, 5)), int(rng.integers(1, 9))
        self.key = rng.bytes(16) if rng.random() < 0.5 else b""
        self.sequence = dict.fromkeys({0, *self.live}, 0)
        self.sent: list[bytes] = []
        width = int(rng.choice([8, 16, 32]))
        self.model = StripesModel(
            self.number,
            self.live,
            (self._ranks(), self._ranks()),
            (width, width if rng.random() < 0.9 else int(rng.choice([8, 16, 32]))),
            room=int(rng.integers(1, 9)),
            blocks=int(rng.integers(4, 9)),
            view=self.view,
            rounds=(self.round, self.round + 1),
            key=self.key,
            clock=int(rng.integers(4)),
            switch=bool(rng.random() < 0.9),
        )
        self._choose()

    def _ranks(self) -> dict[int, int]:
        kind = self.rng.random()
        if kind < 0.2:
            return dict.fromkeys(self.live, 0) | ({0: 1} if kind > 0.05 else {})
        full = [k for k in sorted(self.live) if self.rng.random() < 0.7 or k == self.number]
        if self.rng.random() < 0.1:
            full.remove(self.number)
        return {k: full.index(k) + 1 if k in full else 0 for k in self.live}

    def _choose(self) -> None:
        """Another list, unit and size."""
        self.list = self._list()
        self.fragments = int(self.rng.integers(1, 10))
        self.model.rest = [
            (int(self.rng.integers(self.view + 1)), int(self.rng.integers(256))) for _ in range(2)
        ]
        self.unit = int(self.rng.integers(-120, 78)) if self.rng.random() < 0.8 else 76

    def go_on(self) -> None:
        """Two rounds later, in the same bank, or in another view."""
        model, rng = self.model, self.rng
        if rng.random() < 0.7:
            self.round += int(rng.integers(1, 3))
            model.ranks = (model.ranks[1], self._ranks())
            model.width = (model.width[1], model.width[0])
        else:
            self.view += 1
            model.ranks = (self._ranks(), self._ranks())
        model.view, model.rounds = self.view, (self.round, self.round + 1)
        self._choose()

    def _list(self) -> int:
        chosen = [k for k in self.live if self.rng.random() < 0.7]
        return sum(1 << k - 1 for k in chosen) or 1 << self.number - 1

    def _lanes(self, width: int) -> bytes:
        most = 1 << width - 1
        kind, shape = self.rng.random(), LANES[width]
        if kind < 0.2:
            found = np.full(shape, self.rng.choice([-most, most - 1, 0]))
        elif kind < 0.3:
            found = self.rng.integers(-3, 4, shape)
        else:
            found = self.rng.integers(-most, most, shape)
        return found.astype(NATIVE[width]).tobytes()

    def _exponent(self, width: int) -> int:
        kind = self.rng.random()
        if kind < 0.05:
            return wire.NOT_FINITE
        low = self.unit - 70 if kind < 0.2 else self.unit
        high = min(self.unit + wire.MAX_SHIFT[width], 126)
        return high if kind > 0.8 else int(self.rng.integers(max(low, -120), high + 1))

    def write_own(self) -> None:
        """The training program converts, for an offer that counts or for none."""
        model = self.model
        for bank in range(2):
            conversion = int(self.rng.integers(1, 3))
            width = model.width[(self.round & 1) != bank]
            for index in range(model.room):
                if self.rng.random() < 0.9:
                    own = Own(conversion, self._exponent(width), self._lanes(width))
                    model.own[bank, index] = own
            model.offered[bank] = conversion if self.rng.random() < 0.9 else 3
            for number in (0, *self.others):
                if self.rng.random() < 0.7:
                    round_ = self.round + int(self.round & 1 != bank)
                    model.sent[bank, number] = round_, int(self.rng.integers(model.room))

    def frames(self, count: int) -> Iterator[bytes]:
        """Frames that fit more or less, and old ones again."""
        for _ in range(count):
            if self.sent and self.rng.random() < 0.1:
                yield self.sent[int(self.rng.integers(len(self.sent)))]
                continue
            self.sent.append(self._frame())
            yield self.sent[-1]

    def _frame(self) -> bytes:
        rng, model = self.rng, self.model
        sender = int(rng.choice(self.others if rng.random() < 0.98 else sorted(self.live)))
        kind = FrameType(rng.choice(KINDS, p=[0.65, 0.15, 0.17, 0.03]))
        odd = rng.random() < 0.1
        later = int(rng.integers(-1 if odd else 0, 3 if odd else 2))
        adds = bool(model.ranks_in(self.round + later).get(0))
        if kind in (FrameType.SUM, FrameType.LACKING) and rng.random() < (0.9 if adds else 0.05):
            sender = 0
        self.sequence[sender] += 1 if rng.random() < 0.98 else int(rng.integers(1, 1500))
        header = wire.Header(
            network=NETWORK,
            view=self.view + (odd and rng.random() < 0.2),
            round=self.round + later,
            sender=sender,
            flags=Flag.ANSWER if rng.random() < 0.3 else 0,
            sequence=self.sequence[sender] if self.key else 0,
        )
        width = model.width[header.round > self.round]
        alone = kind in (FrameType.SUM, FrameType.ASK) and rng.random() < 0.1
        body = wire.Contribution(
            members=self.list | (odd and 1 << int(rng.integers(6))),
            index=0,
            fragments=self.fragments + (odd and rng.random() < 0.2),
            number=max(0, self.sequence[sender] - (odd and int(rng.integers(40)))),
            width=width if not odd or rng.random() < 0.8 else int(rng.choice([0, 8, 16, 32])),
            exponent=self._exponent(width) if not odd else int(rng.integers(-120, 128)),
            unit=self.unit + (odd and rng.random() < 0.2),
        )
        if alone:
            body = replace(body, members=bit_of(sender if kind == FrameType.SUM else self.number))
        holder = sender if kind == FrameType.SUM else self.number
        stripe = model.stripe(holder, header, body) if model.aggregators(header.round) else range(0)
        anywhere = odd or not len(stripe)
        places = range(self.fragments + 1) if anywhere else stripe
        body = replace(body, index=int(rng.choice(places)))
        everybody = kind == FrameType.SUM or (odd and rng.random() < 0.3)
        to = GROUP if everybody else MACS[self.number - 1]
        payload = self._lanes(body.width or 8)
        frame = signed(sender, kind, header, body, payload, to, self.key)
        if odd and rng.random() < 0.2:
            frame = frame[:11] + bytes([frame[11] ^ 1]) + frame[12:]
        if odd and self.key and rng.random() < 0.2:
            frame = frame[:-1] + bytes([frame[-1] ^ 1])
        return frame
