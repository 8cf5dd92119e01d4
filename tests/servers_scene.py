# SPDX-License-Identifier: Apache-2.0
"""Random sequences for parameter servers: steps of several workers, contributions, pulls and answers, in and out of
order, twice, damaged, and of other rounds.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from nicps import wire
from nicps.wire import Flag, FrameType
from tests.servers import KINDS, Home, Stored, pieces, signed
from tests.servers_model import ServersModel
from tests.stripes import LANES, MACS, NATIVE, NETWORK, bit_of


class Scene:
    """A member, and what it hears: random, from a seed. `go_on` leads to later rounds, views and phases."""

    def __init__(self, seed: int) -> None:
        rng = self.rng = np.random.default_rng(seed)
        count = int(rng.integers(2, 6))
        live = range(1, count + 1)
        self.live = frozenset(live)
        self.number = int(rng.choice(live))
        self.others = sorted(self.live - {self.number})
        width = int(rng.choice([8, 16, 32]))
        view, round_ = int(rng.integers(1, 5)), int(rng.integers(1, 9))
        self.key = rng.bytes(16) if rng.random() < 0.4 else b""
        self.sequence = dict.fromkeys(self.live, 0)
        self.step = dict.fromkeys(self.live, 1)
        self.sent: list[bytes] = []
        order = rng.permutation(live).tolist()
        servers = tuple(order[: int(rng.integers(1, 4))])
        if self.number not in servers and rng.random() < 0.7:
            servers = (self.number, *servers[1:])
        self.model = ServersModel(
            self.number,
            self.live,
            servers,
            width,
            int(rng.integers(1, 13)),
            view,
            (round_, round_ + 1),
            by_staleness=bool(rng.random() < 0.8),
            passes=frozenset(k for k in self.others if rng.random() < 0.2),
            averages=bool(rng.random() < 0.9),
            key=self.key,
            clock=int(rng.integers(6)),
        )
        self.model.version = (round_ - int(rng.random() < 0.1), int(rng.integers(4)))
        self._fill()
        self._choose()

    def _fill(self) -> None:
        """Parameters of the part, and a store if this host is a worker."""
        model, rng = self.model, self.rng
        lanes = LANES[model.width]
        for local in range(len(model.part(self.number))):
            scale = 1 << int(rng.choice([5, 30, 50, 61]))
            values = rng.integers(-scale, scale, lanes)
            model.homes[local] = Home(values, np.zeros(lanes, np.int64))
        if rng.random() < 0.7:
            model.store = {place: Stored() for place in range(model.room)}
            model.taken = dict.fromkeys(range(model.fragments), 0)

    def _choose(self) -> None:
        """Another list."""
        chosen = [k for k in self.live if self.rng.random() < 0.6]
        self.list = sum(map(bit_of, chosen)) or bit_of(self.others[0])

    def go_on(self) -> bool:
        """The round is committed, or another view begins. Whether another phase does, in which no step counts."""
        model, rng = self.model, self.rng
        round_, kind = model.rounds[0], rng.random()
        if kind < 0.6:
            if rng.random() < 0.8:
                model.settled = round_
            model.rounds = round_ + 1, round_ + 2
            model.version = round_ + 1, 0
        else:
            model.view += 1
            if self.key:
                model.windows.clear()
                model.pulls.clear()
                self.sequence = dict.fromkeys(self.live, 0)
                model.answers = 0
        if kind > 0.9:
            for home in model.homes.values():
                home.last.clear()
                home.due &= home.tag & 0xFFFFFFFF <= model.settled
            model.pushers.clear()
            model.counts.clear()
            model.version = model.rounds[0], 0
        self._choose()
        return kind > 0.9

    def frames(self, count: int) -> Iterator[bytes]:
        """Frames that fit more or less, and old ones again."""
        for _ in range(count):
            if self.sent and self.rng.random() < 0.12:
                yield self.sent[int(self.rng.integers(max(0, len(self.sent) - 30), len(self.sent)))]
                continue
            self.sent.append(self._frame())
            yield self.sent[-1]

    def _lanes(self, width: int) -> bytes:
        most, kind = 1 << width - 1, self.rng.random()
        if kind < 0.2:
            found = np.full(LANES[width], self.rng.choice([-most, most - 1, 0]))
        elif kind < 0.3:
            found = self.rng.integers(-3, 4, LANES[width])
        else:
            found = self.rng.integers(-most, most, LANES[width])
        return found.astype(NATIVE[width]).tobytes()

    def _exponent(self, width: int) -> int:
        """Mostly such that something is left of the lanes; at times the largest, or one too large."""
        most, kind = 22 - width, self.rng.random()
        if kind < 0.1:
            return most + int(kind < 0.03)
        if kind < 0.2:
            return int(self.rng.integers(-128, most + 1))
        return int(self.rng.integers(most - 40, most + 1))

    def _frame(self) -> bytes:
        rng, model = self.rng, self.model
        odd = rng.random() < 0.1
        kind = FrameType(rng.choice(KINDS, p=[0.34, 0.2, 0.22, 0.12, 0.12]))
        sender = int(rng.choice(self.others if rng.random() < 0.98 else sorted(self.live)))
        answers = kind in (FrameType.HELD, FrameType.TAKEN)
        servers = [k for k in model.servers if k != self.number]
        if answers and servers and rng.random() < 0.9:
            sender = int(rng.choice(servers))
        if odd and rng.random() < 0.1:
            kind = FrameType(rng.choice([FrameType.SUM, FrameType.ASK]))
        self.sequence[sender] += 1 if rng.random() < 0.98 else int(rng.integers(1, 1500))
        header = wire.Header(
            network=NETWORK,
            view=model.view + (odd and rng.random() < 0.2),
            round=model.rounds[0] + (int(rng.integers(-1, 3)) if odd else 0),
            sender=sender,
            flags=(Flag.ANSWER if answers or rng.random() < 0.1 else 0)
            | wire.channel_flags(int(rng.choice([0, 0, 0, 7]))),
            sequence=self.sequence[sender] if self.key else 0,
        )
        asker = self.number if answers else sender
        if rng.random() < 0.15:
            self.step[asker] += int(rng.integers(1, 3))
        number = max(0, self.step[asker] - int(odd and rng.random() < 0.5) * int(rng.integers(4)))
        body = self._body(kind, header, number, odd)
        short = kind == FrameType.TAKEN
        if odd and rng.random() < 0.1:
            short = not short
        payload = b"" if short else self._lanes(body.width if body.width in NATIVE else 8)
        everybody = odd and rng.random() < 0.2
        to = MACS[sender - 1] if everybody else MACS[self.number - 1]
        frame = signed(sender, header, body, payload, to, self.key)
        if odd and rng.random() < 0.2:
            frame = frame[:11] + bytes([frame[11] ^ 1]) + frame[12:]
        if odd and self.key and rng.random() < 0.3:
            frame = frame[:-1] + bytes([frame[-1] ^ 1])
        return frame

    def _body(self, kind: FrameType, header: wire.Header, number: int, odd: bool) -> Any:
        rng, model = self.rng, self.model
        pulls = kind in (FrameType.PULL, FrameType.HELD)
        reason = int(rng.integers(1, 5)) if kind == FrameType.TAKEN and rng.random() < 0.2 else 0
        width = 32 if pulls else model.width
        fragments = model.room if pulls else model.fragments
        holder = header.sender if kind in (FrameType.HELD, FrameType.TAKEN) else self.number
        each = pieces(model.width) if pulls else 1
        part = model.part(holder)
        places = range(part.start * each, min(part.stop * each, fragments))
        if odd or not len(places) or (pulls and rng.random() < 0.2):
            places = range(fragments + 1)
        index = int(rng.choice(places))
        if odd and rng.random() < 0.15:
            fragments += int(rng.choice([-1, 1]))
        if odd and rng.random() < 0.15:
            width = int(rng.choice([0, 8, 16, 32, 64]))
        exponent = self._exponent(width) if width in NATIVE else -20
        if kind in (FrameType.CONTRIBUTION, FrameType.SUM, FrameType.ASK):
            members = self.list | bit_of(header.sender)
            members |= (1 << 40) * int(odd and rng.random() < 0.2)
            if not odd or rng.random() < 0.5:
                members = self.list
            cls = wire.FORMATS[kind][0]
            return cls(members, index, max(fragments, 0), number, width, exponent, 0, 0)  # type: ignore[call-arg]
        version = int(rng.integers(model.whole(header.round) + 1 + int(odd)))
        staleness = int(rng.integers(3)) if holder != self.number else 0
        cls = wire.FORMATS[kind][0]
        return cls(version, number, index, max(fragments, 0), staleness, width, exponent, reason)  # type: ignore[call-arg]
