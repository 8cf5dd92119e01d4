# SPDX-License-Identifier: Apache-2.0
"""The kernel's memory of hosts that exchange stripes, and what their programs make in it, in NumPy.

What a sum is, is `tests.stripes.rounded`: the same that the XDP program is held against.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from nicps import wire
from nicps.layout import layout
from tests.stripes import I64, bound, rounded, shifted

NATIVE = {8: ">i1", 16: ">i2", 32: ">i4"}


class Mapped:
    """A map: `array` is what the kernel has, `fd` a descriptor for who maps it."""

    def __init__(self, kind: Any, shape: tuple[int, ...]) -> None:
        size = int(np.prod(shape)) * np.dtype(kind).itemsize
        self._fd = os.memfd_create("kernel")
        os.ftruncate(self._fd, -(-size // 4096) * 4096)
        path = f"/proc/self/fd/{self._fd}"
        self.array: Any = np.memmap(path, np.uint8, "r+", shape=(size,)).view(kind).reshape(shape)

    @property
    def fd(self) -> int:
        """A new one; a frozen map can be mapped for reading only, as it can be through this descriptor."""
        return os.dup(self._fd)

    @property
    def reading_fd(self) -> int:
        """A new one that cannot be mapped for writing: that of a frozen map."""
        return os.open(f"/proc/self/fd/{self._fd}", os.O_RDONLY)

    def close(self) -> None:
        os.close(self._fd)


class Host:
    """One member's maps. `offered`: the conversion that counts, by parity."""

    def __init__(self, room: int, places: int) -> None:
        records = layout().records
        self.room = room
        self.own = Mapped(records["own"], (2, room))
        self.sums = Mapped(records["stored"], (2, room))
        self.offered = [0, 0]
        self._old: list[Mapped] = []
        self.renew_places(places)

    def renew_places(self, places: int) -> None:
        """New ones; who has the old ones mapped keeps those."""
        self.places = places
        self.blocks = Mapped(np.int64, (2, places, 1440))
        self._old.append(self.blocks)

    def close(self) -> None:
        for mapped in (self.own, self.sums, *self._old):
            mapped.close()


def places_for(fragments: int, aggregators: int, width: int) -> int:
    """Blocks that the longest stripe needs."""
    longest = (fragments + aggregators - 1) // aggregators
    return -(-longest // wire.fragments_per_block(width))


def own_lanes(host: Host, round_: int, index: int, width: int) -> tuple[I64, int]:
    """A fragment's lanes and exponent; they are of the conversion that was offered."""
    record = host.own.array[round_ & 1, index]
    assert record["conversion"] == host.offered[round_ & 1] != 0, "not ready"
    lanes = np.frombuffer(record["lane"].tobytes(), NATIVE[width]).astype(np.int64)
    return lanes, int(record["exponent"].astype(np.int8))


def exchange(
    hosts: Mapping[int, Host],
    round_: int,
    view: int,
    aggregators: Sequence[int],
    listed: Iterable[int],
    width: int,
    unit: int,
    fragments: int,
    only: Iterable[int] | None = None,
) -> None:
    """All that the programs make of a round, or of `only` some fragments of it.

    Holds for each lane: the shifted lanes of the list are lane * 2**s + remainder, and what shifting drops is less than
    a unit a contribution.
    """
    listed, bank, tag = sorted(listed), round_ & 1, view << 32 | round_
    per_block = wire.fragments_per_block(width)
    per = 1440 // per_block
    for index in range(fragments) if only is None else only:
        parts = [own_lanes(hosts[number], round_, index, width) for number in listed]
        rank = next(
            rank
            for rank in range(len(aggregators))
            if bound(fragments, rank, len(aggregators)) <= index
            and index < bound(fragments, rank + 1, len(aggregators))
        )
        maker = aggregators[rank]
        if len(listed) == 1:
            (lanes, exponent), maker = parts[0], 0
        else:
            lost = any(x == wire.NOT_FINITE for _, x in parts)
            finite = [(lanes, x - unit) for lanes, x in parts if x != wire.NOT_FINITE]
            assert all(by <= wire.MAX_SHIFT[width] for _, by in finite), "the bound was too low"
            total = np.zeros(per, np.int64)
            for part, by in finite:
                total += shifted(part, by)
            lanes, exponent, rest = rounded(total, width, unit, lost)
            if exponent != wire.NOT_FINITE:
                assert (total == (lanes << (exponent - unit)) + rest).all()
            local = index - bound(fragments, rank, len(aggregators))
            at = (local % per_block) * per
            hosts[maker].blocks.array[bank, local // per_block, at : at + per] = rest
        for number, host in hosts.items():
            if len(listed) == 1 and number == listed[0]:
                continue
            record = host.sums.array[bank, index : index + 1]
            record["lane"] = np.frombuffer(lanes.astype(NATIVE[width]).tobytes(), np.uint8)
            record["exponent"] = exponent & 0xFF
            if number == maker:
                record["rest"] = tag
            record["tag"] = tag
