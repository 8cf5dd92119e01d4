# SPDX-License-Identifier: Apache-2.0
"""The order in which frames of several channels leave a host (P3): a queue and a ring for each of them."""

from __future__ import annotations

from typing import Any

import pytest

from nicps import wire
from nicps.agent.sender import Sender
from nicps.exchange import Exchange
from nicps.protocol import SendFragments
from nicps.protocol.phase import Phase
from nicps.protocol.plan import ChannelPlan
from tests.unit.test_sender import FRAGMENTS, Gradient, header

pytestmark = pytest.mark.unit

#: Channel 1 is the most urgent one.
PLANS = tuple(ChannelPlan(urgency, FRAGMENTS, (FRAGMENTS,)) for urgency in (0, 5, 3))
PHASE = Phase(
    1,
    1,
    wire.PhaseKind.TRAIN,
    first_round=1,
    fragments=FRAGMENTS,
    last_fragments=FRAGMENTS,
    width=16,
    exchange=Exchange.STRIPES,
    channels=PLANS,
)


class Ring:
    """Frames leave as the test says; until then they are in the way of others."""

    def __init__(self, name: object, leaving: list[object], slots: int = 5) -> None:
        self.name, self.leaving, self.slots = name, leaving, slots
        self.waiting = 0
        self.urgencies: list[int] = []
        self.takes = True  # the interface does

    def free(self) -> int:
        return self.slots - self.waiting

    def pending(self) -> int:
        return self.waiting

    def unsent(self) -> int:
        return 0 if self.takes else self.waiting

    def push(self, headers: Any, payload: Any, *_: Any) -> int:
        self.waiting += len(headers)
        self.leaving += [self.name] * len(headers)
        return len(headers)

    def flush(self) -> None:
        pass

    def take_back(self) -> None:
        self.waiting = 0

    def set_urgency(self, urgency: int) -> None:
        self.urgencies.append(urgency)


class Plane:
    """A data plane with rings for channels; `leaving` says whose frames went into a ring, in order."""

    def __init__(self, slots: int = 5) -> None:
        self.leaving: list[object] = []
        self.slots = slots
        self.tx = Ring(0, self.leaving, slots)
        self.opened: list[Ring] = []
        self.small = 0

    def open_ring(self, urgency: int) -> Ring:
        ring = Ring(f"urgency {urgency}", self.leaving, self.slots)
        self.opened.append(ring)
        return ring

    def send(self, data: bytes) -> bool:
        self.leaving.append("control")
        return True


class Host:
    """A sender, and how many frames of a channel may wait."""

    def __init__(self, slots: int = 5) -> None:
        self.plane = Plane(slots)
        self.most: dict[int, int] = {}
        self.sent: list[SendFragments] = []
        self.sender = Sender(
            self.plane,  # type: ignore[arg-type]
            header,
            lambda count: 1,
            lambda action, started: self.sent.append(action),
            batch=lambda channel: self.most.get(channel, 0),
        )

    def queue(self, channel: int, phase: Phase = PHASE, count: int = FRAGMENTS) -> SendFragments:
        ranges = ((0, count),)
        action = SendFragments(1, 1, 1, 8, ranges, False, Exchange.STRIPES, channel=channel)
        self.sender.fragments_of(action, phase, Gradient())
        return action

    def left(self) -> list[object]:
        """Pump once; what has gone into the rings since the last time."""
        before = len(self.plane.leaving)
        self.sender.pump(1.0)
        return self.plane.leaving[before:]


def test_what_is_urgent_leaves_first_and_control_before_all() -> None:
    host = Host(slots=100)
    for channel in (0, 2, 1):
        host.queue(channel, count=3)
    host.sender.frame(bytes([wire.VERSION, wire.FrameType.TOKEN]) + bytes(60))
    order = ["control", *["urgency 5"] * 3, *["urgency 3"] * 3, *[0] * 3]
    assert host.left() == order
    assert [action.channel for action in host.sent] == [1, 2, 0]


def test_what_is_urgent_overtakes_bulk_that_waits_for_room() -> None:
    host = Host()
    host.queue(0)
    assert host.left() == [0] * 5
    host.queue(1, count=2)
    assert host.left() == ["urgency 5"] * 2
    host.plane.tx.waiting = 0
    host.queue(1, count=1)
    assert host.left() == ["urgency 5", *[0] * 5]


def test_a_full_ring_stops_its_own_channel_only() -> None:
    host = Host()
    host.queue(1)
    host.queue(2, count=2)
    assert host.left() == [*["urgency 5"] * 5, *["urgency 3"] * 2]
    blocked = {line.ring.name: line.blocked for line in host.sender.lines.order}  # type: ignore[attr-defined]
    assert blocked == {"urgency 5": True, "urgency 3": False, 0: False}
    assert not host.sender.refused


def test_bulk_has_at_most_its_window_in_its_ring_while_something_urgent_is_open() -> None:
    host = Host(slots=100)
    host.most[0] = 2
    action = host.queue(0)
    assert host.left() == [0] * 2
    assert host.sender.refused, "it is tried again soon"
    assert host.left() == []
    host.plane.tx.waiting = 1
    assert host.left() == [0]
    host.most[0] = 0
    assert host.left() == [0] * (FRAGMENTS - 3) and not host.sender.refused
    assert host.sent == [action]


def test_what_a_ring_cannot_get_rid_of_is_lost_there_only() -> None:
    """The interface refuses frames of one channel for ever; those of the others go on."""
    host = Host(slots=100)
    bulk = host.queue(0, count=2)
    host.plane.tx.takes = False
    for late in (0.0, 0.06):
        host.queue(1, count=1)
        host.sender.pump(1.0 + late)
        assert host.sender.refused and bulk not in host.sent
    host.queue(1, count=1)
    host.sender.pump(1.11)
    assert bulk in host.sent and len(host.sent) == 4 and not host.sender.refused


def test_one_channel_has_the_ring_that_is_there() -> None:
    host = Host()
    host.queue(0, count=2)
    host.left()
    assert not host.plane.opened and not host.plane.tx.urgencies


def test_a_rings_urgency_is_that_of_its_channel_in_the_phase() -> None:
    host = Host(slots=100)
    host.queue(1, count=1)
    other = Phase(
        2, 1, wire.PhaseKind.TRAIN, fragments=FRAGMENTS, channels=(PLANS[1], PLANS[0], PLANS[2])
    )
    plain = Phase(3, 1, wire.PhaseKind.TRAIN, fragments=FRAGMENTS, last_fragments=FRAGMENTS)
    for phase in (other, other, plain):
        host.queue(0, phase, count=1)
    host.queue(1, other, count=1)
    assert [ring.name for ring in host.plane.opened] == ["urgency 5"]
    assert host.plane.tx.urgencies == [5, 0]
    assert host.plane.opened[0].urgencies == [0]


def test_fragments_of_all_channels_are_dropped() -> None:
    host = Host()
    queued = [host.queue(channel) for channel in (2, 0, 1)]
    host.left()
    dropped = host.sender.drop_fragments()
    assert sorted(dropped, key=lambda each: each.channel) == sorted(
        queued, key=lambda each: each.channel
    )
    assert host.left() == []


def test_rings_are_there_as_long_as_channels_have_something_to_send() -> None:
    host = Host()
    host.queue(1)
    host.queue(2, count=1)
    host.left()
    (idle,) = host.sender.lines.take_idle()
    assert idle.ring is host.plane.opened[1]
    assert [line.ring for line in host.sender.lines.order] == [host.plane.opened[0], host.plane.tx]
    host.queue(2, count=1)
    assert len(host.plane.opened) == 3
