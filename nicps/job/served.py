# SPDX-License-Identifier: Apache-2.0
"""What a job with parameter servers has of the kernel's memory at this host: the own part, and a store.

A store, and own lanes, are made before the training program goes into the phase. The own part is filled once the
program has given its weights (docs/servers.md).
"""

from __future__ import annotations

from collections.abc import Callable

from nicps import protocol
from nicps.job.actions import BeginServing, BeginTask, DropServed, Post, UseServed
from nicps.job.node_info import NodeInfo
from nicps.job.orders import BeginPull, BeginStep, Orders
from nicps.job.program import Program
from nicps.job.serving import PartOf, Room, announce, keeps_part
from nicps.job.slow_work import FillPart, ReadPart, ReserveServed, StripesRefused
from nicps.job.tasks import Tasks
from nicps.protocol import Offer, Phase, Source
from nicps.protocol.serving import Serving, per_push, pulled_fragments
from nicps.session.served_form import Pulled, Serves, Stepped


class ServedMemory:
    """What there is, and what a phase needs.

    Attributes: `phase`, the last one of training that this host was in; `lanes`, parameters of the vector, once the
    training program has told that.
    """

    def __init__(self, node: NodeInfo, tasks: Tasks, owner: object) -> None:
        self._node, self._tasks, self._owner = node, tasks, owner
        self.phase: Phase | None = None
        self.lanes = 0
        self._made = 0  # the how manieth store this is
        self._mapped = 0, 0  # the last training program that was told of one, and of which
        self._opened = False
        self._store = 0, 0  # fragments of parameters, and of steps
        self._before: Phase | None = (
            None  # of whose rounds the part that is here has seen one committed
        )
        self._filled = 0, Room()  # for the phase that begins with that round, and as that part
        self._asked = 0  # the round in which the program wants all parameters
        self._filling = False
        self._delayed: Orders = []  # what it has asked for meanwhile

    @property
    def servers(self) -> tuple[int, ...]:
        """Of the last training phase, by rank."""
        serving = self.phase.serving if self.phase is not None else None
        return serving.servers if serving is not None else ()

    # ---- what a phase needs

    def serves(self, phase: Phase) -> bool:
        """Whether this host serves in it."""
        return phase.serving is not None and self._node.number in phase.serving.servers

    def fits(self, phase: Phase) -> bool:
        """Whether the program of servers is loaded, and the store that the phase needs is there."""
        return self._opened and self._needed(phase) in ((0, 0), self._store)

    def needs_filling(self, phase: Phase) -> bool:
        """Whether the own part is not here yet."""
        node = self._node
        if not self.serves(phase) or self._filled == (phase.first_round, self._room(phase)):
            return False
        return not keeps_part(self._before, phase, node.number, node.learners)

    def note_commit(self, phase: Phase) -> None:
        """A round of the phase counts: from now on the part that it has is the newest. A worker has none."""
        self._before = phase if self.serves(phase) else None

    def _room(self, phase: Phase) -> Room:
        return Room.of(phase, self._node.number)

    def _part_of(self, phase: Phase) -> PartOf:
        return PartOf(self._room(phase), phase.width, self.lanes)

    def _needed(self, phase: Phase) -> tuple[int, int]:
        room = self._room(phase)
        return room.room, room.pushes

    # ---- what is made

    def reserve(
        self, phase: Phase, then: Callable[[float], Orders], refuse: Callable[[float, str], Orders]
    ) -> BeginTask:
        """Load the program, and make a store if the phase needs another one; `refuse` says why there is no program."""
        sizes = self._needed(phase)
        sizes = (0, 0) if sizes == self._store else sizes

        def made(now: float, outcome: int | StripesRefused) -> Orders:
            if isinstance(outcome, StripesRefused):
                return refuse(now, outcome.reason)
            self._opened = True
            if not sizes[0]:
                return then(now)
            self._store, self._made = sizes, self._made + 1
            return [UseServed(outcome), *then(now)]

        assert phase.serving is not None
        own = any(phase.shares[server - 1] for server in phase.serving.servers)
        return self._tasks.begin(self._owner, ReserveServed(*sizes, own), made)

    def fill(
        self, phase: Phase, current: Callable[[], bool], then: Callable[[float], Orders]
    ) -> BeginTask:
        """Make the own part out of the weights that the program has given, if the phase is still `current` then."""

        def filled(now: float, number: int) -> Orders:
            delayed, self._delayed, self._filling = self._delayed, [], False
            if not current():
                return [DropServed(number)]
            self._filled, self._before = (phase.first_round, self._room(phase)), None
            return [UseServed(number), *then(now), *delayed]

        self._filling, self._delayed = True, []
        return self._tasks.begin(self._owner, FillPart(self._part_of(phase)), filled)

    def begin(self, phase: Phase) -> BeginServing:
        """The phase's rounds come next. Hosts that have come back number their steps from 1 on again."""
        assert phase.serving is not None
        if not self.serves(phase):
            self._before = None  # another host serves this part now, so the copy here grows old
        room, staleness = pulled_fragments(phase.fragments, phase.width), phase.serving.staleness
        forget = frozenset(self._node.learners)
        return BeginServing(phase.first_round, forget, room, staleness, self.serves(phase))

    # ---- what the training program is told, and asks for

    def message(self, phase: Phase, program: int) -> Serves:
        """Which members serve, and which memory the training program of that number has not mapped yet."""
        before, self._mapped = self._mapped, (program, self._made)
        fills = self.needs_filling(phase)
        return announce(
            phase, self._node.number, self.lanes, new=self._mapped != before, fills=fills
        )

    def step(self, program: Program, offer: Offer) -> Orders:
        """It has a step."""
        program.excuse()
        return [BeginStep(offer)]

    def note_stepped(self, now: float, program: Program, action: protocol.Stepped) -> Orders:
        """All servers have added its step."""
        program.give_duty(now, "work")
        values = action.round, action.number, action.version, action.staleness
        return [Post(program.number, Stepped(*values))]

    def pull(self, now: float, program: Program, round_: int, current: Phase | None) -> Orders:
        """It needs all parameters. A server has its own part by itself, and pulls what others serve.

        Args:
            current: the phase that this host is in or getting ready for. If neither that nor the phase in force has
                servers, or one of them has gone, nobody answers, and the program is told.
        """
        phase = self.phase
        if phase is None or phase.serving is None:
            return []
        program.excuse()
        self._asked = round_
        trains = bool(phase.shares[self._node.number - 1])
        others = () if trains else self._others(phase, phase.serving)
        if not (trains or others):
            return self._give_part(phase, program, round_)
        if current is None or current.serving is None:
            current = self._node.phase_in_force  # which a test that is being prepared for follows
        serving = current.serving if current is not None else None
        if serving is None or not self._node.view.live.issuperset(serving.servers):
            program.give_duty(now, "work")
            return [Post(program.number, Pulled(round_, 1, lost=True))]
        pull: Orders = [BeginPull(round_, others)]
        if self._filling:  # a server that trains: this host is not in the phase yet
            self._delayed, pull = pull, []
        return pull

    def note_pulled(self, now: float, program: Program, action: protocol.Pulled) -> Orders:
        """All parameters have come that it needs from others."""
        phase = self.phase
        if phase is not None and self.serves(phase) and not phase.shares[self._node.number - 1]:
            return self._give_part(phase, program, self._asked)
        program.give_duty(now, "work")
        return [Post(program.number, Pulled(self._asked, action.number))]

    def _give_part(self, phase: Phase, program: Program, round_: int) -> Orders:
        """Read the own part, which is in no store, for the program."""
        part = self._part_of(phase)
        message = Pulled(round_, 1, part.lanes.start, len(part.lanes))

        def read(now: float, _: object) -> Orders:
            program.give_duty(now, "work")
            return [Post(program.number, message)]

        return [self._tasks.begin(self._owner, ReadPart(part), read)]

    def _others(self, phase: Phase, serving: Serving) -> tuple[Source, ...]:
        """Where the parameters are that are not in the own part."""
        each, found = per_push(phase.width), []
        for rank, server in enumerate(serving.servers):
            part = serving.part(rank, phase.fragments)
            if server != self._node.number:
                found.append(Source(server, part.start * each, part.stop * each))
        return tuple(found)
