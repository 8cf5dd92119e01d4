# SPDX-License-Identifier: Apache-2.0
"""A training program with channels, and the decisions of a lead: steps of several parts, which are read as they come.

A step's parts become ready in the order of the backward pass. A channel offers its next one once its last one is read,
or before that: as its round opens, or a round ahead.
"""

from __future__ import annotations

import hashlib
import random
from collections import deque
from typing import TYPE_CHECKING

from nicps import wire
from nicps.exchange import Exchange
from nicps.protocol import (
    Committed,
    Installed,
    Joiner,
    NodeState,
    Offer,
    Phase,
    SendFragments,
)
from nicps.protocol.channels import ChannelledRing
from nicps.protocol.phase import equal_shares
from tests.simulator.channel_kernel import renew
from tests.simulator.gradients import quantise
from tests.simulator.places import bounds
from tests.simulator.sums import sum_in

if TYPE_CHECKING:
    from tests.simulator.channel_host import ChannelHost

READ_S = 1e-4
WIDTH = 16


class ChannelProgram:
    """One host's.

    Attributes:
        weights: a hash over all that was applied; `trained`, the steps of the job that were.
        phase: that it trains in; None between phases, and before the first.
        joiners: the hosts that have answered the lead's call.
        need: a round, and the samples that are still enough for it.
    """

    def __init__(self, host: ChannelHost) -> None:
        self.host, self.lan = host, host.lan
        self.weights, self.trained = "", 0
        self.phase: Phase | None = None
        self.joiners: dict[bytes, Joiner] = {}
        self.need = 0, 0
        self.blank = True
        self._preparing: Phase | None = None
        self._base = 0  # steps that were trained before the phase
        self._watches = False  # it has no share in the phase, and reads nothing
        self._away = True  # no phase is in force
        self._busy: set[int] = set()  # channels whose last sum is not read yet
        self._held: list[Committed] = []  # of the next step: this one is not whole here
        self._decided = 0, 0, 0  # view, phase and step of the lead's last word
        self._epoch = 0  # raised when what was begun is of no use any more
        self._early = random.Random(f"early {host.lan.seed} {host.index} {host.life}")
        self._begin()

    def _begin(self) -> None:
        """Another step: nothing of it is there yet."""
        self._epoch += 1
        self._samples = 0
        self._dropped = False
        self._ready: dict[int, deque[int]] = {}  # by channel: places whose gradients are there
        self._read: dict[tuple[int, int], int] = {}  # channel and place -> what was read

    # ---- what the rest of the host asks

    @property
    def ring(self) -> ChannelledRing | None:
        """Of the phase in force."""
        ring = self.host.node.rings.current
        return ring if isinstance(ring, ChannelledRing) else None

    def phase_of(self, action: SendFragments) -> Phase | None:
        """The phase that fragments are of."""
        ring = self.host.node.rings.current
        same = ring is not None and action.generation == ring.phase.generation
        return ring.phase if same and ring is not None else None

    @property
    def _step(self) -> int:
        """Of the phase: the one that this program is in."""
        return self.trained - self._base

    @property
    def _part(self) -> int:
        """Samples of this member in a step."""
        assert self.phase is not None
        return self.phase.shares[self.host.node.number - 1]

    # ---- phases and views

    def prepare(self, phase: Phase) -> None:
        """A decision's turn has come."""
        host, self._preparing = self.host, phase
        host.note(f"PREPARES {phase.kind.name} {phase.number}")
        if phase.kind is wire.PhaseKind.STOP:
            host.later(1e-4, lambda: host.do(host.node.prepared(host.clock(), phase.number)))
            return
        view = host.node.view.number
        host.later(self.lan.random.random() * 0.01, lambda: self._enter(phase, view))

    def _enter(self, phase: Phase, view: int) -> None:
        """Once all that is committed is read."""
        host = self.host
        if self._preparing is not phase or host.node.view.number != view:
            return
        mac = host.node.view.members[host.node.view.lead - 1].mac
        lead = next(h for h in self.lan.hosts if h.mac == mac)
        there, leads = lead.program, lead is host
        if self._busy or (there.blank and not leads) or (there._busy and not leads):
            host.later(1e-3, lambda: self._enter(phase, view))
            return
        if (self.blank or self._watches) and not leads:
            self._adopt(there)
        self.blank = self._away = False
        self._preparing, self.phase, self._base = None, phase, self.trained
        self._watches = not self._part
        self.lan.checks.prepared(host, self)
        self._renew(phase, new=True)
        self._begin()
        host.do(host.node.prepared(host.clock(), phase.number))
        self._compute()

    def _adopt(self, there: ChannelProgram) -> None:
        """The state of another program, which has been trained."""
        self.weights, self.trained = there.weights, there.trained

    def _renew(self, phase: Phase, *, new: bool) -> None:
        """Areas of the phase, or only places of the view."""
        for channel, plan in enumerate(phase.channels):
            stripes = self.host.at(channel).kernel.stripes
            renew(stripes, plan.room if new else None, phase.width)

    def installed(self, action: Installed) -> None:
        """A view is in force."""
        host, phase, self._preparing = self.host, action.phase, None
        host.note(f"VIEW {action.view.number} {sorted(action.view.live)} rounds {action.rounds}")
        self.joiners = {}
        if phase is None:
            self._away = True
            self._learn()
            return
        if action.again:
            self._away = True
            self._come_back(phase, action.view.number)
            return
        self.phase = phase
        self._renew(phase, new=False)
        host.later(1e-5, lambda: host.do(host.node.advance(host.clock())))
        self._go_on_in(phase)
        self._watch_over()

    def _learn(self) -> None:
        """A view without a phase is in force."""

    def _go_on_in(self, phase: Phase) -> None:
        """The phase goes on in another view."""
        self._offer_all()

    def _watch_over(self) -> None:
        """A lead that reads nothing takes the state of a host that does, and decides."""
        host = self.host
        if not self._watches or self._away or not host.node.leads:
            return
        seed = host.node.view.seed
        others = [h.program for h in self.lan.hosts if not h.dead and h.node.view.seed == seed]
        ahead = max(others, key=lambda other: other.trained * (not other.blank))
        if ahead.trained > self.trained and not ahead.blank:
            self._adopt(ahead)
        self.decide()
        host.later(5e-3, self._watch_over)

    def _come_back(self, phase: Phase, view: int) -> None:
        """To a phase that this program had left: it offers again what is not committed."""
        host, ring = self.host, self.ring
        if host.node.view.number != view or host.node.changing:
            return
        if self._busy:
            host.later(1e-3, lambda: self._come_back(phase, view))
            return
        assert ring is not None and ring.step is not None
        self.phase, self._away = phase, False
        self._watches = not self._part
        self._base = self.trained - ring.step.current
        self._renew(phase, new=True)
        self._begin()
        host.do(host.node.advance(host.clock()))
        self._compute()

    # ---- a step

    def _compute(self) -> None:
        """The own share of the step, in micro-batches; then its parts, in backward order."""
        lan, host, epoch = self.lan, self.host, self._epoch
        share = self._part
        if not share:
            return
        seconds = lan.compute_s * (0.5 + lan.random.random()) * host.slowness

        def half() -> None:
            if self._epoch != epoch or self._dropped or self.phase is None:
                return
            first = self.phase.first_of(self._step)
            self._samples = share // 2
            host.do(host.node.progress(host.clock(), first, self._samples))
            if self._epoch != epoch:
                return
            round_, enough = self.need
            if lan.plan.quorum < 1 and round_ == first and 0 < enough <= self._samples:
                self._backward(epoch)
            else:
                host.later(seconds / 2, whole)

        def whole() -> None:
            if self._epoch == epoch and not self._dropped:
                self._samples = share
                self._backward(epoch)

        host.later(seconds / 2, half if share > 1 else whole)

    def _backward(self, epoch: int) -> None:
        assert self.phase is not None
        order = [
            (channel, place)
            for channel, plan in enumerate(self.phase.channels)
            for place in range(len(plan.rounds))
        ]
        rng = self.lan.random
        if rng.random() < 0.5:  # or one behind the other, channel by channel
            order.sort(key=lambda part: part[1])
        when = 0.0
        for channel, place in order:
            when += rng.random() * self.lan.part_s

            def ready(channel: int = channel, place: int = place) -> None:
                if self._epoch == epoch and not self._dropped:
                    self._ready.setdefault(channel, deque()).append(place)
                    self._offer_next(channel)

            self.host.later(when, ready)

    def _offer_all(self) -> None:
        for channel in list(self._ready):
            self._offer_next(channel)

    def _offer_next(self, channel: int) -> None:
        """The next part of that channel, if its turn has come."""
        phase, host = self.phase, self.host
        queue = self._ready.get(channel)
        if phase is None or not queue or self._away:
            return
        if self._preparing is not None:
            return
        place = queue[0]
        round_ = phase.first_of(self._step, channel) + place
        ring = host.node.rings.of_round(round_)
        if ring is None or len(ring.rounds) <= channel:
            return
        if ring.rounds[channel] > round_:  # committed, while this program was away
            queue.popleft()
            self._offer_next(channel)
            return
        # The bank of the round that is read last is that of the one after the next.
        unread, before = channel in self._busy, round_ - ring.rounds[channel]
        early = unread + before
        if early > 1 or (early and self._early.random() < 0.5):
            return
        queue.popleft()
        fragments = phase.fragments_in(round_, channel)
        rng = self.lan.odds.random
        offer = quantise(rng, [0] * fragments, phase.width)
        largest = min(offer.largest + rng.choice((0, 0, 0, 1, 3)), 126)
        conversion = rng.getrandbits(31) + 1
        port = host.at(channel)
        self.lan.sums_of(channel).offered(port, round_, offer, largest, conversion)
        said = Offer(round_, self._samples, largest, False, conversion, channel)
        host.do(host.node.offer(host.clock(), said))
        live = host.node.view.live
        aggregators = phase.aggregators(live)
        first, end = 0, 0
        if host.node.number in aggregators:
            first, end = bounds(fragments, aggregators.index(host.node.number), len(aggregators))
        order = [*range(first, end), *range(end, fragments), *range(first)]
        bank, epoch = port.kernel.stripes.records.own[round_ & 1], self._epoch

        def convert() -> None:
            count = rng.randint(1, len(order))
            for index in order[:count]:
                bank[index].conversion, bank[index].lane = conversion, offer.lanes[index]
            del order[:count]
            host.do(host.node.advance(host.clock()))
            if order:
                host.later(self.lan.odds.converting_s * rng.random(), convert)

        if self._epoch == epoch:
            convert()

    def closed(self, round_: int) -> None:
        """The step's list is closed without this member."""
        if self.phase is not None and self.phase.step_of(round_) == self._step:
            self._dropped = True
            self._ready = {}

    # ---- sums

    def committed(self, commit: Committed) -> None:
        """A sum is there: it is read soon."""
        channel = commit.channel
        if self.blank or self._watches:
            return
        self._busy.add(channel)
        delay = READ_S + (self.lan.random.random() * 0.02 if self.lan.random.random() < 0.05 else 0)

        def read() -> None:
            if self.host.program is self:
                self._take(commit)

        self.host.later(delay, read)

    def _take(self, commit: Committed) -> None:
        host, channel, phase = self.host, commit.channel, commit.phase
        if phase.step_of(commit.round, channel) == self._step + 1:
            self._held.append(commit)
            return
        self._busy.discard(channel)
        port, found = host.at(channel), []
        for index in range(phase.fragments_in(commit.round, channel) if commit.counted else 0):
            whose = host.node.number, commit.view, commit.round
            lane = sum_in(port.kernel.stripes.records, *whose, commit.counted, index)
            if lane is None:
                self.lan.checks.fail(
                    f"{host.node.name} reads round {commit.round} of channel {channel}: there is no sum {index}"
                )
            found.append(lane if lane is not None and lane.finite else None)
        text = repr((sorted(commit.counted.items()), found))
        place = phase.place_of(commit.round, channel)
        if phase.step_of(commit.round, channel) != self._step:
            self.lan.checks.fail(
                f"{host.node.name} reads round {commit.round} of channel {channel} in step {self._step}"
            )
        self._read[channel, place] = int(hashlib.sha1(text.encode()).hexdigest()[:8], 16)
        host.do(host.node.read(host.clock(), commit.round, 0, channel))
        if len(self._read) == sum(len(plan.rounds) for plan in phase.channels):
            self._apply(phase)
        else:
            self._offer_next(channel)

    def _apply(self, phase: Phase) -> None:
        """The step is whole."""
        host = self.host
        text = f"{self.weights} {sorted(self._read.items())}"
        self.weights = hashlib.sha1(text.encode()).hexdigest()[:12]
        last = phase.first_of(self._step + 1) - 1
        self.trained += 1
        self.lan.checks.applied_step(host, self)
        self._begin()
        held, self._held = self._held, []
        for commit in held:
            host.later(READ_S, lambda commit=commit: host.program is self and self._take(commit))
        digest = int(self.weights, 16) & 0xFFFFFFFF or 1
        host.do(host.node.read(host.clock(), last, digest))
        if host.dead:
            return
        thinks_s = self.lan.random.choice((0.0, 0.0, 1e-3, 0.02)) * self.lan.random.random()
        host.later(thinks_s, lambda: host.program is self and self.decide())
        if self._preparing is None and not self._away:
            self._compute()

    # ---- the lead

    def decide(self) -> None:
        """The lead's program says how it goes on, if that is to be said."""
        host, lan, node = self.host, self.lan, self.host.node
        if not node.leads or node.state is not NodeState.MEMBER or host.dead:
            return
        if not node.membership.ready or node.changing:
            return
        if node.phase is None:
            self._open()
            return
        ring, now = self.ring, host.clock()
        pending = self._away or node.phase is not node.phase_in_force
        if ring is None or ring.step is None or pending or self.phase is None:
            return
        if self._step != ring.step.current or not (
            ring.step.undecided or self.trained >= lan.rounds
        ):
            return
        if not ring.between_steps:
            return
        word = node.view.number, ring.phase.number, self.trained
        if self._decided == word:
            return
        self._decided = word
        if self.trained >= lan.rounds:
            stop = Phase(0, 0, wire.PhaseKind.STOP, settings={"ok": True})
            host.do(node.decide(now, stop))
        elif self.joiners:
            joiners = tuple(self.joiners.values())
            host.note(f"REBUILDS {[j.name for j in joiners]}")
            host.do(node.rebuild(now, joiners))
        elif lan.random.random() < 0.15:
            self._open()
        else:
            saves = lan.random.random() < 0.2
            lan.checks.decided(host, self.trained, saves=saves)
            host.do(node.go_on(now, saves=saves))

    def _open(self) -> None:
        """A training phase with a plan."""
        host, node, lan = self.host, self.host.node, self.lan
        view = node.view
        counted = set(view.live)
        if len(counted) > 2 and lan.random.random() < 0.1:
            counted.discard(lan.random.choice(sorted(counted - {view.lead})))
        plans = lan.plans()
        room = plans[0].room
        shares = equal_shares(lan.plan.batch, len(view.members), counted)
        phase = Phase(
            0,
            0,
            wire.PhaseKind.TRAIN,
            first_round=node.highest_round + 1,
            fragments=room,
            last_fragments=room,
            width=WIDTH,
            shares=shares,
            quorum=max(1, int(lan.plan.quorum * sum(shares))),
            exchange=Exchange.STRIPES,
            channels=plans,
        )
        lan.checks.decided(host, self.trained, saves=False)
        host.do(node.decide(host.clock(), phase))
