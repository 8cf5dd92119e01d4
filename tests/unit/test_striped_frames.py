# SPDX-License-Identifier: Apache-2.0
"""Headers of frames of stripes, batch by batch: questions are numbered by channel."""

from __future__ import annotations

from nicps import wire
from nicps.agent.striped import StripeFrames, header_dtype
from nicps.protocol import Member, Striped
from nicps.wire import FrameType

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
