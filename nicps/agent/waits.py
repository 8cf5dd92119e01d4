# SPDX-License-Identifier: Apache-2.0
"""How long the rounds of training wait for which member, or for a Linux switch; and which of them is slow."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from nicps import wire
from nicps.agent.flows import FlowWatch
from nicps.protocol import Member, Node
from nicps.protocol.channels import ChannelledRing
from nicps.protocol.signals import Late

#: Shorter waits are not looked at: small rounds have thousands of them a second.
_LEAST_S = 0.001
#: Least time between two looks at whom the host waits for. Waits in between count as the next one that was looked at.
_EVERY_S = 0.03
#: While rounds are under way the loop wakes up more often than this: a longer wait was a pause of this host.
_MOST_S = 0.1
#: The recent times are halved so often, so that newer ones count for more.
_HALVED_S = 10.0
#: So long training must have been measured before a host is called slow.
_ENOUGH_S = 1.0
#: Rounds wait for a slow host in at least this part of the time, and so many times as long as for each of the others
#: on the average: hosts that are equally fast wait for one another, too.
_PART, _TIMES = 0.2, 2.0

#: A member's MAC address (of a Linux switch `wire.SWITCH`), or its name (None).
Host: TypeAlias = bytes | str | None


@dataclass(slots=True)
class Waited:
    """Seconds of training, and of them those in which a round waited: by whom it waited for, and for what of it."""

    seconds: float = 0.0
    of: defaultdict[tuple[Host, Late], float] = field(default_factory=lambda: defaultdict(float))

    def add(self, seconds: float, late: Iterable[tuple[Host, Late]]) -> None:
        """So long the rounds waited for these."""
        self.seconds += seconds
        for key in late:
            self.of[key] += seconds

    def halve(self) -> None:
        """What comes later counts twice as much."""
        self.seconds /= 2
        for key in self.of:
            self.of[key] /= 2


@dataclass(frozen=True, slots=True)
class SlowHost:
    """In that `part` of the time rounds waited for this host, mostly for `what`."""

    host: Host
    part: float
    what: Late


def find_slow(waited: Waited, members: Collection[Host]) -> list[SlowHost]:
    """The hosts that rounds wait for much longer than for the others, the slowest first.

    Args:
        members: those that rounds can wait for. A host that is none of them is a switch.
    """
    if waited.seconds < _ENOUGH_S:
        return []
    whole: defaultdict[Host, float] = defaultdict(float)
    for (host, _), seconds in waited.of.items():
        whole[host] += seconds
    of_members = sum(whole.get(host, 0.0) for host in members)
    found = []
    for host, seconds in sorted(whole.items(), key=lambda of: -of[1]):
        own, others = (seconds, len(members) - 1) if host in members else (0.0, len(members))
        mean = (of_members - own) / max(1, others)
        if seconds >= _PART * waited.seconds and seconds >= _TIMES * mean:
            what = max(Late, key=lambda of: waited.of.get((host, of), 0.0))
            found.append(SlowHost(host, seconds / waited.seconds, what))
    return found


def find_late(node: Node) -> Mapping[int, Late]:
    """Whom the open round waits for while others are done, as far as this host knows; 0 is a Linux switch.

    While the list is open they are the members with a share that have not offered. After that, as long as this host
    lacks sums, they are those that hold these up, if that can be told; otherwise the members that lack something.
    Nobody is waited for while all are at work.
    """
    ring = node.ring
    token = ring.token if ring is not None else None
    if ring is None or token is None or token.round != ring.round:
        return {}
    takes_part, lines = node.view.live, token.lines
    if token.state == wire.TokenState.CLOSING:
        if late := ring.find_late():
            return late
        what, found = Late.MARK, frozenset(k for k in takes_part if not lines[k - 1].complete)
        if found < takes_part:
            found = found - {node.view.lead} or found  # the lead marks itself last
    else:
        takes_part = frozenset(k for k in takes_part if ring.phase.shares[k - 1])
        if isinstance(ring, ChannelledRing) and ring.step is not None and ring.step.listed:
            takes_part &= ring.step.listed.keys()  # of the step
        settled = frozenset(k for k in takes_part if lines[k - 1].settled) | ring.offered
        what, found = Late.GRADIENT, takes_part - settled
    return dict.fromkeys(found, what) if found < takes_part else {}


class Waits:
    """Measures how long the open rounds wait, and for whom.

    Attributes: `of_job`, since the job began, by MAC address.
    """

    def __init__(self, node: Node, flows: FlowWatch, now: float) -> None:
        self._node, self._flows = node, flows
        self._at, self._halve_at, self._look_at = now, now + _HALVED_S, now
        self._late: list[tuple[Host, Late]] | None = None  # of the wait that is about to begin
        self._unseen_s = 0.0  # of waits that were not looked at
        self._recent = Waited()
        self.of_job = Waited()

    def begin_job(self) -> None:
        """Another job begins."""
        self._recent, self.of_job, self._unseen_s = Waited(), Waited(), 0.0

    def look(self, now: float) -> None:
        """The loop has handled all that has come, and is about to wait: find out whom for. After the wait that would
        delay the host's answers.
        """
        self._late = None
        if now >= self._look_at and self._trains:
            self._late, self._look_at = self._find_late(), now + _EVERY_S

    def note(self, now: float, waited_s: float) -> None:
        """The loop has waited so long until now."""
        elapsed, self._at = min(now - self._at, _MOST_S), now
        if not self._trains:
            return
        late: Iterable[tuple[Host, Late]] = ()
        if waited_s >= _LEAST_S:
            if self._late is None:
                self._unseen_s += elapsed
                return
            late, elapsed, self._unseen_s = self._late, elapsed + self._unseen_s, 0.0
        self._recent.add(elapsed, late)
        self.of_job.add(elapsed, late)
        if now >= self._halve_at:
            self._halve_at = now + _HALVED_S
            self._recent.halve()

    @property
    def _trains(self) -> bool:
        """Rounds of training wait for their members; with servers nobody waits."""
        phase = self._node.phase_in_force
        return phase is not None and phase.kind is wire.PhaseKind.TRAIN and phase.serving is None

    def _find_late(self) -> list[tuple[Host, Late]]:
        """The hosts that the open rounds of all channels wait for, each once."""
        node, found = self._node, dict[int, Late]()
        for channel in range(1, len(node.rounds)):
            found |= self._flows.find_late(channel)
        found |= find_late(node)
        members = node.members
        return [(members[k - 1].mac if k else wire.SWITCH, what) for k, what in found.items()]

    def slow(self) -> list[SlowHost]:
        """The hosts that have been slow in the last seconds, by MAC address."""
        members = self._node.members
        live = {members[k - 1].mac for k in self._node.view.live}
        recent = Waited(self._recent.seconds)
        recent.of.update(
            (key, seconds)
            for key, seconds in self._recent.of.items()
            if key[0] in live or key[0] == wire.SWITCH
        )
        return find_slow(recent, live)

    def facts(self, members: Iterable[Member]) -> dict[str, Any]:
        """All of the job, for the run's result (`read_waited`)."""
        names: dict[Host, str | None] = {member.mac: member.name for member in members}
        names[wire.SWITCH] = None
        rows = [
            {"name": names[host], "what": str(what), "seconds": seconds}
            for (host, what), seconds in self.of_job.of.items()
            if host in names
        ]
        return {"seconds": self.of_job.seconds, "for": rows}


def read_waited(facts: Iterable[Mapping[str, Any]]) -> Waited:
    """What all hosts of a run have measured, by name."""
    waited = Waited()
    for each in facts:
        waited.seconds += each["seconds"]
        for row in each["for"]:
            waited.of[row["name"], Late(row["what"])] += row["seconds"]
    return waited
