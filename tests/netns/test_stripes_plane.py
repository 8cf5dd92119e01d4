# SPDX-License-Identifier: Apache-2.0
"""Stripes between two data planes at the ends of a wire: from TX ring to doorbell. The tests play the agents.

Of 20 fragments host 1 aggregates the first ten, host 2 the others; each sends the other's half.
"""

from __future__ import annotations

import contextlib
import functools
import select
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from nicps import wire
from nicps.dataplane import DataPlane, TxRing
from nicps.dataplane.doorbell import Bell
from nicps.dataplane.interface import read_interface
from nicps.errors import BpfLoadError
from tests.netns.planes import form, fragments, random_lanes, send_all, until
from tests.netns.wires import veth_pair
from tests.stripes import LANES, NATIVE, rounded, shifted

NETWORK, VIEW, KEY = wire.network_id("test"), 1, bytes(range(16))
FRAGMENTS, HALF, WIDTH, UNIT = 20, 10, 16, -60
STRIPES = {1: range(HALF), 2: range(HALF, FRAGMENTS)}
TAG, LIST, CONVERSION = VIEW << 32 | 1, 0b11, 4


class Member:
    """One host, with lanes of its own."""

    def __init__(self, number: int, plane: DataPlane, other: DataPlane) -> None:
        self.number, self.plane, self.maps = number, plane, plane.maps
        self.stripes, self.other = plane.maps.stripes, np.frombuffer(other.mac, np.uint8)
        macs = [plane.mac, other.mac] if number == 1 else [other.mac, plane.mac]
        plane.enter_view(VIEW, number, macs, 3 - number, KEY if plane.keyed else None)
        self.stripes.use(self.stripes.reserve(FRAGMENTS))
        places = -(-HALF // wire.fragments_per_block(WIDTH))
        self.stripes.use(self.stripes.reserve_places(places))
        self.stripes.set_ranks((1, 2), (1, 2))
        rng = np.random.default_rng(number)
        own = self.stripes.own[1]
        lanes = rng.integers(-(2**15), 2**15, (FRAGMENTS, LANES[WIDTH]))
        own["lane"] = lanes.astype(NATIVE[WIDTH]).view(np.uint8)
        own["exponent"] = (
            rng.integers(UNIT - 4, UNIT + 43, FRAGMENTS).astype(np.int8).view(np.uint8)
        )
        own["conversion"] = CONVERSION
        config = plane.maps.config
        channel = plane.maps.stripes.areas.words[0]
        channel["offered"] = CONVERSION
        channel["width"] = channel["width_next"] = WIDTH
        for words in (config, channel):
            words["round"] = words["round_low"] = 1
            words["round_high"] = 2
        config["enabled"] = 1

    def headers(self, indices: range, kind: type[wire.Contribution]) -> NDArray[np.uint8]:
        """(k, 56), with a question's numbers from 1 on."""
        header = wire.Header(network=NETWORK, view=VIEW, round=1, sender=self.number)
        frame = wire.pack(
            header, kind(LIST, 0, FRAGMENTS, 0, WIDTH, 0, UNIT), tail=bytes(wire.PAYLOAD_BYTES)
        )
        size = wire.CONTRIBUTION_HEADER_BYTES
        rows = np.tile(np.frombuffer(frame[:size], np.uint8), (len(indices), 1))
        at = wire.HEADER_BYTES
        numbers = np.arange(1, len(indices) + 1, dtype=">u4")
        rows[:, at + 8 : at + 12] = np.array(indices, ">u4").view(np.uint8).reshape(-1, 4)
        rows[:, at + 16 : at + 20] = numbers.view(np.uint8).reshape(-1, 4)
        rows[:, at + 21] = self.stripes.own["exponent"][1, indices.start : indices.stop]
        return rows

    def contribute(self, indices: range) -> None:
        """To the other, out of the map: its rows are not contiguous."""
        lanes = self.stripes.own["lane"][1, indices.start : indices.stop]
        rows = self.headers(indices, wire.Contribution)
        assert not lanes.flags.c_contiguous
        assert self.plane.tx.push(rows, lanes, self.other) == len(indices)
        self.plane.tx.flush()

    def has(self, count: int) -> bool:
        """Compare the sums."""
        lacking = self.maps.missing_sums(1, VIEW, 0, FRAGMENTS, FRAGMENTS)
        return FRAGMENTS - sum(n for _, n in lacking) == count


def check(members: tuple[Member, Member]) -> None:
    """Both have the same sums, those of the reference, and each its remainders."""
    first, second = members
    for index in range(FRAGMENTS):
        total = np.zeros(LANES[WIDTH], np.int64)
        for member in members:
            own = member.stripes.own[1, index]
            lanes = np.frombuffer(own["lane"].tobytes(), NATIVE[WIDTH]).astype(np.int64)
            total += shifted(lanes, int(own["exponent"].view(np.int8)) - UNIT)
        lanes, exponent, _ = rounded(total, WIDTH, UNIT, not_finite=False)
        for member in members:
            record = member.stripes.sums[1, index]
            assert record["lane"].tobytes() == lanes.astype(NATIVE[WIDTH]).tobytes()
            assert record["exponent"].view(np.int8) == exponent
    assert first.stripes.sums["rest"][1].tolist() == [TAG] * HALF + [0] * HALF
    assert second.stripes.sums["rest"][1].tolist() == [0] * HALF + [TAG] * HALF


@pytest.fixture(params=[False, True], ids=["trusted", "keyed"])
def members(request: pytest.FixtureRequest) -> Iterator[tuple[Member, Member]]:
    """Both hosts, with the room for stripes."""
    with veth_pair() as names, ExitStack() as stack:
        left, right = (
            stack.enter_context(DataPlane(name, NETWORK, keyed=request.param)) for name in names
        )
        for plane in (left, right):
            plane.open_stripes()
        yield Member(1, left, right), Member(2, right, left)


def counted(member: Member, **expected: int) -> None:
    """The counters of frames, all of them."""
    found = {name: count for name, count in member.maps.counters().items() if count}
    assert found == expected


def test_sums_of_contributions(members: tuple[Member, Member]) -> None:
    first, second = members
    first.contribute(STRIPES[2])
    second.contribute(STRIPES[1])
    for member in members:
        until(lambda member=member: member.has(FRAGMENTS), "all sums", 20.0)
        assert member.maps.reached(1, VIEW, 0, FRAGMENTS) == (FRAGMENTS, FRAGMENTS)
        assert member.maps.missing_sums(1, VIEW, 0, FRAGMENTS, 9) == []
        until(lambda member=member: member.maps.count(1, VIEW, 0) == FRAGMENTS, "all are counted")
        counted(member, summed=HALF, stored=HALF)
        assert select.select([member.plane.doorbell.fileno()], [], [], 5)[0]
        bells = member.plane.doorbell.take()
        assert bells == [Bell(TAG, LIST, 0, FRAGMENTS, UNIT), Bell(TAG, 0, FRAGMENTS, FRAGMENTS, 0)]
        assert not select.select([member.plane.doorbell.fileno()], [], [], 0)[0]
        assert member.plane.receive() == [], "no frame wakes the agent"
    check(members)
    keyed = first.plane.keyed
    outgoing = first.maps._outgoing[0]
    assert (outgoing["sequence"], outgoing["answers"]) == ((HALF, HALF) if keyed else (0, 0))
    assert first.maps.sequence == (HALF if keyed else 0)


def test_the_kernels_go_on_where_the_agents_have_begun(members: tuple[Member, Member]) -> None:
    """Each sends three contributions; the sum of each of them sends the next one, until all are here."""
    first, second = members
    for member, other in ((first, 2), (second, 1)):
        begin = STRIPES[other].start
        member.stripes.set_sent(1, other, begin + 3)
        member.contribute(range(begin, begin + 3))
    for member, other in ((first, 2), (second, 1)):
        until(lambda member=member: member.has(FRAGMENTS), "all sums", 20.0)
        counted(member, summed=HALF, stored=HALF, clocked=HALF - 3)
        assert member.maps.next_to_send(1, other) == STRIPES[other].stop
    check(members)


def test_the_kernel_sends_nothing_that_is_not_there(members: tuple[Member, Member]) -> None:
    """Lanes that are not converted yet; and nothing of another round, or after another view."""
    first, second = members
    begin = STRIPES[2].start
    first.stripes.own["conversion"][1, begin + 5] = CONVERSION - 1
    first.stripes.set_sent(1, 2, begin + 3)
    first.stripes.set_sent(1, 2, begin + 1)
    assert first.maps.next_to_send(1, 2) == begin + 3, "it does not go back"
    first.contribute(range(begin, begin + 3))
    until(lambda: second.maps.counters()["summed"] == 5, "sums up to the gap")
    assert first.maps.next_to_send(1, 2) == begin + 5
    assert first.maps.next_to_send(3, 2) == first.maps.next_to_send(2, 2) == 0
    first.stripes.own["conversion"][1, begin + 5] = CONVERSION
    first.stripes.set_sent(3, 2, begin + 6)  # the bank's next round
    first.contribute(range(begin + 5, begin + 8))
    until(lambda: second.maps.counters()["summed"] == 8, "what was sent")
    assert first.maps.counters()["clocked"] == 2
    key = KEY[::-1] if first.plane.keyed else None
    first.plane.enter_view(VIEW + 1, 1, [first.plane.mac, second.plane.mac], 2, key)
    assert first.maps.next_to_send(3, 2) == 0


def test_what_is_told_of_a_round_that_is_not_whole(members: tuple[Member, Member]) -> None:
    """Some contributions have not been sent, and some own lanes are not there."""
    first, second = members
    second.stripes.own["conversion"][1, 13:15] = CONVERSION - 1
    assert second.maps.converted(1, CONVERSION, HALF, FRAGMENTS) == 3
    first.contribute(range(10, 16))
    until(lambda: second.maps.counters()["unready"] == 2, "all have come")
    until(lambda: first.has(4), "the sums that can be made")
    assert second.maps.absent(1, VIEW, HALF, HALF, LIST) == {1: 6}
    assert first.maps.absent(1, VIEW, 0, HALF, LIST) == {2: HALF}
    for member in members:
        assert member.maps.reached(1, VIEW, HALF, FRAGMENTS) == (13, 16)
        assert member.maps.reached(1, VIEW, 0, HALF) == (0, 0)
        assert member.maps.missing_sums(1, VIEW, 0, FRAGMENTS, 9) == [(0, 10), (13, 2), (16, 4)]
        assert member.maps.missing_sums(1, VIEW, HALF, FRAGMENTS, 1) == [(13, 2)]
    assert [bell.count for bell in second.plane.doorbell.take()] == [0]
    assert first.plane.doorbell.take() == []
    # Questions: the sum of 12 once more, and who is lacking in 13 and in 16.
    asked = range(12, 17)
    rows = first.headers(asked, wire.Ask)
    empty = np.zeros((len(asked), wire.PAYLOAD_BYTES), np.uint8)
    each = np.tile(first.other, (len(asked), 1))
    assert first.plane.tx.push(rows, empty, each) == len(asked)
    first.plane.tx.flush()
    got: list[tuple[bytes, bytes]] = []
    until(lambda: got.extend(first.plane.receive()) or len(got) == 3, "three answers")
    told = {
        frame.body.index: frame.body.members for _, data in got for frame in [wire.unpack(data)]
    }
    assert told == {13: LIST, 14: LIST, 16: 0b01}
    assert first.maps.counters()["duplicate"] == 2, "the sums are here already"
    # Now all of it.
    second.stripes.own["conversion"][1] = CONVERSION
    second.contribute(STRIPES[1])
    first.contribute(STRIPES[2])
    for member in members:
        until(lambda member=member: member.has(FRAGMENTS), "all sums", 20.0)
    assert second.maps.counters()["duplicate"] == 4, "these had come"
    check(members)


def test_both_layouts_take_turns_in_the_ring() -> None:
    """Slots have had frames of the other length and to another host; none is mixed with what was there."""
    with veth_pair() as names, ExitStack() as stack:
        left, right = (stack.enter_context(DataPlane(name, NETWORK)) for name in names)
        for plane in (left, right):
            plane.open_stripes()
        first, second = Member(1, left, right), Member(2, right, left)
        lanes = random_lanes(256)
        for turn in range(5):  # 276 frames each, of 512 slots
            for member in (first, second):
                member.stripes.set_ranks((1, 2), (1, 2))
                member.stripes.use(member.stripes.reserve(FRAGMENTS))
                member.stripes.use(member.stripes.reserve_places(HALF))
                own = np.random.default_rng(turn).integers(0, 256, (FRAGMENTS, 1440))
                member.stripes.own["lane"][1] = own
                member.stripes.own["conversion"] = CONVERSION
                member.stripes.own["exponent"] = np.uint8(UNIT & 0xFF)
            first.contribute(STRIPES[2])
            second.contribute(STRIPES[1])
            for member in (first, second):
                until(lambda member=member: member.has(FRAGMENTS), "all sums", 20.0)
            check((first, second))
            for member in (first, second):
                member.stripes.set_ranks((), ())
            right.maps.allocate(64)
            send_all(left, *fragments(256, lanes))
            until(lambda: right.maps.count(1, VIEW, 1) == 256, "all fragments")
            assert (right.maps.accumulators[1].reshape(-1, 360) == lanes << 4).all()


def test_the_room_is_opened_when_it_is_needed() -> None:
    """Before, frames of stripes are counted and dropped; a second call, and calls of several threads, change
    nothing.
    """
    with veth_pair() as names, ExitStack() as stack:
        left, right = (stack.enter_context(DataPlane(name, NETWORK)) for name in names)
        first, second = Member(1, left, right), Member(2, right, left)
        first.contribute(STRIPES[2])
        until(lambda: second.maps.counters()["mode"] == HALF, "all are dropped")
        threads = [threading.Thread(target=plane.open_stripes) for plane in (left, right, left)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        left.open_stripes()
        first.contribute(STRIPES[2])
        second.contribute(STRIPES[1])
        for member in (first, second):
            until(lambda member=member: member.has(FRAGMENTS), "all sums", 20.0)
        check((first, second))
        # Fragments still are another exchange's.
        send_all(left, *fragments(4, random_lanes(4)))
        until(lambda: second.maps.counters()["mode"] == HALF + 4, "fragments are dropped")
        left.close()
        left.open_stripes()


def test_a_room_that_the_kernel_refuses() -> None:
    """All other functions go on, and the error gives the reason."""
    with veth_pair() as names, ExitStack() as stack:
        left, right = (stack.enter_context(DataPlane(name, NETWORK)) for name in names)
        later: dict[str, Any] = left._loaded.later
        name = "nicps_stripes"
        whole = later[name]
        later[name] = type(whole)(whole.source, whole.kind, whole.code[:-8])
        with pytest.raises(BpfLoadError, match=f"the kernel refuses {name} of nicps.c: "):
            left.open_stripes()
        form(left, right)
        send_all(left, *fragments(4, random_lanes(4)))
        until(lambda: right.maps.count(1, VIEW, 1) == 4, "fragments are taken")
        later[name] = whole
        left.open_stripes()
        assert name not in later


def test_ranks_are_the_views(members: tuple[Member, Member]) -> None:
    """A new view takes no contributions until it has an order."""
    first, second = members
    key = KEY[::-1] if first.plane.keyed else None
    macs = [first.plane.mac, second.plane.mac]
    second.plane.enter_view(VIEW, 2, macs, 1, key)
    first.plane.enter_view(VIEW, 1, macs, 2, key)
    second.stripes.areas.words["round_high"] = second.maps.config["enabled"] = 1
    first.contribute(STRIPES[2])
    until(lambda: second.maps.counters()["mode"] == HALF, "all are dropped")
    second.stripes.set_ranks((1, 2), ())
    first.contribute(STRIPES[2])
    until(lambda: second.maps.counters()["summed"] == HALF, "all are added")


def test_every_byte_of_what_a_ring_sends() -> None:
    """Both layouts, with the ring's destination, one for all and one each, in slots that have had something else."""
    rng = np.random.default_rng(2)
    expected: list[bytes] = []
    got: list[bytes] = []

    def have_come(count: int) -> bool:
        with contextlib.suppress(BlockingIOError):
            while True:
                got.append(heard.recv(2048))
        return len(got) >= count

    with (
        veth_pair() as (left, right),
        socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(wire.ETHERTYPE)) as heard,
    ):
        heard.bind((right, wire.ETHERTYPE))
        heard.setblocking(False)
        interface = read_interface(left)
        ring = TxRing(interface, wire.ETHERTYPE, wire.GROUP, frames=16)
        for _ in range(60):
            count, width = int(rng.integers(1, 17)), int(rng.choice([48, 56]))
            rows = rng.integers(0, 256, (count, width), np.uint8)
            payload = rng.integers(0, 256, (count, 1448), np.uint8)[:, 8:]
            own = np.tile(np.frombuffer(wire.GROUP, np.uint8), (count, 1))
            each = rng.integers(0, 256, (count, 6), np.uint8)
            destination, to = [(None, own), (each, each), (each[0], each[:1].repeat(count, 0))][
                int(rng.integers(3))
            ]
            assert ring.push(rows, payload, destination) == count
            ring.flush()
            until(lambda: ring.pending() == 0, "all have left")
            head = interface.mac + wire.ETHERTYPE.to_bytes(2, "big")
            expected += [
                to[at].tobytes() + head + rows[at].tobytes() + payload[at].tobytes()
                for at in range(count)
            ]
            until(functools.partial(have_come, len(expected)), "all have come")
        ring.close()
    assert got == expected


@pytest.mark.parametrize("destination", [wire.BROADCAST, wire.GROUP])
def test_sums_go_where_all_else_goes(destination: bytes) -> None:
    with veth_pair() as (left, _), DataPlane(left, NETWORK, destination=destination) as plane:
        assert plane.maps.config["everybody"].tobytes() == destination
        plane.enter_view(VIEW, 1, [plane.mac], 1)
        assert plane.maps.config["everybody"].tobytes() == destination
