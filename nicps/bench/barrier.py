# SPDX-License-Identifier: Apache-2.0
"""A common start for processes in several namespaces of one machine, and their times.

Workers connect to a UNIX socket (a path, since paths cross network namespaces) and send their measurements. They are
told when to start the next round on the clock that all of them share.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from nicps.errors import NetworkProblem
from nicps.session.channel import Channel, ChannelClosed

_LEAD_S = 0.02  # between the message and the start
_CHECK_S = 0.1
_LAST_WORDS_S = 10.0


def _no_check() -> None:
    """The default `check`: why workers fail is unknown."""


class BarrierServer:
    """The measuring side, for `workers` processes."""

    def __init__(self, path: Path, workers: int) -> None:
        self.path = path
        self._workers = workers
        self._check: Callable[[], None] = _no_check
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(path))
        os.chmod(path, 0o666)
        self._listener.listen(workers)
        self._channels: list[Channel] = []

    def accept(self, timeout_s: float, check: Callable[[], None] = _no_check) -> None:
        """Wait until all workers have connected.

        Args:
            check: raises when workers have failed, with the reason; called at intervals, and when one has gone.

        Raises:
            NetworkProblem: not all of them connected.
        """
        self._check = check
        deadline = time.monotonic() + timeout_s
        while len(self._channels) < self._workers:
            check()
            if select.select([self._listener], [], [], _CHECK_S)[0]:
                connection, _ = self._listener.accept()
                self._channels.append(Channel(connection))
            elif time.monotonic() > deadline:
                raise NetworkProblem(
                    f"{len(self._channels)} of {self._workers} workers have come within {timeout_s:g} s"
                )

    def gather(self, timeout_s: float = 120.0) -> list[dict[str, Any]]:
        """One message from every worker.

        Raises:
            NicpsError: one has gone; with `check`'s reason.
        """
        with self._explaining():
            return [channel.recv(timeout_s)[0] for channel in self._channels]

    def start(self) -> float:
        """Tell all workers when to start; return that time (CLOCK_MONOTONIC).

        Raises:
            NicpsError: as `gather`.
        """
        at = time.monotonic() + _LEAD_S
        with self._explaining():
            for channel in self._channels:
                channel.send({"start": at})
        return at

    @contextlib.contextmanager
    def _explaining(self) -> Iterator[None]:
        """Wait for the reason of a worker that has gone; it may come later than the end of its connection."""
        try:
            yield
        except ChannelClosed:
            deadline = time.monotonic() + _LAST_WORDS_S
            while time.monotonic() < deadline:
                self._check()
                time.sleep(_CHECK_S)
            raise

    def close(self) -> None:
        """Close and remove the socket."""
        for channel in self._channels:
            channel.close()
        self._listener.close()
        self.path.unlink(missing_ok=True)


class BarrierClient:
    """A worker's side."""

    def __init__(self, path: str) -> None:
        self._channel = Channel.connect(path)

    def wait(self, message: Mapping[str, Any]) -> float:
        """Send `message`, and sleep until the common start; return that time."""
        self._channel.send(dict(message))
        at = float(self._channel.recv(300.0)[0]["start"])
        time.sleep(max(0.0, at - time.monotonic()))
        return at

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message, and go on."""
        self._channel.send(dict(message))


def busy_ticks() -> int:
    """Ticks in which the machine's processors were not idle, softirq included (/proc/stat)."""
    fields = [int(x) for x in Path("/proc/stat").read_text().splitlines()[0].split()[1:]]
    return sum(fields[:8]) - fields[3] - fields[4]


def median(values: Sequence[float]) -> float:
    """The median."""
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def peak_rss_bytes(pid: int) -> int:
    """VmHWM of a process."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0
