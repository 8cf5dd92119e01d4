# SPDX-License-Identifier: Apache-2.0
"""Which of this host's frames leave first: a queue and a TX ring for each channel (docs/channels.md, "Order on the
wire").
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from nicps.dataplane import DataPlane
from nicps.dataplane.txring import TxRing

_REFUSED_S = 0.1  # the interface takes nothing: a frame that it refuses so long counts as lost

Item = TypeVar("Item")


@dataclass(slots=True)
class Line(Generic[Item]):
    """What a channel has to send, and its ring.

    Attributes: `fragments`, sent so far. `awaits_room`, the loop watches the ring for room; None: it does not know the
    ring. Since the last look: `blocked`, it waits for room in its ring; `refused`, the
    interface's queue is full; `stopped`, nothing of it can be sent now.
    """

    ring: TxRing
    urgency: int = 0
    queue: deque[Item] = field(default_factory=deque)
    fragments: int = 0
    blocked: bool = False
    refused: bool = False
    stopped: bool = False
    awaits_room: bool | None = None
    _refuses: tuple[int, int] | None = None  # frames: sent, and refused
    _refuses_since: float = 0.0

    def begin(self) -> None:
        """It may send again."""
        if not self.refused:
            self._refuses = None
        self.blocked = self.refused = self.stopped = False

    def is_lost(self, now: float) -> bool:
        """Whether the interface has refused the same frame for so long that it must count as lost.

        A full queue lets frames out. But a virtual cable refuses frames that are longer than its other end takes. The
        sender does not wait for such frames: other members watch them, like frames that the LAN loses (R16).
        """
        if not self.refused:
            return False
        refuses = self.fragments, self.ring.unsent()
        if refuses != self._refuses:
            self._refuses, self._refuses_since = refuses, now
        if now < self._refuses_since + _REFUSED_S:
            return False
        self.ring.take_back()
        self._refuses, self.refused = None, False
        return True


class Priorities(Generic[Item]):
    """The lines of all channels. That of channel 0, `first`, is always there, others with their first fragments.

    Attributes: `order`, all of them, the most urgent one first.
    """

    def __init__(self, dataplane: DataPlane) -> None:
        self._dataplane = dataplane
        self.first: Line[Item] = Line(dataplane.tx)
        self._lines = {0: self.first}
        self.order = [self.first]

    def of(self, channel: int, urgency: int) -> Line[Item]:
        """That channel's line, which has that urgency from now on.

        Raises:
            OSError: there is no room for its ring.
        """
        line = self._lines.get(channel)
        if line is None:
            line = self._lines[channel] = Line(self._dataplane.open_ring(urgency), urgency)
        elif line.urgency != urgency:
            line.urgency = urgency
            line.ring.set_urgency(urgency)
        else:
            return line
        self._sort()
        return line

    def next(self) -> Line[Item] | None:
        """The most urgent one that has something to send, and can."""
        for line in self.order:
            if line.queue and not line.stopped:
                return line
        return None

    def take_idle(self) -> list[Line[Item]]:
        """Forget the lines of channels above 0 that have nothing to send; the caller closes their rings."""
        idle = {
            channel: each for channel, each in self._lines.items() if channel and not each.queue
        }
        self._lines = {
            channel: each for channel, each in self._lines.items() if channel not in idle
        }
        self._sort()
        return list(idle.values())

    def _sort(self) -> None:
        """The most urgent one first; of equals the lower channel."""
        ranked = sorted(self._lines.items(), key=lambda of: (-of[1].urgency, of[0]))
        self.order = [line for _, line in ranked]
