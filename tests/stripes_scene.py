# SPDX-License-Identifier: Apache-2.0
"""Random sequences for stripes: contributions of several members, in and out of order, twice, damaged, of old rounds
and of lists that differ, sums of other aggregators, and questions.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from nicps import wire
from nicps.wire import Flag, FrameType
from tests.stripes import GROUP, KINDS, LANES, MACS, NATIVE, NETWORK, bit_of, signed
from tests.stripes_model import ChannelsModel, Own, StripesModel


class Scene:
    """A member, and what it hears: random, from a seed. `go_on` leads to later rounds and views.

    Args:
        like: the scene of channel 0, if this is of another one.
    """

    def __init__(self, seed: Any, like: Scene | None = None, channel: int = 0) -> None:
        rng = self.rng = np.random.default_rng(seed)
        self._of_channels = np.random.default_rng((1, *np.atleast_1d(seed)))
        self.channel = channel
        count = int(rng.integers(2, 6))
        self.live = frozenset(range(1, count + 1)) - (
            {int(rng.integers(1, count + 1))} if count > 2 and rng.random() < 0.3 else set()
        )
        self.number = int(rng.choice(sorted(self.live)))
        self.view, self.round = int(rng.integers(1, 5)), int(rng.integers(1, 9))
        self.key = rng.bytes(16) if rng.random() < 0.5 else b""
        self.sequence = dict.fromkeys({0, *self.live}, 0)
        if like is not None:
            self.live, self.number, self.view = like.live, like.number, like.view
            self.key, self.sequence = like.key, like.sequence
            if rng.random() < 0.4:  # rounds of equal numbers, or of the other parity
                self.round = like.round + int(rng.random() < 0.4)
        self.others = sorted(self.live - {self.number})
        self.sent: list[bytes] = []
        width = int(rng.choice([8, 16, 32]))
        self.model = StripesModel(
            self.number,
            self.live,
            like.model.ranks if like is not None else (self._ranks(), self._ranks()),
            (width, width if rng.random() < 0.9 else int(rng.choice([8, 16, 32]))),
            room=int(rng.integers(1, 9)),
            blocks=int(rng.integers(4, 9)),
            view=self.view,
            rounds=(self.round, self.round + 1),
            key=self.key,
            clock=int(rng.integers(4)),
            switch=like.model.switch if like is not None else bool(rng.random() < 0.9),
            channel=channel,
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
        model = self.model
        if self.rng.random() < 0.7:
            self._open_later()
            model.ranks = (model.ranks[1], self._ranks())
        else:
            self.view += 1
            model.ranks = (self._ranks(), self._ranks())
        self._enter()

    def follow(self, like: Scene) -> None:
        """Go on as channel 0 did."""
        if like.view == self.view:
            self._open_later()
        self.model.ranks, self.view = like.model.ranks, like.view
        self._enter()

    def _open_later(self) -> None:
        self.round += int(self.rng.integers(1, 3))
        self.model.width = (self.model.width[1], self.model.width[0])

    def _enter(self) -> None:
        self.model.view, self.model.rounds = self.view, (self.round, self.round + 1)
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
                model.swallow[bank, number] = max(0, int(self._of_channels.integers(-9, 4)))

    def frames(self, count: int) -> Iterator[bytes]:
        """Frames that fit more or less, and old ones again."""
        for _ in range(count):
            if self.sent and self.rng.random() < 0.1:
                yield self.sent[int(self.rng.integers(len(self.sent)))]
                continue
            self.sent.append(self._frame())
            yield self.sent[-1]

    def _flags(self, odd: bool) -> int:
        channel = self.channel
        if odd and self._of_channels.random() < 0.1:
            channel = int(self._of_channels.integers(wire.MAX_CHANNELS))
        return wire.channel_flags(channel)

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
            flags=(Flag.ANSWER if rng.random() < 0.3 else 0) | self._flags(odd),
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


class ChannelsScene:
    """A member whose phase has several channels: the frames of all in random turn."""

    def __init__(self, seed: int, channels: int) -> None:
        first = Scene(seed)
        more = [Scene((seed, channel), first, channel) for channel in range(1, channels)]
        self.scenes = [first, *more]
        self.model = ChannelsModel([scene.model for scene in self.scenes])
        self._rng = np.random.default_rng((seed, 0))
        self._share()

    def write_own(self) -> None:
        """`Scene.write_own` of all."""
        for scene in self.scenes:
            scene.write_own()

    def frames(self, count: int) -> Iterator[bytes]:
        """`Scene.frames`, of all in turn."""
        sources = [scene.frames(count) for scene in self.scenes]
        for at in self._rng.integers(len(sources), size=count).tolist():
            yield next(sources[at])

    def go_on(self) -> None:
        """Later rounds in each, or another view."""
        first, *more = self.scenes
        first.go_on()
        for scene in more:
            scene.follow(first)
        self._share()

    def _share(self) -> None:
        """The remainders of a switch are those of channel 0."""
        for model in self.model.channels:
            model.rest = self.model.first.rest
