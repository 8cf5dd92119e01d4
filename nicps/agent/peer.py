# SPDX-License-Identifier: Apache-2.0
"""A connection to the agent's socket: its user, the rights of that user, and the limits for every peer."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Sequence
from typing import Any

from nicps.errors import NicpsError
from nicps.session.channel import Channel, ChannelClosed
from nicps.session.fields import Message, encode
from nicps.session.messages import Error

LARGEST_MESSAGE = 1 << 20  # to the agent itself: it must not spend its time on megabytes of a peer
_MOST_BACKLOG = 1 << 20  # bytes that a peer has not read
_SO_PASSRIGHTS = 83  # from Linux 6.16
# Numbers: to combine members of an enumeration takes as long as to receive.
_GLANCE = int(socket.MSG_PEEK | socket.MSG_DONTWAIT)
_AT_ONCE, _CUT = int(socket.MSG_DONTWAIT), int(socket.MSG_CTRUNC)


def refuse_descriptors(connection: socket.socket) -> None:
    """Refuse descriptors: a sender gets EPERM, if the kernel can do that. Connections inherit this from their
    listener.
    """
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, _SO_PASSRIGHTS, 0)


class GuardedChannel(Channel):
    """The agent's end of a connection to a peer that need not be trusted.

    It reads to the end of a message and leaves the bytes after it with the kernel, and queues a bounded number of
    bytes. It never takes a descriptor, nor lets `recvmsg` drop one, since closing it could take for ever
    (`nicps.agent.closing`).

    Attributes: `deaf`, the other end has stopped reading. `ended`, it has sent all that it will ever send, and all has
    been read: closing this end takes no time.
    """

    def __init__(self, connection: socket.socket) -> None:
        super().__init__(connection, LARGEST_MESSAGE)
        self.deaf = self.ended = False

    def pump(self) -> None:
        """Read more of one message, to its end at most.

        Raises:
            ChannelClosed: the other end has gone, or has sent a descriptor.
        """
        while size := self._missing():
            data = self._take(size)
            if not data:
                return
            self._in += data

    def _take(self, size: int) -> bytes:
        """Read at most so many bytes; none if there are none now."""
        try:
            # Without room for them descriptors stay with the kernel, and the flag shows that there are some.
            seen, _, flags, _ = self.socket.recvmsg(size, 0, _GLANCE)
            if flags & _CUT:
                raise ChannelClosed("the other end of the socket sent a descriptor")
            if not seen:
                self.ended = True
                raise ChannelClosed("the other end of the socket has gone")
            return self.socket.recv(len(seen), _AT_ONCE)
        except BlockingIOError:
            return b""
        except OSError as error:
            raise ChannelClosed(f"the other end of the socket has gone: {error}") from None

    def post(self, message: dict[str, Any], fds: Sequence[int] = ()) -> None:
        """Queue a message, as `Channel.post` does.

        Raises:
            ChannelClosed: the other end has gone, or has stopped reading.
        """
        if self.backlog > _MOST_BACKLOG:
            self.deaf = True
            raise ChannelClosed("the other end of the socket reads nothing")
        super().post(message, fds)


class Peer:
    """A connection, and the rights of its user. `was_refused`: a command of it was refused."""

    def __init__(self, connection: socket.socket, uid: int, commands: bool, trains: bool) -> None:
        connection.setblocking(False)
        self.uid, self.commands, self.trains = uid, commands, trains
        self.channel = GuardedChannel(connection)
        self.is_trainer = self.uses_store = False
        self.was_refused = False
        self.submission = 0  # the number of the job that it has submitted, until that has ended
        self.watches_all = False

    def post(self, message: Message) -> None:
        """Send, if the peer is still there and reads."""
        with contextlib.suppress(ChannelClosed):
            self.channel.post(encode(message))

    def refuse(self, error: NicpsError) -> None:
        """Answer with an error."""
        self.was_refused = True
        self.post(Error.of(error))
