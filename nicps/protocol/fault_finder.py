# SPDX-License-Identifier: Apache-2.0
"""What comes of reports that fragments do not arrive (R16): a member must go, or the exchange is given up."""

from __future__ import annotations

from nicps.protocol.actions import Committed, NoProgress, NotAdded
from nicps.protocol.local_host import LocalHost
from nicps.protocol.membership import Membership
from nicps.protocol.phase import Timings
from nicps.protocol.progress import Standstill
from nicps.protocol.ring import Ring
from nicps.protocol.rings import Rings
from nicps.protocol.signals import Lacking, Steps


class FaultFinder:
    """Judges what members report, and has the one at fault evicted."""

    def __init__(
        self, host: LocalHost, rings: Rings, membership: Membership, timings: Timings
    ) -> None:
        self._host = host
        self._rings = rings
        self._membership = membership
        self._standstill = Standstill(host, timings)

    def note_counted(self, commit: Committed) -> None:
        """A round was committed: its exchange works."""
        self._standstill.note_counted(commit)

    def hear(self, now: float, lacking: Lacking) -> Steps:
        """What a member lacks of members; or of a switch, which is number 0. Nobody is evicted for that."""
        if 0 in lacking.lacks:
            self._standstill.excuse(lacking.round)
            return self._give_up(lacking.round)
        ring, learners = self._rings.current, self._membership.learners
        phase = ring.phase if ring is not None else None
        return self._find_fault(now, self._standstill.hear(now, lacking, learners, phase))

    def _give_up(self, round_: int) -> Steps:
        """The lead is told that the exchange makes no sums, unless it has marked the round: others may commit it."""
        ring = self._rings.current
        if ring is None or any(ring.completes) or not self._host.leads:
            return []
        return [NotAdded(round_, ring.phase.exchange)]

    def _find_fault(self, now: float, found: list[NoProgress]) -> Steps:
        """Of the full members that stay, the lowest proposes to go on without the one at fault.

        The k-th does at its k-th verdict: those before it may have heard other reports. If it may be the network, the
        lead is told instead.
        """
        evicted = frozenset(one.evicted for one in found if one.evicted)
        ring, host = self._rings.current, self._host
        standstill = self._standstill
        if evicted and ring is not None and self._is_networks_fault(ring):
            told = [one for one in found if not one.evicted]
            gives_up = standstill.gives_up(ring.phase)
            return [*told, *(self._give_up(found[-1].round) if gives_up else [])]
        staying = sorted(host.view.live - self._membership.learners - evicted)
        acts = host.number in staying[: standstill.verdicts]
        return [*found, *(self._membership.evict(now, evicted) if acts else [])]

    def _is_networks_fault(self, ring: Ring) -> bool:
        return self._standstill.blames_network(ring.phase, has_sums=ring.has_sums)
