# SPDX-License-Identifier: Apache-2.0
"""What has arrived at a host with servers, as the protocol asks for it."""

from __future__ import annotations

from tests.simulator.kernel import Kernel, Receiver, in_ranges
from tests.simulator.servers import ServersKernel


class ServedReceiver(Receiver):
    """As `nicps.protocol.kernel.ServedReceiver`."""

    def __init__(self, kernel: Kernel, servers: ServersKernel) -> None:
        super().__init__(kernel)
        self._servers = servers

    def count(self, round_: int, view: int, sender: int) -> int:
        return len(self._kernel.taken.get((view, round_, sender), ()))

    def acknowledged_to(self, number: int, first: int, end: int) -> tuple[int, int]:
        return _reached([one >= number for one in self._servers.taken[first:end]], first)

    def missing_acknowledgements(
        self, number: int, first: int, end: int, limit: int
    ) -> list[tuple[int, int]]:
        taken = self._servers.taken
        return in_ranges((i for i in range(first, end) if taken[i] < number), limit)

    def pulled_to(self, number: int, first: int, end: int) -> tuple[int, int]:
        return _reached([one.tag == number for one in self._servers.store[first:end]], first)

    def missing_parameters(
        self, number: int, first: int, end: int, limit: int
    ) -> list[tuple[int, int]]:
        store = self._servers.store
        return in_ranges((i for i in range(first, end) if store[i].tag != number), limit)

    def least_version(self, first: int, end: int) -> tuple[int, int]:
        return self._servers.least_version(first, end)

    def answered(self, server: int) -> tuple[int, int, int, int]:
        return self._servers.answered(server)

    def made(self, round_: int, view: int) -> int:
        made = self._servers.made
        return made.count if made.tag == view << 32 | round_ else 0


def _reached(here: list[bool], first: int) -> tuple[int, int]:
    beyond = max((at for at, one in enumerate(here, 1) if one), default=0)
    return first + (here.index(False) if False in here else len(here)), first + beyond
