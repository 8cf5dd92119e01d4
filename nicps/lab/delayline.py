# SPDX-License-Identifier: Apache-2.0
"""The lab's delay line: frames wait in this process, since the kernel has no place for them.

    python -I -S delayline.py FAULTS_FD INTERFACE

Frames that a port's program (`ebpf/lab_port.c`) does not pass at once come in at INTERFACE, with port and direction in
their mark, and go out there again when their time has come. The time is the port's delay, which is read from the map
behind FAULTS_FD; a frame that others shall overtake waits for up to `LATE_S` more. Frames with the same delay keep
their order.

As a script it prints the number of the process that serves, and detaches that process. It imports the standard library
only. Linux 5.19 or newer.
"""

from __future__ import annotations

import contextlib
import heapq
import mmap
import os
import random
import select
import socket
import struct
import sys
import time

#: LAB_PORTS, two elements each.
PORTS = 256
#: struct lab_faults: loss, duplicate, corrupt, reorder, delay_ns, side, line, lose_left, lose_type.
FAULTS = struct.Struct("=QQQQQIIiI")
_DELAY = struct.Struct("=Q")
_DELAY_AT = 32

#: Seconds that a frame which others shall overtake waits beyond its delay.
LATE_S = (0.0005, 0.005)
#: The number of frames that wait; further ones are lost.
MOST_BYTES = 256 << 20

_TO_HOST = 1
_LATE = 2
_ETH_P_ALL = 3
_SOL_PACKET = 263
_PACKET_IGNORE_OUTGOING = 23
_SO_RCVBUFFORCE = 33
_SO_RCVMARK = 75
_LONGEST = 65_600
_BATCH = 64
_NICENESS = -10
_ANCILLARY = socket.CMSG_SPACE(4)


class DelayLine:
    """Frames that wait, by the time at which they go."""

    def __init__(self, line: socket.socket, faults: mmap.mmap) -> None:
        self._socket = line
        self._faults = faults
        self._waiting: list[tuple[float, int, int, bytes]] = []
        self._bytes = 0
        self._arrived = 0

    def serve(self) -> None:
        """Run until the process is ended."""
        while True:
            wait_s = max(0.0, self._waiting[0][0] - time.monotonic()) if self._waiting else None
            select.select([self._socket], [], [], wait_s)
            self._receive()
            self._release()

    def _receive(self) -> None:
        with contextlib.suppress(BlockingIOError):
            for _ in range(_BATCH):
                frame, ancillary, _, _ = self._socket.recvmsg(_LONGEST, _ANCILLARY)
                if ancillary and self._bytes < MOST_BYTES:
                    self._hold(frame, struct.unpack("=I", ancillary[0][2])[0])

    def _hold(self, frame: bytes, mark: int) -> None:
        port = 2 * (mark >> 8 & 0xFF) + (mark & _TO_HOST)
        wait_s = _DELAY.unpack_from(self._faults, port * FAULTS.size + _DELAY_AT)[0] / 1e9
        if mark & _LATE:
            wait_s += random.uniform(*LATE_S)
        due = time.monotonic() + wait_s
        self._arrived += 1
        self._bytes += len(frame)
        heapq.heappush(self._waiting, (due, self._arrived, mark, frame))

    def _release(self) -> None:
        now = time.monotonic()
        while self._waiting and self._waiting[0][0] <= now:
            _, _, mark, frame = heapq.heappop(self._waiting)
            self._bytes -= len(frame)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_MARK, mark)
            with contextlib.suppress(OSError):  # a full queue loses frames, on a real line too
                self._socket.send(frame)


def _open(interface: str) -> socket.socket:
    line = socket.socket(socket.AF_PACKET, socket.SOCK_RAW | socket.SOCK_NONBLOCK, 0)
    line.setsockopt(_SOL_PACKET, _PACKET_IGNORE_OUTGOING, 1)
    line.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, 64 << 20)
    line.setsockopt(socket.SOL_SOCKET, _SO_RCVMARK, 1)
    line.bind((interface, _ETH_P_ALL))
    return line


def _main(faults_fd: int, interface: str) -> None:
    line = _open(interface)
    pages = -(-2 * PORTS * FAULTS.size // mmap.PAGESIZE)
    access = mmap.PROT_READ | mmap.PROT_WRITE  # the kernel wants both
    faults = mmap.mmap(faults_fd, pages * mmap.PAGESIZE, mmap.MAP_SHARED, access)
    os.close(faults_fd)
    if (pid := os.fork()) > 0:
        print(pid, flush=True)
        return
    os.chdir("/")
    nowhere = os.open(os.devnull, os.O_RDWR)
    for fd in range(3):
        os.dup2(nowhere, fd)
    os.setpriority(os.PRIO_PROCESS, 0, _NICENESS)
    DelayLine(line, faults).serve()


if __name__ == "__main__":
    try:
        _main(int(sys.argv[1]), sys.argv[2])
    except OSError as error:
        sys.exit(f"the lab's delay line (Linux 5.19 or newer): {error.strerror}")
