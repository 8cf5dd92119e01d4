# SPDX-License-Identifier: Apache-2.0
"""A LAN in virtual time for the protocol's state machines: seeded loss, duplication and delay, no clock, no socket.

The kernel's part (what is taken, bounced, kept from the agent) is modelled in `Host`; the state machines are the
production ones. Every delivered fragment carries its sender's value, so that sums can be checked exactly.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, replace

from nicps import wire
from nicps.protocol import (
    Action,
    Committed,
    Formed,
    Member,
    Node,
    Phase,
    PhaseAgreed,
    Prepare,
    Send,
    SendFragments,
    Timings,
)
from nicps.protocol.token import TokenState

HOP_S = 50e-6  # a frame's way through the LAN
FRAGMENT_S = 12e-6  # line time of a fragment


@dataclass(frozen=True)
class Conditions:
    """What the LAN does to frames. Probabilities per frame and receiver (`loss` also once at the sender's port)."""

    loss: float = 0.0
    duplicate: float = 0.0
    jitter_s: float = 0.0


class Host:
    """One simulated host: the node, a model of its XDP program, and a scripted trainer."""

    def __init__(self, lan: Lan, index: int) -> None:
        self.lan = lan
        self.mac = bytes([2, 0, 0, 0, 0, index + 1])
        self.node = Node(self.mac, f"h{index + 1}", "sim", self, lan.timings)
        self.taken: dict[tuple[int, int], set[int]] = {}  # (round, sender) -> fragments
        self.sums: dict[int, dict[int, int]] = {}  # round -> fragment -> sum of others' values
        self.seen = (0, 0)
        self.heard = 0.0
        self.bounced: bytes | None = None
        self.bounces = 0
        self.committed: list[Committed] = []
        self.formed: Formed | None = None
        self.phase: Phase | None = None  # being prepared, or in force
        self.log: list[Action] = []
        self.on_action: Callable[[Host, Action], None] = lambda host, action: None
        self.sent_counts: dict[int, int] = {}
        self.dead = False
        self._tx_free = 0.0
        self._timer: float | None = None

    # Receiver

    def count(self, round_: int, view: int, sender: int) -> int:
        return len(self.taken.get((round_, sender), ()))

    def missing(
        self, round_: int, view: int, sender: int, fragments: int, limit: int
    ) -> list[tuple[int, int]]:
        have = self.taken.get((round_, sender), set())
        lacking = [i for i in range(fragments) if i not in have]
        ranges: list[tuple[int, int]] = []
        for i in lacking:
            if ranges and sum(ranges[-1]) == i:
                ranges[-1] = (ranges[-1][0], ranges[-1][1] + 1)
            elif len(ranges) < limit:
                ranges.append((i, 1))
            else:
                break
        return ranges

    # the agent's part

    def do(self, actions: list[Action]) -> None:
        if self.dead:
            return
        now = self.lan.now
        for action in actions:
            self.log.append(action)
            if isinstance(action, Send):
                self._tx_free = max(now, self._tx_free)
                self.lan.broadcast(self, action.frame, self._tx_free)
            elif isinstance(action, SendFragments):
                self._tx_free = max(now, self._tx_free)
                for first, count in action.ranges:
                    for index in range(first, first + count):
                        self._tx_free += FRAGMENT_S
                        self.sent_counts[index] = self.sent_counts.get(index, 0) + 1
                        self.lan.fragment(self, action.round, index, self._tx_free)
                self.lan.at(
                    self._tx_free, lambda a=action: self.do(self.node.sent(self.lan.now, a))
                )
            elif isinstance(action, Formed):
                self.formed = action
            elif isinstance(action, Committed):
                self.committed.append(action)
            self.on_action(self, action)
        self._arm()

    def _arm(self) -> None:
        deadline = self.node.deadline()
        if deadline is not None and deadline != self._timer:
            self._timer = deadline
            self.lan.at(max(deadline, self.lan.now + 1e-5), lambda: self._tick(deadline))

    def _tick(self, deadline: float) -> None:
        if self._timer == deadline and not self.dead:
            self._timer = None
            self._sync()
            self.do(self.node.tick(self.lan.now))

    def _sync(self) -> None:
        self.node.kernel_saw(self.lan.now, self.seen, self.heard, self.bounced)
        self.bounced = None

    # the XDP program's part

    def die(self) -> None:
        """Kill -9: from now on nothing comes from this host, and nothing reaches it."""
        self.dead = True

    def take_fragment(self, sender: Host, round_: int, index: int) -> None:
        kernel = self.node.kernel
        if kernel is None or not kernel.round_low <= round_ <= kernel.round_high:
            return
        got = self.taken.setdefault((round_, sender.node.number), set())
        if index in got:
            return
        got.add(index)
        self.heard = self.lan.now
        sums = self.sums.setdefault(round_, {})
        sums[index] = sums.get(index, 0) + self.lan.value(sender.node.number, round_, index)

    def take_frame(self, source: bytes, data: bytes) -> None:
        frame = wire.unpack(data)
        if isinstance(frame.body, wire.Token) and frame.header.view == self.node.view:
            token, kernel = TokenState.of(frame), self.node.kernel
            if kernel is None or token.key <= self.seen:
                if not frame.header.flags & wire.Flag.REPEAT:
                    return
            else:
                self.seen = token.key
                self.heard = self.lan.now
                if token.owner != self.node.number:
                    news = (
                        frame.header.flags & (wire.Flag.REPEAT | wire.Flag.PARKED)
                        or token.round != kernel.round
                        or token.sent != kernel.sent_seen
                        or token.state != wire.TokenState.OPEN
                    )
                    if not news:
                        return
                elif (
                    kernel.bounce
                    and token.state == wire.TokenState.OPEN
                    and not token.ranges
                    and token.idle + 1 < len(token.lines)
                    and token.round == kernel.round
                    and self._total(token.round) + kernel.own_sent == token.sent
                ):
                    token.owner = self.node.number % len(token.lines) + 1
                    token.hop += 1
                    token.idle += 1
                    self.seen = token.key
                    self.bounces += 1
                    header = replace(
                        frame.header,
                        flags=frame.header.flags | wire.Flag.BOUNCED,
                        sender=self.node.number,
                    )
                    self.bounced = token.pack(header)
                    self.lan.broadcast(self, self.bounced, self.lan.now)
                    return
        self._sync()
        self.do(self.node.on_frame(self.lan.now, source, data))

    def _total(self, round_: int) -> int:
        return sum(len(got) for (r, _), got in self.taken.items() if r == round_)


class Lan:
    """Hosts, and the events between them, in virtual time."""

    def __init__(
        self, hosts: int, conditions: Conditions | None = None, seed: int = 0, **timings: float
    ) -> None:
        self.now = 0.0
        self.random = random.Random(seed)
        self.conditions = conditions or Conditions()
        self.timings = Timings(**timings)
        self.frames = 0
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._arrival: dict[tuple[int, int], float] = {}
        self.hosts = [Host(self, i) for i in range(hosts)]

    def value(self, sender: int, round_: int, index: int) -> int:
        """What a member's fragment adds: distinct per member, round and fragment."""
        return 1 << (sender * 3) | (round_ * 7919 + index) % 5

    def at(self, time: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (time, next(self._order), event))

    def run(self, until: Callable[[], bool], limit_s: float = 60.0) -> None:
        """Run until the condition holds; fails after `limit_s` of virtual time."""
        while not until():
            assert self._queue, "nothing is going to happen any more"
            self.now, _, event = heapq.heappop(self._queue)
            assert self.now < limit_s, f"not reached within {limit_s} s of virtual time"
            event()

    def broadcast(self, sender: Host, frame: bytes, when: float) -> None:
        self.frames += 1
        self._deliver(sender, when, lambda host: host.take_frame(sender.mac, frame))

    def fragment(self, sender: Host, round_: int, index: int, when: float) -> None:
        self._deliver(sender, when, lambda host: host.take_fragment(sender, round_, index))

    def _deliver(self, sender: Host, when: float, take: Callable[[Host], None]) -> None:
        conditions, rng = self.conditions, self.random
        if rng.random() < conditions.loss:
            return
        for host in self.hosts:
            if host is sender or host.dead or rng.random() < conditions.loss:
                continue
            copies = 2 if rng.random() < conditions.duplicate else 1
            for _ in range(copies):
                arrival = when + HOP_S + rng.random() * conditions.jitter_s
                if not conditions.jitter_s:  # a LAN keeps the order between two hosts
                    pair = (id(sender), id(host))
                    arrival = max(arrival, self._arrival.get(pair, 0.0) + 1e-9)
                    self._arrival[pair] = arrival
                self.at(arrival, lambda host=host: take(host))  # type: ignore[misc]


class Job:
    """A scripted job on node 1: train `rounds`, then stop. Members compute for a while, then offer."""

    def __init__(self, lan: Lan, phases: list[Phase], compute: Callable[[int, int], float]) -> None:
        self.lan, self.phases, self.compute = lan, phases, compute
        self.agreed: list[Phase] = []
        self.quota: dict[int, Phase] = {}
        for host in lan.hosts:
            host.on_action = self._on_action

    def start(self) -> None:
        first = self.lan.hosts[0]
        first.do(first.node.start(self.lan.now, nonce=99))

    @property
    def done(self) -> bool:
        return len(self.agreed) == len(self.phases)

    def _on_action(self, host: Host, action: Action) -> None:
        lan = self.lan
        if isinstance(action, Formed) and action.number == 1:
            lan.at(lan.now, self._next)
        elif isinstance(action, PhaseAgreed):
            self.agreed.append(action.phase)
            if not action.phase.rounds and not self.done:
                lan.at(lan.now, self._next)
        elif isinstance(action, Prepare):
            phase = host.phase = action.phase
            delay = self.compute(host.node.number, 0)
            lan.at(lan.now + delay, lambda: self._prepared(host, phase))
        elif isinstance(action, Committed):
            phase = host.phase
            assert phase is not None
            round_ = action.round
            lan.at(lan.now + 1e-4, lambda: host.do(host.node.read(lan.now, round_)))
            if host.node.number == 1:
                lan.at(lan.now + 3e-4, lambda: host.do(host.node.go_on(lan.now)))
            if phase.rounds and round_ == phase.last_round:
                if host.node.number == 1:
                    lan.at(lan.now + 2e-4, self._next)
            else:
                self._compute(host, round_ + 1)

    def _prepared(self, host: Host, phase: Phase) -> None:
        host.do(host.node.prepared(self.lan.now, phase.number))
        if phase.rounds:
            self._compute(host, phase.first_round)

    def _compute(self, host: Host, round_: int) -> None:
        phase = host.phase
        assert phase is not None
        share = phase.shares[host.node.number - 1]
        if share:
            self.lan.at(
                self.lan.now + self.compute(host.node.number, round_),
                lambda: host.do(host.node.offer(self.lan.now, round_, share)),
            )

    def _next(self) -> None:
        first = self.lan.hosts[0].node
        phase = self.phases[len(self.agreed)]
        if phase.first_round == 0 and phase.rounds:
            phase = replace(phase, first_round=first.open_round + 2)
        self.lan.hosts[0].do(first.decide(self.lan.now, phase))


def check_sums(lan: Lan, phase: Phase) -> None:
    """The invariant: every member committed the same list, and its sum holds every gradient of it exactly once."""
    first = lan.hosts[0].committed
    for host in lan.hosts:
        assert [(c.round, dict(c.counted), c.unit) for c in host.committed] == [
            (c.round, dict(c.counted), c.unit) for c in first
        ]
    for commit in first:
        if not phase.first_round <= commit.round <= phase.last_round:
            continue
        for host in lan.hosts:
            others = [k for k in commit.counted if k != host.node.number]
            for index in range(phase.fragments_in(commit.round)):
                expected = sum(lan.value(k, commit.round, index) for k in others)
                assert host.sums.get(commit.round, {}).get(index, 0) == expected


__all__ = ["Conditions", "Host", "Job", "Lan", "Member", "check_sums"]
