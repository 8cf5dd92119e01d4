# SPDX-License-Identifier: Apache-2.0
"""The training program's memory where the exchange is `stripes` (docs/stripes.md): its own lanes, the sums, and what
rounding the sums of its own stripe has left over.

Own lanes are written here, and all else is written by the kernel's programs alone.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable, Iterable, Iterator
from itertools import zip_longest
from typing import Any

import numpy as np
import numpy.typing as npt

from nicps.barrier import barrier
from nicps.layout import layout
from nicps.session.absolute import BOOL, I8, Lanes
from nicps.session.arena import Arena, Handover
from nicps.session.lanes import I64, LaneFormat
from nicps.session.maps import mapped
from nicps.wire import BLOCK_LANES, NOT_FINITE, PAYLOAD_BYTES

_BANKS = 2
_LAST_CONVERSION = (1 << 32) - 1
#: The agent hears of so many batches at once, at most: if the program is held up then, the line has enough to send.
_MOST_PARTS = 16


def stripe(fragments: int, rank: int, aggregators: int) -> range:
    """The fragments of the aggregator of that rank, from 0."""
    return range(fragments * rank // aggregators, fragments * (rank + 1) // aggregators)


def in_turn(
    fragments: int, batch: int, rank: int, aggregators: int, own_batch: int = 0
) -> Iterator[range]:
    """All batches: those of the stripe of that rank first, then one of each other stripe in turn.

    Those of that rank may have another size (default: the same), as nobody waits for one of them.

    A sum needs the lanes of all members. If each member converted the other stripes one after another, few sums would
    be whole before all members had converted most of their vectors.
    """
    stripes = [stripe(fragments, (rank + k) % aggregators, aggregators) for k in range(aggregators)]
    sizes = own_batch or batch, *[batch] * (aggregators - 1)
    own, *others = [
        [part[at : at + size] for at in range(0, len(part), size)]
        for part, size in zip(stripes, sizes, strict=True)
    ]
    yield from own
    for turn in zip_longest(*others):
        yield from (part for part in turn if part is not None)


class Records:
    """Banks of records with lanes, two of them but for servers: those of a vector in one format.

    Attributes: `lanes`, (banks, fragments, per_fragment); `exponents`, int8 (banks, fragments).
    """

    def __init__(
        self, name: str, format: LaneFormat, fd: int, room: int, prot: int, banks: int = _BANKS
    ) -> None:
        record = layout().records[name]
        size = banks * room * record.itemsize
        whole = np.frombuffer(mapped(fd, size, prot), np.uint8)[:size].view(record)
        self._fields: Any = whole.reshape(banks, room)[:, : format.fragments]
        self.lanes: Lanes = self._fields["lane"].view(format.wire)
        self.exponents: I8 = self._fields["exponent"].view(np.int8)

    def __getitem__(self, field: str) -> npt.NDArray[Any]:
        """Another field, (banks, fragments)."""
        found: npt.NDArray[Any] = self._fields[field]
        return found

    def usable_rests(self, round_: int, view: int, part: slice) -> BOOL:
        """In sums, which of these fragments have a remainder of that round: its tag is the round's, the sum finite."""
        bank = round_ & 1
        usable: BOOL = self["rest"][bank, part] == np.uint64(view << 32 | round_)
        usable &= self.exponents[bank, part] != NOT_FINITE
        return usable


class OwnRecords:
    """This member's own records, which are written here.

    Args:
        arena, doorbell: by which the agent hears of what is converted, in the order in which it is.
    """

    def __init__(self, arena: Arena, doorbell: int) -> None:
        self._handover = Handover(arena, doorbell)
        self._records: Records | None = None
        self._conversion = 0
        self._of: dict[int, int] = {}  # the last one of each channel
        self._counting = threading.Lock()  # channels may be different threads'

    def map(self, format: LaneFormat, fd: int, room: int) -> None:
        """Map new ones, (2, room); the descriptor is closed."""
        self._records = Records("own", format, fd, room, mmap.PROT_READ | mmap.PROT_WRITE)
        self._conversion = max(self._conversion, int(self._records["conversion"].max()))

    @property
    def records(self) -> Records:
        """The lanes, and what goes with them."""
        assert self._records is not None, "the agent has sent no own records"
        return self._records

    def begin(self, round_: int, channel: int = 0) -> int:
        """The number of a new conversion, above 0, which no record has. Call it before the offer is sent."""
        if not channel:
            self._handover.begin(round_)
        with self._counting:
            self._conversion = self._conversion % _LAST_CONVERSION + 1
            self._of[channel] = self._conversion
            return self._conversion

    def convert(
        self,
        round_: int,
        parts: Iterable[range],
        write: Callable[[int, int], None],
        own: int,
        channel: int = 0,
        first: int = 0,
        *,
        rings: bool = True,
    ) -> None:
        """Let `write` convert these parts, each from its first fragment on so many.

        The agent is told once the first `own` fragments are converted, of which it sends none, and after the next part.
        Then it is told more and more rarely: converting is faster than the line, and the agent takes the processor each
        time.

        Args:
            channel, first: of several, whose round it is, and where its fragments begin in a bank.
            rings: the agent has the offer already, and hears of what is converted; otherwise it gets the offer after
                this.
        """
        conversions, done = self.records["conversion"][round_ & 1, first:], 0
        conversion, told, next_at = self._of[channel], -1, own
        for part in parts:
            write(part.start, len(part))
            barrier()  # a reader that sees the conversion also sees the lanes
            conversions[part.start : part.stop] = conversion
            done += len(part)
            if rings and done >= next_at:
                self._tell(round_, done, channel)
                told, next_at = done, done + min(max(1, done - own), _MOST_PARTS * len(part))
        if rings and told != done:
            self._tell(round_, done, channel)
        elif not (rings or channel):
            self._handover.note(round_, done)

    def sent(self, round_: int) -> bool:
        """Whether the agent has begun to send what was converted for that round, on channel 0: a list has it."""
        return self._handover.sent(round_)

    def _tell(self, round_: int, done: int, channel: int) -> None:
        if channel:
            self._handover.ring()
        else:
            self._handover.show(round_, done)

    def close(self) -> None:
        """Close arena and doorbell; the mapping goes with the last view of it."""
        self._handover.close()


class Remainders:
    """What rounding the sums of the own stripe has left over: of each view's stripe, as its places are renewed."""

    def __init__(self, format: LaneFormat) -> None:
        self._format = format
        self._of: list[tuple[int, I64]] = []  # first view, lanes; in the order in which they came

    @staticmethod
    def size(places: int) -> int:
        """Bytes of so many places a bank."""
        return _BANKS * places * BLOCK_LANES * 8

    def add(self, whole: mmap.mmap, places: int, view: int, part: range) -> None:
        """Use a part of mapped places, int64 (2, places, 1440), from that view on.

        A round of an earlier view may still be committed. Its remainders are in the places before, which are kept.
        """
        words = np.frombuffer(whole, np.int64)[: self.size(places) // 8]
        mine = words.reshape(_BANKS, places, -1)[:, part.start : part.stop]
        self._of.append((view, mine.reshape(_BANKS, -1, self._format.per_fragment)))

    def of(self, round_: int, view: int, count: int) -> I64:
        """Of the first `count` fragments of the stripe in that view, int64 (count, per_fragment), in units."""
        while len(self._of) > 1 and self._of[1][0] <= view:
            del self._of[0]  # views of commits only grow
        assert self._of, "the agent has sent no places"
        bank: I64 = self._of[0][1][round_ & 1, :count]
        return bank


assert PAYLOAD_BYTES == BLOCK_LANES
