# SPDX-License-Identifier: Apache-2.0
"""What a job with parameter servers has of the kernel's memory at this host: the own part, and a store.

A store, and own lanes, are made before the training program goes into the phase. The own part is filled once the
program has given its weights (docs/servers.md).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from nicps import wire
from nicps.job.actions import (
    BeginServing,
    BeginTask,
    DropServed,
    FillPart,
    ReadPart,
    ReserveServed,
    StripesRefused,
    UseServed,
)
from nicps.job.node_info import NodeInfo
from nicps.job.orders import Orders
from nicps.job.tasks import Tasks
from nicps.protocol import Phase, Source
from nicps.protocol.serving import Serving, pulled_fragments
from nicps.session.served_form import Pulled, Serves

_LANES = wire.lanes_per_fragment(32)


@dataclass(frozen=True, slots=True)
class _Part:
    """Of which servers' parts this host's is that of `rank`."""

    servers: tuple[int, ...]
    rank: int
    fragments: int


class ServedMemory:
    """What there is, and what a phase needs.

    Attributes: `serving`, of the last training phase, if that had servers; `made`, the how manieth store this is, for
    a program must map a new one.
    """

    def __init__(self, node: NodeInfo, tasks: Tasks, owner: object) -> None:
        self._node, self._tasks, self._owner = node, tasks, owner
        self.serving: Serving | None = None
        self.made = 0
        self._opened = False
        self._store = 0, 0  # fragments of parameters, and of steps
        self._part: _Part | None = None

    @property
    def servers(self) -> tuple[int, ...]:
        """Of the last training phase, by rank."""
        return self.serving.servers if self.serving is not None else ()

    # ---- what a phase needs

    def serves(self, phase: Phase) -> bool:
        """This host serves in it."""
        return phase.serving is not None and self._node.number in phase.serving.servers

    def fits(self, phase: Phase) -> bool:
        """The program and the store that it needs are there."""
        return self._opened and self._needed(phase) in ((0, 0), self._store)

    def needs_filling(self, phase: Phase) -> bool:
        """The own part is not there yet."""
        if not self.serves(phase):
            return False
        return self._part_in(phase) != self._part or self._node.number in self._node.learners

    def _needed(self, phase: Phase) -> tuple[int, int]:
        """A store's size; a lone server has no need of one."""
        assert phase.serving is not None
        trains = bool(phase.shares[self._node.number - 1])
        if not (trains or len(phase.serving.servers) > 1):
            return 0, 0
        return pulled_fragments(phase.fragments, phase.width), phase.fragments

    def _part_in(self, phase: Phase) -> _Part:
        assert phase.serving is not None
        servers = phase.serving.servers
        return _Part(servers, servers.index(self._node.number), phase.fragments)

    def _range(self, phase: Phase) -> range:
        """The own part, in fragments of steps."""
        assert phase.serving is not None
        return phase.serving.part(self._part_in(phase).rank, phase.fragments)

    # ---- what is made

    def reserve(
        self, phase: Phase, then: Callable[[float], Orders], refuse: Callable[[float, str], Orders]
    ) -> BeginTask:
        """Load the program, and make a store, where it needs another one; `refuse` says why there is no program."""
        sizes = self._needed(phase)
        sizes = (0, 0) if sizes == self._store else sizes

        def made(now: float, outcome: int | StripesRefused) -> Orders:
            if isinstance(outcome, StripesRefused):
                return refuse(now, outcome.reason)
            self._opened = True
            if not sizes[0]:
                return then(now)
            self._store, self.made = sizes, self.made + 1
            return [UseServed(outcome), *then(now)]

        return self._tasks.begin(self._owner, ReserveServed(*sizes), made)

    def fill(
        self, phase: Phase, lanes: int, current: Callable[[], bool], then: Callable[[float], Orders]
    ) -> BeginTask:
        """The program has given its weights: they become the own part, if the phase is still `current` then.

        Args:
            lanes: that it has given.
        """
        assert phase.serving is not None
        part = self._range(phase)

        def filled(now: float, number: int) -> Orders:
            if not current():
                return [DropServed(number)]
            self._part = self._part_in(phase)
            return [UseServed(number), *then(now)]

        averages = phase.serving.every > 0
        task = FillPart(lanes, part.start, len(part), phase.width, averages)
        return self._tasks.begin(self._owner, task, filled)

    def begin(self, phase: Phase) -> BeginServing:
        """The phase's rounds come next. Hosts that have come back number their steps from 1 on again."""
        room = pulled_fragments(phase.fragments, phase.width)
        return BeginServing(frozenset(self._node.learners), room)

    # ---- what the training program is told, and asks for

    def message(self, phase: Phase, lanes: int, *, shown: int) -> Serves:
        """Who serves, and what is new.

        Args:
            lanes: of the job's vector.
            shown: the store that the program has mapped.
        """
        assert phase.serving is not None
        serving, new = phase.serving, self.made != shown
        room, pushes = self._store if new else (0, 0)
        first, own = self.parameters(phase, lanes) if self.needs_filling(phase) else (0, 0)
        return Serves(serving.servers, serving.every, serving.sets, room, pushes, first, own)

    def parameters(self, phase: Phase, lanes: int) -> tuple[int, int]:
        """The own part: its first parameter, and how many of the vector's `lanes` are in it."""
        part, each = self._range(phase), wire.lanes_per_fragment(phase.width)
        first = part.start * each
        return first, max(0, min(part.stop * each, lanes) - first)

    def read(
        self, phase: Phase, lanes: int, round_: int, then: Callable[[float, Pulled], Orders]
    ) -> BeginTask:
        """Give the program the own part, which is in no store."""
        first, own = self.parameters(phase, lanes)
        message = Pulled(round_, 1, first, own)
        return self._tasks.begin(self._owner, ReadPart(own), lambda now, _: then(now, message))

    def others(self, phase: Phase) -> tuple[Source, ...]:
        """Where the parameters are that are not in the own part."""
        assert phase.serving is not None
        serving, each = phase.serving, pulled_fragments(1, phase.width)
        found = []
        for rank, server in enumerate(serving.servers):
            part = serving.part(rank, phase.fragments)
            if server != self._node.number:
                found.append(Source(server, part.start * each, part.stop * each))
        return tuple(found)
