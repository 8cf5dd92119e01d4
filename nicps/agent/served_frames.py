# SPDX-License-Identifier: Apache-2.0
"""Frames to parameter servers, batch by batch: a worker's steps, and its questions for parameters (docs/servers.md)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from nicps import wire
from nicps.agent.striped import header_dtype
from nicps.dataplane.servers import Servers
from nicps.errors import JobFailed
from nicps.protocol import Member, Phase, SendServed
from nicps.protocol.serving import PULLED_WIDTH, pulled_fragments
from nicps.session.lanes import U8
from nicps.wire import PAYLOAD_BYTES, FrameType

#: Of a step no number reaches 2**21: a lane of w bits has an exponent of 22 - w at most.
STEP_BITS = 22

_TYPES = {
    FrameType.PUSH: wire.Push,
    FrameType.PULL: wire.Pull,
    FrameType.CONTRIBUTION: wire.Contribution,
}


@dataclass(slots=True)
class ServedLanes:
    """A step that is converted, or the empty payload of a question."""

    servers: Servers

    def available(self, round_: int) -> int:
        """Any number: a step is converted before it is asked for."""
        return 1 << 32

    def payload(self, round_: int, first: int, count: int) -> tuple[U8, U8 | int]:
        """Views, no copies."""
        records = self.servers.own[first : first + count]
        return records["lane"], records["exponent"]

    def sending(self, round_: int) -> None:
        """Nobody wants to know."""

    def awaited(self, yes: bool) -> None:
        """Nobody waits for what has been converted."""


class Questions:
    """What goes with a question for parameters: the answer is written over it."""

    def __init__(self, most: int) -> None:
        self._nothing = np.zeros((most, PAYLOAD_BYTES), np.uint8)

    def available(self, round_: int) -> int:
        """Any number."""
        return 1 << 32

    def payload(self, round_: int, first: int, count: int) -> tuple[U8, U8 | int]:
        """Zeros."""
        return self._nothing[:count], 0

    def sending(self, round_: int) -> None:
        """Nobody wants to know."""

    def awaited(self, yes: bool) -> None:
        """Zeros are always there."""


def _body_of(action: SendServed, phase: Phase, first: int = 0) -> wire.Contribution | wire.Push:
    """What the frames of it say, with the index of the first fragment."""
    if action.type is FrameType.CONTRIBUTION:
        of = action.members, first, phase.fragments, action.number, phase.width, 0, 0
        return wire.Contribution(*of)
    if action.type is FrameType.PUSH:
        about = action.version, action.number, first, phase.fragments
        return wire.Push(*about, 0, phase.width, 0)
    room = pulled_fragments(phase.fragments, phase.width)
    return wire.Pull(action.version, action.number, first, room, 0, PULLED_WIDTH, 0)


def own_frame(header: wire.Header, action: SendServed, phase: Phase, first: int) -> bytes:
    """For `DataPlane.serve_own`, from that fragment on; the kernel puts lanes and exponents in."""
    packed = wire.pack(header, _body_of(action, phase, first), tail=bytes(PAYLOAD_BYTES))
    body = packed[wire.HEADER_BYTES : wire.PUSH_HEADER_BYTES]
    return wire.ethernet(wire.BROADCAST, packed) + body


def check_exponents(first: int, exponents: npt.NDArray[Any], width: int) -> None:
    """Those of a step from that fragment on.

    Raises:
        JobFailed: one is too large for parameters. No kernel takes that: it would be sent again for ever.
    """
    most = STEP_BITS - width
    x = exponents.view(np.int8)
    if (x > most).any():
        at = int((x > most).argmax())
        raise JobFailed(
            f"fragment {first + at} of a step has an exponent of {x[at]}, and at most {most} can be added: the"
            " training program has written over its step"
        )


class ServedFrames:
    """Makes the headers of a batch of frames from one template.

    Args:
        most: frames in a batch.
        members: the list of the view in force.
    """

    def __init__(self, most: int, members: Callable[[], Sequence[Member]]) -> None:
        self._members = members
        self._dtypes = {kind: header_dtype(body) for kind, body in _TYPES.items()}
        sizes = {dtype.itemsize for dtype in self._dtypes.values()}
        assert len(sizes) == 1, "one cursor reads them all"
        self._rows = np.zeros((most, sizes.pop()), np.uint8)

    def template(self, header: wire.Header, action: SendServed, phase: Phase) -> U8:
        """The header that all frames of it have, uint8 (56,)."""
        frame = wire.pack(header, _body_of(action, phase), tail=bytes(PAYLOAD_BYTES))
        return np.frombuffer(frame[: self._rows.shape[1]], np.uint8)

    def fill(
        self,
        action: SendServed,
        template: U8,
        first: int,
        count: int,
        exponents: U8 | int,
        sequence: int,
    ) -> tuple[U8, U8]:
        """Headers, uint8 (count, 56), and where the frames go, uint8 (6,).

        Args:
            exponents: in the order of the frames, as all that is returned: from the last fragment to the first one, if
                the action says so.

        Raises:
            JobFailed: an exponent is too large for parameters. No kernel takes that: it would be sent again for ever.
        """
        rows = self._rows[:count]
        rows[:] = template
        records = rows.view(self._dtypes[action.type]).reshape(count)
        index = np.arange(first, first + count, dtype=np.uint32)
        records["index"] = index[::-1] if action.down else index
        records["sequence"] = np.arange(sequence, sequence + count, dtype=np.uint32)
        if action.type is not FrameType.PULL:
            x = records["exponent"]
            x[:] = np.asarray(exponents, np.uint8).view(
                np.int8
            )  # a copy: the program can still write to its own
            check_exponents(first, x[::-1] if action.down else x, int(records["width"][0]))
        return rows, np.frombuffer(self._members()[action.to - 1].mac, np.uint8)
