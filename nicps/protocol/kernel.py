# SPDX-License-Identifier: Apache-2.0
"""The XDP program as the state machines know it: what it has taken, and what it must know."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable


class Receiver(Protocol):
    """What has arrived: the kernel's maps in production, a model in tests.

    `count` and `missing` are of fragments as their senders broadcast them, `reached` and `missing_sums` of the round's
    sums, whoever makes them, and what follows of stripes.
    """

    def count(self, round_: int, view: int, sender: int) -> int:
        """Distinct fragments taken from that member in that round."""

    def missing(
        self, round_: int, view: int, sender: int, fragments: int, limit: int
    ) -> list[tuple[int, int]]:
        """At most `limit` (first, count) ranges that have not arrived, first ones first."""

    def reached(self, round_: int, view: int, first: int, end: int) -> tuple[int, int]:
        """Of the sums `first` to `end`: the first that is not here, and one past the last that is."""

    def missing_sums(
        self, round_: int, view: int, first: int, end: int, limit: int
    ) -> list[tuple[int, int]]:
        """At most `limit` (first, count) ranges of the sums `first` to `end` that are not here, first ones first."""

    def converted(self, round_: int, conversion: int, first: int, end: int) -> int:
        """How many of this host's own fragments in a row, from `first` on, have lanes of that conversion."""

    def next_to_send(self, round_: int, aggregator: int) -> int:
        """The fragment of that aggregator's stripe that this host sends next; 0: it has sent none in that round.

        The program sends one for each sum of that stripe that comes.
        """

    def absent(
        self, round_: int, view: int, first: int, count: int, members: int
    ) -> Mapping[int, int]:
        """In this host's own stripe: how many contributions of the listed others are lacking, by number."""


@runtime_checkable
class ChannelledReceiver(Protocol):
    """A kernel that has channels above 0."""

    def of_channel(self, channel: int) -> Receiver:
        """What has arrived in that one."""


@runtime_checkable
class ServedReceiver(Protocol):
    """What a kernel has of servers: at a worker of its newest step, and of its newest pull, by their numbers."""

    def acknowledged_to(self, number: int, first: int, end: int) -> tuple[int, int]:
        """Of push fragments `first` to `end`: the first that is not added, and one past the last that is."""

    def missing_acknowledgements(
        self, number: int, first: int, end: int, limit: int
    ) -> list[tuple[int, int]]:
        """At most `limit` (first, count) ranges of these that no server has added."""

    def pulled_to(self, number: int, first: int, end: int) -> tuple[int, int]:
        """Of fragments of parameters `first` to `end`: the first that is not here, and one past the last that is."""

    def missing_parameters(
        self, number: int, first: int, end: int, limit: int
    ) -> list[tuple[int, int]]:
        """At most `limit` (first, count) ranges of these that are not here."""

    def least_version(self, first: int, end: int) -> tuple[int, int]:
        """Round and version of the oldest of these fragments of parameters."""

    def answered(self, server: int) -> tuple[int, int, int, int]:
        """What that server has said of this host's steps: a number, its staleness, a round, its highest version."""

    def made(self, round_: int, view: int) -> int:
        """At a server: its push fragments to which all listed members of that round have contributed."""


@dataclass(slots=True)
class ChannelState:
    """What the XDP program must know of a channel above 0. The aggregators are those of channel 0."""

    round: int
    round_low: int
    round_high: int
    width: int
    width_next: int
    offered: tuple[int, int]
    clock: int
    urgency: int


@dataclass(slots=True)  # a frozen one takes seven times as long to make; one follows every event
class KernelState:
    """What the XDP program must know to act for this member (`struct nicps_config`).

    `aggregators`, `width`: of stripes, in the open round; `_next`: in later ones. `offered`, by parity: the conversion
    of this host's lanes that counts. `clock`: the agent is woken after so many sums. `partner`: parameters are taken of
    that member, too. `urgency`: of this channel's frames. `channels`: the same of channels 1 and up.
    """

    round: int
    round_low: int
    round_high: int
    sent_seen: int
    own_sent: int
    bounce: bool
    sums: bool = False
    sums_next: bool = False
    aggregators: tuple[int, ...] = ()
    aggregators_next: tuple[int, ...] = ()
    width: int = 0
    width_next: int = 0
    offered: tuple[int, int] = (0, 0)
    clock: int = 0
    partner: int = 0
    urgency: int = 0
    channels: tuple[ChannelState, ...] = ()
