# SPDX-License-Identifier: Apache-2.0
"""Headers and destinations of frames of stripes, batch by batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from nicps import wire
from nicps.errors import JobFailed
from nicps.protocol import Member, Striped
from nicps.session.lanes import U8
from nicps.wire import FrameType

_BODIES = {
    FrameType.CONTRIBUTION: wire.Contribution,
    FrameType.SUM: wire.Sum,
    FrameType.ASK: wire.Ask,
}
_SWITCH: U8 = np.frombuffer(wire.SWITCH, np.uint8)
_NOT_FINITE = 127  # the exponent of a fragment without a value
#: The newest questions of a channel, which an answer may be to. A member asks again for what it has no answer to.
_OPEN = 4096


def header_dtype(body: type[Any]) -> np.dtype[np.void]:
    """A frame's header with that body as a NumPy record, from the wire definition.

    A field of the body that has the name of one of the header is `body_` and that name.
    """
    names, formats, offsets = [], [], []
    base = 0
    for cls in (wire.Header, body):
        layout = wire.Layout.of(cls)
        for name, kind, offset in zip(layout.names, layout.wires, layout.offsets, strict=True):
            names.append(f"body_{name}" if name in names else name)
            formats.append(f">{'i' if kind.code == 'b' else 'u'}{kind.size}")
            offsets.append(base + offset)
        base += layout.struct.size
    return np.dtype({"names": names, "formats": formats, "offsets": offsets, "itemsize": base})


_LACKING = header_dtype(wire.Lacking)


class StripeFrames:
    """Makes the headers and destinations of a batch of frames from one template, and knows which questions are open.

    Args:
        most: frames in a batch.
        members: the list of the view in force.
    """

    def __init__(self, most: int, members: Callable[[], Sequence[Member]]) -> None:
        self._members = members
        dtype = header_dtype(wire.Contribution)
        self._rows = np.zeros((most, dtype.itemsize), np.uint8)
        self._records = self._rows.view(dtype).reshape(most)
        # By channel, the numbers used so far: the kernel answers each one once, and has a window for each channel.
        self._questions = [0] * wire.MAX_CHANNELS
        self._answered: list[set[int]] = [set() for _ in self._questions]

    def template(self, header: wire.Header, striped: Striped, fragments: int, width: int) -> U8:
        """The header that all frames of a contribution have, uint8 (56,)."""
        view, behind = striped.rest_view, striped.behind
        if striped.type is FrameType.ASK:  # `number` is the question's
            view = behind = 0
        what = striped.members, 0, fragments, view, width, 0, striped.unit, behind
        body = _BODIES[striped.type](*what)
        frame = wire.pack(header, body, tail=bytes(wire.PAYLOAD_BYTES))
        return np.frombuffer(frame[: self._rows.shape[1]], np.uint8)

    def fill(
        self,
        striped: Striped,
        width: int,
        template: U8,
        first: int,
        count: int,
        exponents: U8 | int,
        sequence: int,
    ) -> tuple[U8, U8 | None]:
        """Headers, uint8 (count, 56), and where the frames go: uint8 (count, 6), (6,), or None for all hosts.

        Raises:
            JobFailed: an exponent is too large for the round. No kernel takes that: it would be retransmitted for ever.
        """
        rows, records = self._rows[:count], self._records[:count]
        rows[:] = template
        records["index"] = np.arange(first, first + count, dtype=np.uint32)
        records["sequence"] = np.arange(sequence, sequence + count, dtype=np.uint32)
        if striped.type is FrameType.ASK:
            channel = wire.channel_of(int(records["flags"][0]))
            before = self._questions[channel]
            records["number"] = np.arange(before + 1, before + count + 1)
            self._questions[channel] += count
        else:
            # A copy: the training program can still write to its own records.
            x = records["exponent"]
            x[:] = np.asarray(exponents, np.uint8).view(np.int8)
            over = (x > striped.unit + wire.MAX_SHIFT[width]) & (x != _NOT_FINITE)
            if over.any():
                at = int(over.argmax())
                raise JobFailed(
                    f"fragment {first + at} has an exponent of {x[at]}, and this member has said that none is above"
                    f" {striped.unit + wire.MAX_SHIFT[width]}: the training program has written over its contribution"
                )
        return rows, self._destination(striped, int(records["fragments"][0]), first, count)

    def takes_answer(self, frame: bytes) -> bool:
        """Whether a LACKING frame answers an open question of this host: one that it has not answered before.

        The kernel, which has checked its tag, lets near numbers pass: a frame that is replayed, too.
        """
        if len(frame) < _LACKING.itemsize:
            return True  # it is malformed, and is reported as such
        record = np.frombuffer(frame, _LACKING, 1)
        channel, number = wire.channel_of(int(record["flags"][0])), int(record["number"][0])
        newest, answered = self._questions[channel], self._answered[channel]
        if not max(0, newest - _OPEN) < number <= newest or number in answered:
            return False
        answered.add(number)
        if len(answered) > 2 * _OPEN:
            self._answered[channel] = {one for one in answered if one > newest - _OPEN}
        return True

    def _destination(self, striped: Striped, fragments: int, first: int, count: int) -> U8 | None:
        if striped.type is FrameType.SUM:
            return None
        members = self._members()
        if striped.members.bit_count() == 1:
            return np.frombuffer(members[striped.members.bit_length() - 1].mac, np.uint8)
        if 0 in striped.aggregators:
            return _SWITCH
        n = len(striped.aggregators)
        macs = np.array([list(members[k - 1].mac) for k in striped.aggregators], np.uint8)
        return macs[(np.arange(first + 1, first + count + 1) * n - 1) // fragments]
