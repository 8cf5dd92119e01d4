# SPDX-License-Identifier: Apache-2.0
"""The maps of the room for stripes as the agent makes and reads them: frozen ones, new ones, and every reading."""

from __future__ import annotations

import gc
import mmap
import os
import select
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from nicps import wire
from nicps.dataplane import bpf, loader
from nicps.dataplane.doorbell import Bell, Doorbell
from nicps.dataplane.maps import Maps
from nicps.errors import EnvironmentProblem
from nicps.layout import layout
from nicps.wire import BLOCK_LANES, FrameType
from tests.stripes import LANES, MACS, NATIVE, NETWORK, signed
from tests.xdp.memory import memory_of
from tests.xdp.test_maps import runs

VIEW, UNIT, WIDTH, ROOM = 7, -60, 16, 12
EACH = layout().limits["BLOCK_SLOTS"]
TAG = VIEW << 32 | 1


class Host:
    """Member 1 of three, all aggregators, with the program and its room, and round 1 open."""

    def __init__(self) -> None:
        self.loaded = loader.load(
            "nicps.c", {"nicps_xdp": "xdp"}, {}, later={"nicps_stripes": "xdp"}
        )
        program = self.loaded.open("nicps_stripes")
        rooms = self.loaded.maps["nicps_rooms"]
        bpf.map_update(rooms, bytes(4), program.to_bytes(4, "little"))
        os.close(program)
        self.maps = Maps(self.loaded.maps)
        self.doorbell = Doorbell(self.loaded.maps["doorbell"])
        self.maps.config["network"] = NETWORK
        self.begin(VIEW)

    def begin(self, view: int) -> None:
        """Enter a view, with rounds 1 and 2 open and striped."""
        self.maps.enter_view(view, 1, MACS[:3], 2)
        config = self.maps.config
        self.maps.stripes.set_ranks((1, 2, 3), (1, 2, 3))
        for words in (config, channel := self.channel):
            words["round"] = words["round_low"] = 1
            words["round_high"] = 2
        channel["width"] = channel["width_next"] = WIDTH
        config["enabled"] = 1

    @property
    def channel(self) -> Any:
        """The words of channel 0."""
        return self.maps.stripes.areas.words[0]

    def use(self, room: int = ROOM, blocks: int = 4) -> None:
        """New maps for vectors of that size, as before a job."""
        self.maps.stripes.use(self.maps.stripes.reserve(room))
        self.use_places(blocks)
        self.maps.stripes.own["exponent"] = UNIT & 0xFF

    def use_places(self, blocks: int) -> None:
        self.maps.stripes.use(self.maps.stripes.reserve_places(blocks))

    def give(
        self,
        kind: FrameType,
        sender: int,
        index: int,
        view: int = VIEW,
        flags: int = 0,
        **body: Any,
    ) -> bpf.Run:
        """A frame of stripes with lanes of 1."""
        header = wire.Header(network=NETWORK, view=view, round=1, sender=sender, flags=flags)
        values = wire.Contribution(0b111, index, ROOM, 0, WIDTH, UNIT, UNIT)
        lanes = np.ones(LANES[WIDTH], NATIVE[WIDTH]).tobytes()
        frame = signed(sender, kind, header, replace(values, **body), lanes, MACS[0], b"")
        return bpf.prog_test_run(self.loaded.programs["nicps_xdp"], frame)


@pytest.fixture(scope="module")
def loaded() -> Iterator[Host]:
    host = Host()
    yield host
    host.maps.close()
    host.loaded.close()


@pytest.fixture
def host(loaded: Host) -> Host:
    """With nothing in its maps, and nothing told."""
    loaded.begin(VIEW)
    loaded.use()
    loaded.maps.ring["announced"] = 0
    loaded.doorbell.take()
    return loaded


# ---- maps


def test_nobody_but_programs_writes_sums(host: Host) -> None:
    """Nor remainders: no mapping, no system call; a descriptor of them can be handed out."""
    stripes = host.maps.stripes
    for fd in (stripes.sums_fd, stripes.blocks_fd):
        with pytest.raises(PermissionError):
            bpf.map_memory(fd)
        with pytest.raises(PermissionError):
            bpf.map_update(fd, bytes(4), bytes(bpf.map_info(fd).value))
        with pytest.raises(PermissionError):
            mmap.mmap(os.dup(fd), mmap.PAGESIZE, mmap.MAP_SHARED, mmap.PROT_WRITE)
    with pytest.raises(ValueError, match="read-only"):
        stripes.sums["tag"] = 1
    stripes.own["conversion"][1, :4] = 5
    host.channel["offered"] = 5
    before = host.maps.counters()
    host.give(FrameType.SUM, 2, 4)
    host.give(FrameType.CONTRIBUTION, 2, 0)
    host.give(FrameType.CONTRIBUTION, 3, 0)
    risen = {name: count - before[name] for name, count in host.maps.counters().items()}
    assert (risen["stored"], risen["gathered"], risen["summed"]) == (1, 1, 1)
    assert np.flatnonzero(stripes.sums["tag"][1]).tolist() == [0, 4]
    assert stripes.sums["lane"][1, 4].tobytes() == np.ones(720, ">i2").tobytes()
    assert stripes.sums["lane"][1, 0].tobytes() == np.full(720, 2, ">i2").tobytes()  # its own are 0
    assert stripes.sums["rest"][1].tolist() == [TAG] + [0] * (ROOM - 1)
    theirs = np.frombuffer(bpf.map_memory(os.dup(stripes.sums_fd), writable=False), np.uint8)
    assert theirs.tobytes()[: stripes.sums.nbytes] == stripes.sums.tobytes()


def test_new_maps_take_the_place_of_old_ones(host: Host) -> None:
    stripes = host.maps.stripes
    host.give(FrameType.SUM, 2, 4)
    gc.collect()
    descriptors = len(os.listdir("/proc/self/fd"))
    old = stripes.sums
    assert host.maps.count(1, VIEW, 0) == 1
    stripes.use(reserved := stripes.reserve(ROOM + 3))
    assert (stripes.own_fd, stripes.sums_fd) == (reserved.own_fd, reserved.sums_fd)
    assert stripes.room == host.maps.config["room"] == ROOM + 3
    assert stripes.own.shape == stripes.sums.shape == (2, ROOM + 3)
    assert bpf.map_info(stripes.own_fd).entries == bpf.map_info(stripes.sums_fd).entries == 30
    assert old["tag"][1, 4] == TAG, "who has the old ones mapped keeps them"
    assert not stripes.sums["tag"].any() and host.maps.count(1, VIEW, 0) == 0
    assert stripes.places == host.maps.config["gather_blocks"] == 0, "the room is another one"
    host.use_places(4)
    assert bpf.map_info(stripes.blocks_fd).entries == 8
    assert stripes.gathers.shape == (2, 4 * EACH)
    host.use_places(5)
    assert stripes.places == host.maps.config["gather_blocks"] == 5
    assert stripes.gathers.shape == (2, 5 * EACH)
    assert host.maps.config["enabled"] == 1
    host.give(FrameType.SUM, 2, 4)
    host.give(FrameType.CONTRIBUTION, 2, 0)
    assert stripes.sums["tag"][1, 4] == stripes.gathers["tag"][1, 0] == TAG
    del old
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_a_host_without_a_stripe_has_places(host: Host) -> None:
    """A map cannot be empty."""
    host.use_places(0)
    assert host.maps.stripes.places == host.maps.config["gather_blocks"] == 1


def test_too_much_memory(host: Host) -> None:
    stripes = host.maps.stripes
    descriptors = len(os.listdir("/proc/self/fd"))
    with pytest.raises(EnvironmentProblem, match=r"cannot allocate \d+ MB of own lanes and sums"):
        stripes.reserve(1_000_000_000)
    with pytest.raises(EnvironmentProblem, match=r"cannot allocate \d+ MB of places"):
        stripes.reserve_places(100_000_000)
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert (stripes.room, stripes.places) == (ROOM, 4)
    host.give(FrameType.SUM, 2, 4)
    assert host.maps.reached(1, VIEW, 4, 5) == (5, 5)


def test_a_reserved_room_that_is_not_needed(host: Host) -> None:
    descriptors = len(os.listdir("/proc/self/fd"))
    host.maps.stripes.reserve(3).close()
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_retired_places_take_nothing_and_keep_what_they_hold(host: Host) -> None:
    """Between a view and the places for its stripe; the training program still reads what is left in the old ones."""
    stripes = host.maps.stripes
    stripes.own["conversion"][1, :] = host.channel["offered"] = 5
    host.give(FrameType.CONTRIBUTION, 2, 0, exponent=UNIT + 20)
    host.give(FrameType.CONTRIBUTION, 3, 0)
    shape = (2, 4, BLOCK_LANES)
    theirs = np.frombuffer(bpf.map_memory(stripes.blocks_fd, False), np.int64)
    left = theirs[: np.prod(shape)].reshape(shape)[1, 0, : LANES[WIDTH]].copy()
    assert stripes.converted(1, 5, 0, 4) == 4
    host.begin(VIEW + 1)
    stripes.retire_places()
    before = host.maps.counters()
    host.give(FrameType.CONTRIBUTION, 2, 1, view=VIEW + 1)
    host.give(FrameType.ASK, 2, 1, view=VIEW + 1)
    host.give(FrameType.SUM, 2, 4, view=VIEW + 1)
    risen = {name: n - before[name] for name, n in host.maps.counters().items() if n > before[name]}
    assert risen == {"range": 2, "stored": 1}
    assert stripes.converted(1, 5, 0, 4) == 0 and stripes.places == 0
    assert stripes.absent(1, VIEW + 1, 0, 4, 0b111) == {2: 4, 3: 4}
    host.use_places(4)
    host.give(FrameType.CONTRIBUTION, 2, 1, view=VIEW + 1)
    assert stripes.gathers["tag"][1, 1] == (VIEW + 1) << 32 | 1
    assert stripes.converted(1, 5, 0, 4) == 4
    now = theirs[: np.prod(shape)].reshape(shape)[1, 0, : LANES[WIDTH]]
    assert (now == left).all() and left.any()


def test_released_maps_are_given_back(host: Host) -> None:
    """All memory except that of maps which another process has mapped, for as long as it has."""
    stripes, config, maps = host.maps.stripes, host.maps.config, host.loaded.maps
    room = 3000
    host.use(room, 500)
    own, sums = (bpf.map_info(fd).id for fd in (stripes.own_fd, stripes.sums_fd))
    places = [bpf.map_info(fd).id for fd in (stripes.blocks_fd, stripes._gathers_fd)]
    shapes = layout().records
    sizes = 2 * room * (shapes["own"].itemsize + shapes["stored"].itemsize)
    sizes += 2 * 500 * (8 * BLOCK_LANES + EACH * shapes["gather"].itemsize)
    assert memory_of(own, sums, *places) == pytest.approx(sizes, rel=0.01)
    theirs = bpf.map_memory(stripes.own_fd)
    stripes.retire()
    assert config["room"] == config["gather_blocks"] == stripes.room == 0
    assert host.channel["room"] == host.channel["blocks"] == 0
    before = host.maps.counters()
    host.give(FrameType.SUM, 2, 4)
    host.give(FrameType.CONTRIBUTION, 2, 0)
    risen = {name: n - before[name] for name, n in host.maps.counters().items() if n > before[name]}
    assert risen == {"range": 2}
    stripes.release()
    gc.collect()
    assert memory_of(sums, *places) == 0
    assert memory_of(own) == pytest.approx(2 * room * shapes["own"].itemsize, rel=0.01)
    theirs.close()
    assert memory_of(own) == 0
    stripes.release()  # a second time nothing happens
    host.use()
    stripes.release()  # nor where others have come into use since
    host.give(FrameType.SUM, 2, 4)
    assert stripes.sums["tag"][1, 4] == TAG
    assert all(bpf.map_info(maps[name]).entries == 1 for name in ("own", "sums"))


# ---- views and ranks


def test_ranks(host: Host) -> None:
    host.maps.stripes.set_ranks((3, 1), (2,))
    config = host.maps.config
    assert (config["rank"], config["aggregators"]) == (2, 2)
    assert (config["rank_next"], config["aggregators_next"]) == (0, 1)
    ranks = host.maps._members["rank"]
    assert ranks[:5].tolist() == [[0, 0], [2, 0], [0, 1], [1, 0], [0, 0]]
    host.maps.stripes.set_ranks((), (1,))
    assert (config["rank"], config["aggregators"]) == (0, 0)
    assert (config["rank_next"], config["aggregators_next"]) == (1, 1)
    assert ranks.sum() == 1


def test_a_switch_is_the_aggregator(host: Host) -> None:
    """Its sums are stored, and what goes back to it names the round whose remainders belong to this one."""
    stripes, config = host.maps.stripes, host.maps.config
    stripes.retire_places()
    stripes.own["conversion"][1, :] = host.channel["offered"] = 5
    assert stripes.converted(1, 5, 0, 4) == 0, "the own stripe has no places"
    stripes.set_ranks((0,), (1, 2))
    assert (config["rank"], config["aggregators"]) == (0, 1)
    assert (config["rank_next"], config["aggregators_next"]) == (1, 2)
    assert host.maps._members["rank"][:3].tolist() == [[1, 0], [0, 1], [0, 2]]
    assert stripes.converted(1, 5, 0, 4) == 4, "a switch's host needs none"
    assert stripes.converted(2, 5, 0, 4) == 0
    stripes.set_rest(1, VIEW - 1, 200)
    stripes.set_rest(2, VIEW, 3)
    stripes.set_sent(1, 0, 6)
    made = host.give(FrameType.SUM, 0, 4)
    assert made.verdict == bpf.XDP_TX and stripes.sums["tag"][1, 4] == TAG
    sent = wire.unpack(made.frame[wire.ETHERNET_BYTES :])
    assert made.frame[:6] == wire.SWITCH and sent.type == FrameType.CONTRIBUTION
    assert (sent.body.index, sent.body.number, sent.body.behind) == (6, VIEW - 1, 200)
    assert stripes.next_to_send(1, 0) == 7
    stripes.set_rest(1, VIEW - 1, 0)
    sent = wire.unpack(host.give(FrameType.SUM, 0, 5).frame[wire.ETHERNET_BYTES :])
    assert (sent.body.index, sent.body.number, sent.body.behind) == (7, 0, 0)
    for behind in (-1, 256):
        with pytest.raises(ValueError, match=f"remainders of {behind} rounds before"):
            stripes.set_rest(1, VIEW, behind)
    host.begin(VIEW + 1)
    before = host.maps.counters()["stranger"]
    host.give(FrameType.SUM, 0, 4, view=VIEW + 1)
    assert host.maps.counters()["stranger"] == before + 1, "in another view it is none"


def test_a_view_begins_with_nothing_of_the_former(host: Host) -> None:
    """No ranks, no numbers of answers, no questions; the live members are the view's."""
    host.maps._windows["asked"] = host.maps._windows["answers"] = 9
    host.maps._token_windows["highest"] = host.maps._token_windows["repeat"] = 9
    host.maps._outgoing["answers"] = host.maps._outgoing["sequence"] = 9
    assert host.maps.sequence == 9
    host.maps._outgoing["answers"] = 10
    assert host.maps.sequence == 10, "what is used up first counts"
    host.maps.enter_view(VIEW + 1, 3, [MACS[0], None, MACS[2]], 1)
    config = host.maps.config
    assert config["live_members"] == 0b101
    assert not any(
        config[name] for name in ("rank", "rank_next", "aggregators", "aggregators_next")
    )
    assert not host.maps._members["rank"].any()
    assert not host.maps._windows.view(np.uint64).any()
    assert not host.maps._token_windows.view(np.uint64).any()
    assert not host.maps._outgoing.view(np.uint64).any()


# ---- readings


def test_before_there_is_a_room(loaded: Host) -> None:
    """As if nothing had come."""
    loaded.begin(VIEW)
    maps = Maps(loaded.loaded.maps)
    assert maps.reached(1, VIEW, 3, 9) == (3, 3)
    assert maps.missing_sums(1, VIEW, 3, 9, 4) == [(3, 6)]
    assert maps.missing_sums(1, VIEW, 3, 3, 4) == []
    assert maps.converted(1, 1, 3, 9) == 0
    assert maps.absent(1, VIEW, 3, 6, 0b110) == {2: 6, 3: 6}
    assert maps.stripes.own_fd == maps.stripes.sums_fd == maps.stripes.blocks_fd == -1
    maps.close()


@pytest.mark.parametrize("seed", range(60))
def test_readings_against_a_plain_model(loaded: Host, seed: int) -> None:
    """Maps with random contents: tags of this round, of others, and of other views."""
    rng = np.random.default_rng(seed)
    maps = Maps(loaded.loaded.maps)
    stripes, records = maps.stripes, layout().records
    number = int(rng.integers(1, 6))
    maps.config["number"] = number
    round_ = int(rng.integers(1, 5))
    room, places = int(rng.integers(1, 40)), int(rng.integers(1, 20))
    tag = VIEW << 32 | round_
    chance = float(rng.choice([0.0, 0.2, 0.8, 1.0]))

    def tags(count: int) -> Any:
        others = rng.choice([0, tag - 2, tag + 2, (VIEW + 1) << 32 | round_], (2, count))
        return np.where(rng.random((2, count)) < chance, tag, others).astype(np.uint64)

    stripes.areas.set_rooms((room,))
    stripes.areas.set_blocks((-(-places // EACH),))
    stripes.sums = np.zeros((2, room), records["stored"])
    stripes.sums["tag"] = tags(room)
    stripes.own = np.zeros((2, room), records["own"])
    stripes.own["conversion"] = np.where(rng.random((2, room)) < chance, 3, rng.integers(0, 3))
    stripes.places, stripes.gathers = 1, np.zeros((2, places), records["gather"])
    stripes.gathers["tag"] = tags(places)
    stripes.gathers["seen"] = rng.integers(0, 1 << 63, (2, places), dtype=np.uint64) << np.uint64(1)
    stripes.gathers["seen"] |= rng.integers(0, 2, (2, places), dtype=np.uint64)

    bank = round_ % 2
    for _ in range(20):
        first, end = sorted(rng.integers(0, room + 4, 2).tolist())
        here = {at for at in range(first, min(end, room)) if stripes.sums["tag"][bank, at] == tag}
        lacking = set(range(first, end)) - here
        expected = (min(lacking, default=end), max(here, default=first - 1) + 1)
        assert maps.reached(round_, VIEW, first, end) == expected
        limit = int(rng.integers(1, 4))
        assert maps.missing_sums(round_, VIEW, first, end, limit) == runs(lacking)[:limit]
        for conversion in range(4):
            count = 0
            while (
                conversion
                and first + count < min(end, room)
                and stripes.own["conversion"][bank, first + count] == conversion
            ):
                count += 1
            assert maps.converted(round_, conversion, first, end) == count
        count = int(rng.integers(0, places + 3))
        members = int(rng.integers(0, 1 << 63)) << 1 | int(rng.integers(2))
        expected_absent = {
            k: sum(
                at >= places
                or stripes.gathers["tag"][bank, at] != tag
                or not int(stripes.gathers["seen"][bank, at]) >> k - 1 & 1
                for at in range(count)
            )
            for k in range(1, 65)
            if members >> k - 1 & 1 and k != number
        }
        assert maps.absent(round_, VIEW, first, count, members) == expected_absent
    maps.close()
    loaded.begin(VIEW)


def test_readings_of_what_the_program_writes(host: Host) -> None:
    """Contributions to an own stripe of four, sums of the others'."""
    maps = host.maps
    maps.stripes.own["conversion"][1, :4] = [6, 6, 6, 5]
    host.channel["offered"] = 6
    assert maps.converted(1, 6, 0, 4) == 3
    assert maps.converted(2, 6, 0, 4) == 0
    for sender, index in ((2, 0), (2, 1), (2, 2), (3, 0), (3, 1)):
        host.give(FrameType.CONTRIBUTION, sender, index)
    assert maps.absent(1, VIEW, 0, 4, 0b111) == {2: 1, 3: 2}
    assert maps.absent(2, VIEW, 0, 4, 0b110) == maps.absent(1, VIEW + 1, 0, 4, 0b110)
    assert maps.absent(2, VIEW, 0, 4, 0b110) == {2: 4, 3: 4}
    assert maps.reached(1, VIEW, 0, 4) == (2, 2)
    for index in (4, 7):
        host.give(FrameType.SUM, 2, index)
    assert maps.reached(1, VIEW, 4, 8) == (5, 8)
    assert maps.missing_sums(1, VIEW, 0, ROOM, 9) == [(2, 2), (5, 2), (8, 4)]
    maps.stripes.forget_own()
    assert maps.converted(1, 6, 0, 4) == 0


# ---- the doorbell


def test_the_doorbell(host: Host) -> None:
    """Readable while something is in it; a list with its unit, then counts; nothing is lost round the ring."""
    host.channel["clock"] = 1
    poll = select.epoll()
    poll.register(host.doorbell.fileno(), select.EPOLLIN)
    assert poll.poll(0) == []
    host.give(FrameType.CONTRIBUTION, 2, 0)
    assert poll.poll(5)
    assert host.doorbell.take() == [Bell(TAG, 0b111, 0, ROOM, UNIT)]
    assert poll.poll(0) == [] and host.doorbell.take() == []
    for turn in range(1, 40):  # 40 bytes each: the ring's 4096 are written over three times
        for index in range(4, 12):
            host.give(FrameType.SUM, 2 + index // 8, index)
        assert host.doorbell.take() == [Bell(TAG, 0, count, ROOM, 0) for count in range(1, 9)], turn
        host.use()
    poll.close()
