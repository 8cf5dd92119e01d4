# SPDX-License-Identifier: Apache-2.0
"""A LAN in virtual time: frames are lost, doubled, late, out of order, or cut off, as a seed has it."""

from __future__ import annotations

import contextlib
import functools
import gc
import heapq
import itertools
import math
import random
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nicps import wire
from nicps.exchange import Exchange
from nicps.job.plan import Plan
from nicps.protocol import Action, Timings
from nicps.protocol.exchange import switch, window_size, windows
from tests.simulator.digest import Digest
from tests.simulator.linux_switch import LinuxSwitch
from tests.simulator.places import KernelFrame, Odds
from tests.simulator.switch import LEAST_WINDOW, QUANTUM, Switch

if TYPE_CHECKING:
    from tests.simulator.host import Host

HOP_S = 50e-6  # a frame's way through the LAN
STALL_S = 1.0  # of the job: the least that one can have
RECORDS = 17  # fragments of each member's records
FRAGMENT_S = 12e-6  # line time of a fragment
Fragment = tuple[int, "bytes | None", int, int, int]  # view, key, sender, round, index
_STEP_AT = (
    wire.HEADER_BYTES
    + dict(zip(wire.Layout.of(wire.View).names, wire.Layout.of(wire.View).offsets, strict=True))[
        "step"
    ]
)
_OF_LINUX_SWITCH = (wire.FrameType.VIEW, wire.FrameType.SWITCH)
_TRACED = 4000  # lines of the trace that are kept
_OVERHEARD = 100  # frames that a stranger keeps
INSTALL = 100 + wire.ViewStep.INSTALL
#: What is said outside a view's keys, and numbers: only what is in it tells whether it is old.
OUTSIDE = (int(wire.FrameType.CALL), int(wire.FrameType.ANSWER), INSTALL)


@dataclass(frozen=True)
class Conditions:
    """What the LAN does to frames. Probabilities per frame and receiver (`loss` also once at the sender's port)."""

    loss: float = 0.0
    duplicate: float = 0.0
    jitter_s: float = 0.0
    late: float = 0.0  # part of the frames that come `late_s` later: they are overtaken
    late_s: float = 0.002


@contextlib.contextmanager
def frames_read_once() -> Iterator[None]:
    """All hosts share what a frame says: a broadcast is taken apart once. Frames are values, so nobody can tell."""
    unpack = wire.unpack
    wire.unpack = functools.lru_cache(256)(unpack)
    try:
        yield
    finally:
        wire.unpack = unpack


@contextlib.contextmanager
def seldom_collected() -> Iterator[None]:
    """Next to nothing of a run is garbage that counting references does not find."""
    thresholds = gc.get_threshold()
    gc.set_threshold(100_000, *thresholds[1:])
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)


@contextlib.contextmanager
def short_turns() -> Iterator[None]:
    """Small gradients go to a switch in many windows."""
    quantum, wire.QUANTUM = wire.QUANTUM, QUANTUM
    least, switch._LEAST_WINDOW = switch._LEAST_WINDOW, LEAST_WINDOW
    try:
        yield
    finally:
        wire.QUANTUM, switch._LEAST_WINDOW = quantum, least


@contextlib.contextmanager
def short_windows() -> Iterator[None]:
    """Small stripes are sent in many windows, whose size follows few losses, and those rounds that take the longest. A
    few sums that overtake one are enough to ask for it.
    """
    small = {"QUEUE": 12, "LEAST_WINDOW": 2, "OVERTAKE": 2, "PROBES": 2, "RANGES": 4}
    sizes = {"LEAST": 1, "ENOUGH": 8, "PATIENCE": 1, "LONGEST_S": 0.005, "ENOUGH_S": 0.02}
    changed = [(windows, *each) for each in small.items()]
    changed += [(window_size, *each) for each in sizes.items()]
    before = [(module, name, getattr(module, name)) for module, name, _ in changed]
    for module, name, value in changed:
        setattr(module, name, value)
    try:
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)


def kind_of(frame: bytes) -> int:
    """A frame's type; of a list that is proposed, to be accepted, or in force 100 and the step."""
    if frame[1] != wire.FrameType.VIEW:
        return frame[1]
    return 100 + frame[_STEP_AT]


def kind_sent(frame: wire.Frame) -> int:
    """The same, of a frame that is not packed yet."""
    return 100 + frame.body.step if isinstance(frame.body, wire.View) else frame.type


class Lan:
    """Hosts, and the events between them, in virtual time."""

    def __init__(
        self,
        hosts: int,
        conditions: Conditions | None = None,
        seed: int = 0,
        plan: Plan | None = None,
        rounds: int = 20,
        test_every: int = 8,
        fragments: int = 12,
        compute_s: float = 0.003,
        drift: float = 0.0,
        timings: Timings | None = None,
        late: int = 0,
        too_large: float = 0.0,
    ) -> None:
        from tests.simulator.checks import Checks

        self._jobs = 0
        self.now = 0.0
        self.random = random.Random(seed)
        self.more = random.Random(~seed)
        self.conditions = conditions or Conditions()
        self.timings = timings or Timings()
        plan = plan or Plan("job", batch=10 * hosts, width=16, alarm_below=0.0)
        self.plan = plan
        self.rounds, self.test_every, self.fragments = rounds, test_every, fragments
        self.spare = 0  # of the room of a round, fragments that the rounds of a step do not use
        self.saving_s = 0.01  # what a lead takes to get ready what it hands out
        self.compute_s = compute_s
        self.too_large = too_large  # part of the gradients that do not fit their round's unit
        self.frames = 0
        self.records = RECORDS  # fragments of each member's, to be collected
        self.ended = ""  # how the job has ended, at whoever was the first
        self.well = False  # it has ended well
        self.calm_at = 0.0  # no fault is planned for later
        self.patience = 1  # how many times longer than others the job may take after that
        self.given_up = ""  # why nobody may go on
        self.moments: list[Callable[[Host, Action], bool]] = []  # true: it has come
        self.lose: dict[int, int] = {}  # how many frames of a kind are to be lost next
        self.groups: list[frozenset[int]] = []  # of host indices, while the LAN is cut
        self.trace: deque[str] = deque(maxlen=_TRACED)
        self.overheard: deque[tuple[bytes, bytes, bytes | None]] = deque(maxlen=_OVERHEARD)
        # Where the plan has it that one adds: now and then one with less room than members think.
        slots = random.Random(f"room {seed}").choice((2 * QUANTUM, 2 * QUANTUM, 4 * QUANTUM, 4))
        self.switch = Switch(slots=slots)
        self.deaf: Host | None = None  # gets none of its sums
        self.starved: set[tuple[int, int]] = set()  # sender's index (-1: the switch), receiver's
        self.unicast = True  # frames to one host get there
        self.answers_lost: set[int] = (
            set()
        )  # by index: what these hosts' programs send gets nowhere
        self.checks = Checks(self)
        self.digest = Digest()
        self.odds = Odds(seed)
        #: Time, order, the host that the event is for (None: the LAN) in which of its lives, event, what it is told.
        self._queue: list[
            tuple[float, int, Host | None, int, Callable[..., None], tuple[Any, ...]]
        ] = []
        self._order = itertools.count()
        self._arrival: dict[tuple[int, int, int], float] = {}
        self.hosts = [
            self._host(i, 1 + drift * self.random.uniform(-1, 1)) for i in range(hosts + late)
        ]
        for host in self.hosts[hosts:]:
            host.dead = True  # until it is switched on
        self.starter = self.hosts[0], 0  # and which of its lives it is
        if plan.exchange.central:
            self.linux = LinuxSwitch(self)

    def _host(self, index: int, rate: float) -> Host:
        from tests.simulator.host import Host

        return Host(self, index, rate)

    def next_job_id(self) -> str:
        """The name of a run."""
        self._jobs += 1
        return f"job{self._jobs}"

    @property
    def prepared(self) -> Mapping[str, Any]:
        """What the preparation of a job leaves."""
        plan = self.plan
        settings = {
            "batch": plan.batch,
            "lane": f"i{plan.width}",
            "quorum": plan.quorum,
            "unit": plan.unit,
            "alarm_below": plan.alarm_below,
            "admit": plan.admit,
            "redeal": plan.redeal,
            "exchange": (Exchange.SWITCH if plan.exchange.central else plan.exchange).name,
            "stall_s": max(STALL_S, 3 * self.compute_s),
        }
        if plan.steps:
            settings["rank"] = 1
        if plan.planned:
            settings["priorities"] = wire.MAX_CHANNELS
        return {"job": "job", "files": [{"path": "job.tar"}], "settings": settings}

    def note(self, text: str) -> None:
        """A line of the trace."""
        self.trace.append(f"{self.now:10.6f}  {text}")

    def at(self, time: float, event: Callable[[], None]) -> None:
        """Do something at that time."""
        heapq.heappush(self._queue, (max(time, self.now), next(self._order), None, 0, event, ()))

    def at_host(self, host: Host, time: float, event: Callable[..., None], *told: Any) -> None:
        """Do something at a host, if it has not been killed by then."""
        entry = (max(time, self.now), next(self._order), host, host.life, event, told)
        heapq.heappush(self._queue, entry)

    def run(self, until: Callable[[], bool], limit_s: float = math.inf) -> bool:
        """Run until the condition holds; False if it does not within `limit_s` of virtual time, or nothing happens."""
        queue, pop, checks = self._queue, heapq.heappop, self.checks
        with frames_read_once(), short_turns(), short_windows(), seldom_collected():
            while not until():
                if not queue:
                    return False
                if queue[0][0] > limit_s:
                    self.now = limit_s
                    return False
                self.now, _, host, life, event, told = pop(queue)
                if host is None or (host.life == life and not host.dead):
                    event(*told)
                    if checks.moved:
                        checks.step()
        return True

    def over(self, host: Host, why: str, ok: bool) -> None:
        """The job has ended at a host."""
        if not self.ended:
            self.ended, self.well = why or "well", ok

    def trouble(self, until: float) -> None:
        """A fault lasts until then."""
        self.calm_at = max(self.calm_at, until)

    def moment(self, host: Host, action: Action) -> None:
        """A host does something: perhaps what a fault waits for."""
        self.moments = [moment for moment in self.moments if not moment(host, action)]

    def broadcast(self, sender: Host, frame: bytes, key: bytes | None, when: float) -> None:
        """A small frame; `key` stands for what its tag was made with."""
        self.frames += 1
        self.digest.add_frame(sender.index, when, frame)
        if self.lose:
            kind = kind_of(frame)
            if self.lose.get(kind):
                self.lose[kind] -= 1
                self.note(f"LOST {wire.FrameType(frame[1]).name} of {sender.node.name}")
                return
        if frame[1] == wire.FrameType.TOKEN and self.plan.exchange == Exchange.SWITCH:
            passing = wire.unpack(frame)
            self._to_switch(sender, when, lambda: self.switch.follow(passing.header, passing.body))
        if self.plan.exchange.central and frame[1] in _OF_LINUX_SWITCH:
            self._to_switch(sender, when, lambda: self.linux.hear(sender.mac, frame))
        if kind_of(frame) in OUTSIDE:
            self.overheard.append((sender.mac, frame, key))
        self._deliver(sender, when, lambda host: host.take_frame(sender.mac, frame, key))

    def replay(self, source: bytes, frame: bytes, key: bytes | None) -> None:
        """A stranger sends a frame once more, just as it was."""
        self.note(f"AGAIN {wire.FrameType(frame[1]).name} of {source[-1]}")
        for host in self.hosts:
            if not host.dead:
                host.take_frame(source, frame, key)

    def feed(self, sender: Host, fragment: Fragment, when: float) -> None:
        """One fragment for the switch, which sends what comes of it to all, or to who has asked."""
        life = sender.life
        view, _, number, round_, index = fragment

        def take() -> None:
            if sender.life != life and when > sender.killed_at:
                return
            value = self.checks.value(number, round_, index)
            before = self.switch.sums.get(index % self.switch.slots)
            out = self.switch.add(view, round_, number, index, value)
            if before is not None and before is not self.switch.sums[index % self.switch.slots]:
                self.checks.replaced(before.of, (view, round_, index))
            if out is not None:
                self._deliver(
                    None,
                    self.now,
                    lambda host: (
                        (-1, host.index) in self.starved
                        or host.kernel.take_sum(view, round_, index, out[0])
                    ),
                    only=sender if out[1] else None,
                )

        self._to_switch(sender, when, take)

    def _to_switch(self, sender: Host, when: float, take: Callable[[], None]) -> None:
        """On the same wire in the same order; the switch is where the first host is when the LAN is cut."""
        lost = self.conditions.loss and self.random.random() < self.conditions.loss
        if not lost and 0 in self.near(sender.index):
            self.at(when + HOP_S / 2, take)

    def fragment(self, sender: Host, fragment: Fragment, when: float) -> None:
        """One fragment of a contribution; if its sender dies before its turn it never goes out."""
        life = sender.life

        def take(host: Host) -> None:
            passes = (sender.index, host.index) not in self.starved
            if passes and (sender.life == life or when <= sender.killed_at):
                host.kernel.take_fragment(*fragment)

        self._deliver(sender, when, take)

    def stripe(
        self, sender: Host, frame: KernelFrame, when: float, *, answers: bool = False
    ) -> None:
        """A frame of stripes or of servers, for one host or for all; `answers`: it overtakes what is queued."""
        life = sender.life
        if self.lose.get(frame.type):
            self.lose[frame.type] -= 1
            return
        if (answers and sender.index in self.answers_lost) or not (
            self.unicast or frame.to is None
        ):
            return

        if frame.to == wire.SWITCH:

            def feed() -> None:
                starved = (sender.index, -1) in self.starved
                if not starved and (sender.life == life or when <= sender.killed_at):
                    self.linux.take(frame, sender.mac)

            self._to_switch(sender, when, feed)
            return

        def take(host: Host) -> None:
            passes = (sender.index, host.index) not in self.starved
            if passes and (sender.life == life or when <= sender.killed_at):
                host.kernel.stripes.take(frame)

        floods = frame.to is None or self.odds.flood()
        only = None if floods else next(h for h in self.hosts if h.mac == frame.to)
        self._deliver(sender, when, take, only, way=int(answers))

    def from_switch(self, take: Callable[[Host], None], only: Host | None = None) -> None:
        """A frame of a Linux switch: to all, or to one host."""
        self._deliver(None, self.now, take, only)

    def near(self, index: int) -> Collection[int]:
        """The hosts that hear that one, and it."""
        if not self.groups:
            return range(len(self.hosts))
        return frozenset().union(*(group for group in self.groups if index in group))

    def cut(self, groups: Sequence[frozenset[int]]) -> None:
        """Only hosts of one group hear each other."""
        self.groups = list(groups)
        self.note(f"CUT {[sorted(g) for g in groups]}" if groups else "HEALED")

    def _deliver(
        self,
        sender: Host | None,
        when: float,
        take: Callable[[Host], None],
        only: Host | None = None,
        way: int = 0,
    ) -> None:
        """`sender` None: the switch, from where the first host is; `only`: to that host.

        Frames that go out on different ways may overtake each other.
        """
        conditions, chance, last = self.conditions, self.random.random, self._arrival
        loss, duplicate, late = conditions.loss, conditions.duplicate, conditions.late
        port, at = (sender.index, sender.index) if sender is not None else (-1, 0)
        if loss and chance() < loss:
            return
        near, now, queue, order = self.near(at), self.now, self._queue, self._order
        for host in self.hosts if only is None else (only,):
            if host is sender or host.dead or host.index not in near:
                continue
            if sender is None and host is self.deaf:
                continue
            if loss and chance() < loss:
                continue
            copies = 2 if duplicate and chance() < duplicate else 1
            for _ in range(copies):
                arrival = when + HOP_S
                if conditions.jitter_s:
                    arrival += chance() * conditions.jitter_s
                elif late and chance() < late:
                    arrival += chance() * conditions.late_s
                else:  # a LAN keeps the order between two hosts
                    pair = port, host.index, way
                    soonest = last.get(pair, 0.0) + 1e-9
                    if arrival < soonest:
                        arrival = soonest
                    last[pair] = arrival
                time = arrival if arrival > now else now
                heapq.heappush(queue, (time, next(order), host, host.life, take, (host,)))
