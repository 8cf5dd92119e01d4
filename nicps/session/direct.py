# SPDX-License-Identifier: Apache-2.0
"""A training program's side of direct calls: small gathers between programs and kernels (docs/direct.md)."""

from __future__ import annotations

import errno
import mmap
import os
import select
import struct
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from nicps.barrier import barrier
from nicps.layout import layout
from nicps.session.maps import mapped
from nicps.wire import (
    BROADCAST,
    DIRECT_FRAGMENTS,
    DIRECT_MEMBERS,
    ETHERTYPE,
    PAYLOAD_BYTES,
    SHORT_BYTES,
    VERSION,
    Flag,
    FrameType,
    channel_flags,
)

#: Bytes of a member's numbers at most.
MOST_BYTES = DIRECT_FRAGMENTS * PAYLOAD_BYTES
#: A call that is not complete after so long is withdrawn.
_LIMIT_S = 0.05
#: What a call waits for is asked for again after so long, and each time after twice as long, up to the second.
_REPEAT_S, _SELDOM_S = 0.002, 0.02

_BANKS = 2
_FRAME = struct.Struct(">6s6sH BBHIIIHHIQ IIHBBI")
_REFUSED = frozenset({errno.ENOBUFS, errno.EAGAIN, errno.ENETDOWN, errno.EIO, errno.EBADFD})

Look: TypeAlias = Callable[[], tuple[int, frozenset[int]]]


@dataclass(frozen=True, slots=True)
class Desk:
    """One look at a desk."""

    tag: int
    view: int
    marks: int
    gone: int
    agreed: int
    agreed_view: int
    verdict: int


@dataclass(frozen=True, slots=True)
class DirectCall:
    """A call: `round`, the open one of its channel; `number`, direct calls since the last one; `call`, a checksum of
    what is called; `live`, the members of the view, this one too.
    """

    view: int
    round: int
    number: int
    call: int
    live: frozenset[int]

    @property
    def tag(self) -> int:
        """As a desk has it."""
        return self.round << 32 | self.number


def bits(members: Collection[int]) -> int:
    """A set of members as the kernel has it."""
    return sum(1 << member - 1 for member in members)


class DirectMemory:
    """What the kernel's programs write of direct calls, mapped for reading, and the way out.

    Args:
        descriptors: of the desks, the numbers, the interface, and the rings that wake the channels' threads.
    """

    def __init__(self, descriptors: Sequence[int]) -> None:
        desks, numbers, self._tap, *bells = descriptors
        record, limits = layout().records["desk"], layout().limits
        count = limits["CHANNELS"] * _BANKS
        assert record.fields is not None
        self._at = {name: int(field[1]) for name, field in record.fields.items()}
        self._stride = record.itemsize
        whole = memoryview(mapped(desks, count * record.itemsize, mmap.PROT_READ))
        self._words = whole[: count * record.itemsize].cast("Q")
        self._halves = whole[: count * record.itemsize].cast("I")
        self._each = DIRECT_FRAGMENTS * PAYLOAD_BYTES
        self._numbers = mapped(numbers, count * DIRECT_MEMBERS * self._each, mmap.PROT_READ)
        self.bells = [_Bell(fd) for fd in bells]

    def look(self, channel: int, number: int) -> Desk:
        """The desk of that call. If it changes meanwhile, its tag is 0."""
        at = (channel * _BANKS + number % _BANKS) * self._stride
        tag, view = self._word(at, "tag"), self._half(at, "view")
        agreed_view = self._half(at, "agreed_view")
        barrier()
        marks, gone, agreed = (self._word(at, name) for name in ("marks", "gone", "agreed"))
        verdict = self._half(at, "verdict")
        barrier()
        if (self._word(at, "tag"), self._half(at, "view")) != (tag, view):
            tag = 0
        return Desk(tag, view, marks, gone, agreed, agreed_view, verdict)

    def _word(self, at: int, name: str) -> int:
        return self._words[(at + self._at[name]) // 8]

    def _half(self, at: int, name: str) -> int:
        return self._halves[(at + self._at[name]) // 4]

    def read(self, channel: int, number: int, member: int) -> tuple[int, bytes]:
        """The checksum of what that member has called, and its numbers."""
        place = channel * _BANKS + number % _BANKS
        at = place * self._stride + 4 * (member - 1)
        size = min(self._half(at, "size"), self._each)
        first = (place * DIRECT_MEMBERS + member - 1) * self._each
        return self._half(at, "call"), self._numbers[first : first + size]

    def send(self, frame: bytes) -> bool:
        """Give the kernel a frame; it may refuse it, and the desk tells. False: the interface takes none."""
        try:
            os.write(self._tap, frame)
        except OSError as error:
            if error.errno not in _REFUSED:
                raise
            return False
        return True

    def close(self) -> None:
        """Close what is open; the mappings go with the last view of them."""
        os.close(self._tap)
        for bell in self.bells:
            bell.close()


class _Bell:
    """A ring of the kernel that wakes a thread; its records say nothing."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        page = mmap.PAGESIZE
        self._read = memoryview(mmap.mmap(fd, page)).cast("Q")
        written = mmap.mmap(fd, page, prot=mmap.PROT_READ, offset=page)
        self._written = memoryview(written).cast("Q")
        self._poll = select.poll()
        self._poll.register(fd, select.POLLIN)

    def wait(self, seconds: float) -> None:
        """Until it has rung since the last time, or so long."""
        self._poll.poll(seconds * 1000)
        self._read[0] = self._written[0]

    def close(self) -> None:
        os.close(self._fd)


class DirectChannel:
    """The direct calls of one channel.

    Args:
        number: this member's.
    """

    def __init__(self, memory: DirectMemory, channel: int, number: int) -> None:
        self._memory, self._channel, self._number = memory, channel, number
        self._bell = memory.bells[channel]
        self._flags, limits = channel_flags(channel), layout().limits
        self._marked, self._withdrawn = limits["MARKED"], limits["WITHDRAWN"]

    def gather(
        self, call: DirectCall, data: bytes, look: Look
    ) -> dict[int, tuple[int, bytes]] | None:
        """Give all members `data`, at most `MOST_BYTES`, and get theirs.

        Returns what each of them has called, as a checksum, and its numbers; or None, where no member completes the
        call. That is the same at all members.

        Args:
            look: returns the view in force, as far as the agent has told this program, and the view's members. It
                raises the error that ends the call.
        """
        frames, memory = self._numbers(call, data), self._memory
        everybody, until = bits(call.live), time.monotonic() + _LIMIT_S
        given = False  # the last of them: without it this host never marks the call
        for frame in frames:
            given = memory.send(frame)
        repeats = [frame[:16] + self._flags_of(Flag.REPEAT) + frame[18:] for frame in frames]
        wait_s = _REPEAT_S
        while True:
            desk = memory.look(self._channel, call.number)
            here = desk.tag == call.tag and desk.view == call.view
            if here and desk.marks & everybody == everybody:
                break
            if here and (desk.gone or desk.verdict == self._withdrawn):
                return None
            if desk.view == call.view and desk.tag > call.tag:
                return None  # this host never marks the call
            now = time.monotonic()
            if now >= until:
                memory.send(self._frame(FrameType.WITHDRAWN, call))
                if not given:
                    return None  # nor can it say so: the interface is gone, or down
            if look()[0] != call.view:
                if not self._settles(call, look):
                    return None
                break
            if wait_s > _REPEAT_S:
                for frame in repeats:
                    taken = memory.send(frame)
                given = given or taken
            self._bell.wait(wait_s)
            wait_s = min(2 * wait_s, _SELDOM_S)
        barrier()
        found = {k: memory.read(self._channel, call.number, k) for k in call.live - {self._number}}
        return {**found, self._number: (call.call, data)}

    def _settles(self, call: DirectCall, look: Look) -> bool:
        """Another view is in force: whether the call is complete, as all that are left of its view say."""
        wait_s, memory = _REPEAT_S, self._memory
        while True:
            view, live = look()
            desk = memory.look(self._channel, call.number)
            if (desk.tag, desk.view) != (call.tag, call.view) or desk.verdict != self._marked:
                return False
            others = bits((call.live & live) - {self._number})
            if desk.marks & bits(call.live) == bits(call.live):
                return True
            if desk.gone:
                return False
            if not others or (desk.agreed_view == view and desk.agreed & others == others):
                return True
            memory.send(self._frame(FrameType.SETTLE, call))
            self._bell.wait(wait_s)
            wait_s = min(2 * wait_s, _SELDOM_S)

    # ---- frames

    def _numbers(self, call: DirectCall, data: bytes) -> list[bytes]:
        room = SHORT_BYTES if len(data) <= SHORT_BYTES else PAYLOAD_BYTES
        parts = max(1, -(-len(data) // room))
        return [
            self._frame(FrameType.NUMBERS, call, len(data), index, parts)
            + data[index * room : (index + 1) * room].ljust(room, b"\0")
            for index in range(parts)
        ]

    def _frame(
        self, kind: FrameType, call: DirectCall, size: int = 0, index: int = 0, parts: int = 1
    ) -> bytes:
        return _FRAME.pack(
            BROADCAST, bytes(6), ETHERTYPE,
            VERSION, kind, self._flags, 0, 0, call.round, 0, 0, 0, 0,
            call.call, call.number, size, index, parts, call.view,
        )  # fmt: skip

    def _flags_of(self, more: int) -> bytes:
        return (self._flags | more).to_bytes(2, "big")
