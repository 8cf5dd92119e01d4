# SPDX-License-Identifier: Apache-2.0
"""The share of the line that urgent rounds may take, where no step binds the channels together.

A switch that puts urgent frames first starves bulk for as long as there are any, whatever its members wish. So a member
leaves the line free for some time after each urgent round (docs/channels.md, "Order on the wire").
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from nicps.protocol.carried import Offer
from nicps.protocol.exchange import Exchanger


class Restraint:
    """Offers of this member that come too soon after the last round of their channel.

    Args:
        share: the part of the time that rounds of one channel may take while less urgent ones are under way, above 0;
            1: all of it.
        exchanges: by channel.
        below: by channel, the exchanges of channels of lower urgency.
    """

    def __init__(
        self, share: float, exchanges: Sequence[Exchanger], below: Sequence[Sequence[Exchanger]]
    ) -> None:
        self._pause = 1 / share - 1  # as a part of the round before
        self._exchanges, self._below = exchanges, below
        self._waiting: dict[int, Offer] = {}  # by channel

    @property
    def waits(self) -> bool:
        """An offer does, for rounds that the kernel may end at any time."""
        return bool(self._waiting)

    def holds(self, now: float, offer: Offer) -> bool:
        """Whether the offer has to wait; `release` returns it then."""
        if now >= self._free_at(offer.channel):
            return False
        self._waiting[offer.channel] = offer
        return True

    def _free_at(self, channel: int) -> float:
        """When that channel may offer again."""
        if not any(each.under_way for each in self._below[channel]):
            return -math.inf
        took_s, whole_at = self._exchanges[channel].last_took
        return whole_at + took_s * self._pause

    def due(self) -> float:
        """When the next offer has waited long enough."""
        return min((self._free_at(channel) for channel in self._waiting), default=math.inf)

    def release(self, now: float) -> list[Offer]:
        """Those that have waited long enough, or have nothing to wait for any more; at infinity all of them."""
        free = [channel for channel in self._waiting if now >= self._free_at(channel)]
        return [self._waiting.pop(channel) for channel in free]
