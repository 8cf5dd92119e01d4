# SPDX-License-Identifier: Apache-2.0
"""The TX ring: batches of frames with lanes go from NumPy arrays to the interface, one system call a batch.

An AF_PACKET ring of TPACKET_V2 slots in memory that the kernel shares. The kernel has three rules, each found by trial
or in its net/packet/af_packet.c:

- Slots are used strictly in order, across calls too. So there is one position, ours, and a slot is filled only when
  it is the next in turn.
- A slot is free again when its frame has left the interface's queue, not when it was handed over. So no more than the
  ring's frames ever stand in that queue, and a shaped one (tbf) that holds a ring's worth is not overrun. A frame that
  the queue refuses stays in its slot and goes out with the next `flush`, or is taken back.
- The socket does not bypass the queueing discipline (PACKET_QDISC_BYPASS is off): frames are shaped, and a program at
  the interface's egress sees them and signs those that carry this socket's mark.
"""

from __future__ import annotations

import errno
import mmap
import select
import socket
import struct

import numpy as np
import numpy.typing as npt

from nicps.dataplane import htb, tags
from nicps.dataplane.interface import QUEUE_FULL, Interface, explain_send
from nicps.layout import layout
from nicps.wire import BROADCAST, CONTRIBUTION_HEADER_BYTES, ETHERNET_BYTES, PAYLOAD_BYTES

_SOL_PACKET = 263
_PACKET_VERSION, _PACKET_TX_RING = 10, 13
_TPACKET_V2 = 1
_SO_SNDBUFFORCE = 32

_STATUS_AVAILABLE, _STATUS_SEND_REQUEST, _STATUS_SENDING, _STATUS_WRONG = 0, 1, 2, 4

#: One frame with its struct tpacket2_hdr (32 bytes): two of them a page.
_SLOT_BYTES = 2048
_FRAME_AT = 32
_LONGEST_BYTES = ETHERNET_BYTES + tags.BYTES + CONTRIBUTION_HEADER_BYTES + PAYLOAD_BYTES
_MAC_BYTES = 6
_TAG_AT = 2 * _MAC_BYTES
#: What the kernel accounts a frame with, at most: the frame, and a buffer's head for each.
_ACCOUNTED_BYTES = 2816

U8 = npt.NDArray[np.uint8]


class TxRing:
    """Fragments, and frames of stripes, on their way out of one interface.

    `fileno` is readable when a good part of the ring has become free after it was full: wait on that, not on the
    socket, which would wake for every single frame. A frame that the interface's queue refused waits for the next
    `flush`: while there are any `unsent`, flush again after a few milliseconds.

    Args:
        destination: of frames without one of their own: all hosts, or a multicast group.
        frames: slots, a multiple of 2. 512 are 6.2 ms at 1 Gbit/s.
        urgency: of its frames, 0 to 7 (`nicps.dataplane.htb`).
        tagged: frames have an 802.1p tag (`nicps.dataplane.tags`).
    """

    def __init__(
        self,
        interface: Interface,
        ethertype: int,
        destination: bytes = BROADCAST,
        frames: int = 512,
        urgency: int = 0,
        *,
        tagged: bool = False,
    ) -> None:
        self.frames = frames
        self._tag = slice(_TAG_AT, _TAG_AT + tags.BYTES) if tagged else None
        self._name = interface.name
        self._next = 0
        self._full = False
        # Protocol 0: this socket receives nothing.
        self._socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
        self._epoll = select.epoll()
        try:
            tag = tags.tag(0) if tagged else b""
            self._map(interface, destination + interface.mac + tag + struct.pack(">H", ethertype))
            self.set_urgency(urgency)
        except BaseException:
            self.close()
            raise

    def _map(self, interface: Interface, head: bytes) -> None:
        size = self.frames * _SLOT_BYTES
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_MARK, layout().limits["MARK"])
        block = max(mmap.PAGESIZE, _SLOT_BYTES)
        self._socket.setsockopt(_SOL_PACKET, _PACKET_VERSION, _TPACKET_V2)
        request = struct.pack("IIII", block, size // block, _SLOT_BYTES, self.frames)
        self._socket.setsockopt(_SOL_PACKET, _PACKET_TX_RING, request)
        # Twice this is the limit; the kernel wakes a writer when less than half of that limit is in flight.
        self._socket.setsockopt(
            socket.SOL_SOCKET, _SO_SNDBUFFORCE, max(self.frames * _ACCOUNTED_BYTES // 2, 1 << 16)
        )
        self._socket.bind((interface.name, 0))
        self._socket.setblocking(False)
        self._memory = mmap.mmap(self._socket.fileno(), size)
        slots = np.frombuffer(self._memory, np.uint8).reshape(self.frames, _SLOT_BYTES)
        words = slots.view(np.uint32)
        self._status = words[:, 0]
        self._length = words[:, 1]
        self._head = len(head)
        self._frames = slots[:, _FRAME_AT : _FRAME_AT + _LONGEST_BYTES]
        self._frames[:, : self._head] = np.frombuffer(head, np.uint8)
        self._destination = self._frames[0, :_MAC_BYTES].copy()
        self._epoll.register(self._socket.fileno(), select.EPOLLOUT | select.EPOLLET)

    def set_urgency(self, urgency: int) -> None:
        """Of the frames from now on."""
        priority = htb.of_urgency(urgency)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY, priority)
        if self._tag is not None:
            self.set_tags(tags.of_urgency(urgency))

    def set_tags(self, *priorities: int) -> None:
        """The priorities in the tags of a ring with tags, slot by slot in turn."""
        assert self._tag is not None, "a ring without tags"
        each = b"".join(map(tags.tag, priorities))
        rows = np.frombuffer(each, np.uint8).reshape(len(priorities), tags.BYTES)
        self._frames[:, self._tag] = rows[np.arange(self.frames) % len(priorities)]

    def fileno(self) -> int:
        """Readable when there is room again; `free` takes the event away."""
        return self._epoll.fileno()

    def free(self) -> int:
        """Frames that `push` would take now. Once the ring was full, none until a quarter of it is free."""
        return self._free(self.frames)

    def _free(self, most: int) -> int:
        """The same, as far as `most`."""
        self._epoll.poll(0)
        free = self._available(self.frames if self._full else most)
        if self._full and free < self.frames // 4:
            return 0
        self._full = free == 0
        return min(free, most)

    def _available(self, most: int) -> int:
        """Free slots in a row, from the next in turn on, as far as `most`."""
        behind = _leading_zeros(self._status[self._next : self._next + most])
        rest = min(most, self.frames) - behind
        if not rest or self._next + behind < self.frames:
            return behind
        return behind + _leading_zeros(self._status[: min(rest, self._next)])

    def push(self, headers: U8, payload: U8, destination: U8 | None = None) -> int:
        """Put frames into the ring; `flush` sends them.

        Args:
            headers: (k, 48) of fragments, or (k, 56) of contributions and questions, from the version byte on.
            payload: (k, 1440); its rows need not lie one behind the other.
            destination: (k, 6), or (6,) for all; None: the ring's own.

        Returns how many of the k were taken, from the first on.
        """
        count = self._free(len(headers)) if len(headers) else 0
        body = self._head + headers.shape[1]
        to = self._destination if destination is None else destination
        done = 0
        while done < count:
            part = min(count - done, self.frames - self._next)
            here, there = slice(self._next, self._next + part), slice(done, done + part)
            frames = self._frames[here]
            frames[:, :_MAC_BYTES] = to[there] if to.ndim > 1 else to
            frames[:, self._head : body] = headers[there]
            frames[:, body : body + PAYLOAD_BYTES] = payload[there]
            self._length[here] = body + PAYLOAD_BYTES
            # Last, since this gives the slot away. All other order follows from the system call in `flush`.
            self._status[here] = _STATUS_SEND_REQUEST
            self._next = (self._next + part) % self.frames
            done += part
        self._full = self._full or not self._available(1)
        return count

    def flush(self) -> None:
        """Hand the kernel all frames that it takes without waiting; the rest stays, see `unsent`.

        Raises:
            InterfaceDown: the interface has gone down; frames that were not sent stay.
            InterfaceUnfit: its MTU is too small for a fragment; frames that were not sent stay.
            InterfaceMissing: it no longer exists.
        """
        try:
            self._socket.send(b"", socket.MSG_DONTWAIT)
        except BlockingIOError:
            pass
        except OSError as error:
            if error.errno in QUEUE_FULL:
                return
            if error.errno == errno.EMSGSIZE:  # the kernel goes no further than a refused slot
                self._status[self._status == _STATUS_WRONG] = _STATUS_SEND_REQUEST
            raise explain_send(self._name, error) from None

    def pending(self) -> int:
        """Frames that have not left the interface's queue yet, those not handed over included."""
        return int(np.count_nonzero(self._status))

    def unsent(self) -> int:
        """Frames that the kernel has not taken over yet: call `flush` again, in order before anything else."""
        return int(np.count_nonzero(self._status == _STATUS_SEND_REQUEST))

    def take_back(self) -> None:
        """Take back the frames that the kernel has not taken over."""
        refused = np.flatnonzero(self._status == _STATUS_SEND_REQUEST)
        self._status[refused] = _STATUS_AVAILABLE
        self._next = (self._next - len(refused)) % self.frames  # these are the last ones before it
        self._full = not self._available(1)

    def close(self) -> None:
        """Close the socket; frames in the interface's queue are still sent."""
        self._epoll.close()
        self._socket.close()


def _leading_zeros(status: npt.NDArray[np.uint32]) -> int:
    taken = status != 0  # a copy: the kernel changes the ring meanwhile
    if not len(taken):
        return 0
    first = int(taken.argmax())
    return first if taken[first] else len(taken)
