# SPDX-License-Identifier: Apache-2.0
"""What leaves a host, and what does not: its interface goes down, or its training program is lost."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from nicps import wire
from nicps.agent.sender import Sender
from nicps.errors import InterfaceDown, JobFailed
from nicps.exchange import Exchange
from nicps.protocol import SendFragments, Striped
from nicps.protocol.phase import Phase
from tests.listed import members_of

FRAGMENTS = 12


class Interface:
    """Takes frames as `DataPlane` does, while it is up."""

    def __init__(self) -> None:
        self.up = True
        self.small: list[bytes] = []
        self.tx = self
        self._ring = 0
        self.flushed = 0
        self.longest = wire.MAX_FRAME_BYTES  # longer frames are refused, as by a queue that is full

    def send(self, data: bytes) -> bool:
        if not self.up:
            raise InterfaceDown("down")
        if self.longest < len(data):
            return False
        self.small.append(data)
        return True

    def free(self) -> int:
        return 5

    def unsent(self) -> int:
        return self._ring

    def push(self, headers: Any, payload: Any) -> int:
        self._ring += len(headers)
        return len(headers)

    def flush(self) -> None:
        if self._ring and not self.up:
            raise InterfaceDown("down")
        if self.longest >= wire.FRAGMENT_HEADER_BYTES + wire.PAYLOAD_BYTES:
            self.flushed, self._ring = self.flushed + self._ring, 0

    def take_back(self) -> None:
        self._ring = 0


class Gradient:
    """All of it is there."""

    def __init__(self) -> None:
        self.waited_for = True
        self.shifts = np.zeros(FRAGMENTS, np.uint8)

    def available(self, round_: int) -> int:
        return FRAGMENTS

    def payload(self, round_: int, first: int, count: int) -> Any:
        lanes = np.zeros((count, wire.PAYLOAD_BYTES), np.uint8)
        return lanes, self.shifts[first : first + count]

    def sending(self, round_: int) -> None:
        pass

    def awaited(self, yes: bool) -> None:
        self.waited_for = yes


def header(flags: int, round_: int) -> wire.Header:
    return wire.Header(flags=flags, network=1, view=1, round=round_, sender=1, sequence=1)


def test_what_is_sent_while_the_interface_is_down_is_lost_and_holds_up_nothing() -> None:
    """A holder that waited to send would never find out that it is alone."""
    interface, gradient = Interface(), Gradient()
    sent: list[SendFragments] = []
    handed_on: list[bool] = []
    sender = Sender(
        interface,  # type: ignore[arg-type]
        header,
        lambda count: 1,
        lambda action, started: sent.append(action),
    )
    phase = Phase(1, 1, wire.PhaseKind.TRAIN, fragments=FRAGMENTS, width=16)
    action = SendFragments(1, 1, phase.first_round, 8, ((0, FRAGMENTS),), False)
    token = bytes([wire.VERSION, wire.FrameType.TOKEN]) + bytes(60)

    interface.up = False
    sender.fragments_of(action, phase, gradient)
    sender.frame(token, lambda: handed_on.append(True))
    sender.pump(1.0)
    assert sender.down
    assert sent == [action] and handed_on == [True]
    assert not interface.small and not interface.flushed
    assert not gradient.waited_for

    interface.up = sender.muted = True
    sender.fragments_of(action, phase, gradient)
    sender.frame(token)
    sender.pump(2.0)
    assert not sender.down and not interface.small and not interface.flushed
    assert sent == [action, action]

    sender.muted = False
    sender.fragments_of(action, phase, gradient)
    sender.frame(token)
    sender.pump(2.0)
    assert not sender.down
    assert sent == [action, action, action] and interface.small == [token]
    assert interface.flushed >= FRAGMENTS


@pytest.mark.parametrize("longest", [0, 1400])
def test_what_the_interface_refuses_for_ever_is_lost(longest: int) -> None:
    """The other end of a virtual cable has a smaller MTU: the token must not wait behind fragments for ever."""
    interface, gradient = Interface(), Gradient()
    sent: list[SendFragments] = []
    sender = Sender(
        interface,  # type: ignore[arg-type]
        header,
        lambda count: 1,
        lambda action, started: sent.append(action),
    )
    phase = Phase(1, 1, wire.PhaseKind.TRAIN, fragments=5, last_fragments=5, width=16)
    action = SendFragments(1, 1, 7, 8, ((0, 5),), False)
    token = bytes([wire.VERSION, wire.FrameType.TOKEN]) + bytes(60)
    interface.longest = longest
    for start in (1.0, 2.0):
        sender.fragments_of(action, phase, gradient)
        sender.frame(token)
        sender.pump(start)
        sender.pump(start + 0.05)
        assert sender.refused and len(sent) == start - 1
        for late in (0.15, 0.2, 0.4):
            sender.pump(start + late)
        assert not sender.refused and len(sent) == start
        assert interface.small == [token] * int(start) * (longest > 0)
    interface.longest = wire.MAX_FRAME_BYTES
    sender.fragments_of(action, phase, gradient)
    sender.pump(3.0)
    assert interface.flushed == 5 and not sender.refused


@pytest.mark.parametrize(
    ("width", "exchange", "shift", "most"),
    [
        (32, Exchange.BROADCAST, 27, 26),
        (16, Exchange.BROADCAST, 255, 42),
        (8, Exchange.BROADCAST, 51, 50),
        (16, Exchange.SWITCH, 1, 0),
    ],
)
def test_a_shift_that_no_kernel_takes_is_not_sent(
    width: int, exchange: Exchange, shift: int, most: int
) -> None:
    """The training program writes the shifts: others would ask for the fragment again and again."""
    interface, gradient = Interface(), Gradient()
    sender = Sender(
        interface,  # type: ignore[arg-type]
        header,
        lambda count: 1,
        lambda action, started: None,
    )
    phase = Phase(
        1,
        1,
        wire.PhaseKind.TRAIN,
        fragments=FRAGMENTS,
        last_fragments=FRAGMENTS,
        width=width,
        exchange=exchange,
    )
    gradient.shifts[3] = most
    sender.fragments_of(SendFragments(1, 1, 7, 8, ((0, 5),), False, exchange), phase, gradient)
    sender.pump(1.0)
    assert interface.flushed == 5
    gradient.shifts[8] = shift
    sender.fragments_of(SendFragments(1, 1, 7, 8, ((5, 5),), False, exchange), phase, gradient)
    told = f"fragment 8 of round 7 has a shift of {shift}, and at most {most} can be added: the"
    with pytest.raises(JobFailed, match=told):
        sender.pump(2.0)
    assert interface.flushed == 5 and not interface.unsent()


def sent_in_order(exchange: Exchange) -> list[str]:
    """What leaves first: a contribution is queued, then a token, a sign of life, and the next token."""
    interface, order = Interface(), list[str]()
    interface.small = Order(order)  # type: ignore[assignment]
    sender = Sender(
        interface,  # type: ignore[arg-type]
        header,
        lambda count: 1,
        lambda action, started: order.append("fragments"),
    )
    phase = Phase(1, 1, wire.PhaseKind.TRAIN, fragments=FRAGMENTS, width=16)
    ranges = ((0, FRAGMENTS),)
    action = SendFragments(1, 1, phase.first_round, 8, ranges, False, exchange)
    sender.fragments_of(action, phase, Gradient())
    for kind in (wire.FrameType.TOKEN, wire.FrameType.WANT, wire.FrameType.TOKEN):
        sender.frame(bytes([wire.VERSION, kind]) + bytes(60))
    sender.pump(1.0)
    return order


class Order(list[bytes]):
    """Frames by their kind, into a list that others write too."""

    def __init__(self, order: list[str]) -> None:
        self._order = order

    def append(self, data: bytes) -> None:
        self._order.append(wire.FrameType(data[1]).name)


@pytest.mark.parametrize("exchange", [Exchange.BROADCAST, Exchange.SWITCH])
def test_a_token_waits_for_the_fragments_before_it(exchange: Exchange) -> None:
    assert sent_in_order(exchange) == ["WANT", "fragments", "TOKEN", "TOKEN"]


def test_a_token_overtakes_fragments_where_the_exchange_has_it_so() -> None:
    exchange = replace(Exchange.BROADCAST, name="overtaken", token_waits=False)
    assert sent_in_order(exchange) == ["TOKEN", "WANT", "TOKEN", "fragments"]


def test_what_is_dropped_is_not_waited_for() -> None:
    """Its training program was killed. The ring listens for others again once nothing is being sent."""
    dataplane: Any = Interface()
    sender = Sender(dataplane, header, lambda count: 1, lambda action, started: None)
    phase = Phase(1, 1, wire.PhaseKind.TRAIN, fragments=FRAGMENTS, width=16)
    action = SendFragments(1, 1, phase.first_round, 8, ((0, FRAGMENTS),), False)
    sender.fragments_of(action, phase, Gradient())
    assert sender.drop_fragments() == [action]
    assert sender.drop_fragments() == []


def test_a_program_whose_contribution_is_dropped_is_waited_for_no_more() -> None:
    """The agent gave it the processor before others while all waited for its gradient."""
    interface, gradient = Interface(), Gradient()
    gradient.waited_for = False
    gradient.available = lambda round_: 3  # type: ignore[method-assign]
    sender = Sender(interface, header, lambda count: 1, lambda action, started: None)  # type: ignore[arg-type]
    phase = Phase(1, 1, wire.PhaseKind.TRAIN, fragments=FRAGMENTS, width=16)
    action = SendFragments(1, 1, phase.first_round, 8, ((0, FRAGMENTS),), False)
    sender.fragments_of(action, phase, gradient)
    sender.pump(1.0)
    assert sender.waits and gradient.waited_for
    assert sender.drop_fragments() == [action]
    assert not sender.waits and not gradient.waited_for


class Recorded(Interface):
    """Keeps the headers of frames, and where they went."""

    def __init__(self) -> None:
        super().__init__()
        self.frames: list[tuple[bytes, wire.Frame]] = []

    def free(self) -> int:
        return 7

    def push(self, headers: Any, payload: Any, destination: Any = None) -> int:
        everywhere = np.frombuffer(wire.BROADCAST, np.uint8)
        to = np.broadcast_to(everywhere if destination is None else destination, (len(headers), 6))
        for at, row in enumerate(headers):
            frame = wire.unpack(row.tobytes() + payload[at].tobytes())
            self.frames.append((to[at].tobytes(), frame))
        return super().push(headers, payload)


MEMBERS = members_of(4)


def stripes(
    kind: wire.FrameType, ranges: tuple[tuple[int, int], ...], members: int = 0b1101
) -> SendFragments:
    """Member 2 has left; 1, 3 and 4 have contributed to a round whose unit is 2**-60."""
    striped = Striped(kind, members, -60, (1, 3, 4))
    samples = int(kind is not wire.FrameType.ASK)
    return SendFragments(1, 1, 7, samples, ranges, False, Exchange.STRIPES, striped)


def send_stripes(action: SendFragments, exponents: int = -40) -> Recorded:
    interface, gradient = Recorded(), Gradient()
    gradient.shifts[:] = np.int8(exponents).astype(np.uint8)
    numbers = iter(range(1, 1000, 50))
    done = lambda action, started: None  # noqa: E731
    sender = Sender(interface, header, lambda count: next(numbers), done, lambda: MEMBERS)  # type: ignore[arg-type]
    phase = Phase(1, 1, wire.PhaseKind.TRAIN, fragments=FRAGMENTS, last_fragments=10, width=16)
    sender.fragments_of(action, phase, gradient)
    while interface.flushed < sum(count for _, count in action.ranges):
        sender.pump(1.0)
    return interface


def test_a_contribution_goes_to_the_aggregator_of_each_fragment() -> None:
    """12 fragments and three aggregators: each has four in a row."""
    found = send_stripes(stripes(wire.FrameType.CONTRIBUTION, ((3, 2), (6, 6)))).frames
    assert [(mac[5], frame.body.index) for mac, frame in found] == [
        *((1, 3), (3, 4), (3, 6), (3, 7), (4, 8), (4, 9), (4, 10), (4, 11)),
    ]
    for _, frame in found:
        body = frame.body
        assert isinstance(body, wire.Contribution)
        assert frame.type is wire.FrameType.CONTRIBUTION
        assert (body.members, body.fragments, body.width) == (0b1101, FRAGMENTS, 16)
        assert (body.exponent, body.unit, body.number) == (-40, -60, 0)


def test_what_one_member_alone_contributes_goes_to_all() -> None:
    found = send_stripes(stripes(wire.FrameType.SUM, ((0, 3),), members=0b100)).frames
    assert [mac for mac, _ in found] == [wire.BROADCAST] * 3
    assert {frame.type for _, frame in found} == {wire.FrameType.SUM}


def test_questions_go_to_the_aggregator_or_to_who_alone_has_contributed() -> None:
    """Each has a number of its own, and no lanes."""
    found = send_stripes(stripes(wire.FrameType.ASK, ((3, 9),))).frames
    assert [mac[5] for mac, _ in found] == [1, 3, 3, 3, 3, 4, 4, 4, 4]
    assert [frame.body.number for _, frame in found] == [*range(1, 10)]
    alone = send_stripes(stripes(wire.FrameType.ASK, ((3, 9),), members=0b100)).frames
    assert {mac[5] for mac, _ in alone} == {3}


def test_all_goes_to_a_linux_switch_and_names_the_remainders() -> None:
    """A question has a number of its own in that place; a lone contributor sends its lanes to all."""
    for kind in (wire.FrameType.CONTRIBUTION, wire.FrameType.ASK):
        striped = Striped(kind, 0b1101, -60, (0,), rest_view=9, behind=2)
        action = SendFragments(1, 1, 7, 4, ((3, 9),), False, Exchange.LINUX_SWITCH, striped)
        found = send_stripes(action).frames
        assert {mac for mac, _ in found} == {wire.SWITCH}
        said = [(frame.body.number, frame.body.behind) for _, frame in found]
        asks = kind is wire.FrameType.ASK
        assert said == ([(k, 0) for k in range(1, 10)] if asks else [(9, 2)] * 9)


def test_an_exponent_that_no_kernel_would_add_ends_the_job() -> None:
    most = -60 + wire.MAX_SHIFT[16]
    assert len(send_stripes(stripes(wire.FrameType.CONTRIBUTION, ((3, 2),)), most).frames) == 2
    assert len(send_stripes(stripes(wire.FrameType.CONTRIBUTION, ((3, 2),)), 127).frames) == 2
    with pytest.raises(JobFailed, match="fragment 3 has an exponent of -17"):
        send_stripes(stripes(wire.FrameType.CONTRIBUTION, ((3, 2),)), most + 1)
