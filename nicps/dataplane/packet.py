# SPDX-License-Identifier: Apache-2.0
"""The packet socket for single frames: it receives the frames that the XDP program passes up, and sends control
frames.
"""

from __future__ import annotations

import ctypes
import errno
import socket
import struct
from collections.abc import Collection, Sequence

from nicps.dataplane.interface import QUEUE_FULL, Interface, explain_send
from nicps.errors import InterfaceDown, NicpsError
from nicps.layout import layout
from nicps.wire import BROADCAST, ETHERNET_BYTES, GROUP

_SOL_PACKET = 263
_PACKET_ADD_MEMBERSHIP = 1
_PACKET_MR_MULTICAST, _PACKET_MR_PROMISC = 0, 1
_PACKET_IGNORE_OUTGOING = 23
_SO_ATTACH_FILTER, _SO_RCVBUFFORCE = 26, 33
_RECEIVE_BYTES = 4 << 20
_LONGEST = 2048
# Instructions of classic BPF.
_LOAD_WORD, _LOAD_HALF, _LOAD_BYTE, _EQUAL, _RETURN = 0x20, 0x28, 0x30, 0x15, 0x06


class PacketSocket:
    """Frames of one EtherType on one interface, without those that this host sends.

    They go to `destination`: to all, or to a multicast group. The socket always receives frames to all and to the usual
    group, so hosts of one network need not use the same destination.

    Args:
        all_destinations: receive frames to other hosts too: a switch's controller.
        seal: receive only frames with this destination: those that the XDP program has passed up (6 bytes).
        priority: of the frames that go out (SO_PRIORITY, `nicps.dataplane.htb`).
        tag: their 802.1p tag, or nothing.
    """

    def __init__(
        self,
        interface: Interface,
        ethertype: int,
        destination: bytes = BROADCAST,
        *,
        all_destinations: bool = False,
        seal: bytes | None = None,
        priority: int = 0,
        tag: bytes = b"",
    ) -> None:
        self._name = interface.name
        self._head = destination + interface.mac + tag + struct.pack(">H", ethertype)
        # Unbound and without a protocol it receives nothing, so no frame of another interface can slip in.
        self._socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
        try:
            self._socket.setsockopt(_SOL_PACKET, _PACKET_IGNORE_OUTGOING, 1)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_MARK, layout().limits["MARK"])
            self._socket.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, _RECEIVE_BYTES)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY, priority)
            wanted = [(_PACKET_MR_MULTICAST, group) for group in {GROUP, destination} - {BROADCAST}]
            if all_destinations:
                wanted.append((_PACKET_MR_PROMISC, b""))
            for kind, group in wanted:  # or the interface's filter drops them
                request = struct.pack("=iHH8s", interface.index, kind, len(group), group)
                self._socket.setsockopt(_SOL_PACKET, _PACKET_ADD_MEMBERSHIP, request)
            if seal is not None:
                _take_only(self._socket, seal)
            self._socket.bind((interface.name, ethertype))
            self._socket.setblocking(False)
        except BaseException:
            self._socket.close()
            raise

    def fileno(self) -> int:
        """Readable when a frame is there."""
        return self._socket.fileno()

    def receive(self, limit: int = 512) -> list[tuple[bytes, bytes]]:
        """All frames that have come, at most `limit`: (source MAC, frame from the version byte on).

        Raises:
            InterfaceDown: the interface has gone down.
        """
        return [(data[6:12], data[ETHERNET_BYTES:]) for data in self.receive_whole(limit)]

    def receive_whole(self, limit: int = 512) -> list[bytes]:
        """The same, each with its Ethernet header."""
        frames: list[bytes] = []
        receive = self._socket.recv
        try:
            while len(frames) < limit:
                frames.append(receive(_LONGEST))
        except BlockingIOError:
            pass
        except OSError as error:
            if error.errno == errno.ENETDOWN:
                raise InterfaceDown(f"interface {self._name} has gone down") from None
            raise NicpsError(f"cannot receive on {self._name}: {error.strerror}") from None
        return frames

    def send(self, frame: bytes) -> bool:
        """Send one frame to all, given from its version byte on; False if the queue is full: try again.

        Raises:
            InterfaceDown: the interface has gone down.
            InterfaceUnfit: its MTU is too small for the frame.
            InterfaceMissing: it no longer exists.
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


def _take_only(packets: socket.socket, destination: bytes) -> None:
    """Let the kernel drop all frames to other destinations: a classic BPF program (linux/filter.h)."""
    word, half = struct.unpack(">IH", destination)
    program = (
        (_LOAD_WORD, 0, 0, 0),
        (_EQUAL, 0, 3, word),  # if not: skip 3
        (_LOAD_HALF, 0, 0, 4),
        (_EQUAL, 0, 1, half),
        (_RETURN, 0, 0, 0xFFFFFFFF),
        (_RETURN, 0, 0, 0),
    )
    attach_filter(packets, program)


def take_types(packets: socket.socket, ethertype: int, types: Collection[int]) -> None:
    """Let the kernel drop all frames except ours of these types."""
    checks = [(_EQUAL, len(types) - at, 0, kind) for at, kind in enumerate(types)]  # to the end
    program = (
        (_LOAD_HALF, 0, 0, ETHERNET_BYTES - 2),
        (_EQUAL, 0, len(types) + 1, ethertype),
        (_LOAD_BYTE, 0, 0, ETHERNET_BYTES + 1),
        *checks,
        (_RETURN, 0, 0, 0),
        (_RETURN, 0, 0, 0xFFFFFFFF),
    )
    attach_filter(packets, program)


def attach_filter(packets: socket.socket, program: Sequence[tuple[int, int, int, int]]) -> None:
    """A classic BPF program: code, jumps if true and if not, and a number, for each instruction."""
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *step) for step in program))
    filter = struct.pack("@HP", len(program), ctypes.addressof(code))
    packets.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, filter)
