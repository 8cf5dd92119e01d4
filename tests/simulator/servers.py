# SPDX-License-Identifier: Apache-2.0
"""What the XDP program does with frames of servers (ebpf/nicps_servers.h), as a model: the rules, in their order.

A processor may stall at each of the program's steps, and go on long after others.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from nicps.protocol import KernelState, Phase, SendServed
from nicps.protocol.serving import Serving, per_push, pulled_fragments
from nicps.wire import FrameType, Refusal
from tests.simulator.partners import hand_over
from tests.simulator.places import Progress
from tests.simulator.served_places import (
    NOTHING,
    Content,
    Home,
    Part,
    ServedFrame,
    Stored,
    Token,
)

if TYPE_CHECKING:
    from tests.simulator.served_host import ServedHost

_FRAME_S = 12e-6  # line time


class ServersKernel:
    """One host's room for servers, and what its kernel does there. It is the `Receiver` as far as it has servers."""

    def __init__(self, host: ServedHost) -> None:
        self.host = host
        self.part: Part | None = None
        self.coming: Part | None = None  # of the phase that this host is prepared for
        self.store: list[Stored] = []
        self.taken: list[int] = []
        self.own: Token = ("", 0)  # the step that is converted
        self.settled = self.round = 0  # `config`
        self.version = (0, 0)  # round, pushes
        self.running = 0  # processors in the program
        self.passed_on = 0  # fragments of parameters, to partners
        self._phase = 0  # the first round of the one whose rounds are open
        self._forget()

    def _forget(self) -> None:
        self.pushers: dict[int, tuple[int, int]] = {}  # number, staleness
        self.pushed: dict[int, Progress] = {}  # by worker
        self.made = Progress()
        self.stored, self.acknowledged = Progress(), Progress()
        self.answers: dict[int, tuple[tuple[int, int], tuple[int, int]]] = {}
        self.announced = 0

    def clear(self) -> None:
        """A new view."""

    # ---- what the agent does

    def make_store(self, phase: Phase) -> None:
        """There is one from the first phase on."""
        room = pulled_fragments(phase.fragments, phase.width)
        if not self.store:
            self.store = [Stored() for _ in range(room)]
            self.taken = [0] * phase.fragments

    def commit(self, round_: int, *, listed: bool) -> None:
        """A training round counts: in this order."""
        if self.round:
            self.version = round_ + 1, 0
        if listed:
            self.settled = round_
        if self.round:
            self.round = round_ + 1

    def enter_phase(self, phase: Phase) -> None:
        """Its first token is here: nothing of before counts. First nothing is taken any more."""
        if phase.first_round == self._phase:
            return
        self._phase, self.round = phase.first_round, 0
        serves = phase.serving is not None and self.host.node.number in phase.serving.servers
        self.part, self.coming = (self.coming or self.part) if serves else None, None
        self._quiesce(phase.first_round)

    def _quiesce(self, phase: int) -> None:
        if phase != self._phase:
            return
        if self.running:
            self.host.later(1e-3, lambda: self._quiesce(phase))
            return
        if self.part is not None:
            for home in self.part.homes.values():
                home.last = {}
                home.due &= home.tag & 0xFFFFFFFF <= self.settled
            self._forget()
        self.version = phase, 0
        self.round = phase

    def send(self, action: SendServed, start: float) -> float:
        """Put these frames on the wire from `start` on; when the last one has left."""
        host = self.host
        to = host.node.view.members[action.to - 1].mac
        whose = action.view, host.keys.get(action.view), action.round, host.node.number
        steps = action.type in (FrameType.PUSH, FrameType.CONTRIBUTION)
        for first, count in action.ranges:
            fragments = range(first, first + count)
            for index in reversed(fragments) if action.down else fragments:
                start += _FRAME_S
                what = action.number, index, action.version, action.members
                token = self.own if steps else ("", 0)
                frame = ServedFrame(action.type, *whose, to, *what, token=token)
                if action.type == FrameType.PUSH:
                    host.lan.checks.served.sent(host, frame)
                host.lan.stripe(host, frame, start + host.lan.overtaken_s(action.channel))
        return start

    # ---- what the agent reads

    def least_version(self, first: int, end: int) -> tuple[int, int]:
        """Round and version of the oldest of these."""
        return min(stored.rest for stored in self.store[first:end])

    def answered(self, server: int) -> tuple[int, int, int, int]:
        """What a server has said of this host's steps."""
        first, second = self.answers.get(server, ((0, 0), (0, 0)))
        return *first, *second

    # ---- frames

    def take(self, frame: ServedFrame) -> str:
        """A frame comes: why it is dropped, or an empty text."""
        host, state = self.host, self.host.kernel.state
        view, number = host.node.view, host.node.number
        if state is None or frame.view != view.number or frame.key != view.seed:
            return "view"
        if frame.sender == number or frame.sender not in view.live:
            return "stranger"
        high = max(state.round_high, self.round)
        open_ = self._open(state)
        if frame.round < open_ or frame.round > high:
            return "round"
        serving = self._serving(frame.round)
        if serving is None:
            return "mode"
        if frame.to != host.mac:
            return "astray"
        if frame.round > open_:
            asks = (FrameType.PUSH, FrameType.PULL, FrameType.CONTRIBUTION)
            if frame.type not in asks:
                return "round"
            self.answer(frame, reason=Refusal.NOT_YET)
            return ""
        if frame.type == FrameType.HELD:
            self._go_on(self._hold(frame, serving))
        elif frame.type == FrameType.TAKEN:
            return self._hear_taken(frame, serving)
        else:
            index, part = frame.index, self.part
            if frame.type == FrameType.PULL:
                index //= per_push(host.lan.plan.width)
            home = part.homes.get(index) if part is not None else None
            if part is None or home is None:
                if frame.type != FrameType.PULL or not self.store:
                    return "range"
                self._go_on(hand_over(self, frame))
                return ""
            at = part, home
            if frame.type == FrameType.PUSH:
                self._go_on(self._push(frame, *at))
            elif frame.type == FrameType.PULL:
                self._go_on(self._give(frame, *at))
            else:
                self._go_on(self._contribute(frame, *at))
        return ""

    def _open(self, state: KernelState) -> int:
        """A server's round is 0 until it has begun the phase."""
        return self.round if self.part is not None or not self.round else state.round

    def _serving(self, round_: int) -> Serving | None:
        rings = self.host.node.rings
        for ring in (rings.coming, rings.current):
            if ring is not None and round_ >= ring.phase.first_round:
                return ring.phase.serving
        return None

    def _go_on(self, steps: Iterator[None], *, stalled: bool = False) -> None:
        """Until the end, or until this processor stalls."""
        lan = self.host.lan
        self.running += not stalled
        for _ in steps:
            if stall_s := lan.odds.stall_s():
                lan.note(f"h{self.host.index + 1}  STALLS {stall_s}")
                lan.at_host(self.host, lan.now + stall_s, self._resume, steps)
                return
        self.running -= 1
        lan.checks.served.idle(self.host)

    def _resume(self, steps: Iterator[None]) -> None:
        self._go_on(steps, stalled=True)

    def _claim(self, home: Home, part: Part, round_: int) -> bool:
        """Add what is due; whether the home is claimed now."""
        if home.claimed:
            return False
        home.claimed = True
        if home.due and home.tag & 0xFFFFFFFF <= self.settled:
            home.due = False
            self.host.lan.checks.served.settles(self.host, home, part)
            home.content = {**home.content, **home.sums}
        if self.round != round_:
            home.claimed = False
            return False
        return True

    def _whole(self, round_: int) -> int:
        return self.version[1] if self.version[0] == round_ else 0

    def _push(self, frame: ServedFrame, part: Part, home: Home) -> Iterator[None]:
        served, worker, tag = self.host.lan.checks.served, frame.sender, frame.tag
        version = self._whole(frame.round)
        if frame.version > version:
            return  # malformed
        yield  # CHECKED
        if not self._claim(home, part, frame.round):
            return
        yield  # CLAIMED
        number, staleness = self.pushers.get(worker, (0, 0))
        if home.last.get(worker, 0) >= frame.number:
            home.claimed = False
            staleness = staleness if number == frame.number else 0
            self.answer(frame, frame.version + max(0, staleness - 1), staleness)
            return
        if home.tag == tag and home.seen:
            home.claimed = False
            self.answer(frame, version, reason=Refusal.SYNCHRONISING)
            return
        if number < frame.number:
            number, staleness = frame.number, max(1, version + 1 - frame.version)
            self.pushers[worker] = number, staleness
        yield  # FIXED
        progress = self.pushed.setdefault(worker, Progress())
        if number > frame.number or progress.enter(frame.number):
            home.claimed = False
            return
        served.pushes(self.host, frame, part, home, staleness)
        home.content = {**home.content, frame.token: ("push", staleness)}
        home.last[worker] = frame.number
        content = home.content
        home.claimed = False
        self.host.kernel.heard = self.host.clock()
        yield  # ADDED
        if progress.leave() == len(part.homes):
            yield  # WHOLE
            if self.version[0] == frame.round:
                self.version = frame.round, self.version[1] + 1
                served.raised(self.host, frame, part, self.version[1])
        held = content if self.host.lan.plan.width == 32 else None
        self.answer(frame, version, staleness, content=held)

    def _contribute(self, frame: ServedFrame, part: Part, home: Home) -> Iterator[None]:
        bit, tag = 1 << frame.sender - 1, frame.tag
        live = sum(1 << k - 1 for k in self.host.node.view.live)
        if not frame.members & bit or frame.members & ~live:
            return
        version = self._whole(frame.round)
        yield  # CHECKED
        if not self._claim(home, part, frame.round):
            return
        yield  # CLAIMED
        seen = home.seen if home.tag == tag else 0
        last = seen | bit == frame.members
        wrong = home.tag > tag or (seen and home.members != frame.members)
        if wrong or seen & bit or (last and self.made.enter(tag)):
            home.claimed = False
            if not wrong and seen & bit:
                self.answer(frame, version)
            return
        if self.announced < tag and not self.host.lan.odds.lose_bell():
            self.announced = tag
            list_ = frame.view, frame.round, frame.members, 0
            self.host.wake(self.host.list_up, *list_)
        if seen and frame.token in home.sums:
            self.host.lan.checks.fail(f"1: {frame.token} is averaged twice at {self.host.name}")
        weight = "mean", frame.members.bit_count()
        home.sums = {**(home.sums if seen else {}), frame.token: weight}
        home.tag, home.members, home.seen, home.due = tag, frame.members, seen | bit, last
        home.claimed = False
        self.host.kernel.heard = self.host.clock()
        yield  # ADDED
        if last:
            self._count(self.made, len(part.homes))
        self.answer(frame, version)

    def _give(self, frame: ServedFrame, part: Part, home: Home) -> Iterator[None]:
        version = self._whole(frame.round)
        yield  # CHECKED
        if not self._claim(home, part, frame.round):
            return
        yield  # CLAIMED
        synchronises = home.tag == frame.tag and home.seen
        content = home.content
        home.claimed = False
        if synchronises:
            self.answer(frame, version, reason=Refusal.SYNCHRONISING)
        else:
            self.host.lan.checks.served.gives(self.host, frame, home)
            self.answer(frame, version, content=content)

    # ---- at a worker

    def _hold(self, frame: ServedFrame, serving: Serving) -> Iterator[None]:
        index = frame.index
        stored = self.store[index]
        state, server = (
            self.host.kernel.state,
            self._server(serving, index // per_push(self.host.lan.plan.width)),
        )
        if frame.sender not in (server, state.partner if state is not None else 0):
            return
        yield
        if stored.tag >= frame.number or self.stored.enter(frame.number):
            return
        self.host.lan.checks.served.stores(self.host, frame)
        stored.content, stored.tag = frame.content, frame.number
        stored.rest = frame.round, frame.version + bool(frame.staleness)
        yield
        self._count(self.stored, len(self.store))
        if frame.staleness:
            self._acknowledge(frame, index // per_push(self.host.lan.plan.width))

    def _hear_taken(self, frame: ServedFrame, serving: Serving) -> str:
        if frame.reason:
            self.host.wake(self.host.refused_up, frame.sender, frame.number)
            return ""
        if self._server(serving, frame.index) != frame.sender:
            return "stranger"
        return self._acknowledge(frame, frame.index)

    def _acknowledge(self, frame: ServedFrame, index: int) -> str:
        first, second = self.answers.get(frame.sender, ((0, 0), (0, 0)))
        first = max(first, (frame.number, frame.staleness))
        self.answers[frame.sender] = first, max(second, (frame.round, frame.version))
        if self.taken[index] >= frame.number:
            return "duplicate"
        if reason := self.acknowledged.enter(frame.number):
            return reason
        self.taken[index] = frame.number
        self._count(self.acknowledged, len(self.taken))
        return ""

    def _server(self, serving: Serving, index: int) -> int:
        """Whose part has that push fragment."""
        parts = enumerate(serving.servers)
        return next(k for r, k in parts if index in serving.part(r, len(self.taken)))

    # ---- answers and the doorbell

    def answer(
        self,
        frame: ServedFrame,
        version: int = 0,
        staleness: int = 0,
        *,
        reason: int = 0,
        content: Content | None = None,
    ) -> None:
        """By XDP_TX: at once, past whatever is queued, and signed with the key that is there now."""
        host = self.host
        kind = FrameType.TAKEN if content is None else FrameType.HELD
        to = host.node.view.members[frame.sender - 1].mac
        whose = frame.view, host.node.view.seed, frame.round, host.node.number
        said = frame.number, frame.index, version, frame.members, staleness, int(reason)
        content = NOTHING if content is None else content
        answer = ServedFrame(kind, *whose, to, *said, content=content)
        host.lan.stripe(host, answer, host.lan.now, answers=True)

    def _count(self, progress: Progress, all_: int) -> None:
        """The agent hears of some, and always of the last."""
        host, state = self.host, self.host.kernel.state
        count, clock = progress.leave(), state.clock if state is not None else 0
        some = clock and count % clock == 0 and not host.lan.odds.lose_bell()
        if count == all_ or some:
            host.wake(host.sums_up)
