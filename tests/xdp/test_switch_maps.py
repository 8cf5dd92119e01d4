# SPDX-License-Identifier: Apache-2.0
"""The maps of a Linux switch as its control process uses them: views, keys, room, messages; and what is in flight."""

from __future__ import annotations

import gc
import itertools
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

from nicps import wire
from nicps.dataplane import bpf, loader, xdp
from nicps.dataplane.switch import (
    Differing,
    OtherView,
    SwitchMaps,
    SwitchPlane,
    TooLong,
    Version,
    read_message,
)
from nicps.errors import EnvironmentProblem
from nicps.layout import layout
from nicps.wire import FrameType
from tests.stripes import MACS, NETWORK, signed
from tests.xdp import stall
from tests.xdp.stall import Meeting

VIEW, SEED, WIDTH, ROOM = 7, bytes(16), 32, 5
VIEWS = itertools.count(100)
KEYS = [bytes([at]) * 16 for at in range(1, 9)]


class Switch:
    """The program on no interface, and its maps."""

    def __init__(self, source: str) -> None:
        self.loaded = loader.load(source, {xdp.SWITCH_PROGRAM: "xdp"})
        self.maps = SwitchMaps(self.loaded.maps)
        self.maps.config["network"] = NETWORK

    def enter(self, view: int = VIEW, key: bytes | None = None, members: int = 3) -> None:
        self.maps.enter_view(view, SEED, dict(enumerate(MACS[:members], 1)), key)

    def give(self, frame: bytes) -> bpf.Run:
        return bpf.prog_test_run(self.loaded.programs[xdp.SWITCH_PROGRAM], frame)

    def risen(self, frame: bytes) -> set[str]:
        """The counters that a frame has raised."""
        before = self.maps.counters()
        self.give(frame)
        return {name for name, count in self.maps.counters().items() if count > before[name]}

    def messages(self) -> list[object]:
        return [read_message(record) for record in self.maps.doorbell.read()]

    def close(self) -> None:
        self.maps.close()
        self.loaded.close()


@pytest.fixture
def switch() -> Iterator[Switch]:
    """Without a view, and without room."""
    made = Switch("nicps_switch.c")
    yield made
    made.close()


def use(switch: Switch, fragments: int = ROOM, width: int = WIDTH) -> None:
    switch.maps.use(switch.maps.reserve(fragments, width))


def frame(
    sender: int,
    view: int = VIEW,
    round_: int = 1,
    key: bytes = b"",
    sequence: int = 0,
    kind: FrameType = FrameType.CONTRIBUTION,
    **fields: int,
) -> bytes:
    header = wire.Header(network=NETWORK, view=view, round=round_, sender=sender, sequence=sequence)
    body = replace(wire.Contribution(0b111, 0, ROOM, 0, WIDTH, -5, -9), **fields)
    return signed(sender, kind, header, body, bytes(range(240)) * 6, wire.SWITCH, key)


def test_room(switch: Switch) -> None:
    """Until there is some, and a view, nothing is added; another room is empty, and ends the view."""
    maps = switch.maps
    assert maps.room == (0, 0) and maps.view is None
    assert switch.risen(frame(1)) == {"disabled"}
    switch.enter()
    assert (maps.view, maps.seed) == (VIEW, SEED)
    assert switch.risen(frame(1)) == {"malformed"}, "lanes of no width"
    use(switch)
    assert maps.room == (ROOM, WIDTH) and maps.view == VIEW
    assert [switch.risen(frame(k)) for k in (1, 2, 3)] == [{"gathered"}] * 2 + [{"summed"}]
    assert switch.risen(frame(1, width=16)) == {"malformed"}
    assert switch.risen(frame(1, index=ROOM)) == {"range"}
    use(switch, ROOM + 3, 16)
    assert maps.room == (ROOM + 3, 16) and maps.view is maps.seed is None
    assert switch.risen(frame(1, width=16)) == {"disabled"}
    switch.enter()
    last = {"width": 16, "fragments": ROOM + 3, "index": ROOM + 2}
    assert [switch.risen(frame(k, **last)) for k in (1, 2, 3)] == [{"gathered"}] * 2 + [{"summed"}]
    use(switch, ROOM + 3, 16)
    switch.enter()
    assert switch.risen(frame(1, **last)) == {"gathered"}, "the same size empties all places, too"
    maps.leave_view()
    assert switch.risen(frame(2, **last)) == {"disabled"} and maps.view is None


@pytest.mark.parametrize("width", [8, 16, 32])
def test_memory(switch: Switch, width: int) -> None:
    """The announced size is the maps' memory; and that memory is given back."""
    gc.collect()
    descriptors = len(os.listdir("/proc/self/fd"))
    reserved = switch.maps.reserve(1001, width)
    fds = (reserved.places_fd, reserved.blocks_fd, reserved.sums_fd)
    assert sum(bpf.map_info(fd).bytes for fd in fds) == SwitchPlane.memory(1001, width)
    each = SwitchPlane.memory(8000, width) / 8000
    assert each == 2 * (48 + 1440 + 1440 * 64 // width)
    numbers = [bpf.map_info(fd).id for fd in fds]
    switch.maps.use(reserved)
    use(switch, 1, width)
    for number in numbers:
        with pytest.raises(FileNotFoundError):
            bpf.map_by_id(number)
    assert len(os.listdir("/proc/self/fd")) == descriptors + 3
    switch.maps.reserve(3, width).close()
    switch.maps.close()
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_too_much_memory(switch: Switch) -> None:
    use(switch)
    switch.enter()
    with pytest.raises(EnvironmentProblem, match=r"cannot allocate \d+ MB of places of a switch"):
        switch.maps.reserve(400_000_000, 8)
    assert switch.maps.room == (ROOM, WIDTH) and switch.maps.view == VIEW
    assert switch.risen(frame(1)) == {"gathered"}
    for fragments, width in ((0, 8), (4, 0), (4, 64)):
        with pytest.raises(ValueError, match=f"no room is for {fragments} fragments of lanes of"):
            switch.maps.reserve(fragments, width)


def test_a_view_begins_with_nothing_of_the_former(switch: Switch) -> None:
    """Members, key, windows and numbers; the places stay, since a round is run again with its remainder."""
    use(switch)
    switch.enter(key=KEYS[0])
    for at in range(1, 4):
        assert "forged" in switch.risen(frame(at, key=KEYS[1], sequence=1))
        switch.give(frame(at, key=KEYS[0], sequence=900_000))
    assert switch.maps.sequence == 1
    switch.enter(VIEW + 1, KEYS[1], members=2)
    assert switch.maps.sequence == 0 and not switch.maps._windows.view(np.uint64).any()
    assert switch.risen(frame(3, VIEW + 1, key=KEYS[1], sequence=1)) == {"stranger"}
    both = {"members": 0b11, "number": VIEW, "behind": 1}
    for at, name in ((1, "gathered"), (2, "summed")):
        one = frame(at, VIEW + 1, 2, KEYS[1], 1, **both)
        assert switch.risen(one) == {name}, "the remainder of the view before is there"
    assert switch.risen(frame(1, key=KEYS[0], sequence=900_001)) == {"view"}
    switch.enter(VIEW + 2)
    assert switch.risen(frame(1, VIEW + 2, 3)) == {"gathered"}, "no key any more"
    assert switch.maps.config["live_members"] == 0b111


def test_a_key_serves_once(switch: Switch) -> None:
    """While it is in force its numbers go on; when another has been, it is refused."""
    use(switch)
    switch.enter(key=KEYS[0])
    for at in range(1, 4):
        switch.give(frame(at, key=KEYS[0], sequence=5))
    switch.enter(VIEW + 1, KEYS[0])
    assert switch.maps.sequence == 1 and switch.maps._windows["highest"][1] == 5
    switch.enter(VIEW + 2, KEYS[1])
    with pytest.raises(ValueError, match="in force before"):
        switch.enter(VIEW + 3, KEYS[0])
    assert switch.maps.view == VIEW + 2 and switch.maps.config["enabled"] == 1
    switch.enter(VIEW + 3)
    with pytest.raises(ValueError, match="in force before"):
        switch.enter(VIEW + 4, KEYS[1])


@pytest.mark.parametrize(
    ("members", "key", "said"),
    [
        ({1: MACS[0]}, None, "from 2 to 64 members"),
        ({0: MACS[0], 1: MACS[1]}, None, "from 2 to 64 members"),
        ({1: MACS[0], 65: MACS[1]}, None, "from 2 to 64 members"),
        ({1: MACS[0], 2: bytes(6)}, None, "6 bytes, not all zero"),
        ({1: MACS[0], 2: b"short"}, None, "6 bytes, not all zero"),
        ({1: MACS[0], 2: MACS[1]}, b"short", "16 bytes, not 5"),
    ],
)
def test_a_list_that_cannot_be(
    switch: Switch, members: dict[int, bytes], key: bytes | None, said: str
) -> None:
    switch.enter()
    with pytest.raises(ValueError, match=said):
        switch.maps.enter_view(VIEW + 1, SEED, members, key)
    assert switch.maps.view == switch.maps.config["view"] == VIEW
    assert switch.maps.config["enabled"] == 1


def test_messages(switch: Switch) -> None:
    """Each is reported once, and of each kind at most ten a second with ten at once."""
    use(switch)
    switch.enter()
    fragments = [ROOM + 2, ROOM + 1, ROOM + 2, ROOM + 4]
    for size in fragments:
        assert switch.risen(frame(1, fragments=size)) == {"range"}
        assert switch.risen(frame(1, fragments=size, kind=FrameType.ASK, number=1)) == {"range"}
    assert switch.messages() == [TooLong(ROOM + 2), TooLong(ROOM + 4)]
    for view in (9, 9, 8, 8, 9):
        assert switch.risen(frame(1, view)) == {"view"}
    assert switch.messages() == [OtherView(9), OtherView(8), OtherView(9)]
    switch.give(frame(1, number=5, behind=1, round_=9))
    for sender in (2, 3, 3):
        assert switch.risen(frame(sender, number=5, behind=2, round_=9)) == {"malformed"}
    first, refused = Version(0b111, ROOM, -9, 5, 1), Version(0b111, ROOM, -9, 5, 2)
    assert switch.messages() == [Differing(VIEW, 9, 0, 2, first, refused)]
    for view in range(100, 150):
        switch.give(frame(1, view))
    told = switch.messages()
    assert told[0] == OtherView(100) and 5 <= len(told) <= 20
    due = switch.maps._told["due_ns"]
    due[layout().limits["TOLD_VIEW"]] = 0
    switch.give(frame(1, 149))
    assert switch.messages() == [OtherView(149)], "what was not told is told later"


@pytest.fixture(scope="module")
def stalling() -> Iterator[tuple[Switch, Meeting]]:
    stall.need_two_processors()
    made = Switch(str(stall.SWITCH_SOURCE))
    use(made)
    with ThreadPoolExecutor(1) as pool:
        yield made, Meeting(made.loaded.maps, made.give, made.maps.counters, pool)
    made.close()


@pytest.mark.parametrize("place", [stall.CHECKED, stall.CLAIMED, stall.COPIED])
@pytest.mark.parametrize("what", ["another view", "no view", "another room"])
def test_what_is_in_flight_ends_first(
    stalling: tuple[Switch, Meeting], place: int, what: str
) -> None:
    """A contribution that was checked in the old view is not in a place, a window or a number of the new one."""
    switch, meeting = stalling
    deadline = time.monotonic() + stall.LIMIT_S
    while True:
        view, key = next(VIEWS), os.urandom(16)
        switch.enter(view, key)
        for at in (1, 2):
            switch.give(frame(at, view, key=key, sequence=900_000))
        before = switch.maps.counters()["summed"]
        other = meeting.stall(place, frame(3, view, key=key, sequence=900_000))
        assert meeting.reached
        if not other.done():  # else this thread did not get its turn
            break
        assert time.monotonic() < deadline
    if what == "another view":
        switch.enter(next(VIEWS), os.urandom(16))
    elif what == "no view":
        switch.maps.leave_view()
    else:
        use(switch)
    # The kernel's own count: the thread that ran the program may not have had its turn yet.
    assert switch.maps.counters()["summed"] == before + 1, "the processor has ended"
    made = other.result(stall.LIMIT_S)
    assert made.verdict == bpf.XDP_REDIRECT
    unpacked = wire.unpack_header(made.frame[wire.ETHERNET_BYTES :])
    assert (unpacked.view, unpacked.sequence) == (view, 1)
    if what != "another view":
        switch.enter(next(VIEWS), os.urandom(16))
    assert switch.maps.sequence == 0 and not switch.maps._windows.view(np.uint64).any()
