# SPDX-License-Identifier: Apache-2.0
"""P2, P3 with servers: steps go out in the order of backward, parameters come in that of the forward pass."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from random import Random
from typing import Any

import numpy as np
import pytest

from nicps import wire
from nicps.agent.sender import Sender
from nicps.agent.served_frames import ServedFrames
from nicps.protocol import Phase, Timings
from nicps.protocol.actions import SendServed
from nicps.protocol.exchange.steps import Steps
from nicps.protocol.exchange.windows import OVERTAKE, PROBES, QUEUE
from nicps.protocol.partners import Pairing
from nicps.protocol.serving import Serving
from nicps.session.lanes import U8
from tests.listed import ROUND
from tests.served_kernel import (
    FRAGMENTS,
    MEMBERS,
    VIEW_NUMBER,
    ServedKernel,
    finish_with_losses,
    phase_of,
)
from tests.unit.test_sender_channels import Plane, Ring

pytestmark = pytest.mark.unit

TIMINGS = Timings()
PUSH, PULL, CONTRIBUTION = wire.FrameType.PUSH, wire.FrameType.PULL, wire.FrameType.CONTRIBUTION
WINDOW = QUEUE // 2  # two workers
ROOM = 2 * FRAGMENTS  # fragments of parameters


def phase(channels: int, sets: int = 0) -> Phase:
    """Members 4 and 1 serve, 2 and 3 train."""
    made = phase_of(64)
    assert made.serving is not None
    return replace(made, serving=replace(made.serving, channels=channels, sets=sets))


def worker(kernel: ServedKernel, channels: int, sets: int = 0) -> Steps:
    of = phase(channels, sets)
    return Steps(of, VIEW_NUMBER, 2, kernel, TIMINGS, Pairing.of(of, {1, 2, 3, 4}, 2))


def begin(
    steps: Steps, kind: wire.FrameType, number: int = 1, now: float = 0.0
) -> list[SendServed]:
    if kind is PUSH:
        return steps.push(now, number, ROUND, {})
    if kind is CONTRIBUTION:
        return steps.contribute(now, number, ROUND, 0b110)
    return steps.pull(now, number, ROUND)


def in_turn(action: SendServed) -> list[int]:
    """The fragments in the order in which they leave."""
    found: list[int] = []
    for first, count in action.ranges:
        fragments = range(first, first + count)
        found += reversed(fragments) if action.down else fragments
    return found


def in_channels(
    steps: Steps, kernel: ServedKernel, actions: list[SendServed]
) -> dict[int, list[tuple[int, int]]]:
    """By server, its fragments and their channels in the order in which they leave, if each comes at once."""
    left: dict[int, list[tuple[int, int]]] = {}
    while actions:
        for action in actions:
            assert not action.repair
            left.setdefault(action.to, []).extend((one, action.channel) for one in in_turn(action))
            kernel.take(action.number, in_turn(action))
        actions = steps.advance(0.0)
    assert steps.whole
    return left


# ---- which parameters on which channel


def test_shares_are_equal_and_the_front_is_the_most_urgent() -> None:
    shares = Serving((1,), 4, channels=3).shares(10, 16)
    assert shares == [(range(3), 2), (range(3, 6), 1), (range(6, 10), 0)]


def test_without_channels_all_is_one_share() -> None:
    assert Serving((1,), 1, sets=9).shares(10, 16) == [(range(10), 0)]


def test_each_set_has_its_urgent_front() -> None:
    """The push fragment in which both sets meet is of set 1; 9 fragments of parameters end in the 5th of 16 bits."""
    shares = Serving((1,), 1, sets=9, channels=2).shares(10, 16)
    assert shares == [(range(2), 1), (range(5, 7), 1), (range(2, 5), 0), (range(7, 10), 0)]


def test_a_small_vector_has_fewer_shares() -> None:
    shares = Serving((1,), 1, channels=8).shares(3, 32)
    assert [len(share) for share, _ in shares] == [1, 1, 1]
    assert sorted(channel for _, channel in shares) == [0, 2, 5]


# ---- the order


@pytest.mark.parametrize("channels", [1, 3, 8])
@pytest.mark.parametrize("kind", [PUSH, CONTRIBUTION])
def test_a_step_leaves_from_the_rear_to_the_front(kind: wire.FrameType, channels: int) -> None:
    kernel = ServedKernel()
    steps = worker(kernel, channels)
    left = in_channels(steps, kernel, begin(steps, kind))
    for server, part in ((4, range(150)), (1, range(150, FRAGMENTS))):
        assert [index for index, _ in left[server]] == [*reversed(part)]
        assert all(one <= later for (_, one), (_, later) in pairwise(left[server]))
    assert {channel for each in left.values() for _, channel in each} == {*range(channels)}


@pytest.mark.parametrize("channels", [0, 1, 3, 8])
def test_parameters_are_asked_for_from_the_front_to_the_rear(channels: int) -> None:
    kernel = ServedKernel()
    steps = worker(kernel, channels)
    left = in_channels(steps, kernel, begin(steps, PULL))
    for server, part in ((4, range(300)), (1, range(300, ROOM))):
        assert [index for index, _ in left[server]] == [*part]
        assert all(one >= later for (_, one), (_, later) in pairwise(left[server]))


def test_without_channels_a_step_leaves_as_it_did() -> None:
    kernel = ServedKernel()
    steps = worker(kernel, 0)
    left = in_channels(steps, kernel, begin(steps, PUSH))
    assert left[4] == [(index, 0) for index in range(150)]


def test_a_partner_is_asked_on_the_least_urgent_channel() -> None:
    """What it has comes behind the own set: as the own set comes, of both servers' parts in the same measure."""
    kernel = ServedKernel()
    steps = worker(kernel, 4, sets=320)
    actions = begin(steps, PULL)
    assert {action.to for action in actions} == {4, 1}
    partners: list[int] = []
    while not steps.whole:
        for action in actions:
            if action.to == 3:
                assert action.channel == 0 and not action.down
                partners += in_turn(action)
            kernel.take(1, in_turn(action))
        actions = steps.advance(0.0)
    assert sorted(partners) == [*range(320, ROOM)]


# ---- the windows


@pytest.mark.parametrize("kind", [PUSH, PULL])
def test_all_channels_of_a_server_share_its_window(kind: wire.FrameType) -> None:
    """Of which what comes first in order has all that it can use."""
    kernel, random = ServedKernel(), Random(1)
    steps = worker(kernel, 5)
    under_way: set[int] = set()
    actions = begin(steps, kind)
    while not steps.whole:
        for action in actions:
            if action.to == 4:
                under_way.update(in_turn(action))
        assert len(under_way) <= WINDOW
        come = {index for index in under_way if random.random() < 0.5}
        kernel.take(1, {*come, *range(ROOM // 2 if kind is PULL else FRAGMENTS // 2, ROOM)})
        under_way -= come
        actions = [a for a in steps.advance(0.0) if not a.repair]


def test_a_share_that_waits_for_room_has_no_deadline() -> None:
    kernel = ServedKernel()
    steps = worker(kernel, 2)
    begin(steps, PUSH)
    kernel.take(1, range(FRAGMENTS))
    assert steps.advance(0.0) == [] or steps.deadline() < float("inf")
    while not steps.whole:
        kernel.take(1, range(FRAGMENTS))
        steps.advance(0.0)
    assert steps.deadline() == float("inf")


def test_what_later_ones_have_overtaken_is_sent_again() -> None:
    """The last fragment is the first in order: 149 to 65 are under way to the first server."""
    kernel = ServedKernel()
    steps = worker(kernel, 1)
    begin(steps, PUSH)
    late = {149 - 3, 149 - 7}
    kernel.take(1, {*range(149, 149 - 40, -1)} - late)
    again, fresh = steps.advance(0.0)
    assert again.repair and in_turn(again) == [146, 142]
    assert in_turn(fresh) == [149 - WINDOW, 148 - WINDOW, 147 - WINDOW]
    assert steps.advance(0.0) == []


def test_fragments_of_another_channel_overtake_none() -> None:
    """Urgent ones come first, however many: nothing of bulk counts as lost."""
    kernel = ServedKernel()
    steps = worker(kernel, 4)  # of the first server's part the first half is on channel 3
    actions = begin(steps, PULL)
    kernel.take(1, range(150 - WINDOW))
    actions = steps.advance(0.0)
    assert {action.channel for action in actions if action.to == 4} == {3}
    kernel.take(1, range(100))
    actions = steps.advance(0.0)
    bulk = [index for a in actions if a.to == 4 and a.channel == 2 for index in in_turn(a)]
    assert len(bulk) > OVERTAKE and bulk[0] == 150
    kernel.take(1, {*range(100), *bulk})
    assert not [a for a in steps.advance(0.0) if a.to == 4 and a.repair], "100 to 150 are urgent"


def test_where_nothing_comes_the_first_in_order_are_sent_again() -> None:
    steps = worker(ServedKernel(), 3)
    begin(steps, PUSH)
    actions = steps.advance(steps.deadline())
    again = [in_turn(action) for action in actions if action.to == 4]
    assert again == [[*range(first, first - PROBES, -1)] for first in (149, 99)], "of each share"


def test_a_server_that_does_not_answer_is_reported_with_all_channels() -> None:
    kernel = ServedKernel()
    steps = worker(kernel, 3)
    begin(steps, PUSH)
    now, lacks = 0.0, dict[int, int]()
    while now < 10 * TIMINGS.silence_most_s and not lacks:
        kernel.take(1, range(150, FRAGMENTS))
        now = steps.deadline()
        steps.advance(now)
        lacks = dict(steps.take_report(now))
    assert lacks == {4: 150}


def test_what_has_come_in_the_view_before_is_not_sent_again() -> None:
    kernel = ServedKernel()
    kernel.take(1, {*range(140, 150), *range(100, 120)})
    steps = worker(kernel, 1)
    actions = [a for a in begin(steps, PUSH) if a.to == 4]
    fresh = [index for a in actions if not a.repair for index in in_turn(a)]
    assert fresh[0] == 139 and fresh[-1] == 139 - WINDOW + 1


@pytest.mark.parametrize("seed", range(40))
def test_all_of_it_comes_in_the_end(seed: int) -> None:
    """Partners answer, or never."""
    random = Random(seed)
    kernel = ServedKernel()
    steps = worker(kernel, random.randint(1, 8), random.choice((0, 320)))
    now, silent = 0.0, {3} if random.random() < 0.3 else ()
    for number in range(1, 5):
        actions = begin(steps, random.choice([PUSH, PULL, CONTRIBUTION]), number, now)
        now = finish_with_losses(steps, kernel, actions, now, random, silent)


# ---- frames


def served(kind: wire.FrameType, channel: int, ranges: tuple[tuple[int, int], ...]) -> SendServed:
    return SendServed(VIEW_NUMBER, ROUND, kind, 5, 4, ranges, channel=channel, down=kind is PUSH)


def test_frames_of_a_step_have_their_own_lanes_and_exponents() -> None:
    """The exponents come in the order of the frames."""
    frames = ServedFrames(8, lambda: MEMBERS)
    action, of = served(PUSH, 2, ((10, 4),)), phase(3)
    header = wire.Header(flags=wire.channel_flags(2), view=VIEW_NUMBER, round=ROUND, sender=2)
    template = frames.template(header, action, of)
    exponents = np.array([3, 2, 1, 0], np.uint8)
    rows, to = frames.fill(action, template, 10, 4, exponents, 100)
    assert bytes(to) == MEMBERS[3].mac
    found = [wire.unpack(bytes(row) + bytes(wire.PAYLOAD_BYTES)) for row in rows]
    bodies = [frame.body for frame in found]
    assert all(isinstance(body, wire.Push) for body in bodies)
    told = [(body.index, body.exponent) for body in bodies if isinstance(body, wire.Push)]
    assert told == [(13, 3), (12, 2), (11, 1), (10, 0)]
    assert [frame.header.sequence for frame in found] == [100, 101, 102, 103]
    assert {wire.channel_of(frame.header.flags) for frame in found} == {2}


class Lanes:
    """Own lanes: their bytes are the fragment's index, and the exponent is 20 less."""

    def available(self, round_: int) -> int:
        return 1 << 32

    def payload(self, round_: int, first: int, count: int) -> tuple[U8, U8]:
        index = np.arange(first, first + count, dtype=np.uint8)
        return np.repeat(index[:, None], wire.PAYLOAD_BYTES, axis=1), index - np.uint8(20)

    def sending(self, round_: int) -> None:
        pass

    def awaited(self, yes: bool) -> None:
        pass


class Seen(Plane):
    """What goes into the rings: whose, and of each frame its index, exponent and first lane."""

    def __init__(self, slots: int) -> None:
        super().__init__(slots)
        self.frames: list[tuple[object, int, int, int]] = []
        self.tx = self._watched(self.tx)

    def open_ring(self, urgency: int) -> Ring:
        return self._watched(super().open_ring(urgency))

    def _watched(self, ring: Ring) -> Ring:
        push = ring.push

        def note(headers: Any, payload: Any, *to: Any) -> int:
            taken = push(headers, payload, *to)
            for row, lanes in zip(headers[:taken], payload[:taken], strict=True):
                body = wire.unpack(bytes(row) + bytes(wire.PAYLOAD_BYTES)).body
                assert isinstance(body, wire.Push)
                self.frames.append((ring.name, body.index, body.exponent, int(lanes[0])))
            return taken

        ring.push = note  # type: ignore[method-assign]
        return ring


def sender(slots: int) -> tuple[Sender, Seen]:
    plane = Seen(slots)

    def header(flags: int, round_: int) -> wire.Header:
        return wire.Header(flags=flags, view=VIEW_NUMBER, round=round_, sender=2)

    made = Sender(plane, header, lambda count: 1, lambda *_: None, lambda: MEMBERS)  # type: ignore[arg-type]
    return made, plane


def test_a_ring_with_little_room_keeps_the_order() -> None:
    """Of a range that goes out in pieces, the rear ones first."""
    queue, plane = sender(4)
    queue.served_of(served(PUSH, 0, ((10, 6), (2, 3))), phase(1), Lanes())
    for _ in range(4):
        queue.pump(1.0)
        plane.tx.waiting = 0
    order = [15, 14, 13, 12, 11, 10, 4, 3, 2]
    assert plane.frames == [(0, index, index - 20, index) for index in order]


def test_urgent_parts_overtake_bulk_that_waits_for_room() -> None:
    queue, plane = sender(4)
    of = phase(3)
    queue.served_of(served(PUSH, 0, ((12, 6),)), of, Lanes())
    queue.pump(1.0)
    queue.served_of(served(PULL, 2, ((0, 3),)), of, Lanes())
    plane.tx.waiting = 0
    queue.pump(1.0)
    assert [name for name, *_ in plane.frames] == [*[0] * 4, *["urgency 2"] * 3, *[0] * 2]
    assert [index for _, index, *_ in plane.frames] == [17, 16, 15, 14, 0, 1, 2, 13, 12]
