# SPDX-License-Identifier: Apache-2.0
"""The areas of channels as the agent lays them out and reads them (nicps/dataplane/areas.py)."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from nicps import wire
from nicps.agent.frames import Frames
from nicps.dataplane import bpf
from nicps.dataplane.areas import Area
from nicps.dataplane.doorbell import Bell
from nicps.layout import layout
from nicps.protocol import Narrow
from nicps.wire import BLOCK_LANES, FrameType
from tests.xdp.memory import memory_of
from tests.xdp.test_maps import runs
from tests.xdp.test_stripes_maps import EACH, UNIT, VIEW, Host

#: Fragments of each channel, and blocks of its own stripe.
ROOMS, BLOCKS = (12, 3, 7), (4, 1, 2)


@pytest.fixture(scope="module")
def loaded() -> Iterator[Host]:
    host = Host()
    yield host
    host.maps.close()
    host.loaded.close()


@pytest.fixture
def host(loaded: Host) -> Host:
    """With three channels, and nothing in its maps."""
    loaded.begin(VIEW)
    stripes = loaded.maps.stripes
    stripes.use(stripes.reserve(*ROOMS))
    stripes.use(stripes.reserve_places(*BLOCKS))
    stripes.own["exponent"] = UNIT & 0xFF
    loaded.maps.ring["announced"] = 0
    loaded.doorbell.take()
    words = stripes.areas.words
    for name in ("round", "round_low", "round_high", "width", "width_next"):
        words[name] = words[name][0]
    words["clock"] = 1
    return loaded


def give(host: Host, kind: FrameType, sender: int, index: int, channel: int) -> bpf.Run:
    """A frame of that channel's round 1."""
    flags = wire.channel_flags(channel)
    return host.give(kind, sender, index, flags=flags, fragments=ROOMS[channel])


def test_areas_lie_one_behind_the_other(host: Host) -> None:
    areas, config = host.maps.stripes.areas, host.maps.config
    assert [areas[channel] for channel in range(3)] == [
        Area(0, 12, 0, 4),
        Area(12, 3, 4, 1),
        Area(15, 7, 5, 2),
    ]
    assert areas[3] == Area()
    assert (config["channels"], config["room"], config["gather_blocks"]) == (3, 22, 7)
    names = ("first", "room", "first_block", "blocks")
    assert [[int(w[name]) for name in names] for w in areas.words[:4]] == [
        [0, 12, 0, 4],
        [12, 3, 4, 1],
        [15, 7, 5, 2],
        [0, 0, 0, 0],
    ]
    stripes = host.maps.stripes
    assert (stripes.room, stripes.places) == (22, 7)
    assert stripes.sums.shape == stripes.own.shape == (2, 22)
    assert stripes.gathers.shape == (2, 7 * EACH)


def test_what_comes_lies_in_its_area(host: Host) -> None:
    """And is read, counted and told as of its channel."""
    stripes, maps = host.maps.stripes, host.maps
    stripes.own["conversion"][1] = 5
    stripes.areas.words["offered"] = 5
    for channel in (2, 1, 0):
        give(host, FrameType.SUM, 3, ROOMS[channel] - 1, channel)
        give(host, FrameType.CONTRIBUTION, 2, 0, channel)
    give(host, FrameType.CONTRIBUTION, 3, 0, 2)
    bells = host.doorbell.take()
    assert bells[0] == Bell(VIEW << 32 | 1, 0, 1, 7, 0, 2)
    assert bells[1] == Bell(VIEW << 32 | 1, 0b111, 0, 7, UNIT, 2)
    assert [bell.channel for bell in bells] == [2, 2, 1, 1, 0, 0, 2]
    assert np.flatnonzero(stripes.sums["tag"][1]).tolist() == [11, 14, 15, 21]
    assert np.flatnonzero(stripes.gathers["tag"][1]).tolist() == [0, 4 * EACH, 5 * EACH]
    assert not stripes.sums["tag"][0].any() and not stripes.gathers["tag"][0].any()
    assert [maps.count(1, VIEW, 0, channel) for channel in range(4)] == [1, 1, 2, 0]
    assert maps.count(1, VIEW, 0) == 1, "no channel's sums are among those of channel 0"
    for channel, room in enumerate(ROOMS):
        here = (1, room) if channel == 2 else (0, room)
        assert maps.reached(1, VIEW, 0, room, channel) == here
        missing = [(1, room - 2)] if channel == 2 else [(0, room - 1)]
        assert maps.missing_sums(1, VIEW, 0, room, 9, channel) == missing
        assert maps.reached(1, VIEW, room, room + 2, channel) == (room, room), "the next area's"
        lacking = {2: 0, 3: 0} if channel == 2 else {2: 0, 3: 1}
        assert maps.absent(1, VIEW, 0, 1, 0b111, channel) == lacking
        assert maps.converted(1, 5, 0, room + 9, channel) == room
    stripes.own["conversion"][1, 12] = 6
    assert [maps.converted(1, 5, 0, room, channel) for channel, room in enumerate(ROOMS)] == [
        12,
        0,
        7,
    ]


@pytest.mark.parametrize("seed", range(20))
def test_readings_of_random_areas(loaded: Host, seed: int) -> None:
    """Those of a channel are those of its part of the bank, wherever that lies."""
    rng = np.random.default_rng(seed)
    loaded.begin(VIEW)
    stripes, records = loaded.maps.stripes, layout().records
    rooms = rng.integers(1, 20, int(rng.integers(1, 9))).tolist()
    blocks = rng.integers(1, 4, len(rooms)).tolist()
    stripes.areas.set_rooms(rooms)
    stripes.areas.set_blocks(blocks)
    tag, bank = VIEW << 32 | 3, 1
    stripes.sums = np.zeros((2, sum(rooms)), records["stored"])
    stripes.sums["tag"] = rng.choice([0, tag, tag - 2], stripes.sums.shape, p=[0.2, 0.6, 0.2])
    stripes.own = np.zeros((2, sum(rooms)), records["own"])
    stripes.own["conversion"] = rng.choice([2, 3], stripes.own.shape, p=[0.1, 0.9])
    stripes.places, stripes.gathers = 1, np.zeros((2, sum(blocks) * EACH), records["gather"])
    stripes.gathers["tag"] = rng.choice([tag, tag + 2], stripes.gathers.shape)
    stripes.gathers["seen"] = rng.integers(0, 4, stripes.gathers.shape)
    sums = np.split(stripes.sums["tag"][bank] == tag, np.cumsum(rooms)[:-1])
    own = np.split(stripes.own["conversion"][bank] == 3, np.cumsum(rooms)[:-1])
    places = np.split(stripes.gathers[bank], np.cumsum(blocks)[:-1] * EACH)
    loaded.maps.config["number"] = 3
    for channel, room in enumerate(rooms):
        first, end = sorted(rng.integers(0, room + 6, 2).tolist())
        lacking = {at for at in range(first, end) if at >= room or not sums[channel][at]}
        here = set(range(first, end)) - lacking
        expected = (min(lacking, default=end), max(here, default=first - 1) + 1)
        assert stripes.reached(3, VIEW, first, end, channel) == expected
        assert stripes.missing_sums(3, VIEW, first, end, 3, channel) == runs(lacking)[:3]
        mine = [*own[channel][first:end], False]
        assert stripes.converted(3, 3, first, end, channel) == mine.index(False)
        count = int(rng.integers(0, blocks[channel] * EACH + 3))
        part = places[channel][:count]
        absent = {
            k: count - int(((part["tag"] == tag) & (part["seen"] >> (k - 1) & 1 == 1)).sum())
            for k in (1, 2)
        }
        assert stripes.absent(3, VIEW, 0, count, 0b111, channel) == absent
    loaded.begin(VIEW)


def test_what_was_sent_is_of_its_channel(host: Host) -> None:
    """A window that shrank is whole again in the next round of the bank."""
    stripes, maps = host.maps.stripes, host.maps
    for channel, index in ((0, 5), (2, 3), (7, 9)):
        stripes.set_sent(1, 2, index, channel)
    stripes.set_sent(1, 2, 4, 2)
    stripes.set_sent(1, 2, 4, 0)
    assert [maps.next_to_send(1, 2, channel) for channel in range(8)] == [5, 0, 4, 0, 0, 0, 0, 9]
    assert maps.next_to_send(2, 2, 2) == maps.next_to_send(1, 3, 2) == 0
    stripes.swallow(1, 2, 6, 2)
    stripes.set_sent(1, 2, 5, 2)
    assert stripes.swallows(1, 2, 2) == 6 and stripes.swallows(1, 2) == 0
    stripes.set_sent(3, 2, 1, 2)
    assert stripes.swallows(3, 2, 2) == 0 and maps.next_to_send(3, 2, 2) == 1
    stripes.swallow(3, 2, 6, 2)
    stripes.forget_sent()
    assert maps.next_to_send(3, 2, 2) == stripes.swallows(3, 2, 2) == 0


def test_the_agent_makes_windows_smaller_and_whole_again(host: Host) -> None:
    """Of that channel and round, and of stripes to which something was sent."""
    stripes = host.maps.stripes
    agent: Any = SimpleNamespace(_dataplane=SimpleNamespace(maps=host.maps))
    stripes.set_sent(1, 2, 5, 2)
    stripes.set_sent(1, 2, 5)
    Frames.narrow(agent, Narrow(VIEW, 1, 2, ((2, 6), (3, 4))))
    assert (stripes.swallows(1, 2, 2), stripes.swallows(1, 3, 2), stripes.swallows(1, 2)) == (
        6,
        0,
        0,
    )
    Frames.narrow(agent, Narrow(VIEW, 1, 2, ((2, 0),)))
    assert stripes.swallows(1, 2, 2) == 0
    stripes.forget_sent()


def test_a_new_plan_begins_with_nothing(host: Host) -> None:
    """Counts of fragments that are broadcast stay; those of sums do not."""
    stripes, maps = host.maps.stripes, host.maps
    for channel in range(3):
        give(host, FrameType.SUM, 3, ROOMS[channel] - 1, channel)
        stripes.set_sent(1, 2, 3, channel)
    maps._progress[1, 5] = (VIEW << 32 | 1, 4)
    assert maps.count(1, VIEW, 0) == 5
    stripes.use(stripes.reserve(7, 2))
    assert [maps.count(1, VIEW, 0, channel) for channel in range(3)] == [4, 0, 0]
    assert [maps.next_to_send(1, 2, channel) for channel in range(3)] == [0, 0, 0]
    assert (maps.config["channels"], maps.config["room"]) == (2, 9)
    assert maps.config["gather_blocks"] == 0 and not stripes.areas.words["blocks"].any()
    maps._progress[1, 5] = (0, 0)


def test_no_channel_has_places_while_they_are_made(host: Host) -> None:
    stripes = host.maps.stripes
    stripes.retire_places()
    before = host.maps.counters()
    for channel in range(3):
        give(host, FrameType.CONTRIBUTION, 2, 0, channel)
        give(host, FrameType.SUM, 3, ROOMS[channel] - 1, channel)
    risen = {name: n - before[name] for name, n in host.maps.counters().items() if n > before[name]}
    assert risen == {"range": 3, "stored": 3}
    stripes.retire()
    assert not stripes.areas.words["room"].any() and host.maps.config["channels"] == 1


def test_a_view_closes_the_rounds_of_all_channels(host: Host) -> None:
    host.maps.enter_view(VIEW + 1, 1, [bytes((2, 0, 0, 0, 0, k)) for k in (1, 2, 3)], 2)
    words: Any = host.maps.stripes.areas.words
    assert (words["round_low"] > words["round_high"]).all()


@pytest.mark.parametrize("rooms", [(), (1,) * 9])
def test_channels_that_cannot_be(host: Host, rooms: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=f"{len(rooms)} channels are not 1 to 8"):
        host.maps.stripes.areas.set_rooms(rooms)


def test_channels_take_no_more_memory_than_their_fragments(host: Host) -> None:
    """Two banks of lanes, sums and places, and for each channel a block that may be half used."""
    stripes, records = host.maps.stripes, layout().records
    one, parts = 4000, (1500, 1500, 700, 300)
    sizes = []
    for rooms, blocks in (((one,), (1000,)), (parts, tuple(room // 4 for room in parts))):
        stripes.use(stripes.reserve(*rooms))
        stripes.use(stripes.reserve_places(*blocks))
        fds = (stripes.own_fd, stripes.sums_fd, stripes.blocks_fd, stripes._gathers_fd)
        sizes.append(memory_of(*(bpf.map_info(fd).id for fd in fds)))
    each = records["own"].itemsize + records["stored"].itemsize
    places = 8 * BLOCK_LANES + EACH * records["gather"].itemsize
    assert sizes[0] == pytest.approx(2 * (one * each + 1000 * places), rel=0.01)
    assert sizes[1] == pytest.approx(sizes[0], rel=0.001)


def test_what_channels_take_of_every_host(host: Host) -> None:
    """The maps that are there for any job: windows, counts, and what was sent. One channel took 24 KB."""
    names = ("channels", "sent", "windows", "token_windows", "progress")
    numbers = [bpf.map_info(host.loaded.maps[name]).id for name in names]
    assert memory_of(*numbers) <= (24 + 52) * 1024
