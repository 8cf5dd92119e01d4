# SPDX-License-Identifier: Apache-2.0
"""The output of a host's script, on its way to the host that has started it: cumulative acknowledgements over a file
(docs/run.md).

State machines without clock or socket: `now` and frames come in, frames go out. The output is in a file at the sender,
so nothing is kept in memory, and lost pieces are read again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from nicps import wire
from nicps.wire import ScriptStep

#: Bytes of output in a frame.
PIECE_BYTES = 1400
#: Frames that are under way at once, of one host.
WINDOW = 4
INTERVAL_S = 0.02  # between two windows: so 280 kB/s a host
#: Bytes of a script's output that are shown, and kept.
MOST_BYTES = 1 << 30
_RETRANSMIT_S = 0.1
_ALIVE_S = 0.5  # between two signs of life
_GIVES_UP_S = 10.0  # without an acknowledgement
_LOST_S = 5.0  # without a sign of life
_KILL_S = 0.2  # between two KILL frames


@dataclass(frozen=True, slots=True)
class Piece:
    """A frame to be sent: `length` bytes of the output from `at` on, or the report."""

    step: ScriptStep
    at: int
    length: int = 0


class OutputSender:
    """The sender, at the host of the script.

    Args:
        reach: the number of bytes from an offset on that are of one stream; a frame has bytes of one stream.

    Attributes: `done`, the other host has all, and the report. `given_up`: it does not answer.
    """

    def __init__(self, now: float, reach: Callable[[int], int] = lambda at: MOST_BYTES) -> None:
        self._reach = reach
        self._size = 0  # of the output
        self._most = MOST_BYTES
        self._ended = False
        self._acknowledged = self._sent = 0
        self._heard = self._progress = now
        self._last = now - _ALIVE_S
        self.done = self.given_up = False

    def cut(self, size: int) -> None:
        """There is no more output than that: the script has shortened its file."""
        self._most = min(self._most, max(size, self._acknowledged))
        self._size = min(self._size, self._most)

    def note_output(self, size: int, *, ended: bool) -> None:
        """So many bytes have been printed in all; with `ended` there will be no more."""
        self._size = min(max(size, self._size), self._most)
        self._ended = self._ended or ended

    def acknowledge(self, now: float, at: int) -> None:
        """SEEN: the other host has all bytes before `at`, or the report too."""
        self._heard = now
        if self._ended and at == self._size + 1:
            self.done = True
        elif self._acknowledged < at <= self._size:
            self._acknowledged, self._progress = at, now
            self._sent = max(self._sent, at)

    def due(self, now: float) -> list[Piece]:
        """The frames that are to be sent now."""
        if self.done or self.given_up or now < self._last + INTERVAL_S:
            return []
        if now > self._heard + _GIVES_UP_S:
            self.given_up = True
            return []
        if self._sent == self._acknowledged:
            self._progress = now
        elif now > self._progress + _RETRANSMIT_S:
            self._sent, self._progress = self._acknowledged, now
        pieces: list[Piece] = []
        end = min(self._size, self._acknowledged + WINDOW * PIECE_BYTES)
        while self._sent < end and len(pieces) < WINDOW:
            length = min(PIECE_BYTES, min(end, self._reach(self._sent)) - self._sent)
            pieces.append(Piece(ScriptStep.OUTPUT, self._sent, length))
            self._sent += length
        if self._ended and self._acknowledged == self._size and now >= self._last + _RETRANSMIT_S:
            pieces = [Piece(ScriptStep.END, self._size)]
        elif not pieces and now >= self._last + _ALIVE_S:
            pieces = [Piece(ScriptStep.OUTPUT, self._acknowledged)]
        if pieces:
            self._last = now
        return pieces


class OutputReceiver:
    """The receiver, at the host that has started the run; one for each other host.

    Attributes: `ended`: the script has ended, and all of its output is here.
    """

    def __init__(self, now: float) -> None:
        self._at = 0
        self._heard = now
        self._killed = now - _KILL_S
        self.ended = False

    @property
    def seen(self) -> int:
        """The offset for a SEEN frame."""
        return self._at + self.ended

    def note_alive(self, now: float) -> None:
        """The host is alive; bytes that it has sent are not taken now."""
        self._heard = now

    def take(self, now: float, frame: wire.Script, tail: bytes) -> bytes | None:
        """OUTPUT or END: return the bytes that are new, in order. The report is returned once; None if nothing is
        new.
        """
        self._heard = now
        if frame.at != self._at or self.ended:
            return None
        if frame.step == ScriptStep.END:
            self.ended = True
            return tail
        self._at += len(tail)
        return tail or None

    def is_lost(self, now: float) -> bool:
        """The host has not been heard for too long."""
        return not self.ended and now > self._heard + _LOST_S

    def kills(self, now: float) -> bool:
        """A KILL frame is due, if the script there must end."""
        if self.ended or now < self._killed + _KILL_S:
            return False
        self._killed = now
        return True
