# SPDX-License-Identifier: Apache-2.0
"""A hash over everything that a simulated job sends and commits, with the virtual time of each.

Two versions of the protocol that give the same digest for a seed behave alike in it, to the byte and the nanosecond.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable
from typing import TYPE_CHECKING

from nicps import wire

if TYPE_CHECKING:
    from nicps.protocol import Committed, SendFragments

_SMALL, _CONTRIBUTION, _COMMIT = b"s", b"c", b"r"


class Digest:
    """What one LAN has seen so far; hosts are told apart by their index."""

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=16)

    def add_frame(self, host: int, when: float, frame: bytes) -> None:
        """A small frame leaves a host, or its kernel."""
        self._hash.update(_SMALL + struct.pack(">HdI", host, when, len(frame)) + frame)

    def add_contribution(self, host: int, when: float, action: SendFragments) -> None:
        """Fragments leave a host, the first of them at that time; the line's speed gives the others'."""
        head = struct.pack(
            ">HdIIIi??",
            host,
            when,
            action.view,
            action.generation,
            action.round,
            action.samples,
            action.repair,
            bool(action.flags & wire.Flag.ADD),
        )
        ranges = b"".join(struct.pack(">II", *bounds) for bounds in action.ranges)
        self._hash.update(_CONTRIBUTION + head + struct.pack(">I", len(ranges)) + ranges)

    def add_commit(self, host: int, when: float, commit: Committed) -> None:
        """A round is committed at a host."""
        counted = sorted(commit.counted.items())
        head = struct.pack(">HdIii", host, when, commit.round, commit.unit, commit.next_unit)
        members = b"".join(struct.pack(">HI", *entry) for entry in counted)
        self._hash.update(_COMMIT + head + struct.pack(">I", len(members)) + members)

    def hexdigest(self) -> str:
        """Of all that was added."""
        return self._hash.hexdigest()


def digest_of_all(digests: Iterable[tuple[int, str]]) -> str:
    """One hash over the digests of many seeds, in the order of the seeds."""
    lines = "".join(f"{seed} {digest}\n" for seed, digest in sorted(digests))
    return hashlib.blake2b(lines.encode(), digest_size=16).hexdigest()
