# SPDX-License-Identifier: Apache-2.0
"""What the XDP program of a Linux switch does, in Python: written from docs/linux-switch.md, not from the C.

Its arithmetic is that of stripes (tests/stripes.py). And random sequences for it: rounds that follow each other and
that are run again, in one view and in others, with and without the remainders of the one before.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from nicps import wire
from nicps.dataplane.switch import Differing, Message, OtherView, TooLong, Version
from nicps.wire import Flag, FrameType
from tests.model import DROP, PASS, TX, Outcome
from tests.stripes import (
    GROUP,
    I64,
    LANES,
    MACS,
    NATIVE,
    NETWORK,
    Window,
    doubt,
    rounded,
    shifted,
    signed,
)

REDIRECT = "redirect"
#: So far above the unit may a remainder's exponent be, by how many are on the list.
REST_ROOM = {most: 61 if most <= 32 else 57 for most in range(1, 64)}


@dataclass
class Place:
    """One of a fragment's two."""

    tag: int
    members: int
    fragments: int
    unit: int
    view: int  # with `behind`: that of the round whose remainder belongs to this one
    behind: int
    total: I64
    carried: I64  # of the round before, in this round's units
    seen: int = 0
    not_finite: bool = False
    exponent: int = 0
    lanes: bytes = b""

    @property
    def whole(self) -> bool:
        return self.seen == self.members

    @property
    def version(self) -> Version:
        return Version(self.members, self.fragments, self.unit, self.view, self.behind)


@dataclass
class SwitchModel:
    """The program, with room for vectors of `room` fragments."""

    live: frozenset[int]
    room: int
    width: int
    view: int
    enabled: bool = True
    key: bytes = b""
    places: dict[int, list[Place | None]] = field(default_factory=dict)
    windows: dict[int, Window] = field(default_factory=dict)
    answers: int = 0  # the last number that was given to one
    messages: list[Message] = field(default_factory=list)
    told_room: int = 0
    told_view: int | None = None
    told_tag: int = 0

    def run(self, frame: bytes) -> Outcome:
        """One frame of ours, from its Ethernet header on."""
        ours = frame[wire.ETHERNET_BYTES :]
        if frame[:6] != wire.SWITCH or len(ours) < wire.HEADER_BYTES:
            return Outcome(PASS)
        header = wire.Header(*wire.Layout.of(wire.Header).struct.unpack_from(ours))
        asks = header.type == FrameType.ASK
        if header.version != wire.VERSION or header.network != NETWORK:
            return Outcome(PASS)
        if header.type != FrameType.CONTRIBUTION and not asks:
            return Outcome(PASS)
        length = wire.CONTRIBUTION_HEADER_BYTES + wire.PAYLOAD_BYTES
        if len(ours) < length or header.length != length:
            return Outcome(DROP, ("truncated",))
        if not self.enabled or header.view != self.view:
            self._tell_view(header.view)
            return Outcome(DROP, ("view" if self.enabled else "disabled",))
        if header.sender not in self.live or frame[6:12] != MACS[header.sender - 1]:
            return Outcome(DROP, ("stranger",))
        if wire.channel_of(header.flags):
            return Outcome(DROP, ("mode",))
        if reason := doubt(self.windows, self.key, ours, header):
            return Outcome(DROP, (reason,))
        values = wire.Layout.of(wire.Contribution).struct.unpack_from(ours, wire.HEADER_BYTES)
        body = wire.Contribution(*values)
        payload = ours[wire.CONTRIBUTION_HEADER_BYTES : header.length]
        if asks:
            return self._answer(header, body, payload)
        return self._add(header, body, payload)

    def _tell_view(self, view: int) -> None:
        if view != self.told_view:
            self.told_view = view
            self.messages.append(OtherView(view))

    def _beyond(self, body: wire.Contribution) -> bool:
        if body.fragments > max(self.room, self.told_room):
            self.told_room = body.fragments
            self.messages.append(TooLong(body.fragments))
        return body.fragments > self.room or body.index >= body.fragments

    def _strangers(self, members: int) -> int:
        return members & ~sum(1 << number - 1 for number in self.live)

    def _add(self, header: wire.Header, body: wire.Contribution, payload: bytes) -> Outcome:
        tag, bit = header.view << 32 | header.round, 1 << header.sender - 1
        rest = (body.number << 32) + header.round - body.behind if body.behind else 0
        wrong = not body.members & bit or self._strangers(body.members) or body.width != self.width
        if wrong or (rest and (body.behind >= header.round or rest >= tag)):
            return Outcome(DROP, ("malformed",))
        finite = body.exponent != wire.NOT_FINITE
        if finite and body.exponent - body.unit > wire.MAX_SHIFT[body.width]:
            return Outcome(DROP, ("shift",))
        if self._beyond(body):
            return Outcome(DROP, ("range",))
        pair = self.places.setdefault(body.index, [None, None])
        said = Version(body.members, body.fragments, body.unit, body.number, body.behind)
        more: tuple[str, ...] = ()
        at = next((at for at, place in enumerate(pair) if place and place.tag == tag), None)
        if at is None:
            tags = [place.tag if place else 0 for place in pair]
            free = [at for at in range(2) if tags[at] < tag and (not rest or tags[at] != rest)]
            if not free:
                return Outcome(DROP, ("round",))
            at = min(free, key=lambda at: tags[at])
            carried = np.zeros(LANES[self.width], np.int64)
            if rest:
                left = self._rest(pair[1 - at], rest, said)
                carried, more = (carried, ("left_out",)) if left is None else (left, ())
            place = Place(
                tag,
                said.members,
                said.fragments,
                said.unit,
                said.view,
                said.behind,
                carried,
                carried,
            )
            pair[at] = place
        else:
            found = pair[at]
            assert found is not None
            place = found
            if place.seen & bit:
                return Outcome(DROP, ("duplicate",))
            if place.version != said:
                if self.told_tag != tag:
                    self.told_tag = tag
                    who = header.view, header.round, body.index, header.sender
                    self.messages.append(Differing(*who, place.version, said))
                return Outcome(DROP, ("malformed",))
        lanes = np.frombuffer(payload, NATIVE[self.width]).astype(np.int64)
        by = min(body.exponent - body.unit, wire.MAX_SHIFT[self.width])
        place.total = place.total + shifted(lanes, by)
        place.seen |= bit
        place.not_finite |= not finite
        if not place.whole:
            return Outcome(DROP, ("gathered", *more))
        made, place.exponent, place.total = rounded(
            place.total, self.width, body.unit, place.not_finite
        )
        place.lanes = made.astype(NATIVE[self.width]).tobytes()
        body = replace(body, exponent=place.exponent, number=0, behind=0)
        out = self._send(header, body, FrameType.SUM, place.lanes, GROUP)
        return Outcome(REDIRECT, ("summed", *more), out)

    def _rest(self, former: Place | None, rest: int, said: Version) -> I64 | None:
        """What is left over of that round, in units of this; None: it is not there, or there is no room for it."""
        if former is None or former.tag != rest or not former.whole:
            return None
        if former.fragments != said.fragments:
            return None
        if former.exponent == wire.NOT_FINITE:
            return np.zeros_like(former.total)
        if former.exponent - said.unit > REST_ROOM.get(said.members.bit_count(), -1000):
            return None
        return shifted(former.total, former.unit - said.unit)

    def _answer(self, header: wire.Header, body: wire.Contribution, payload: bytes) -> Outcome:
        tag = header.view << 32 | header.round
        if not body.members or self._strangers(body.members) or body.width != self.width:
            return Outcome(DROP, ("malformed",))
        if self._beyond(body):
            return Outcome(DROP, ("range",))
        pair = self.places.get(body.index, [None, None])
        place = next((place for place in pair if place and place.tag == tag), None)
        if place is None and all(one and one.tag > tag for one in pair):
            return Outcome(DROP, ("round",))
        said = body.members, body.fragments, body.unit
        if place and said != (place.members, place.fragments, place.unit):
            return Outcome(DROP, ("malformed",))
        if not self.windows.setdefault(header.sender, Window()).answers_to(body.number):
            return Outcome(DROP, ("replayed",))
        body = replace(body, behind=0)
        to = MACS[header.sender - 1]
        if place and place.whole:
            body = replace(body, exponent=place.exponent)
            out = self._send(header, body, FrameType.SUM, place.lanes, to)
        else:
            body = replace(body, members=body.members & ~(place.seen if place else 0))
            out = self._send(header, body, FrameType.LACKING, payload, to)
        return Outcome(TX, ("answered",), out)

    def _send(
        self,
        header: wire.Header,
        body: wire.Contribution,
        kind: FrameType,
        payload: bytes,
        to: bytes,
    ) -> bytes:
        self.answers += bool(self.key)
        sequence = self.answers if self.key else 0
        own = replace(header, flags=Flag.ANSWER, sender=0, sequence=sequence, tag=0)
        return signed(0, kind, own, body, payload, to, self.key)


class SwitchScene:
    """A switch, and what comes to it: random, from a seed. `go_on` leads to later rounds and views."""

    def __init__(self, seed: int) -> None:
        rng = self.rng = np.random.default_rng(seed)
        count = 64 if rng.random() < 0.02 else int(rng.integers(2, 6))
        away = {int(rng.integers(1, count + 1))} if count > 2 and rng.random() < 0.3 else set()
        self.live = frozenset(range(1, count + 1)) - away
        self.view, self.round = int(rng.integers(1, 5)), int(rng.integers(1, 9))
        self.key = rng.bytes(16) if rng.random() < 0.4 else b""
        self.width = int(rng.choice([8, 16, 32]))
        self.sequence = dict.fromkeys(self.live, 0)
        self.sent: list[bytes] = []
        self.rest: tuple[int, int] | None = None  # view and round of the one that was committed
        room = int(rng.integers(1, 7))
        enabled = bool(rng.random() < 0.97)
        self.model = SwitchModel(self.live, room, self.width, self.view, enabled, self.key)
        self.fragments = int(rng.integers(1, room + 1))
        self._choose()

    def _choose(self) -> None:
        """Another list and unit; mostly the same size."""
        rng = self.rng
        chosen = [k for k in self.live if rng.random() < 0.8]
        self.list = sum(1 << k - 1 for k in chosen) or 1 << min(self.live) - 1
        if rng.random() < 0.1:
            self.fragments = int(rng.integers(1, self.model.room + 1))
        near = int(rng.integers(-4, 5)) if rng.random() < 0.7 else int(rng.integers(-70, 71))
        start = getattr(self, "unit", int(rng.integers(-120, 78)))
        self.unit = min(max(start + near, -120), 77)

    def go_on(self) -> None:
        """The round is committed, dropped or run again, in this view or in the next one."""
        rng, model = self.rng, self.model
        kind = rng.random()
        if kind < 0.6:
            self.rest = (self.view, self.round)
        if rng.random() < 0.3:
            self.view += 1
            model.view = self.view
        if kind < 0.8:
            self.round += 1 if rng.random() < 0.9 else int(rng.integers(1, 4))
        self._choose()

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
        if kind < 0.02:
            return wire.NOT_FINITE
        low = self.unit - 70 if kind < 0.2 else self.unit
        high = min(self.unit + wire.MAX_SHIFT[width], 126)
        return high if kind > 0.9 else int(self.rng.integers(max(low, -120), high + 1))

    def frames(self, count: int) -> Iterator[bytes]:
        """Mostly contributions that are lacking; and questions, odd ones, and old ones again."""
        for _ in range(count):
            if self.sent and self.rng.random() < 0.1:
                yield self.sent[int(self.rng.integers(len(self.sent)))]
                continue
            self.sent.append(self._frame())
            yield self.sent[-1]

    def _lacking(self) -> tuple[int, int] | None:
        """Of the open round: a member on the list, and a fragment for which it has not contributed."""
        tag, found = self.view << 32 | self.round, []
        for index in range(self.fragments):
            pair = self.model.places.get(index, [])
            seen = next((place.seen for place in pair if place and place.tag == tag), 0)
            found += [(k, index) for k in sorted(self.live) if (self.list & ~seen) >> k - 1 & 1]
        return found[int(self.rng.integers(len(found)))] if found else None

    def _frame(self) -> bytes:
        rng = self.rng
        odd = rng.random() < 0.15
        kind = FrameType.ASK if rng.random() < 0.15 else FrameType.CONTRIBUTION
        sender, index = int(rng.choice(sorted(self.live))), int(rng.integers(self.fragments))
        if kind == FrameType.CONTRIBUTION and (lacking := self._lacking()) and rng.random() < 0.9:
            sender, index = lacking
        self.sequence[sender] += 1 if rng.random() < 0.98 else int(rng.integers(1, 1500))
        header = wire.Header(
            network=NETWORK + (odd and rng.random() < 0.05),
            view=max(self.view + (int(rng.integers(-1, 2)) if odd else 0), 0),
            round=max(self.round + (int(rng.integers(-2, 3)) if odd else 0), 0),
            sender=sender if not odd or rng.random() < 0.9 else int(rng.choice([0, 3, 65, 300])),
            flags=Flag.ANSWER if rng.random() < 0.3 else 0,
            sequence=self.sequence[sender] if self.key else 0,
        )
        view, behind = 0, 0
        if self.rest is not None and self.rest[1] < header.round:
            view, behind = self.rest[0], header.round - self.rest[1]
        if odd and rng.random() < 0.3:
            view, behind = int(rng.integers(self.view + 2)), int(rng.integers(0, 5))
        if kind == FrameType.ASK:
            view = max(0, self.sequence[sender] - (odd and int(rng.integers(40))))
            behind = int(rng.integers(256)) if odd else 0
        width = self.width if not odd or rng.random() < 0.9 else int(rng.choice([0, 8, 16, 32, 64]))
        body = wire.Contribution(
            members=self.list | (odd and rng.random() < 0.3 and 1 << int(rng.integers(6))),
            index=index + (odd and rng.random() < 0.1 and self.fragments),
            fragments=self.fragments + (odd and rng.random() < 0.2 and int(rng.integers(9))),
            number=view,
            width=width,
            exponent=self._exponent(self.width) if not odd else int(rng.integers(-128, 128)),
            unit=self.unit + (odd and rng.random() < 0.2),
            behind=behind,
        )
        if odd and rng.random() < 0.1:
            body = replace(body, members=0)
        everybody = odd and rng.random() < 0.1
        to = GROUP if everybody else wire.SWITCH
        source = header.sender if header.sender <= wire.MAX_MEMBERS else 1
        frame = signed(source, kind, header, body, self._lanes(self.width), to, self.key)
        damage = rng.random() if odd else 1.0
        if damage < 0.1:
            frame = frame[:11] + bytes([frame[11] ^ 1]) + frame[12:]
        elif damage < 0.2 and self.key:
            frame = frame[:-1] + bytes([frame[-1] ^ 1])
        elif damage < 0.25:
            frame = frame[: int(rng.integers(60, len(frame)))]
        elif damage < 0.28:
            frame = frame[:15] + bytes([FrameType.SUM]) + frame[16:]
        return frame
