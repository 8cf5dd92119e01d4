# SPDX-License-Identifier: Apache-2.0
"""The messages to `nicps run`, at the host where it waits: the output of the scripts of all hosts, and their ends."""

from __future__ import annotations

import codecs
from typing import Any

from nicps.agent.control import ControlSocket
from nicps.agent.peer import Peer
from nicps.agent.printed import Printed
from nicps.session.events import Output
from nicps.session.fields import Message
from nicps.session.messages import Error, Result
from nicps.wire import ScriptStream

_MOST_BACKLOG = 1 << 18  # bytes that `nicps run` has not read; with more, no output is requested
_PIECE = 1 << 16


class Shown:
    """The connections of one `nicps run`, which may have gone.

    Args:
        job: the run's name.
        submission: its number; 0: no command waits for it.
    """

    def __init__(self, control: ControlSocket, job: str, submission: int) -> None:
        self._control, self._job, self.submission = control, job, submission
        self._decoders: dict[tuple[str, ScriptStream], Any] = {}
        self._own_seen = 0  # bytes of this host's script

    @property
    def waiting(self) -> list[Peer]:
        """The connections."""
        number = self.submission
        return [peer for peer in self._control.peers if number and peer.submission == number]

    @property
    def full(self) -> bool:
        """So many bytes have not been read that no more output is accepted."""
        return max((peer.channel.backlog for peer in self.waiting), default=0) > _MOST_BACKLOG

    def send(self, message: Message) -> None:
        """Send a message; after a result or an error no message follows."""
        for peer in self.waiting:
            self._control.post(peer, message)
            if isinstance(message, Result | Error):
                peer.submission = 0

    def forward(self, host: str, stream: ScriptStream, piece: bytes) -> None:
        """A character may be cut in two: the rest of it comes with the next piece."""
        decoder = self._decoders.get((host, stream))
        if decoder is None:
            decoder = codecs.getincrementaldecoder("utf-8")("replace")
            self._decoders[host, stream] = decoder
        if text := decoder.decode(piece):
            self.send(Output(self._job, host, text, stream.name.lower()))

    def forward_own(self, host: str, printed: Printed) -> None:
        """Send the new output of this host's script."""
        size = printed.measure()
        while self.waiting and not self.full:
            stream = printed.stream(self._own_seen)
            piece = printed.read(self._own_seen, _PIECE)
            if not piece:
                if self._own_seen < size:
                    printed.cut(self._own_seen)
                return
            self._own_seen += len(piece)
            self.forward(host, stream, piece)

    def has_own(self, printed: Printed) -> bool:
        """All output of this host's script was forwarded, or no command waits for it."""
        return self._own_seen >= printed.measure() or not self.waiting
