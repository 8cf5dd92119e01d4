# SPDX-License-Identifier: Apache-2.0
"""A processor stalls in a frame of one channel, and meets the same round of another one, or a phase of another plan."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from nicps import wire
from nicps.dataplane import bpf
from nicps.layout import layout
from nicps.wire import FrameType
from tests.stripes import GROUP, MACS, NETWORK, signed
from tests.stripes_model import ChannelsModel, Own, StripesModel
from tests.xdp import stall
from tests.xdp.stall import Meeting
from tests.xdp.striped import Target

VIEW, LIST, CONVERSION = 3, 0b111, 7
RANKS = {1: 1, 2: 0, 3: 0}
EACH = layout().limits["BLOCK_SLOTS"]
#: Two plans of the same maps, as (fragments, blocks) of each channel: fragment 8 of channel 0 in the first one has the
#: place of fragment 0 of channel 1 in the other, and its sum is where that of fragment 4 of channel 1 is.
OLD, NEW = ((12, 3), (4, 1)), ((4, 1), (12, 3))
ROOM, BLOCKS = 16, 4


class Striped:
    """This host is member 1 of three, and the aggregator; own lanes are offered in both banks."""

    def __init__(self, target: Target, meeting: Meeting) -> None:
        self.target, self._meeting = target, meeting
        self.meet = meeting.meet

    def reset(self) -> None:
        """Empty maps, with two channels that have round 1 open."""
        self.model = self.plan(OLD, 1)
        self.target.begin(self.model)
        self.target.write_own(self.model)

    def plan(self, plan: tuple[tuple[int, int], ...], round_: int) -> ChannelsModel:
        """Of that plan, with rounds from that one on open."""
        models = [
            StripesModel(
                1,
                frozenset({1, 2, 3}),
                (RANKS, RANKS),
                (32, 32),
                room,
                blocks,
                VIEW,
                (round_, 3),
                offered=[CONVERSION, CONVERSION],
                channel=channel,
            )
            for channel, (room, blocks) in enumerate(plan)
        ]
        for model in models:
            model.own = {
                (bank, index): Own(CONVERSION, -3, lanes(bank + 2 * model.channel))
                for bank in range(2)
                for index in range(model.room)
            }
        return ChannelsModel(models)

    def begin_phase(self) -> None:
        """The other plan, from round 3 on."""
        self.model = self.plan(NEW, 3)
        self.target.lay_out(self.model.channels)
        self.target.enter(self.model)
        self.target.write_own(self.model)

    def give(self, frame: bytes) -> str:
        """Its verdict; the model says the same."""
        run = self.target.give(frame)
        outcome = self.model.run(frame)
        assert run.verdict == {"drop": bpf.XDP_DROP, "tx": bpf.XDP_TX}[outcome.verdict]
        return outcome.counters[0]

    def same(self) -> None:
        """The maps are the model's; what was told on the way does not count."""
        self.target.doorbell.take()
        self.model.bells.clear()
        self.target.same_state(self.model)


@pytest.fixture(scope="module")
def program() -> Iterator[Striped]:
    stall.need_two_processors()
    target = Target(str(stall.SOURCE), 64)
    with ThreadPoolExecutor(1) as pool:
        yield Striped(target, Meeting(target.fds, target.give, target.counters, pool))
    target.close()


def lanes(seed: int) -> bytes:
    return np.random.default_rng(seed).integers(-9999, 9999, 360).astype(">i4").tobytes()


def frame(kind: FrameType, sender: int, channel: int, index: int, round_: int = 1) -> bytes:
    """Of round 1, or of the next phase; a sum is of the lanes of its sender alone."""
    flags = wire.channel_flags(channel)
    header = wire.Header(network=NETWORK, view=VIEW, round=round_, sender=sender, flags=flags)
    members = 1 << sender - 1 if kind == FrameType.SUM else LIST
    fragments, _ = (OLD if round_ == 1 else NEW)[channel]
    body = wire.Contribution(members, index, fragments, 1, 32, -3, -5)
    to = GROUP if kind == FrameType.SUM else MACS[0]
    return signed(sender, kind, header, body, lanes(10 * sender + channel + round_), to, b"")


CONTRIBUTION, SUM = FrameType.CONTRIBUTION, FrameType.SUM


@pytest.mark.parametrize("place", [stall.CHECKED, stall.CLAIMED, stall.ADDED])
def test_the_same_round_of_another_channel(program: Striped, place: int) -> None:
    """Whole in channel 0 while the last contribution of channel 1 is on its way: neither has anything of the other."""
    last = frame(CONTRIBUTION, 3, 1, 0)

    def prepare() -> None:
        program.reset()
        program.give(frame(CONTRIBUTION, 2, 1, 0))

    def meanwhile() -> list[str]:
        given = [program.give(frame(CONTRIBUTION, k, 0, 0)) for k in (2, 3)]
        return [*given, program.give(frame(SUM, 2, 0, 11))]

    met = program.meet(place, last, prepare, meanwhile)
    assert met.meanwhile == ["gathered", "summed", "stored"]
    assert met.run.verdict == bpf.XDP_TX
    assert program.model.run(last).out == met.run.frame
    counts = [program.model.channels[channel].count[1] for channel in range(2)]
    assert counts == [(VIEW << 32 | 1, 2), (VIEW << 32 | 1, 1)]
    program.same()


def test_a_place_that_is_another_channels_now(program: Striped) -> None:
    """Its processor stalled over the phase: what is newer stays, and the older contribution is dropped."""

    def meanwhile() -> list[str]:
        program.begin_phase()
        return [program.give(frame(CONTRIBUTION, k, 1, 0, 3)) for k in (2, 3)]

    old = frame(CONTRIBUTION, 2, 0, 8)
    met = program.meet(stall.CHECKED, old, program.reset, meanwhile)
    assert met.meanwhile == ["gathered", "summed"] and met.run.verdict == bpf.XDP_DROP
    assert met.counters == {"gathered": 1, "summed": 1, "round": 1}
    program.same()


def test_a_sum_that_is_another_channels_now(program: Striped) -> None:
    def meanwhile() -> list[str]:
        program.begin_phase()
        return [program.give(frame(CONTRIBUTION, k, 1, 4, 3)) for k in (2, 3)]

    met = program.meet(stall.CHECKED, frame(SUM, 2, 0, 8), program.reset, meanwhile)
    assert met.meanwhile == ["gathered", "summed"] and met.run.verdict == bpf.XDP_DROP
    assert met.counters == {"gathered": 1, "summed": 1, "round": 1}
    program.same()


@pytest.mark.parametrize("place", [stall.CHECKED, stall.CLAIMED])
def test_what_an_old_plan_leaves_is_written_over(program: Striped, place: int) -> None:
    """It adds, after the phase has begun: the first newer contribution begins anew there."""
    newer = [frame(CONTRIBUTION, k, 1, 0, 3) for k in (2, 3)]

    def meanwhile() -> None:
        program.begin_phase()
        if place == stall.CLAIMED:
            assert program.target.give(newer[0]).verdict == bpf.XDP_DROP

    met = program.meet(place, frame(CONTRIBUTION, 2, 0, 8), program.reset, meanwhile)
    assert met.counters == {"gathered": 1} | ({"busy": 1} if place == stall.CLAIMED else {})
    assert int(program.target.gathers[(BLOCKS + 1) * EACH]["tag"]) == VIEW << 32 | 1
    assert [program.give(one) for one in newer] == ["gathered", "summed"]
    program.model.first.announced[1] = VIEW << 32 | 1
    program.same()


def test_a_sum_of_an_old_plan_is_written_over(program: Striped) -> None:
    """It comes late into a record that is another channel's: as older than all of the phase it is no sum of it."""
    met = program.meet(
        stall.CLAIMED, frame(SUM, 2, 0, 8), program.reset, lambda: program.begin_phase()
    )
    assert met.counters == {"stored": 1}
    assert int(program.target.sums[ROOM + 8]["tag"]) == VIEW << 32 | 1
    given = [program.give(frame(CONTRIBUTION, k, 1, 4, 3)) for k in (2, 3)]
    assert given == ["gathered", "summed"]
    program.model.first.count[1] = VIEW << 32 | 1, 1
    program.same()


def test_a_sum_of_an_old_plan_is_counted_under_its_own_tag(program: Striped) -> None:
    """Made and not counted as its processor stalls: no sum of the next phase counts in that channel until then."""
    first, last = (frame(CONTRIBUTION, k, 1, 0) for k in (2, 3))

    def prepare() -> None:
        program.reset()
        program.give(first)

    def meanwhile() -> list[int]:
        program.begin_phase()
        newer = [frame(SUM, 2, channel, 2, 3) for channel in (0, 1)]
        return [program.target.give(one).verdict for one in newer]

    met = program.meet(stall.ADDED, last, prepare, meanwhile)
    assert met.counters == {"summed": 1, "stored": 1, "busy": 1}
    rows = program.target.progress.reshape(2, -1)[1]
    above = wire.MAX_MEMBERS + 1
    found = {row: (int(p["tag"]), int(p["count"])) for row, p in enumerate(rows) if p["tag"]}
    assert found == {0: (VIEW << 32 | 3, 1), above: (VIEW << 32 | 1, 1)}
    assert program.target.give(frame(SUM, 2, 1, 2, 3)).verdict == bpf.XDP_DROP
    assert (int(rows[above]["tag"]), int(rows[above]["count"])) == (VIEW << 32 | 3, 1)
