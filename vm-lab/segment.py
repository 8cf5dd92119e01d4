# SPDX-License-Identifier: Apache-2.0
"""A LAN segment of virtual machines: what one sends, all others get; no frame leaves this machine.

QEMU's stream netdev connects to a UNIX socket, and sends every frame behind its length (32 bits, big-endian).
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from pathlib import Path

_LENGTH = struct.Struct("!I")


class Segment:
    """A hub at a UNIX socket; a port for whoever connects. A full port makes its senders wait, so nothing is lost.

    `frames` counts those that came in.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.frames = 0
        self._lock = threading.Lock()
        self._ports: dict[socket.socket, threading.Lock] = {}
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(path))
        self._listener.listen()
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def ports(self) -> int:
        """How many are plugged in."""
        with self._lock:
            return len(self._ports)

    def device(self, mac: str) -> tuple[str, ...]:
        """QEMU's options for a virtio-net interface at this segment.

        Native XDP wants no segments merged and no checksums left open by the other end: guest_tso4 and the like.
        """
        off = ",".join(f"guest_{what}=off" for what in ("csum", "tso4", "tso6", "ecn", "ufo"))
        return (
            "-netdev",
            f"stream,id=lan,server=off,addr.type=unix,addr.path={self.path}",
            "-device",
            f"virtio-net-pci,netdev=lan,mac={mac},{off}",
        )

    def close(self) -> None:
        """Unplug everybody."""
        with self._lock:
            ends = [self._listener, *self._ports]
        for end in ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()
        self.path.unlink(missing_ok=True)

    def __enter__(self) -> Segment:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                port, _ = self._listener.accept()
                with self._lock:
                    self._ports[port] = threading.Lock()
                threading.Thread(target=self._carry, args=(port,), daemon=True).start()

    def _carry(self, port: socket.socket) -> None:
        """Everything that comes in at a port, until it is unplugged."""
        with contextlib.suppress(OSError), port.makefile("rb") as frames:
            while len(length := frames.read(_LENGTH.size)) == _LENGTH.size:
                (size,) = _LENGTH.unpack(length)
                body = frames.read(size)
                if len(body) < size:
                    break  # its guest died: with half a frame the others' streams would be out of step
                frame = length + body
                with self._lock:
                    self.frames += 1
                    others = [(to, lock) for to, lock in self._ports.items() if to is not port]
                for to, lock in others:
                    with lock, contextlib.suppress(OSError):  # unplugged meanwhile
                        to.sendall(frame)
        with self._lock:
            self._ports.pop(port, None)
