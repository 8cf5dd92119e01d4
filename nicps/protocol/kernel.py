# SPDX-License-Identifier: Apache-2.0
"""The XDP program as the state machines know it: what it has taken, and what it must know."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


class Receiver(Protocol):
    """What has arrived: the kernel's maps in production, a model in tests."""

    def count(self, round_: int, view: int, sender: int) -> int:
        """Distinct fragments taken from that member in that round."""

    def missing(
        self, round_: int, view: int, sender: int, fragments: int, limit: int
    ) -> list[tuple[int, int]]:
        """At most `limit` (first, count) ranges that have not arrived, first ones first."""


@dataclass(slots=True)  # a frozen one takes seven times as long to make; one follows every event
class KernelState:
    """What the XDP program must know to act for this member (`struct nicps_config`)."""

    round: int
    round_low: int
    round_high: int
    sent_seen: int
    own_sent: int
    bounce: bool
    sums: bool = False
    sums_next: bool = False
