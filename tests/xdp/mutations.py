# SPDX-License-Identifier: Apache-2.0
"""Frames that are wrong in many ways: thousands at once, from a seed, by NumPy."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from nicps import wire

U8 = NDArray[np.uint8]
Ints = NDArray[np.int64]

_WIDTH = 1664  # room for the longest frame, and for what is put behind it
_OURS = wire.ETHERNET_BYTES
_ETHERTYPE = np.frombuffer(wire.ETHERTYPE.to_bytes(2, "big"), np.uint8)
_HEADERS = _OURS + wire.HEADER_BYTES + 48  # the Ethernet header, ours, and any body
_LENGTH_AT = _OURS + 18

#: (offset from the Ethernet header's start, bytes) of every field of the header and of all bodies.
FIELDS = tuple(
    dict.fromkeys(
        (_OURS + base + offset, field.size)
        for base, classes in (
            (0, (wire.Header,)),
            (wire.HEADER_BYTES, tuple(body for body, _ in wire.FORMATS.values())),
        )
        for cls in classes
        for offset, field in zip(
            wire.Layout.of(cls).offsets, wire.Layout.of(cls).wires, strict=True
        )
    )
)


class Mutator:
    """Makes frames out of good ones; the same from the same seed."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng = rng
        self.ways: dict[Callable[[U8, Ints], None], int] = {
            self._nothing: 6,
            self._bits: 3,
            self._bits_in_headers: 5,
            self._field: 8,
            self._cut: 2,
            self._longer: 2,
            self._length: 2,
            self._swap: 2,
            self._splice: 2,
            self._random_headers: 1,
            self._random_bytes: 1,
            self._source: 1,
            self._ethertype: 1,
        }

    def __call__(self, good: Sequence[bytes], count: int) -> list[bytes]:
        """So many frames from the Ethernet header on; at least that header is there."""
        table = np.zeros((len(good), _WIDTH), np.uint8)
        for row, frame in zip(table, good, strict=True):
            row[: len(frame)] = np.frombuffer(frame, np.uint8)
        sizes = np.array([len(frame) for frame in good])
        picked = self.rng.integers(len(good), size=count)
        rows, lengths = table[picked], sizes[picked]
        weights = np.array([*self.ways.values()], float)
        for _ in range(2):  # two faults at once, sometimes
            ways = self.rng.choice(len(weights), count, p=weights / weights.sum())
            for number, way in enumerate(self.ways):
                these = np.flatnonzero(ways == number)
                part, part_lengths = rows[these], lengths[these]
                way(part, part_lengths)
                rows[these], lengths[these] = part, part_lengths
            weights[0] = 60
        return [row[:size].tobytes() for row, size in zip(rows, lengths.tolist(), strict=True)]

    def _nothing(self, rows: U8, lengths: Ints) -> None:
        pass

    def _flip(self, rows: U8, ends: Ints) -> None:
        for _ in range(int(self.rng.integers(1, 4))):
            at = self.rng.integers(0, ends)
            bits = (1 << self.rng.integers(8, size=len(rows))).astype(np.uint8)
            rows[np.arange(len(rows)), at] ^= bits

    def _bits(self, rows: U8, lengths: Ints) -> None:
        self._flip(rows, lengths)

    def _bits_in_headers(self, rows: U8, lengths: Ints) -> None:
        self._flip(rows, np.minimum(lengths, _HEADERS))

    def _cut(self, rows: U8, lengths: Ints) -> None:
        lengths[:] = self.rng.integers(_OURS, lengths + 1)

    def _longer(self, rows: U8, lengths: Ints) -> None:
        more = self.rng.integers(1, 120, len(rows))
        noise = self.rng.integers(256, size=rows.shape, dtype=np.uint8)
        behind = np.arange(_WIDTH) >= lengths[:, None]
        np.copyto(
            rows, noise, where=behind & self.rng.integers(2, size=(len(rows), 1)).astype(bool)
        )
        lengths[:] = np.minimum(lengths + more, _WIDTH)

    def _length(self, rows: U8, lengths: Ints) -> None:
        ours = lengths - _OURS
        near = ours + self.rng.integers(-9, 10, len(rows))
        odd = self.rng.choice([0, 1, 31, 32, 47, 48, 55, 56, 1487, 1488, 1500, 65535], len(rows))
        said = np.where(self.rng.integers(2, size=len(rows)), near, odd).clip(0, 65535)
        rows[:, _LENGTH_AT : _LENGTH_AT + 2] = said.astype(">u2").view(np.uint8).reshape(-1, 2)

    def _field(self, rows: U8, lengths: Ints) -> None:
        for row in rows:
            at, size = FIELDS[self.rng.integers(len(FIELDS))]
            top = 1 << 8 * size
            now = int.from_bytes(row[at : at + size].tobytes(), "big")
            values = (0, 1, 2, top - 1, top >> 1, now + 1, now - 1, now << 1, ~now, now + 1024)
            value = values[self.rng.integers(len(values))] % top
            row[at : at + size] = np.frombuffer(value.to_bytes(size, "big"), np.uint8)

    def _swap(self, rows: U8, lengths: Ints) -> None:
        for row in rows:
            size = int(self.rng.choice([1, 2, 4, 8]))
            one, other = _OURS + size * self.rng.integers((_HEADERS - _OURS) // size, size=2)
            kept = row[one : one + size].copy()
            row[one : one + size] = row[other : other + size]
            row[other : other + size] = kept

    def _splice(self, rows: U8, lengths: Ints) -> None:
        order = self.rng.permutation(len(rows))
        at = self.rng.integers(_OURS, _HEADERS, len(rows))
        np.copyto(rows, rows[order].copy(), where=np.arange(_WIDTH) >= at[:, None])
        if self.rng.integers(2):
            lengths[:] = lengths[order]

    def _random_headers(self, rows: U8, lengths: Ints) -> None:
        """The part behind the fields that tell our frames from others'."""
        start = _OURS + int(self.rng.choice([2, 8, 16, 32]))
        rows[:, start:_HEADERS] = self.rng.integers(
            256, size=(len(rows), _HEADERS - start), dtype=np.uint8
        )

    def _random_bytes(self, rows: U8, lengths: Ints) -> None:
        rows[:] = self.rng.integers(256, size=rows.shape, dtype=np.uint8)
        rows[:, 12:14] = _ETHERTYPE
        rows[:, _OURS] = wire.VERSION
        lengths[:] = self.rng.integers(_OURS, _WIDTH, len(rows))

    def _source(self, rows: U8, lengths: Ints) -> None:
        rows[:, 6:12] = self.rng.permutation(rows[:, 6:12])

    def _ethertype(self, rows: U8, lengths: Ints) -> None:
        rows[:, 12:14] = self.rng.integers(256, size=(len(rows), 2), dtype=np.uint8)
