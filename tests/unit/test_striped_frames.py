# SPDX-License-Identifier: Apache-2.0
"""Headers of frames of stripes, batch by batch: questions are numbered by channel, and each is answered once."""

from __future__ import annotations

from typing import Any

from nicps import wire
from nicps.agent.driver import Driver
from nicps.agent.flows import FlowWatch
from nicps.agent.frames import Frames
from nicps.agent.keyring import Keyring
from nicps.agent.loop import Loop
from nicps.agent.records import TimeLine
from nicps.agent.served_room import ServedRoom
from nicps.agent.striped import StripeFrames, header_dtype
from nicps.job import Life, LifeSettings
from nicps.protocol import Member, Striped
from nicps.wire import FrameType
from tests.rooms import MAC, NoKernel

MEMBERS = [Member(number, bytes((2, 0, 0, 0, 0, number)), f"h{number}") for number in (1, 2, 3)]


def test_questions_are_numbered_by_channel() -> None:
    """Each number is used once in its channel; other frames have none."""
    frames = StripeFrames(8, lambda: MEMBERS)
    dtype = header_dtype(wire.Contribution)
    used: dict[int, list[int]] = {}
    for channel, count in ((0, 2), (3, 5), (0, 1), (7, 1), (3, 2), (0, 3)):
        flags = wire.channel_flags(channel)
        for kind in (FrameType.CONTRIBUTION, FrameType.ASK):
            striped = Striped(kind, 0b111, -9, (1, 2, 3), fragments=12)
            template = frames.template(wire.Header(flags=flags), striped, 12, 16)
            rows, to = frames.fill(striped, 16, template, 4, count, 0, 1)
            records = rows.view(dtype).reshape(count)
            assert set(records["flags"].tolist()) == {flags}
            assert to is not None and len(to) == count
            numbers = records["number"].tolist()
            if kind is FrameType.ASK:
                used.setdefault(channel, []).extend(numbers)
            else:
                assert numbers == [0] * count
    assert used == {0: [*range(1, 7)], 3: [*range(1, 8)], 7: [1]}


def ask(frames: StripeFrames, count: int, channel: int = 0) -> None:
    """So many questions of that channel, to a switch."""
    striped = Striped(FrameType.ASK, 0b111, -9, (0,), fragments=12)
    header = wire.Header(flags=wire.channel_flags(channel))
    frames.fill(striped, 16, frames.template(header, striped, 12, 16), 0, count, 0, 1)


def answer(number: int, channel: int = 0) -> bytes:
    """What an aggregator answers to a question, from the version byte on."""
    header = wire.Header(flags=wire.channel_flags(channel) | wire.Flag.ANSWER, sender=2)
    body = wire.Lacking(0b100, 0, 12, number, 16, 0, -9)
    return wire.pack(header, body, tail=bytes(wire.PAYLOAD_BYTES))


def test_a_question_is_answered_once() -> None:
    """By channel, and only if it was asked."""
    frames = StripeFrames(8, lambda: MEMBERS)
    ask(frames, 3)
    ask(frames, 1, channel=5)
    taken = [frames.takes_answer(answer(number)) for number in (2, 2, 0, 4, 1, 3, 1, 3, 2)]
    assert taken == [True, False, False, False, True, True, False, False, False]
    assert [frames.takes_answer(answer(1, channel=5)) for _ in range(2)] == [True, False]
    assert not frames.takes_answer(answer(1, channel=4))
    ask(frames, 1)
    assert frames.takes_answer(answer(4))


def test_old_questions_are_closed_at_last() -> None:
    """What is kept of answers does not grow, however many questions a host asks in its time."""
    frames = StripeFrames(1024, lambda: MEMBERS)
    for turn in range(40):
        ask(frames, 1024)
        numbers = range(turn * 1024 + 1, turn * 1024 + 1025)
        assert all(frames.takes_answer(answer(number)) for number in numbers)
    assert len(frames._answered[0]) <= 2 * 4096 + 1024
    assert not any(frames.takes_answer(answer(number)) for number in range(1, 40 * 1024 + 1))


class Passing(NoKernel):
    """A kernel that passes these frames up, each as often as it comes."""

    def __init__(self, *frames: bytes) -> None:
        super().__init__()
        self.ring = {"seen": 0, "bounced": 0, "token_ns": 0, "heard_ns": 0}
        self.tx = self.link_changes = self.doorbell = self
        self.mac, self.frames = MAC, frames

    def fileno(self) -> int:
        return -1

    rx_fileno = fileno

    def receive(self) -> list[tuple[bytes, bytes]]:
        return [(MEMBERS[1].mac, frame) for frame in self.frames]


class Hearing(Life):
    """Notes the frames that it is given."""

    def on_frame(self, now: float, source: bytes, data: bytes) -> list[Any]:
        self.heard = [*getattr(self, "heard", []), wire.unpack(data).body]
        return []


def test_an_answer_that_is_replayed_makes_no_contribution_go_out_again() -> None:
    """The kernel lets it pass: its tag is good, and its number is near. Members would send what it names each time."""
    plane: Any = Passing(answer(1), answer(1), answer(2), answer(1))
    life, loop = (
        Hearing(MAC, LifeSettings("h1", "nicps"), NoKernel(), lambda: 7),
        Loop(lambda _: None),
    )
    loop.watch = lambda *_, **__: None  # type: ignore[method-assign]
    timeline, keys = TimeLine(), Keyring.read(None)
    rooms = timeline, ServedRoom(plane), FlowWatch(life.node, timeline)
    frames = Frames(Driver(life), plane, keys, loop, *rooms, lambda *_: None)
    ask(frames.sender._stripes, 2)
    for _ in range(2):
        frames._receive()
    loop.close()
    assert [body.number for body in life.heard] == [1, 2]
    assert keys.refused == {"replayed": 6}
