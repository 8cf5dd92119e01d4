# SPDX-License-Identifier: Apache-2.0
"""Memory that the agent and its trainer share: the gradient as it goes out, and a few words of state.

Two buffers, one for each parity of the round, so that a round's fragments stay sendable while the next is converted.
The trainer writes lanes, shifts and `converted`; the agent writes the rest.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from typing import Self

import numpy as np

from nicps.barrier import barrier
from nicps.session.lanes import I64, U8
from nicps.wire import PAYLOAD_BYTES

_PAGE = 4096


class Arena:
    """A mapping of the shared memory for contributions of up to `fragments` fragments."""

    def __init__(self, fd: int, fragments: int) -> None:
        self.fd = fd
        self.fragments = fragments
        self._memory = mmap.mmap(fd, _size(fragments))
        whole = np.frombuffer(self._memory, np.uint8)
        self._words: I64 = whole[:_PAGE].view(np.int64)
        shifts_end = _PAGE + _pages(2 * fragments)
        self.shifts: U8 = whole[_PAGE : _PAGE + 2 * fragments].reshape(2, fragments)
        payload = whole[shifts_end : shifts_end + 2 * fragments * PAYLOAD_BYTES]
        self.lanes: U8 = payload.reshape(2, fragments, PAYLOAD_BYTES)

    @classmethod
    def create(cls, fragments: int) -> Self:
        """A new one, in a memory file of the right size."""
        fd = os.memfd_create("nicps-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, _size(fragments))
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)  # who shrinks it would kill the other end
        return cls(fd, fragments)

    @property
    def need(self) -> tuple[int, int]:
        """(round, samples that are still enough for the quorum), written by the agent (R13)."""
        round_ = int(self._words[0])
        barrier()  # the samples are written before their round
        return round_, int(self._words[1])

    @need.setter
    def need(self, value: tuple[int, int]) -> None:
        self._words[1] = value[1]
        barrier()
        self._words[0] = value[0]

    @property
    def closed(self) -> int:
        """The last round whose list is closed without this member."""
        return int(self._words[2])

    @closed.setter
    def closed(self, round_: int) -> None:
        self._words[2] = round_

    @property
    def phase(self) -> int:
        """Number of the newest phase that the agent knows of."""
        return int(self._words[3])

    @phase.setter
    def phase(self, number: int) -> None:
        self._words[3] = number

    def converted(self, round_: int) -> int:
        """Fragments of that round's contribution that are ready to be sent."""
        fragments = int(self._words[8 + (round_ & 1)])
        barrier()  # lanes and shifts are written before their number
        return fragments

    def set_converted(self, round_: int, fragments: int) -> None:
        """The trainer has converted that many."""
        self._words[8 + (round_ & 1)] = fragments

    def sending_since(self, round_: int) -> float:
        """When the first fragment of that round's contribution went to the kernel (CLOCK_MONOTONIC); 0 if none has."""
        return int(self._words[10 + (round_ & 1)]) / 1e9

    def set_sending_since(self, round_: int, nanoseconds: int) -> None:
        """The agent has begun to send, or (0) the trainer has begun to convert."""
        self._words[10 + (round_ & 1)] = nanoseconds

    def close(self) -> None:
        """Close the descriptor; the mapping goes with the last view of it."""
        os.close(self.fd)


class Handover:
    """How the agent hears of a contribution as it is converted.

    Args:
        doorbell: rung for the agent.
    """

    def __init__(self, arena: Arena, doorbell: int) -> None:
        self._arena, self._doorbell = arena, doorbell

    def begin(self, round_: int) -> None:
        """Nothing of the round's contribution is converted yet. Call it before the agent is told of the offer."""
        self._arena.set_converted(round_, 0)
        self._arena.set_sending_since(round_, 0)

    def show(self, round_: int, fragments: int) -> None:
        """So many of its fragments can be sent."""
        self.note(round_, fragments)
        self.ring()

    def note(self, round_: int, fragments: int) -> None:
        """The same, before the agent is told of the offer."""
        barrier()  # an agent that sees their number also sees their lanes
        self._arena.set_converted(round_, fragments)

    def sent(self, round_: int) -> bool:
        """Whether the agent has begun to send them."""
        return self._arena.sending_since(round_) > 0

    def ring(self) -> None:
        """More of a contribution can be sent."""
        os.eventfd_write(self._doorbell, 1)

    def close(self) -> None:
        """Close arena and doorbell."""
        self._arena.close()
        os.close(self._doorbell)


def _pages(size: int) -> int:
    return -(-size // _PAGE) * _PAGE


def _size(fragments: int) -> int:
    return _PAGE + _pages(2 * fragments) + _pages(2 * fragments * PAYLOAD_BYTES)
