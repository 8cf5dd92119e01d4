# SPDX-License-Identifier: Apache-2.0
"""Connections that are closed outside the loop, since a close can take as long as the peer likes.

Closing a connection closes the descriptors that were sent with it and not received. One of them may be a TCP
socket that lingers for days, or a file on a file system of the sender's.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time

_MOST_AT_ONCE = 64


class Closing:
    """Closes each connection in a thread of its own, which ends with the process at the latest."""

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []

    @property
    def full(self) -> bool:
        """So many are under way that no more connections should be taken."""
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        return len(self._threads) >= _MOST_AT_ONCE

    def end(self, connection: socket.socket) -> None:
        """Shut the connection down at once, so that nothing more comes from the other end; close it in a thread."""
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)
        self.let_go(connection)

    def let_go(self, connection: socket.socket) -> None:
        """Close our descriptor of a connection that another process may go on with."""
        thread = threading.Thread(target=connection.close, daemon=True)
        self._threads.append(thread)
        thread.start()

    def wait(self, timeout_s: float) -> None:
        """Wait until all are closed, at most so long."""
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
