# SPDX-License-Identifier: Apache-2.0
"""The channels of the exchange `stripes` in the XDP program's maps: their rounds, and their areas (docs/channels.md).

A bank of own lanes and sums, and one of the places of the own stripe, hold the areas of all channels in a row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import numpy as np

from nicps.dataplane import bpf, tags
from nicps.dataplane.inner import Records
from nicps.layout import layout


@dataclass(frozen=True, slots=True)
class Area:
    """A channel's part of each bank: `room` fragments from `first`, `blocks` blocks of places from `first_block`."""

    first: int = 0
    room: int = 0
    first_block: int = 0
    blocks: int = 0

    def fragments(self, first: int, end: int) -> slice:
        """Where the channel's fragments `first` to `end` (exclusive) lie in a bank, without those beyond its room."""
        return slice(self.first + min(first, self.room), self.first + min(end, self.room))

    def places(self, count: int, each: int) -> slice:
        """Where the first `count` places of its own stripe lie in a bank, without those beyond its blocks.

        Args:
            each: places of a block.
        """
        begin = self.first_block * each
        return slice(begin, begin + min(count, self.blocks * each))


class Areas:
    """The map `channels`, and the number of channels.

    Args:
        fds: the loaded maps' descriptors by name; the caller keeps them open as long as this lives.
        config: view of that map.

    Attributes: `words`, `struct nicps_channel` by channel: read and assign by name.
    """

    def __init__(self, fds: Mapping[str, int], config: Records) -> None:
        self._config = config
        self.most = layout().limits["CHANNELS"]
        memory = bpf.map_memory(fds["channels"])
        self.words: Any = np.frombuffer(memory, layout().records["channel"], self.most)
        self._areas = [Area()] * self.most
        config["channels"] = 1

    def __getitem__(self, channel: int) -> Area:
        """Of a channel; without a room or places that are in use, with 0 of them."""
        return self._areas[channel]

    def set_rooms(self, rooms: Sequence[int]) -> None:
        """Deal out a bank of fragments to so many channels, at least one. There are no places until `set_blocks`.

        To be called while the program takes no frames.
        """
        if not 1 <= len(rooms) <= self.most:
            raise ValueError(f"{len(rooms)} channels are not 1 to {self.most}")
        self._write("first", "room", rooms)
        self._config["room"] = sum(rooms)
        self._config["channels"] = len(rooms)
        self.set_blocks(())

    def set_blocks(self, blocks: Sequence[int]) -> None:
        """Deal out a bank of blocks of places to the channels; empty: there are none.

        To be called while the program takes no frames, or to take the places away.
        """
        self._write("first_block", "blocks", blocks)
        self._config["gather_blocks"] = sum(blocks)

    def _write(self, first: str, size: str, sizes: Sequence[int]) -> None:
        table = np.zeros((2, self.most), np.uint32)
        table[0, : len(sizes)] = [0, *accumulate(sizes)][: len(sizes)]
        table[1, : len(sizes)] = sizes
        self.words[size] = (
            0  # no frame may be taken with the size of one area and the place of another
        )
        self.words[first], self.words[size] = table
        pairs = zip(self._areas, table.T.tolist(), strict=True)
        self._areas = [replace(area, **{first: at, size: count}) for area, (at, count) in pairs]

    def rank_channels(self) -> None:
        """Where servers hold the parameters a channel's number is its urgency."""
        self.words["priority"] = [tags.of_urgency(channel) for channel in range(self.most)]

    def close_rounds(self) -> None:
        """Take no frames of stripes until rounds are open again."""
        self.words["round_low"], self.words["round_high"] = 1, 0
