# SPDX-License-Identifier: Apache-2.0
"""A host's part in a job, by itself: a node in a network of three, and what the part asks for."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from nicps import wire
from nicps.exchange import Exchange
from nicps.job.actions import BeginTask
from nicps.job.orders import Acknowledge, Order
from nicps.job.part import Part
from nicps.job.slow_work import Settle, Stored, Task
from nicps.job.tasks import Tasks
from nicps.protocol import Committed, Installed, Member, Phase, SendFragments, View
from nicps.session import shared_form as says

ROUND = 7
MEMBERS = tuple(Member(k, bytes([k] * 6), f"h{k}") for k in (1, 2, 3))
SETTINGS = {"batch": 12, "lane": "i16"}
LANES = 600 * 720  # 600 fragments
T = TypeVar("T")


@dataclass
class FakeSwitch:
    """A `SwitchLink`, as far as a job asks it: `lack`, why the switch cannot add."""

    heard: bool = False
    lack: str = "no switch is heard"
    boot: int = 1
    granted_boot: int = 1

    def find_lack(self, fragments: int, width: int) -> str:
        return self.lack


@dataclass
class FakeNode:
    """A `NodeInfo`: the first of three members, in the middle of the training."""

    number: int = 1
    name: str = "h1"
    view: View = field(default_factory=lambda: View(1, MEMBERS, frozenset({1, 2, 3}), lead=2))
    learners: frozenset[int] = frozenset()
    leads: bool = False
    changing: bool = False
    open_round: int = ROUND
    phase: Phase | None = None
    phase_in_force: Phase | None = None
    switch: FakeSwitch = field(default_factory=FakeSwitch)
    others: tuple[int, ...] = ()
    between_steps: bool = True

    @property
    def rounds(self) -> tuple[int, ...]:
        return (self.open_round, *self.others)

    @property
    def highest_round(self) -> int:
        return max(self.rounds)


def training(number: int = 3, first_round: int = 3, **settings: Any) -> Phase:
    """All three train, 600 fragments a gradient; this host's model and files are the lead's."""
    values: dict[str, Any] = {
        "fragments": 600,
        "last_fragments": 600,
        "width": 16,
        "shares": (4, 4, 4),
        "settings": {"handout": "files", "model": "d0"},
    }
    kind = settings.pop("kind", wire.PhaseKind.TRAIN)
    return Phase(number, number, kind, first_round, **{**values, **settings})


def hand_out(
    number: int = 3, fragments: int = 80, source: int = 2, purpose: str = "state"
) -> Phase:
    """A member hands something out, in one round."""
    settings = {
        "purpose": purpose,
        "source": source,
        "bytes": 1440 * fragments,
        "index_bytes": 9,
        "job": "job",
    }
    shares = tuple(int(k == source) for k in (1, 2, 3))
    return Phase(
        number,
        number,
        wire.PhaseKind.HANDOUT,
        ROUND + 1,
        rounds=1,
        fragments=fragments,
        last_fragments=fragments,
        shares=shares,
        settings=settings,
    )


@dataclass
class Host:
    """A part in a job that has the files, and a training program. Tasks wait until the test does them.

    `asked` is all that the part has asked for; `now` the time of its events.
    """

    now: float = 0.0
    spot: FakeNode = field(default_factory=FakeNode)
    asked: list[Order] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=lambda: dict(SETTINGS))

    def __post_init__(self) -> None:
        self.tasks = Tasks()
        self.begun: list[BeginTask] = []
        counts = itertools.count(1), itertools.count(1)
        self.part = Part("job", self.spot, self.tasks, *counts, 16384, "runs/job", self.now)

    def do(self, orders: Iterable[Order]) -> list[Order]:
        """Take note of what is asked for."""
        new = list(orders)
        self.begun += [order for order in new if isinstance(order, BeginTask)]
        self.asked += new
        return new

    def found(self, kind: type[T]) -> list[T]:
        """What was asked for of that kind."""
        return [order for order in self.asked if isinstance(order, kind)]

    def forget(self) -> None:
        self.asked.clear()

    @property
    def answers(self) -> list[int]:
        """Decisions that it has acknowledged."""
        return [order.number for order in self.found(Acknowledge)]

    def finish_task(self, outcome: Any = None) -> Task:
        """The first of the tasks is done."""
        begin = self.begun.pop(0)
        task = begin.task
        self.do(self.tasks.finish(self.now, begin.ticket, outcome))
        return task

    def settle(self, accumulators: int = 1) -> None:
        """All tasks are done, those too that follow; each has room for so many accumulators."""
        while self.begun:
            done = isinstance(self.begun[0].task, Settle)
            self.finish_task(None if done else accumulators)

    # ---- the training program

    def has_job(self, prepared: Mapping[str, Any] | None = None) -> None:
        """All that was handed out is here, and a training program is started."""
        phase = replace(hand_out(1, purpose="job"), first_round=1)
        self.do(self.part.prepare(self.now, phase))
        self.settle()
        self.do(self.part.commit(self.now, Committed(phase, 1, {2: 1}, 0, 0)))
        usual = {"job": "job", "files": [], "settings": self.settings}
        while self.begun:
            self.finish_task(Stored("files", prepared or usual))
        self.forget()

    def builds(self) -> None:
        """The training program is there, and has built the model."""
        if not self.part.job.digest:
            self.has_job()
        self.hears(says.Ready(LANES, "d0"))
        self.forget()

    def hears(self, message: says.FromProgram) -> list[Order]:
        return self.do(self.part.dialogue.handle_message(self.now, message))

    def trains(self, phase: Phase | None = None) -> Phase:
        """The training program is in a training phase."""
        if self.part.program is None or not self.part.program.ready:
            self.builds()
        phase = phase or training()
        self.decides(phase)
        self.settle()
        self.hears(says.Prepared(phase.number))
        self.spot.phase_in_force = phase
        self.forget()
        return phase

    def offers(self, round_: int = ROUND, at: float = 0.0) -> None:
        self.now = at
        self.hears(says.Offer(round_, 4, None, False))

    # ---- the network

    def decides(self, phase: Phase) -> None:
        """The lead has decided on that phase."""
        self.spot.phase = phase
        self.do(self.part.prepare(self.now, phase))

    def goes_on(self, phase: Phase | None, *, again: bool = True) -> None:
        """Another view is in force, in which that phase goes on."""
        self.spot.phase = self.spot.phase_in_force = phase
        installed = Installed(self.spot.view, self.spot.number, phase, again)
        self.do(self.part.enter_view(self.now, installed))

    def commits(self, phase: Phase, round_: int = ROUND, at: float = 0.0) -> None:
        self.now = at
        self.spot.open_round = round_ + 1
        counted = {1: 4, 2: 4, 3: 4}
        self.do(self.part.commit(at, Committed(phase, round_, counted, -20, -20, Exchange.SWITCH)))

    def sends(
        self,
        started: float,
        ended: float,
        ranges: tuple[tuple[int, int], ...] = ((0, 256),),
        *,
        round_: int = ROUND,
        repair: bool = False,
        exchange: Exchange = Exchange.SWITCH,
    ) -> None:
        action = SendFragments(1, 1, round_, 4, ranges, repair, exchange)
        self.do(self.part.note_sent(action, started, ended))
