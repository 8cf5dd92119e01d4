# SPDX-License-Identifier: Apache-2.0
"""The agent's UNIX socket: commands on this host, and the training program."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Callable, Mapping
from typing import Any

from nicps.dataplane.channel import Channel, ChannelClosed, unix_address
from nicps.errors import EnvironmentProblem, NicpsError

VERSION = 1  # of the messages (docs/socket.md)
LARGEST_MESSAGE = 1 << 20  # to the agent itself: it must never be busy with anybody's megabytes
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


_MOST_PEERS = 64
_MOST_BACKLOG = 1 << 20  # bytes that a peer has not read


class Peer:
    """A connection to the agent's socket."""

    def __init__(self, connection: socket.socket) -> None:
        credentials = connection.getsockopt(
            socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size
        )
        _, self.uid, _ = _CREDENTIALS.unpack(credentials)
        connection.setblocking(False)
        self.channel = Channel(connection, LARGEST_MESSAGE)
        self.is_trainer = False
        self.watches: object = None  # the job whose events it wants
        self.watches_all = False

    def post(self, message: Mapping[str, Any]) -> None:
        """Send, if the peer is still there."""
        with contextlib.suppress(ChannelClosed):
            self.channel.post(dict(message))

    def refuse(self, error: NicpsError) -> None:
        """Answer with an error."""
        self.post({"op": "error", "message": str(error), "exit_code": error.exit_code})


class ControlSocket:
    """Listens, and hands every message to `on_message(peer, message)`.

    Raises:
        EnvironmentProblem: the address is taken, or cannot be used.
    """

    def __init__(
        self,
        address: str,
        watch: Callable[[int, Callable[[], None]], None],
        unwatch: Callable[[int], None],
        on_message: Callable[[Peer, dict[str, Any]], None],
        on_close: Callable[[Peer], None],
    ) -> None:
        self.address = address
        self.peers: list[Peer] = []
        self._watch, self._unwatch = watch, unwatch
        self._on_message, self._on_close = on_message, on_close
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            if not address.startswith("@"):
                _remove_stale(address)
            self._listener.bind(unix_address(address))
            if not address.startswith("@"):
                os.chmod(address, 0o666)  # who may do what is decided by the peer's user
            self._listener.listen(16)
        except OSError as error:
            self._listener.close()
            raise EnvironmentProblem(
                f"cannot listen on {address}: {error.strerror}; another agent? name another with --socket"
            ) from None
        watch(self._listener.fileno(), self._accept)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            connection, _ = self._listener.accept()
            if len(self.peers) >= _MOST_PEERS:
                connection.close()
                return
            peer = Peer(connection)
            self.peers.append(peer)
            self._watch(connection.fileno(), lambda: self._read(peer))

    def _read(self, peer: Peer) -> None:
        try:
            closed = None
            try:
                peer.channel.pump()
            except ChannelClosed as error:
                closed = error
            while peer in self.peers and (item := peer.channel.pop()) is not None:
                message, fds = item
                for fd in fds:  # nobody has a descriptor to give us
                    os.close(fd)
                self._on_message(peer, message)
            if closed is not None:
                raise closed
        except (ChannelClosed, KeyError, TypeError, ValueError, OSError) as error:
            if not isinstance(error, ChannelClosed):
                peer.post({"op": "error", "message": f"bad message: {error!r}", "exit_code": 2})
            self.drop(peer)

    def post(self, peer: Peer, message: Mapping[str, Any]) -> None:
        """Send to a peer, unless it has long stopped reading."""
        if peer.channel.backlog > _MOST_BACKLOG:
            self.drop(peer)
        else:
            peer.post(message)

    def drop(self, peer: Peer) -> None:
        """Close a connection."""
        if peer in self.peers:
            self.peers.remove(peer)
            self._unwatch(peer.channel.fileno())
            peer.channel.close()
            self._on_close(peer)

    def hand_over(self, peer: Peer, give: Callable[[int], None]) -> None:
        """Give a connection away: `give` passes its descriptor on, and we forget it."""
        give(peer.channel.fileno())
        self.peers.remove(peer)
        self._unwatch(peer.channel.fileno())
        peer.channel.close()

    def flush(self) -> None:
        """Send what did not go at once."""
        for peer in self.peers[:]:
            try:
                peer.channel.flush()
            except ChannelClosed:
                self.drop(peer)

    def close(self) -> None:
        """Close everything."""
        for peer in self.peers[:]:
            self.drop(peer)
        self._unwatch(self._listener.fileno())
        self._listener.close()
        if not self.address.startswith("@"):
            with contextlib.suppress(OSError):
                os.unlink(self.address)


def _remove_stale(path: str) -> None:
    """Remove a socket that nobody listens on any more."""
    probe = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        probe.connect(path)
    except FileNotFoundError:
        return
    except ConnectionRefusedError:
        os.unlink(path)
    finally:
        probe.close()
