# SPDX-License-Identifier: Apache-2.0
"""A group's program as `nicps.collective` has it, and the decisions of a lead: calls on each channel, in their order.

Channels do not wait for one another but for what is called on all of them: hosts that come in, and another plan.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

from nicps import wire
from nicps.exchange import Exchange
from nicps.protocol import Committed, Offer, Phase
from nicps.protocol.plan import ChannelPlan
from tests.simulator.channel_kernel import renew
from tests.simulator.channel_program import READ_S, ChannelProgram
from tests.simulator.gradients import quantise
from tests.simulator.places import bounds
from tests.simulator.sized_calls import Call, Section, Turn
from tests.simulator.sums import sum_in

if TYPE_CHECKING:
    from tests.simulator.sized_host import SizedHost

Plan: TypeAlias = tuple[ChannelPlan, ...]
_WATCHES_S = 5e-3  # between two looks of a lead that takes no part
#: Of a call that explains what members have called, or that all of them make on all channels.
_EXPLAINS, _JOINT = Turn(1, 32, 0x3FF0), Turn(1, 32, 0x3FF1)
_ADMITTED = Turn(1, 32, 0x3FF2)


@dataclass(slots=True)
class Flow:
    """What a channel's thread has come to.

    Attributes:
        at, part: the next call of the section, and its next round.
        members: that are in the sums of the call so far.
        explains: members have called different things, and say what.
        open: the round that is offered to next.
        offered: what was offered to it.
        busy: its sum is there, and not read yet.
        chain: a hash over all sums; `count`: of so many rounds.
    """

    at: int = 0
    part: int = 0
    members: frozenset[int] = frozenset()
    explains: bool = False
    open: int = 0
    offered: Turn | None = None
    busy: bool = False
    chain: str = ""
    count: int = 0


class SizedProgram(ChannelProgram):
    """One host's.

    Attributes:
        flows: of each channel that there can be.
        trained: sections of calls that are done.
        stage: of what is called on all channels: how many of its rounds are done.
        decided: what was judged last, by channel: the round, what follows it, and another plan, if that does.
    """

    host: SizedHost  # type: ignore[assignment]

    def __init__(self, host: SizedHost) -> None:
        self.flows = [Flow() for _ in range(wire.MAX_CHANNELS)]
        self.stage = 0
        self.decided: dict[int, tuple[int, str, Plan]] = {}
        self._plan: Plan | None = None  # of the last phase, in force or prepared
        self._entered = 0  # raised with every phase that is entered
        super().__init__(host)

    def _begin(self) -> None:
        """Rounds of another phase are open; what was offered in the one before is offered again."""
        self._entered += 1
        for flow in self.flows:
            flow.offered = None

    @property
    def section(self) -> Section:
        """The one that this program is in."""
        return self.host.lan.calls.sections[self.trained]

    # ---- phases and views

    def _adopt(self, there: ChannelProgram) -> None:
        """A member that comes in is told how far the others are."""
        assert isinstance(there, SizedProgram)
        self.trained, self.stage = there.trained, there.stage
        self.flows = [replace(flow, offered=None, busy=False) for flow in there.flows]

    def _renew(self, phase: Phase, *, new: bool) -> None:
        """Areas of the phase, or only places of the view."""
        rooms = [plan.room for plan in phase.channels] or [phase.fragments]
        for channel, room in enumerate(rooms):
            renew(self.host.at(channel).kernel.stripes, room if new else None, phase.width)

    def _compute(self) -> None:
        """This program has entered a phase: it goes on with its calls."""
        assert self.phase is not None
        self._plan = self.phase.channels
        for flow in self.flows:
            flow.open = self.phase.first_round
        self._go_on()

    def _go_on_in(self, phase: Phase) -> None:
        """The phase goes on in another view."""
        self._plan = phase.channels
        self._go_on()

    def _learn(self) -> None:
        """A program that took no part may be that of the lead, whose state others take: it is told how far they are."""
        seed = self.host.node.view.seed
        there = [h.program for h in self.host.lan.hosts if not h.dead and h.node.view.seed == seed]  # type: ignore[attr-defined]
        whole = [each for each in there if not each.blank and not each._watches]
        if self._watches and whole:
            self._adopt(max(whole, key=lambda each: sum(flow.count for flow in each.flows)))

    def _come_back(self, phase: Phase, view: int) -> None:
        """To a phase that this program had left."""
        host = self.host
        if host.node.view.number != view or host.node.changing:
            return
        if self._busy:
            host.later(1e-3, lambda: self._come_back(phase, view))
            return
        ring = host.node.rings.current
        assert ring is not None
        self.phase, self._plan = phase, phase.channels
        self._away = False
        self._watches = not self._part
        self._renew(phase, new=True)
        self._begin()
        for flow, round_ in zip(self.flows, ring.rounds, strict=False):
            flow.open = round_
        host.do(host.node.advance(host.clock()))
        self._go_on()

    def _watch_over(self) -> None:
        """A lead that takes no part says what the programs of the others have judged."""
        host = self.host
        if host.dead or host.program is not self or not self._watches:
            return
        if self._away or not host.node.leads:
            return
        seed = host.node.view.seed
        for other in self.lan.hosts:
            program = other.program  # type: ignore[attr-defined]
            if not other.dead and other.node.view.seed == seed and not program.blank:
                for channel, said in program.decided.items():
                    if channel not in self.decided or said[0] > self.decided[channel][0]:
                        self.decided[channel] = said
        self.decide()
        host.later(_WATCHES_S, self._watch_over)

    # ---- calls

    def _go_on(self) -> None:
        """All channels that have something to call, call it."""
        phase = self.phase
        if phase is None or self.blank or self._watches:
            return
        self._end_section()
        for channel in range(phase.channel_count):
            self._offer_later(channel)

    def _end_section(self) -> None:
        """Once all that follows the calls of a section is done the next one begins."""
        phase = self.phase
        assert phase is not None
        while self._all_called() and self.trained < self.lan.rounds:
            joint = self.section.joint
            needed = {"nothing": 0, "admit": 2, "plan": 1, "end": 1}[joint]
            if self.stage < needed:
                return
            if joint == "plan":
                plan = self.host.lan.calls.sections[self.trained + 1].plan
                if phase.channels != plan:
                    return
            self.trained += 1
            self.host.note(f"SECTION {self.trained}")
            self.stage = 0
            for flow in self.flows:
                flow.at = flow.part = 0
                flow.members = frozenset()

    def _all_called(self) -> bool:
        """On all channels the calls of the section are done."""
        if self.trained >= self.lan.rounds:
            return True
        flows = list(zip(self.flows, self.section.calls, strict=False))
        return all(flow.at == len(calls) and not flow.busy for flow, calls in flows)

    def _turn(self, channel: int) -> Turn | None:
        """What that channel's next round is for; None: nothing is called there."""
        flow = self.flows[channel]
        if self.trained >= self.lan.rounds or flow.busy:
            return None
        section, phase = self.section, self.phase
        if phase is None or phase.channels != section.plan:
            return None  # the change of the plan has come to nothing: the next lead decides on it again
        calls = section.calls[channel] if channel < len(section.calls) else ()
        if flow.explains:
            return _EXPLAINS
        if flow.at < len(calls):
            return calls[flow.at].turn(flow.part, self.host.index)
        if channel or not self._all_called() or section.joint == "nothing":
            return None
        if self.stage == 1 and section.joint == "admit":
            return _ADMITTED
        return _JOINT if not self.stage else None

    def _offer_later(self, channel: int) -> None:
        """The script does something before it makes that call."""
        flow, turn = self.flows[channel], self._turn(channel)
        if turn is None or flow.offered is not None:
            return
        flow.offered = turn
        entered, round_ = self._entered, flow.open
        rng, slowness = self.lan.random, self.host.slowness
        thinks_s = rng.choice((0.0, 0.0, 1e-3, self.lan.compute_s)) * rng.random() * slowness

        def offer() -> None:
            there = self.host.program is self and self._entered == entered
            if there and self.flows[channel] is flow and flow.open == round_:
                self._offer_turn(channel, flow, turn)

        self.host.later(thinks_s, offer)

    def _offer_turn(self, channel: int, flow: Flow, turn: Turn) -> None:
        """Offer it, and convert it: a short vector is converted first."""
        host, rng, round_ = self.host, self.lan.odds.random, flow.open
        if self._away or self._preparing is not None:
            flow.offered = None  # the phase that comes next, or again, asks for it
            return
        node, phase = host.node, self.phase
        assert phase is not None
        offer = quantise(rng, [0] * turn.fragments, turn.width)
        largest = min(offer.largest + rng.choice((0, 0, 0, 1, 3)), 126)
        conversion = rng.getrandbits(31) + 1
        self.lan.sums_of(channel).offered(host.at(channel), round_, offer, largest, conversion)
        aggregators, first, end = phase.aggregators(node.view.live), 0, 0
        if node.number in aggregators:
            rank = aggregators.index(node.number)
            first, end = bounds(turn.fragments, rank, len(aggregators))
        order = [*range(first, end), *range(end, turn.fragments), *range(first)]
        bank = host.at(channel).kernel.stripes.records.own[round_ & 1]
        short, entered = rng.random() < 0.5, self._entered

        def write(count: int) -> None:
            for index in order[:count]:
                bank[index].conversion, bank[index].lane = conversion, offer.lanes[index]
            del order[:count]

        def convert() -> None:
            if self._entered != entered or host.program is not self:
                return
            write(rng.randint(1, len(order)))
            host.do(node.advance(host.clock()))
            if order:
                host.later(self.lan.odds.converting_s * rng.random(), convert)

        if short:
            write(len(order))
        said = Offer(round_, turn.samples, largest, False, conversion, channel)
        host.do(node.offer(host.clock(), said))
        if order:
            convert()

    # ---- sums

    def closed(self, round_: int) -> None:
        """A list has all members that have a share."""
        if self._watches:
            return
        self.lan.checks.fail(f"{self.host.node.name} is not in the list of round {round_}")

    def committed(self, commit: Committed) -> None:
        """A sum is there: what follows is judged, and the sum is read."""
        host, channel, rng = self.host, commit.channel, self.lan.random
        if self.blank or self._watches:
            read = commit.round, 0, channel
            host.later(0.0, lambda: host.do(host.node.read(host.clock(), *read)))
            return
        flow = self.flows[channel]
        self._busy.add(channel)
        flow.busy = True
        delay = READ_S + (rng.random() * 0.02 if rng.random() < 0.05 else 0)
        host.later(READ_S, lambda: host.program is self and self._judge(commit))
        host.later(delay, lambda: host.program is self and self._take(commit))

    def _judge(self, commit: Committed) -> None:
        """What comes after that round, as every member knows it; the lead says it."""
        what, plan, phase = "continue", (), self.phase
        if not commit.channel and self.flows[0].offered is _JOINT:
            what = self.section.joint
        if what == "plan":
            plan = self.host.lan.calls.sections[self.trained + 1].plan
            what = "continue" if phase is None or phase.channels == plan else "plan"
        self.decided[commit.channel] = commit.round, what, plan
        self._say(commit.channel)

    def _take(self, commit: Committed) -> None:
        """Read it."""
        host, channel = self.host, commit.channel
        flow, fragments = self.flows[channel], commit.fragments if commit.has_sum else 0
        if commit.round != flow.open or flow.offered is None:
            self.lan.checks.fail(
                f"{host.node.name} reads round {commit.round} of channel {channel}, and has offered "
                f"{flow.offered} to {flow.open}"
            )
        found: list[object] = []
        for index in range(fragments):
            whose = host.node.number, commit.view, commit.round
            records = host.at(channel).kernel.stripes.records
            lane = sum_in(records, *whose, commit.counted, index)
            if lane is None:
                self.lan.checks.fail(
                    f"{host.node.name} reads round {commit.round} of channel {channel}: there is no sum {index}"
                )
            found.append(lane if lane is not None and lane.finite else None)
        text = repr((flow.chain, sorted(commit.counted.items()), found))
        flow.chain, flow.count = hashlib.sha1(text.encode()).hexdigest()[:12], flow.count + 1
        self.lan.checks.read(host, channel, flow)
        self._busy.discard(channel)
        self._note_round(channel, flow, commit)
        flow.busy, flow.offered, flow.open = False, None, flow.open + 1
        host.do(host.node.read(host.clock(), commit.round, 0, channel))
        if not host.dead and host.program is self:
            self._go_on()

    def _note_round(self, channel: int, flow: Flow, commit: Committed) -> None:
        """What the round is for the call that it is of, as `nicps.collective.rounds.Attempt` has it."""
        listed = frozenset(commit.counted)
        calls: tuple[Call, ...] = ()
        if self.trained < self.lan.rounds and channel < len(self.section.calls):
            calls = self.section.calls[channel]
        if flow.offered in (_JOINT, _ADMITTED):
            self.stage += 1
        elif flow.explains:
            flow.explains, flow.members = False, frozenset()
            flow.at, flow.part = flow.at + 1, 0
        elif not commit.has_sum:
            flow.explains = True
        elif flow.members and flow.members != listed:
            flow.members, flow.part = frozenset(), 0  # a member has left: the call is begun again
        else:
            flow.members, flow.part = listed, flow.part + 1
            if flow.part == len(calls[flow.at].turns):
                flow.members = frozenset()
                flow.at, flow.part = flow.at + 1, 0

    # ---- the lead

    def decide(self) -> None:
        """All have a view that this host leads: what was said before is said again."""
        if self.host.node.phase is None:
            self._open()
            return
        for channel in list(self.decided):
            self._say(channel)

    def _say(self, channel: int) -> None:
        """What follows a round, if it is to be said."""
        host, lan, node = self.host, self.lan, self.host.node
        if not node.leads or host.dead or node.changing or not node.membership.ready:
            return
        ring, (round_, what, plan) = node.rings.current, self.decided[channel]
        if ring is None or node.phase is not node.phase_in_force:
            return
        rounds = ring.rounds
        if channel >= len(rounds) or round_ != rounds[channel] - 1:
            return
        if round_ < ring.phase.first_round:
            return
        if what == "end":
            stop = Phase(0, 0, wire.PhaseKind.STOP, settings={"ok": True})
            host.do(node.decide(host.clock(), stop))
        elif what == "admit" and self.joiners:
            joiners = tuple(self.joiners.values())
            host.note(f"REBUILDS {[j.name for j in joiners]}")
            host.do(node.rebuild(host.clock(), joiners))
        elif what == "plan":
            self._plan = plan
            self._open()
        else:
            lan.checks.goes_on(host, channel, round_)
            host.do(node.go_on(host.clock(), channel=channel))

    def _open(self) -> None:
        """A phase of the group's plan, as the lead's course has it."""
        host, node, lan = self.host, self.host.node, self.host.lan
        view, first = node.view, node.highest_round + 1
        counted = set(view.live)
        if len(counted) > 2 and lan.random.random() < 0.2:
            counted.discard(lan.random.choice(sorted(counted - {view.lead})))
        # A lead that has taken over knows the plan of the last phase.
        channels = self._plan if self._plan is not None else lan.calls.sections[0].plan
        of = counted, lan.calls.room, 0, Exchange.STRIPES
        phase = lan.plan.training(view, first, *of, channels=channels)
        host.do(node.decide(host.clock(), phase))
