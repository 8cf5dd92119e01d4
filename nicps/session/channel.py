# SPDX-License-Identifier: Apache-2.0
"""Messages over a UNIX stream socket: a big-endian u32 length, a JSON object, and file descriptors beside it.

Both ends use the same class: the trainer's and the commands' end blocks, the agent's does not.
"""

from __future__ import annotations

import array
import contextlib
import errno
import importlib
import math
import os
import select
import socket
import struct
from collections.abc import Sequence
from typing import Any

import orjson

from nicps.errors import NetworkProblem

DEFAULT_SOCKET = "@nicps"  # the agent's
MAX_MESSAGE_BYTES = 1 << 28
_LENGTH = struct.Struct(">I")
_LONGEST_S = 1e6  # of a wait
_MAX_FDS = 16
_FDS_SPACE = socket.CMSG_LEN(_MAX_FDS * 4)
# Numbers: to combine members of an enumeration takes as long as to send.
_TO_SEND = int(socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
_TO_RECEIVE = int(socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC)


class ChannelClosed(NetworkProblem):
    """The other end has gone."""


class Channel:
    """One end of a connection. `recv` blocks; `pump` and `pop` do not.

    Args:
        largest: bytes of a message that is still taken.
    """

    def __init__(self, connection: socket.socket, largest: int = MAX_MESSAGE_BYTES) -> None:
        self.socket = connection
        self._largest = largest
        self._in = bytearray()
        self._fds: list[int] = []
        self._out = bytearray()

    @classmethod
    def connect(cls, address: str) -> Channel:
        """Connect to an agent at a path, at `@name`, or take over the connection `fd:N` that was inherited from it.

        `@name` is an abstract address, which belongs to the network namespace.

        Raises:
            OSError: nobody listens there, or there is no such connection.
        """
        if address.startswith("fd:"):
            return cls(_inherited(address.removeprefix("fd:")))
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.connect(unix_address(address))
        except OSError:
            connection.close()
            raise
        return cls(connection)

    @classmethod
    def to_agent(cls, address: str) -> Channel:
        """Connect a program to the agent of its host.

        Raises:
            NetworkProblem: no agent listens there.
        """
        try:
            return cls.connect(address)
        except OSError as error:
            if address.startswith("fd:"):
                raise NetworkProblem(_no_connection()) from None
            raise NetworkProblem(
                f"no agent listens on {address} ({error.strerror}): run `nicps join --iface IFACE` first"
            ) from None

    @property
    def backlog(self) -> int:
        """Bytes queued that the other end has not taken."""
        return len(self._out)

    def fileno(self) -> int:
        """The socket's descriptor, for selectors."""
        return self.socket.fileno()

    def send(self, message: dict[str, Any], fds: Sequence[int] = ()) -> None:
        """Send a message, waiting until the other end takes it (at most 30 s).

        Raises:
            ChannelClosed: the other end has gone, or takes nothing.
        """
        self.post(message, fds)
        while self._out:
            if not is_ready(select.POLLOUT, 30.0, self.socket.fileno()):
                raise ChannelClosed("the other end of the socket takes no messages")
            self.flush()

    def post(self, message: dict[str, Any], fds: Sequence[int] = ()) -> None:
        """Queue a message and send what goes without waiting; `flush` sends the rest.

        Raises:
            ChannelClosed: the other end has gone.
        """
        if fds:
            message = {**message, "fds": len(fds)}
        body = orjson.dumps(message, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS)
        data = _LENGTH.pack(len(body)) + body
        if fds:
            if not self.flush():  # descriptors travel with their own message's first byte
                raise ChannelClosed("the other end of the socket takes no messages")
            ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))]
            try:
                taken = self.socket.sendmsg([data], ancillary)
            except OSError as error:
                raise ChannelClosed(f"the other end of the socket has gone: {error}") from None
            data = data[taken:]
        self._out += data
        self.flush()

    def flush(self) -> bool:
        """Send what is queued, as far as it goes; whether nothing is left."""
        while self._out:
            try:
                taken = self.socket.send(self._out, _TO_SEND)
            except BlockingIOError:
                return False
            except OSError as error:
                raise ChannelClosed(f"the other end of the socket has gone: {error}") from None
            del self._out[:taken]
        return True

    def recv(self, timeout_s: float | None = None) -> tuple[dict[str, Any], list[int]]:
        """The next message and the descriptors that came with it.

        Raises:
            ChannelClosed: the other end has gone.
            TimeoutError: nothing came for `timeout_s`.
        """
        while (message := self.pop()) is None:
            if not is_ready(select.POLLIN, timeout_s, self.socket.fileno()):
                raise TimeoutError(f"no message within {timeout_s} s")
            self.pump()
        return message

    def wait(self, timeout_s: float) -> bool:
        """Whether there is something to receive, waiting for it at most that long."""
        return self._complete() or is_ready(select.POLLIN, timeout_s, self.socket.fileno())

    def pump(self) -> None:
        """Read what is there.

        Raises:
            ChannelClosed: the other end has gone.
        """
        while True:
            try:
                data, ancillary, _, _ = self.socket.recvmsg(1 << 18, _FDS_SPACE, _TO_RECEIVE)
            except BlockingIOError:
                return
            except OSError as error:
                raise ChannelClosed(f"the other end of the socket has gone: {error}") from None
            for level, kind, words in ancillary:
                if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                    self._fds += array.array("i", words[: len(words) // 4 * 4])
            while len(self._fds) > _MAX_FDS:  # more than any message of ours has
                os.close(self._fds.pop())
            if not data:
                if self._complete():
                    return
                raise ChannelClosed("the other end of the socket has gone")
            self._in += data
            if len(data) < 1 << 18:
                return

    def pop(self) -> tuple[dict[str, Any], list[int]] | None:
        """The next whole message, if one is there.

        Raises:
            ChannelClosed: the other end sent something that is not a message.
        """
        if not self._complete():
            return None
        (length,) = _LENGTH.unpack_from(self._in)
        body = bytes(self._in[_LENGTH.size : _LENGTH.size + length])
        del self._in[: _LENGTH.size + length]
        try:
            message = orjson.loads(body)
        except orjson.JSONDecodeError as error:
            raise ChannelClosed(f"the other end of the socket sent no JSON: {error}") from None
        if not isinstance(message, dict):
            raise ChannelClosed("the other end of the socket sent no JSON object")
        fds: list[int] = []
        if "fds" in message:
            fds, self._fds = self._fds[: message["fds"]], self._fds[message["fds"] :]
        return message, fds

    def shut_down(self) -> None:
        """End the connection, and leave the socket to its thread, which is woken by that: `recv` raises there."""
        with contextlib.suppress(OSError):  # the other end has gone
            self.socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket and every descriptor that nobody took."""
        for fd in self._fds:
            with contextlib.suppress(OSError):
                os.close(fd)
        self._fds = []
        self.socket.close()

    def _complete(self) -> bool:
        return not self._missing()

    def _missing(self) -> int:
        """Bytes that are to come until a message is whole, or first its length; 0 if one is there."""
        if len(self._in) < _LENGTH.size:
            return _LENGTH.size - len(self._in)
        (length,) = _LENGTH.unpack_from(self._in)
        if length > self._largest:
            raise ChannelClosed(f"a message of {length} bytes is larger than {self._largest}")
        return int(max(0, _LENGTH.size + length - len(self._in)))


def is_ready(event: int, timeout_s: float | None, *descriptors: int) -> bool:
    """Whether one of these is, waiting for it at most that long. (`select` takes no descriptor from 1024 on.)"""
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, event)
    return bool(poll.poll(timeout_s and math.ceil(min(timeout_s, _LONGEST_S) * 1000)))


def _no_connection() -> str:
    """Why a process cannot use the connection that a process has inherited."""
    if importlib.import_module("multiprocessing").parent_process() is not None:
        return (
            "a group has one rank a host, in the process that nicps has started, and that one has started this one"
            " (mp.spawn?): call init_process_group, or Group.form, without starting a process"
        )
    return "this process has used its connection to the agent: a process that nicps has started can be in one group"


def _inherited(number: str) -> socket.socket:
    if not number.isdecimal():
        raise OSError(errno.EINVAL, f"{number!r} is no descriptor's number")
    if not os.get_inheritable(int(number)):
        # It was taken and closed before, and a file that this process has opened since has the number.
        raise OSError(errno.EBADF, f"descriptor {number} was not inherited")
    connection = socket.socket(fileno=int(number))
    connection.set_inheritable(False)
    return connection


def agent_address(given: str | None) -> str:
    """The address of this host's agent: the given one, that in NICPS_SOCKET, or `@nicps`."""
    return given or os.environ.get("NICPS_SOCKET", DEFAULT_SOCKET)


def unix_address(address: str) -> str:
    """The socket address for a path, or for `@name`, an abstract one."""
    return "\0" + address[1:] if address.startswith("@") else address
