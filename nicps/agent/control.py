# SPDX-License-Identifier: Apache-2.0
"""The agent's UNIX socket: commands on this host, and the training program."""

from __future__ import annotations

import contextlib
import grp
import os
import socket
import stat
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from nicps.agent.closing import Closing
from nicps.agent.peer import Peer as Peer
from nicps.agent.peer import refuse_descriptors
from nicps.errors import EnvironmentProblem, UsageProblem
from nicps.session.channel import ChannelClosed, unix_address
from nicps.session.fields import Message
from nicps.session.messages import Error

_CREDENTIALS = struct.Struct("iII")  # pid, uid, gid
_SO_PEERGROUPS = 59
_MOST_GROUPS = (
    256  # Python's getsockopt takes no more; of a user with more, only the first one counts
)
_MOST_PEERS = 64
_MOST_OTHERS = 8  # peers that may give no commands must not take the others' places
_MOST_MESSAGES = 32  # of one peer, before the loop turns to other work
_CLOSING_S = 1.0


@dataclass(frozen=True, slots=True)
class Access:
    """The rights at the socket: root and the agent's own user may do everything, `group`'s members give commands,
    `trainer` (a user) attaches as the training program.
    """

    trainer: int
    group: int | None = None

    @classmethod
    def of(cls, trainer: int, group: str = "") -> Access:
        """Look the group up; "" is none.

        Raises:
            EnvironmentProblem: there is no such group.
        """
        try:
            return cls(trainer, grp.getgrnam(group).gr_gid if group else None)
        except KeyError:
            raise EnvironmentProblem(
                f"there is no group {group!r} to admit: make it (`groupadd {group}`), or name another with --group"
            ) from None

    def commands(self, uid: int, groups: Iterable[int] = ()) -> bool:
        """Whether a user in these groups may give commands."""
        return uid in (0, os.geteuid()) or (self.group is not None and self.group in groups)

    def trains(self, uid: int) -> bool:
        """Whether a user may attach a training program."""
        return uid in (0, os.geteuid(), self.trainer)


class ControlSocket:
    """The address is bound at once; `serve` listens at it.

    A path can be opened by its owner and by the group that `access` names. An abstract address can be opened by every
    user, so each peer's rights follow from the kernel's credentials (SO_PEERCRED, SO_PEERGROUPS).

    Raises:
        EnvironmentProblem: the address is taken, or cannot be used.
    """

    def __init__(
        self,
        address: str,
        access: Access,
        watch: Callable[[int, Callable[[], None]], None],
        unwatch: Callable[[int], None],
    ) -> None:
        self.address = address
        self.access = access
        self.peers: list[Peer] = []
        self._watch, self._unwatch = watch, unwatch
        self._take_message: Callable[[Peer, dict[str, Any]], None] | None = None
        self._forget: Callable[[Peer], None] | None = None
        self._closing = Closing()
        self._accepts = True
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        refuse_descriptors(self._listener)
        try:
            if address.startswith("@"):
                self._listener.bind(unix_address(address))
            else:
                _remove_stale(address)
                _bind_path(self._listener, address, access.group)
            self._listener.listen(16)
        except OSError as error:
            self._listener.close()
            raise EnvironmentProblem(
                f"cannot listen on {address}: {error.strerror}; another agent? name another with --socket"
            ) from None

    def serve(
        self,
        take_message: Callable[[Peer, dict[str, Any]], None],
        forget: Callable[[Peer], None],
    ) -> None:
        """Accept connections: `take_message` gets their messages, `forget` those that have ended."""
        self._take_message, self._forget = take_message, forget
        self._watch(self._listener.fileno(), self._accept)

    def _accept(self) -> None:
        if self._closing.full:
            self._accepts = False
            self._unwatch(self._listener.fileno())
            return
        with contextlib.suppress(OSError):
            connection, _ = self._listener.accept()
            uid, groups = _credentials(connection)
            commands, trains = self.access.commands(uid, groups), self.access.trains(uid)
            peer = Peer(connection, uid, commands, trains)
            alike = [p for p in self.peers if (p.commands, p.trains) == (commands, trains)]
            if len(alike) >= (_MOST_PEERS if commands else _MOST_OTHERS):
                self._closing.end(connection)
            else:
                self._add(peer)

    def adopt(self, connection: socket.socket, uid: int) -> Peer:
        """Take one end of a socket pair as a peer that may attach; a training program of that user has the other end.
        (At both ends of a pair the kernel gives the pair's maker as the peer.)
        """
        refuse_descriptors(connection)
        peer = Peer(connection, uid, commands=False, trains=True)
        self._add(peer)
        return peer

    def _add(self, peer: Peer) -> None:
        self.peers.append(peer)
        self._watch(peer.channel.fileno(), lambda: self._read(peer))

    def _read(self, peer: Peer) -> None:
        """Handle some messages; the loop calls again for those that are still with the kernel."""
        try:
            for _ in range(_MOST_MESSAGES):
                peer.channel.pump()
                item = peer.channel.pop()
                if item is None:
                    return
                assert self._take_message is not None, "nobody is read from before `serve`"
                self._take_message(peer, item[0])
                if peer not in self.peers:
                    return
                if peer.was_refused and not peer.commands:  # such a peer could go on sending
                    self.drop(peer)
                    return
        except (ChannelClosed, KeyError, TypeError, ValueError, OSError, RecursionError) as error:
            if not isinstance(error, ChannelClosed):
                peer.post(Error(f"bad message: {error!r}", UsageProblem.exit_code))
            self.drop(peer)

    def post(self, peer: Peer, message: Message) -> None:
        """Send to a peer, unless it has stopped reading."""
        peer.post(message)
        if peer.channel.deaf:
            self.drop(peer)

    def drop(self, peer: Peer) -> None:
        """Close a connection."""
        if peer in self.peers:
            self.peers.remove(peer)
            self._unwatch(peer.channel.fileno())
            if peer.channel.ended:
                peer.channel.close()
            else:
                self._closing.end(peer.channel.socket)
            if self._forget is not None:
                self._forget(peer)

    def hand_over(self, peer: Peer, give: Callable[[int], None]) -> None:
        """Give a connection away: `give` passes its descriptor on, and we forget it."""
        give(peer.channel.fileno())
        self.peers.remove(peer)
        self._unwatch(peer.channel.fileno())
        self._closing.let_go(peer.channel.socket)

    def flush(self) -> None:
        """Send what could not be sent at once; close the connection of a peer that has stopped reading."""
        for peer in self.peers[:]:
            if peer.channel.backlog:
                # The last messages of a peer that has closed its end are read first.
                with contextlib.suppress(ChannelClosed):
                    peer.channel.flush()
            if peer.channel.deaf:
                self.drop(peer)
        if not (self._accepts or self._closing.full):
            self._accepts = True
            self._watch(self._listener.fileno(), self._accept)

    def close(self) -> None:
        """Close everything."""
        for peer in self.peers[:]:
            self.drop(peer)
        self._unwatch(self._listener.fileno())
        self._closing.end(self._listener)
        self._closing.wait(_CLOSING_S)
        if not self.address.startswith("@"):
            with contextlib.suppress(OSError):
                os.unlink(self.address)


def _credentials(connection: socket.socket) -> tuple[int, set[int]]:
    """The user at the other end, and its groups."""
    size = _CREDENTIALS.size
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    _, uid, gid = _CREDENTIALS.unpack(credentials)
    groups: tuple[int, ...] = ()
    with contextlib.suppress(OSError):
        listed = connection.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, 4 * _MOST_GROUPS)
        groups = struct.unpack(f"{len(listed) // 4}I", listed)
    return uid, {gid, *groups}


def _bind_path(listener: socket.socket, path: str, group: int | None) -> None:
    """The socket is open to the owner and, if there is one, to the group, and to no other user."""
    before = os.umask(0o177)
    try:
        listener.bind(path)
    finally:
        os.umask(before)
    if group is not None:
        os.chown(path, -1, group)
        os.chmod(path, 0o660)


def _remove_stale(path: str) -> None:
    """Remove a socket that no process listens on any more."""
    probe = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        probe.connect(path)
    except FileNotFoundError:
        return
    except ConnectionRefusedError:
        if stat.S_ISSOCK(os.lstat(path).st_mode):
            os.unlink(path)
    finally:
        probe.close()
