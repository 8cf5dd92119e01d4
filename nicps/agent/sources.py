# SPDX-License-Identifier: Apache-2.0
"""The payloads of contributions: the training program's memory, files, or zeros (`sender.Source`)."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from nicps.agent.bundle import OutStream
from nicps.dataplane.stripes import Stripes
from nicps.session.arena import Arena
from nicps.session.lanes import U8
from nicps.wire import PAYLOAD_BYTES


@dataclass(slots=True)
class ArenaSource:
    """A contribution in the memory that the trainer writes."""

    arena: Arena
    hurry: Callable[[bool], None]

    def available(self, round_: int) -> int:
        """The fragments that are converted."""
        return self.arena.converted(round_)

    def payload(self, round_: int, first: int, count: int) -> tuple[U8, U8 | int]:
        """A view, no copy."""
        parity = round_ & 1
        lanes = self.arena.lanes[parity, first : first + count]
        return lanes, self.arena.shifts[parity, first : first + count]

    def sending(self, round_: int) -> None:
        """Note the time for the trainer."""
        self.arena.set_sending_since(round_, time.monotonic_ns())

    def awaited(self, yes: bool) -> None:
        """All members wait for this trainer, or no longer do."""
        self.hurry(yes)


@dataclass(slots=True)
class OwnLanes:
    """A contribution to stripes. Only what is converted is sent (`Exchanger.advance`)."""

    stripes: Stripes
    arena: Arena | None
    channel: int = 0

    def available(self, round_: int) -> int:
        """Any number."""
        return 1 << 32

    def payload(self, round_: int, first: int, count: int) -> tuple[U8, U8 | int]:
        """Views, no copies."""
        mine = self.stripes.areas[self.channel].fragments(first, first + count)
        records = self.stripes.own[round_ & 1, mine]
        return records["lane"], records["exponent"]

    def sending(self, round_: int) -> None:
        """Note the time for the trainer, of channel 0."""
        if self.channel or self.arena is None:
            return
        if not self.arena.sending_since(round_):
            self.arena.set_sending_since(round_, time.monotonic_ns())

    def awaited(self, yes: bool) -> None:
        """No member waits for fragments that have been converted."""


@dataclass(slots=True)
class StreamSource:
    """A window of a hand-out."""

    stream: OutStream
    first_round: int

    def available(self, round_: int) -> int:
        """Files are always complete."""
        return 1 << 32

    def payload(self, round_: int, first: int, count: int) -> tuple[U8, U8 | int]:
        """Read from the files."""
        return self.stream.read(round_ - self.first_round, first, count), 0

    def sending(self, round_: int) -> None:
        """Do nothing."""

    def awaited(self, yes: bool) -> None:
        """Files are always complete."""


class Nothing:
    """Empty fragments: they only ask a switch for its sums."""

    def available(self, round_: int) -> int:
        """Any number."""
        return 1 << 32

    def payload(self, round_: int, first: int, count: int) -> tuple[U8, U8 | int]:
        """Zeros."""
        return np.zeros((count, PAYLOAD_BYTES), np.uint8), 0

    def sending(self, round_: int) -> None:
        """Do nothing."""

    def awaited(self, yes: bool) -> None:
        """Zeros are always there."""
