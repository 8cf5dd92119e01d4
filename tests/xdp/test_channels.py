# SPDX-License-Identifier: Apache-2.0
"""Several channels of stripes in the real XDP program: none has anything of another one (docs/channels.md)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from nicps import wire
from nicps.wire import Flag, FrameType
from tests.model import DROP, TX, Outcome
from tests.stripes import GROUP, MACS, NETWORK, signed
from tests.stripes_model import ChannelsModel, Own, StripesModel
from tests.stripes_scene import ChannelsScene
from tests.xdp.sequences import compared
from tests.xdp.striped import Target

SEEDS, CHUNK = 200, 50
KEY = bytes(range(16))
VIEW, WIDTH, UNIT, CONVERSION = 5, 8, -9, 4
RANKS = {1: 1, 2: 2, 3: 3}
#: Fragments of each channel, and its open round: of equal numbers, and of both parities.
ROOMS, ROUNDS = (5, 3, 1, 6), (7, 8, 7, 9)


@pytest.fixture(scope="module")
def target() -> Iterator[Target]:
    made = Target(room=64)
    yield made
    made.close()


class Host:
    """Member 1 of three, all of them aggregators, with four channels; whatever comes, the model says the same."""

    def __init__(self, target: Target, key: bytes = b"", **of_all: Any) -> None:
        self.target, self.key = target, key
        self.sequence = 0
        models = [
            StripesModel(
                1,
                frozenset(RANKS),
                (RANKS, RANKS),
                (WIDTH, WIDTH),
                room,
                room,
                VIEW,
                (round_, round_ + 1),
                key=key,
                offered=[CONVERSION, CONVERSION],
                channel=channel,
                **of_all,
            )
            for channel, (room, round_) in enumerate(zip(ROOMS, ROUNDS, strict=True))
        ]
        for model in models:
            model.own = {
                (bank, at): Own(CONVERSION, UNIT, self.lanes(100 + 10 * model.channel + at))
                for bank in range(2)
                for at in range(model.room)
            }
        self.model = ChannelsModel(models)
        target.begin(self.model)
        target.write_own(self.model)

    @staticmethod
    def lanes(value: int) -> bytes:
        return bytes([value]) * wire.PAYLOAD_BYTES

    def frame(
        self,
        kind: FrameType,
        sender: int,
        channel: int,
        index: int,
        *,
        flags: int = 0,
        sequence: int | None = None,
        to: bytes = b"",
        later: int = 0,
        **body: Any,
    ) -> bytes:
        """Of the open round, or of one after it; numbered one after another."""
        self.sequence += 1
        known = channel < len(ROOMS)
        header = wire.Header(
            network=NETWORK,
            view=VIEW,
            round=(ROUNDS[channel] if known else ROUNDS[0]) + later,
            sender=sender,
            flags=flags | wire.channel_flags(channel),
            sequence=self.sequence if sequence is None else sequence,
        )
        values = wire.Contribution(
            0b111, index, ROOMS[channel] if known else 5, self.sequence, WIDTH, UNIT, UNIT
        )
        to = to or (GROUP if kind == FrameType.SUM else MACS[0])
        lanes = self.lanes(sender + 3 * channel)
        return signed(sender, kind, header, replace(values, **body), lanes, to, self.key)

    def give(self, *args: Any, **values: Any) -> Outcome:
        """One frame."""
        return self.run(self.frame(*args, **values))

    def run(self, frame: bytes) -> Outcome:
        found = self.target.run(frame)
        assert found == self.model.run(frame)
        return found

    def same(self) -> None:
        self.target.same_state(self.model)


# ---- against the model


def play(target: Target, seed: int, channels: int) -> Counter[str]:
    """A random sequence of frames; what came of them, and whether their channel was above 0."""
    reached = Counter[str]()
    for frame, counters in compared(target, ChannelsScene(seed, channels), seed, phases=3):
        above = wire.channel_of(int.from_bytes(frame[16:18], "big")) > 0
        reached.update(f"{name} {above}" for name in counters)
    return reached


@pytest.mark.short("0-2", "50-3", "100-8", "150-8")
@pytest.mark.parametrize("channels", [2, 3, 8])
@pytest.mark.parametrize("first", range(0, SEEDS, CHUNK))
def test_random_sequences(target: Target, first: int, channels: int) -> None:
    """Each frame is treated as its channel's model says; all areas are the same bit for bit."""
    reached: Counter[str] = Counter()
    for seed in range(first, first + CHUNK):
        reached += play(target, seed, channels)
    least = {"summed": 20, "gathered": 20, "stored": 20, "clocked": 3, "answered": 20}
    places = (True, False) if channels < 8 else (True,)
    wanted = {f"{name} {above}": n for name, n in least.items() for above in places}
    wanted["mode True"] = 3
    assert {name: reached[name] for name in wanted if reached[name] < wanted[name]} == {}, reached


# ---- areas


def test_every_edge_of_every_area(target: Target) -> None:
    """A round of each channel, from the first fragment to the last; no frame reaches an area beside its own."""
    host = Host(target)
    for channel, room in enumerate(ROOMS):
        for index in (room, 2**32 - 1):
            for kind, members in ((FrameType.SUM, 0b10), (FrameType.ASK, 0b1)):
                beyond = {"fragments": 2**32 - 1, "members": members}
                assert host.give(kind, 2, channel, index, **beyond).counters == ("range",)
        stripe = host.model.channels[channel].stripe
        for index in range(room):
            body = wire.Contribution(0b111, index, room, 1, WIDTH, UNIT, UNIT)
            at = wire.Header(round=ROUNDS[channel])
            holder = next(k for k in RANKS if index in stripe(k, at, body))
            if holder > 1:
                assert host.give(FrameType.SUM, holder, channel, index).counters == ("stored",)
                continue
            assert host.give(FrameType.CONTRIBUTION, 2, channel, index).counters == ("gathered",)
            assert host.give(FrameType.CONTRIBUTION, 3, channel, index).counters == ("summed",)
    told = [(bell.channel, bell.count) for bell in host.model.bells if bell.count]
    assert told == [(channel, room) for channel, room in enumerate(ROOMS)]
    host.same()
    assert target.sums["tag"].astype(bool).sum() == sum(ROOMS)


def test_an_alone_contributor_of_each_channel(target: Target) -> None:
    """Sums come from it over all stripes; a question to it is answered from the channel's own lanes."""
    host = Host(target)
    for channel in (3, 0, 1):
        last = ROOMS[channel] - 1
        assert host.give(FrameType.SUM, 2, channel, last, members=0b10).counters == ("stored",)
        answer = host.give(FrameType.ASK, 2, channel, last, members=0b1)
        sent = wire.unpack((answer.out or b"")[wire.ETHERNET_BYTES :])
        assert sent.type == FrameType.SUM and sent.tail == host.lanes(100 + 10 * channel + last)
        assert sent.header.flags == Flag.ANSWER | wire.channel_flags(channel)
    host.same()


@pytest.mark.parametrize("kind", [FrameType.CONTRIBUTION, FrameType.SUM, FrameType.ASK])
def test_a_channel_that_the_phase_does_not_have(target: Target, kind: FrameType) -> None:
    host = Host(target)
    assert wire.MAX_CHANNELS == 8
    for channel in range(len(ROOMS), 8):
        assert host.give(kind, 2, channel, 0) == Outcome(DROP, ("mode",))
    target.lay_out(host.model.channels[:1])
    frame = host.frame(kind, 2, 1, 0)
    assert target.run(frame) == Outcome(DROP, ("mode",)), "nor does the next phase have that one"


def test_channels_without_places_take_no_contributions(target: Target) -> None:
    """While places of a view are made; sums come all the same."""
    host = Host(target)
    for model in host.model.channels:
        model.blocks = 0
    target.lay_out(host.model.channels)
    for channel in range(len(ROOMS)):
        if channel != 2:  # one fragment is in the last stripe
            assert host.give(FrameType.CONTRIBUTION, 2, channel, 0).counters == ("range",)
            assert host.give(FrameType.ASK, 2, channel, 0).counters == ("range",)
        last = ROOMS[channel] - 1
        assert host.give(FrameType.SUM, 3, channel, last).counters == ("stored",)
    host.same()


def test_places_end_with_the_channels_blocks(target: Target) -> None:
    """Where the own stripe is longer than its places: the next channel has those behind."""
    host = Host(target)
    for model in host.model.channels:
        model.blocks = 1
    target.lay_out(host.model.channels)
    for channel in (0, 3):
        size = {"fragments": 6}
        assert host.give(FrameType.CONTRIBUTION, 2, channel, 0, **size).counters == ("gathered",)
        assert host.give(FrameType.CONTRIBUTION, 2, channel, 1, **size).counters == ("range",)
    host.same()


def test_equal_rounds_are_of_their_channel(target: Target) -> None:
    """Channels 0 and 2 have round 7 open: contributions, counts, news and what is sent do not meet."""
    host = Host(target, clock=1)
    for channel in (0, 3):
        assert host.give(FrameType.CONTRIBUTION, 2, channel, 0).counters == ("gathered",)
    assert [bell.channel for bell in host.model.bells] == [0, 3]
    assert host.give(FrameType.CONTRIBUTION, 2, 3, 1).counters == ("gathered",)
    assert len(host.model.bells) == 2, "each is told once"
    assert host.give(FrameType.CONTRIBUTION, 3, 3, 0).counters == ("summed",)
    assert host.give(FrameType.CONTRIBUTION, 3, 0, 0).counters == ("summed",)
    assert host.give(FrameType.SUM, 3, 2, 0).counters == ("stored",)
    assert [(bell.channel, bell.count) for bell in host.model.bells[2:]] == [(3, 1), (0, 1), (2, 1)]
    host.same()


@pytest.mark.parametrize("channel", [0, 1, 3])
def test_offers_are_of_their_channel(target: Target, channel: int) -> None:
    """Lanes count if they are those that were offered in this channel; another channel's number is another's."""
    host = Host(target)
    for model in host.model.channels:
        if model.channel != channel:
            model.offered = [CONVERSION + 1, CONVERSION + 1]
    target.write_own(host.model)
    for at in (0, 1, 3):
        assert host.give(FrameType.CONTRIBUTION, 2, at, 0).counters == ("gathered",)
        last = ("summed",) if at == channel else ("unready",)
        assert host.give(FrameType.CONTRIBUTION, 3, at, 0).counters == last
    host.same()


# ---- the kernel's clock


def test_a_sum_sends_the_next_of_its_own_channel(target: Target) -> None:
    host = Host(target)
    for model in host.model.channels:
        stripe = {0: (1, 2), 1: (1, 1), 3: (2, 3)}.get(model.channel)
        if stripe:
            model.sent = {(model.rounds[0] & 1, 2): (model.rounds[0], stripe[1])}
    target.write_own(host.model)
    for channel, (first, next_) in {0: (1, 2), 3: (2, 3)}.items():
        found = host.give(FrameType.SUM, 2, channel, first)
        assert found.counters == ("stored", "clocked")
        sent = wire.unpack((found.out or b"")[wire.ETHERNET_BYTES :])
        assert sent.header.flags == Flag.ANSWER | wire.channel_flags(channel)
        assert sent.body.index == next_ and sent.tail == host.lanes(100 + 10 * channel + next_)
    host.same()


def test_a_window_that_shrinks(target: Target) -> None:
    """So many sums of that stripe, bank and channel send nothing; then each sends one again."""
    host = Host(target)
    model = host.model.channels[3]
    bank = model.rounds[0] & 1
    for each in host.model.channels:
        each.sent = {(each.rounds[0] & 1, number): (each.rounds[0], 0) for number in (2, 3)}
        each.swallow = {(b, number): 9 for b in range(2) for number in (2, 3)}
    model.sent = {(bank, 2): (model.rounds[0], 2), (bank, 3): (model.rounds[0], 4)}
    model.swallow = {(bank, 2): 1, (bank, 3): 0, (bank ^ 1, 2): 7}
    target.write_own(host.model)
    assert host.give(FrameType.SUM, 2, 3, 2).counters == ("stored",)
    assert host.give(FrameType.SUM, 3, 3, 4).counters == ("stored", "clocked")
    assert host.give(FrameType.SUM, 2, 3, 2).counters == ("duplicate",), "no sum: nothing counts"
    found = host.give(FrameType.SUM, 2, 3, 3)
    assert found.counters == ("stored", "clocked")
    assert wire.unpack((found.out or b"")[wire.ETHERNET_BYTES :]).body.index == 2
    assert model.swallow == {(bank, 2): 0, (bank, 3): 0, (bank ^ 1, 2): 7}
    host.same()


def test_a_sum_that_would_send_nothing_is_not_swallowed(target: Target) -> None:
    """This member is not on the list."""
    host = Host(target)
    model = host.model.channels[3]
    model.swallow = {(model.rounds[0] & 1, 2): 1}
    target.write_own(host.model)
    assert host.give(FrameType.SUM, 2, 3, 2, members=0b110).counters == ("stored",)
    assert model.swallow == {(model.rounds[0] & 1, 2): 1}
    host.same()


# ---- with a key


@pytest.mark.parametrize("flags", [0, Flag.ANSWER])
def test_bulk_that_5000_urgent_frames_have_overtaken(target: Target, flags: int) -> None:
    """They were numbered later, and came earlier. Within a channel the window is what it was."""
    host = Host(target, KEY)
    early = [host.frame(FrameType.SUM, 2, 0, 2, flags=flags, sequence=n) for n in (1, 2)]
    host.run(host.frame(FrameType.SUM, 2, 0, 1, flags=flags, sequence=3))
    for number in (1500, 2500, 3800, 5003):
        last = host.frame(FrameType.SUM, 2, 3, 2, flags=flags, sequence=number)
        assert host.run(last).counters in (("stored",), ("duplicate",))
    assert host.run(early[0]).counters == ("stored",)
    assert host.run(early[1]).counters == ("duplicate",), "it is believed"
    late = host.frame(FrameType.SUM, 2, 3, 3, flags=flags, sequence=5003 - 1024)
    assert host.run(late).counters == ("replayed",)
    late = host.frame(FrameType.SUM, 2, 3, 3, flags=flags, sequence=5004 - 1024)
    assert host.run(late).counters == ("stored",)
    host.same()


def test_a_question_that_40_urgent_ones_have_overtaken(target: Target) -> None:
    """Questions are numbered by channel; each is answered once."""
    host = Host(target, KEY)
    first = {"number": 1}
    assert host.give(FrameType.ASK, 2, 0, 0, **first).counters == ("answered",)
    for number in range(1, 41):
        assert host.give(FrameType.ASK, 2, 3, 0, number=number).counters == ("answered",)
    assert host.give(FrameType.ASK, 2, 0, 0, number=2).counters == ("answered",)
    assert host.give(FrameType.ASK, 2, 0, 0, number=2).counters == ("replayed",)
    assert host.give(FrameType.ASK, 2, 3, 0, number=2).counters == ("replayed",)
    host.same()


def test_the_channel_is_signed(target: Target) -> None:
    """A frame whose bits were changed on the way is forged, in a channel that is there."""
    host = Host(target, KEY)
    good = bytearray(host.frame(FrameType.SUM, 2, 3, 3))
    good[16] ^= wire.channel_flags(2) >> 8  # to channel 1, whose round 8 is that before
    good[16 + 10 : 16 + 14] = (8).to_bytes(4, "big")
    assert host.run(bytes(good)) == Outcome(DROP, ("forged",))
    found = host.give(FrameType.ASK, 2, 3, 0)
    assert found.verdict == TX
    host.same()
