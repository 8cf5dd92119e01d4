# SPDX-License-Identifier: Apache-2.0
"""Frames that come in at a bridge's ports, received before the bridge takes them; and frames to all of the bridge's
host.

A bridge takes its ports' frames before sockets that ask for one EtherType receive them; sockets that ask for all
EtherTypes receive them first. So one socket receives the frames of all ports of this namespace, also of ports that come
later.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Collection

from nicps.dataplane.interface import QUEUE_FULL, Interface, explain_send
from nicps.dataplane.packet import take_types
from nicps.errors import NicpsError
from nicps.wire import BROADCAST, ETHERNET_BYTES

_ETH_P_ALL = 3
_SOL_PACKET = 263
_PACKET_IGNORE_OUTGOING = 23
_SO_RCVBUFFORCE = 33
_RECEIVE_BYTES = 1 << 20
_LONGEST = 2048


class Tap:
    """Frames of ours of these types, with the name of the interface at which each came in.

    Args:
        ethertype: of our frames.
        types: of the header's `type`.
    """

    def __init__(self, ethertype: int, types: Collection[int]) -> None:
        self._types = frozenset(types)
        self._ethertype = struct.pack(">H", ethertype)
        kind = socket.SOCK_RAW | socket.SOCK_NONBLOCK
        self._socket = socket.socket(socket.AF_PACKET, kind, socket.htons(_ETH_P_ALL))
        try:
            self._socket.setsockopt(_SOL_PACKET, _PACKET_IGNORE_OUTGOING, 1)
            self._socket.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, _RECEIVE_BYTES)
            take_types(self._socket, ethertype, types)
        except BaseException:
            self._socket.close()
            raise

    def fileno(self) -> int:
        """Readable when a frame is there."""
        return self._socket.fileno()

    def receive(self, limit: int = 512) -> list[tuple[str, bytes, bytes]]:
        """All frames that have come, at most `limit`: (interface, source MAC, frame from the version byte on).

        Raises:
            NicpsError: the kernel refuses.
        """
        frames = []
        try:
            for _ in range(limit):
                data, (name, *_) = self._socket.recvfrom(_LONGEST)
                # Other frames came in before the filter was set.
                ours = data[12:14] == self._ethertype and len(data) > ETHERNET_BYTES + 1
                if ours and data[ETHERNET_BYTES + 1] in self._types:
                    frames.append((name, data[6:12], data[ETHERNET_BYTES:]))
        except BlockingIOError:
            pass
        except OSError as error:
            raise NicpsError(f"cannot hear the ports: {error.strerror}") from None
        return frames

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()


class Sender:
    """Sends to all ports of a bridge, from an address that need not be the bridge's own."""

    def __init__(self, bridge: Interface, ethertype: int, source: bytes) -> None:
        self._name = bridge.name
        self._head = BROADCAST + source + struct.pack(">H", ethertype)
        self._socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW | socket.SOCK_NONBLOCK, 0)
        try:
            self._socket.bind((bridge.name, 0))
        except OSError as error:
            self._socket.close()
            raise explain_send(bridge.name, error) from None

    def send(self, frame: bytes) -> bool:
        """Send one frame, from its version byte on; False if the queue is full.

        Raises:
            InterfaceDown, InterfaceMissing, InterfaceUnfit: the bridge cannot send it now.
        """
        try:
            self._socket.send(self._head + frame)
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno in QUEUE_FULL:
                return False
            raise explain_send(self._name, error) from None
        return True

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()
