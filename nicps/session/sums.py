# SPDX-License-Identifier: Apache-2.0
"""The kernel's sums as a training program reads them: mapped memory, converted batch by batch.

While the rest of a round is on its way, fragments that every other member has sent are summed early: nothing more can
be added to them. A view change takes that back (`forget`): what was sent may be sent again.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import numpy as np

from nicps.barrier import barrier
from nicps.exchange import Exchange
from nicps.layout import layout
from nicps.session.lanes import F32, I64, U8, LaneFormat, Summer
from nicps.session.maps import mapped
from nicps.wire import BLOCK_LANES


@dataclass(slots=True)
class _Early:
    """A round's sum as far as it is known: `done` fragments of it are in `out`."""

    round: int
    senders: frozenset[int]  # members whose gradients are in it, this one's included
    out: F32
    done: int = 0


class Sums:
    """Reads the accumulators of vectors in one format. We never write to them.

    Args:
        number: this member's; its own lanes are combined here, not in the kernel.

    Attributes: `exchange` makes the sums: of some, this member's own lanes are in them.
    """

    def __init__(self, format: LaneFormat, number: int) -> None:
        self.format = format
        self._number = number
        self.exchange = Exchange.BROADCAST
        self._summer = Summer(format)
        self._lanes: I64 | None = None  # (2, blocks, 1440)
        self._slots: Any = None  # (2, slots) records: who has been added
        self._early: _Early | None = None

    def map(self, lanes_fd: int, slots_fd: int, blocks: int) -> None:
        """Map the kernel's arrays, int64 (2, blocks, 1440) and the slots; the descriptors are closed."""
        size = 2 * blocks * BLOCK_LANES * 8
        lanes: I64 = np.frombuffer(mapped(lanes_fd, size, mmap.PROT_READ), np.int64)
        self._lanes = lanes[: 2 * blocks * BLOCK_LANES].reshape(2, blocks, BLOCK_LANES)
        record, each = layout().records["slot"], layout().limits["BLOCK_SLOTS"]
        count = 2 * blocks * each
        whole = np.frombuffer(mapped(slots_fd, count * record.itemsize), np.uint8)
        self._slots = whole[: count * record.itemsize].view(record).reshape(2, blocks * each)

    def bank(self, round_: int, senders: Collection[int]) -> I64 | None:
        """The round's accumulators, int64 (blocks, 1440); None if nobody's lanes have come."""
        if not set(senders) - (set() if self.exchange.includes_own else {self._number}):
            return None
        assert self._lanes is not None
        bank: I64 = self._lanes[round_ & 1]
        return bank

    def begin(self, round_: int, senders: frozenset[int], out: F32) -> bool:
        """Sum the round early into `out`, if `senders` are all that come; whether there is anything to read from."""
        self._early = _Early(round_, senders, out)
        return self._lanes is not None

    def forget(self) -> None:
        """What was summed early counts for nothing."""
        self._early = None

    def ahead(self, view: int, unit: int, own: tuple[U8, U8], stop: Callable[[], bool]) -> None:
        """Sum what every other member has sent by now, until `stop`."""
        early, format = self._early, self.format
        assert early is not None
        bank = self.bank(early.round, early.senders)
        everybody = sum(1 << (number - 1) for number in early.senders - {self._number})
        if self.exchange.includes_own:
            everybody = (1 << 64) - 1
        while early.done < format.fragments:
            first, end = early.done, min(early.done + format.batch, format.fragments)
            slots = self._slots[early.round & 1, first:end]
            tagged = slots["tag"] == view << 32 | early.round
            barrier()  # the kernel writes lanes, then the first seen-bits and the tag, or the next seen-bits
            whole = tagged & (slots["seen"] == everybody)
            if not whole.all() or stop():
                break
            barrier()
            mine = None if self.exchange.includes_own else own
            early.done += self._summer.batch(first, bank, mine, unit, early.out)

    def total(
        self, round_: int, senders: Collection[int], unit: int, own: tuple[U8, U8], out: F32
    ) -> None:
        """The exact sum over the senders' gradients, `own` if this member is one of them; zeros if there are none.

        Args:
            out: float32 (lanes,), written.
        """
        done, early = 0, self._early
        if early is not None and early.round == round_ and early.out is out:
            done = early.done if early.senders == frozenset(senders) else 0
        self._early = None
        bank = self.bank(round_, senders)
        mine = own if self._number in senders and not self.exchange.includes_own else None
        while done < self.format.fragments:
            done += self._summer.batch(done, bank, mine, unit, out)
