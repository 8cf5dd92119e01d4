# SPDX-License-Identifier: Apache-2.0
"""Which calls of a channel are made directly (docs/direct.md), and which take a round at once."""

from __future__ import annotations

from dataclasses import dataclass

from nicps.session.direct import DirectChannel

#: Direct calls between two rounds at most: so agents hear of the group now and then.
_MOST_DIRECT = 1 << 14
#: After so many direct calls in a row that took a round, so many calls are not tried; then twice as many.
_FAILURES, _FEW_SKIPS, _MOST_SKIPS = 3, 16, 1024


@dataclass(slots=True)
class Directly:
    """A channel's direct calls.

    Attributes: `since`, how many have been made since the last round. `free_at`: when the next one begins beside less
    urgent calls, on the monotonic clock.
    """

    calls: DirectChannel
    since: int = 0
    free_at: float = 0.0
    _failed: int = 0
    _skips: int = 0

    def tries(self) -> bool:
        """Whether the next call is tried: the same at all members, as they know the same of those before."""
        if self.since >= _MOST_DIRECT:
            return False
        if self._skips:
            self._skips -= 1
            return False
        return True

    def note(self, *, done: bool) -> None:
        """A call is done, or takes a round, at all members alike."""
        self.since += done
        self._failed = 0 if done else self._failed + 1
        if self._failed >= _FAILURES:
            self._skips = min(_FEW_SKIPS << self._failed - _FAILURES, _MOST_SKIPS)
