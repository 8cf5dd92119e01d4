# SPDX-License-Identifier: Apache-2.0
"""Lists of contributors that a member's kernel tells of before the round before is committed there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ToldList:
    """What the first contribution to a round of stripes says of it, in the view `view`."""

    view: int
    round: int
    members: int
    unit: int
    channel: int = 0


class EarlyLists:
    """The kernel tells of a round's list once. If the round is not open yet, it is kept until it is."""

    def __init__(self) -> None:
        self._kept: dict[int, ToldList] = {}  # by channel

    def __bool__(self) -> bool:
        return bool(self._kept)

    def take(self, view: int, rounds: Sequence[int], told: ToldList) -> bool:
        """Whether that list is of the open round, so that it can be used now. That of the next one is kept.

        Args:
            view: in force.
            rounds: the open round of each channel; nothing where none is open.
        """
        if told.view != view or told.channel >= len(rounds):
            return False
        ahead = told.round - rounds[told.channel]
        if ahead == 1:
            self._kept[told.channel] = told
        return not ahead

    def take_kept(self, view: int, rounds: Sequence[int]) -> list[ToldList]:
        """Those whose round is open now."""
        kept, self._kept = self._kept, {}
        return [told for told in kept.values() if self.take(view, rounds, told)]
