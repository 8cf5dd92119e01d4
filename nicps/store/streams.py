# SPDX-License-Identifier: Apache-2.0
"""Lines from one host to all others, over a network that loses, doubles and reorders: cumulative acknowledgements."""

from __future__ import annotations

from collections.abc import Iterable

from nicps.errors import WireError

PIECE_BYTES = 1400
WINDOW = 8  # pieces that are under way at once
RETRANSMIT_S = 0.1
_MOST_LINE = 1 << 21  # bytes: a program says at most 1 MiB at once
_END = b"\n"


class Outgoing:
    """This host's stream. What some hearer has not acknowledged is kept."""

    def __init__(self, now: float, hearers: Iterable[int]) -> None:
        self._kept, self._first = bytearray(), 0
        self._sent = 0
        self._has = dict.fromkeys(hearers, 0)
        self._progress = now

    @property
    def end(self) -> int:
        """Bytes in all."""
        return self._first + len(self._kept)

    @property
    def everywhere(self) -> int:
        """Bytes that all hearers have."""
        return min(self._has.values(), default=self.end)

    def put(self, line: bytes) -> None:
        """Add a line."""
        self._kept += line + _END

    def hear_only(self, hearer: int) -> None:
        """Nobody else must have the rest."""
        self._has = {hearer: self._has[hearer]}
        self._trim()

    def acknowledge(self, now: float, hearer: int, at: int) -> bool:
        """A hearer has all before `at`; whether that is news."""
        if not self._has.get(hearer, at) < at <= self.end:
            return False
        before, self._has[hearer] = self.everywhere, at
        if self.everywhere > before:
            self._progress = now
            self._trim()
        return True

    def due(self, now: float) -> list[tuple[int, bytes]]:
        """Pieces that are sent now, and where they belong."""
        everywhere = self.everywhere
        if self._sent <= everywhere or now >= self._progress + RETRANSMIT_S:
            self._sent, self._progress = everywhere, now
        pieces, end = [], min(self.end, everywhere + WINDOW * PIECE_BYTES)
        while self._sent < end:
            at = self._sent - self._first
            tail = bytes(self._kept[at : at + min(PIECE_BYTES, end - self._sent)])
            pieces.append((self._sent, tail))
            self._sent += len(tail)
        return pieces

    def due_at(self, now: float) -> float | None:
        """When `due` has something; None: not before more is put."""
        everywhere = self.everywhere
        if everywhere >= self.end:
            return None
        if self._sent < min(self.end, everywhere + WINDOW * PIECE_BYTES):
            return now
        return self._progress + RETRANSMIT_S

    def _trim(self) -> None:
        done = self.everywhere - self._first
        del self._kept[:done]
        self._first += done


class Incoming:
    """The stream of another host. `at`: bytes that have come in order; `read_to`: those of the lines taken so far."""

    def __init__(self) -> None:
        self.at = self.read_to = 0
        self._kept = bytearray()
        self._early: dict[int, bytes] = {}  # pieces behind one that is lost, or late
        self._seen = 0  # of what is kept, bytes without an end of a line

    def take(self, at: int, tail: bytes) -> None:
        """A piece."""
        if at > self.at:
            if len(self._early) < WINDOW:
                self._early[at] = tail
            return
        while True:
            new = tail[self.at - at :]
            self._kept += new
            self.at += len(new)
            at = min(self._early, default=self.at + 1)
            if at > self.at:
                return
            tail = self._early.pop(at)

    def next_line(self) -> bytes | None:
        """The next line, once it is whole.

        Raises:
            WireError: it has no end.
        """
        end = self._kept.find(_END, self._seen)
        if end < 0:
            self._seen = len(self._kept)
            if self._seen > _MOST_LINE:
                raise WireError("it has no end")
            return None
        line = bytes(self._kept[:end])
        del self._kept[: end + 1]
        self._seen = 0
        self.read_to += end + 1
        return line
