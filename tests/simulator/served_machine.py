# SPDX-License-Identifier: Apache-2.0
"""The agent's machine at a host of `served_host.py`, which drives the node by itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.simulator.served_host import ServedHost


class ServedMachine:
    """What the host asks of an agent's machine."""

    def __init__(self, host: ServedHost) -> None:
        self._host, self._node = host, host.node
        self.on_frame, self.deadline = host.node.on_frame, host.node.deadline
        self.list_came, self.sums_came = host.node.on_list, host.node.advance
        self.kernel_saw = host.node.kernel_saw

    def tick(self, now: float, waits: bool) -> list[Any]:
        return self._node.tick(now)

    def join(self, now: float) -> list[Any]:
        self._node.join(now)
        return []

    def renew_view(self, now: float, *, key_is_spent: bool) -> list[Any]:
        return self._node.renew(now, key_is_spent=key_is_spent)

    def fragments_sent(self, now: float, action: Any, start: float = 0.0) -> list[Any]:
        return self._node.sent(now, action)
