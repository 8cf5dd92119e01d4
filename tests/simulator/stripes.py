# SPDX-License-Identifier: Apache-2.0
"""What the XDP program does with frames of stripes (ebpf/nicps_stripes.h), as a model: the rules, in their order.

A processor may stall at each of the program's steps, and go on long after others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from nicps import wire
from nicps.protocol import KernelState, Narrow, SendFragments
from nicps.wire import FrameType
from tests.simulator.gradients import Lane, round_sum
from tests.simulator.places import (
    NO_LANE,
    Asked,
    Gather,
    Own,
    Places,
    Progress,
    Records,
    StripeFrame,
    bounds,
    owner_of,
)

if TYPE_CHECKING:
    from tests.simulator.host import Host

_FRAME_S = 12e-6  # line time


class Stripes:
    """One host's room for stripes, and what its kernel does there. It is the `Receiver` as far as it has stripes."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.records = Records(0)
        self.places = Places(0, 1)
        self.progress = [Progress(), Progress()]
        self.announced = [0, 0]
        self.numbers = 0  # of this host's questions
        self.clear()

    def clear(self) -> None:
        """A new view: its keys are new, and so are the windows."""
        self.asked: dict[int, Asked] = {}
        # by bank and aggregator: the round, and the fragment that is sent next
        self.next: dict[tuple[int, int], tuple[int, int]] = {}
        self.swallows: dict[tuple[int, int], int] = {}  # so many sums send nothing
        self.open: set[int] = set()
        self.rest = [(0, 0), (0, 0)]  # by bank: what contributions to a switch say of remainders

    def retire_places(self) -> None:
        """The own stripe has none until others are made."""
        self.places = Places(0, 1)

    # ---- what the agent reads

    def count(self, round_: int, view: int) -> int:
        """Sums of that round."""
        progress = self.progress[round_ & 1]
        return progress.count if progress.tag == view << 32 | round_ else 0

    def here(self, round_: int, view: int, first: int, end: int) -> list[bool]:
        """Which of these sums are here."""
        tag = view << 32 | round_
        return [sum_.tag == tag for sum_ in self.records.sums[round_ & 1][first:end]]

    def converted(self, round_: int, conversion: int, first: int, end: int) -> int:
        """Own records in a row that are of that conversion; none without places for the own stripe."""
        if not self.places.blocks:
            return 0
        for at, own in enumerate(self.records.own[round_ & 1][first:end]):
            if own.conversion != conversion:
                return at
        return end - first

    def next_to_send(self, round_: int, aggregator: int) -> int:
        """What is sent next to that aggregator; 0: nothing has been sent to it in that round."""
        of, index = self.next.get((round_ & 1, aggregator), (0, 0))
        return index if of == round_ else 0

    def absent(self, round_: int, view: int, count: int, members: int) -> Mapping[int, int]:
        """Contributions of the listed others that lack in the own stripe."""
        lacks: dict[int, int] = {}
        tag, others = view << 32 | round_, members & ~(1 << self.host.node.number - 1)
        for place in self.places.gathers[round_ & 1][:count]:
            lacking = others & ~(place.seen if place.tag == tag else 0)
            for number in range(1, lacking.bit_length() + 1):
                if lacking >> number - 1 & 1:
                    lacks[number] = lacks.get(number, 0) + 1
        return lacks

    # ---- what the agent sends

    def send(self, action: SendFragments, fragments: int, width: int, start: float) -> float:
        """Put these frames on the wire from `start` on; when the last one has left."""
        host, striped = self.host, action.striped
        assert striped is not None
        members = host.node.view.members
        alone = striped.members.bit_count() == 1
        for first, count in action.ranges:
            if striped.type is FrameType.CONTRIBUTION and not action.repair:
                self.rest[action.round & 1] = striped.rest_view, striped.behind
                owner, end = owner_of(first, fragments, striped.aggregators), first + count
                key = action.round & 1, owner
                if self.next.get(key, (0, 0))[0] != action.round:
                    self.swallows[key] = 0
                if self.next_to_send(action.round, owner) < end:
                    self.next[key] = action.round, end
            for index in range(first, first + count):
                to: bytes | None = None
                lane, number, own = NO_LANE, 0, self.records.own[action.round & 1][index]
                if striped.type is FrameType.ASK:
                    self.numbers = number = self.numbers + 1
                    self.open.add(number)
                else:
                    host.sum_checks.sent(host, action.round, index, own)
                    lane = own.lane
                if striped.type is not FrameType.SUM:
                    owner = owner_of(index, fragments, striped.aggregators)
                    owner = striped.members.bit_length() if alone else owner
                    to = members[owner - 1].mac if owner else wire.SWITCH
                start += _FRAME_S
                whose = action.view, host.keys.get(action.view), action.round, host.node.number
                what = striped.members, index, fragments, width, striped.unit
                rest = striped.rest_view, striped.behind
                if striped.type is FrameType.ASK:
                    rest = 0, 0
                frame = StripeFrame(striped.type, *whose, to, *what, lane, number, *rest)
                host.lan.stripe(host, frame, start)
        return start

    def narrow(self, action: Narrow) -> None:
        """The agent makes windows smaller, or as large as before."""
        for owner, sums in action.swallow:
            if self.next_to_send(action.round, owner):
                self.swallows[action.round & 1, owner] = sums

    # ---- frames

    def take(self, frame: StripeFrame) -> str:
        """A frame comes: why it is dropped, or an empty text."""
        host, state = self.host, self.host.kernel.state
        view, number = host.node.view, host.node.number
        if state is None or frame.view != view.number or frame.key != view.seed:
            return "view"
        central = state.aggregators == (0,) or state.aggregators_next == (0,)
        known = frame.sender in view.live or (not frame.sender and central)
        if frame.sender == number or not known:
            return "stranger"
        if not state.round_low <= frame.round <= state.round_high:
            return "round"
        aggregators = self._aggregators(state, frame.round)
        if not aggregators:
            return "mode"
        if frame.type is not FrameType.SUM and frame.to != host.mac:
            return "astray"
        if frame.type is FrameType.CONTRIBUTION:
            return self._gather(frame, state, aggregators)
        if frame.type is FrameType.SUM:
            return self._store(frame, aggregators)
        if frame.type is FrameType.ASK:
            return self._answer(frame, state, aggregators)
        if frame.number not in self.open:
            return "unasked"
        self.open.discard(frame.number)
        header = wire.Header(
            network=host.node.network, view=frame.view, round=frame.round, sender=frame.sender
        )
        what = frame.members, frame.index, frame.fragments, frame.number, frame.width, 0, frame.unit
        data = wire.pack(header, wire.Lacking(*what), tail=bytes(wire.PAYLOAD_BYTES))
        source = view.members[frame.sender - 1].mac if frame.sender else wire.SWITCH
        host.wake(host.frame_up, source, data)
        return ""

    def _aggregators(self, state: KernelState, round_: int) -> tuple[int, ...]:
        return state.aggregators_next if round_ > state.round else state.aggregators

    def _stripe_of(self, number: int, frame: StripeFrame, aggregators: tuple[int, ...]) -> range:
        if number not in aggregators:
            return range(0)
        rank = aggregators.index(number)
        return range(*bounds(frame.fragments, rank, len(aggregators)))

    def _is_offered(self, own: Own, bank: int) -> bool:
        state = self.host.kernel.state
        return bool(own.conversion) and state is not None and own.conversion == state.offered[bank]

    def _go_on(self, steps: Iterator[None]) -> None:
        """Until the end, or until this processor stalls."""
        lan = self.host.lan
        for _ in steps:
            if stall_s := lan.odds.stall_s():
                lan.note(f"h{self.host.index + 1}  STALLS {stall_s}")
                lan.at_host(self.host, lan.now + stall_s, self._go_on, steps)
                return

    def _gather(self, frame: StripeFrame, state: KernelState, aggregators: tuple[int, ...]) -> str:
        members, bit = frame.members, 1 << frame.sender - 1
        live = sum(1 << k - 1 for k in self.host.node.view.live)
        width = state.width_next if frame.round > state.round else state.width
        if not members & bit or members & ~live or frame.width != width:
            return "malformed"
        if frame.lane.finite and frame.lane.exponent - frame.unit > wire.MAX_SHIFT[width]:
            return "shift"
        stripe = self._stripe_of(self.host.node.number, frame, aggregators)
        if frame.index not in stripe or frame.index >= self.records.room:
            return "range"
        local = frame.index - stripe.start
        if local >= self.places.blocks * self.places.per_block:
            return "range"
        self._go_on(self._add(frame, local, self.records, self.places))
        return ""

    def _add(
        self, frame: StripeFrame, local: int, records: Records, places: Places
    ) -> Iterator[None]:
        """What was read of the maps before a stall is not read again; their records are."""
        host, bank, tag, width = self.host, frame.round & 1, frame.tag, frame.width
        place, totals = places.gathers[bank][local], places.totals[bank]
        stored, own = records.sums[bank][frame.index], records.own[bank][frame.index]
        bit, mine = 1 << frame.sender - 1, 1 << host.node.number - 1 & frame.members
        what = frame.members, frame.unit, frame.fragments, width, frame.index
        yield  # CHECKED
        if place.claimed:
            return
        place.claimed = True
        yield  # CLAIMED
        fresh = self.is_fresh(place, tag)
        last = (0 if fresh else place.seen) | bit | mine == frame.members
        refused = ""
        if place.tag > tag and not fresh:
            refused = "round"
        elif not fresh and place.what != what:
            refused = "malformed"
        elif not fresh and self.has_contributed(place, bit):
            refused = "duplicate"
        elif last and mine and not self._is_offered(own, bank):
            refused = "unready"
        elif last and stored.claimed:
            refused = "busy"
        elif last:
            lane = own.lane
            if mine and lane.finite and lane.exponent - frame.unit > wire.MAX_SHIFT[width]:
                refused = "unready"
            elif stored.tag >= tag:
                refused = "round"
            else:
                refused = self.progress[bank].enter(tag)
        if refused:
            place.claimed = False
            return
        stored.claimed |= last
        exponent = own.lane.exponent
        if fresh:
            place.what, place.seen, place.not_finite = what, 0, False
        place.not_finite |= not frame.lane.finite
        place.seen |= bit
        place.tag = tag
        yield  # ADDING
        totals[local] = frame.lane.units(frame.unit, width) + (0 if fresh else totals[local])
        host.kernel.heard = host.clock()
        self._announce(frame)
        if not last:
            place.claimed = False
            return
        if mine:
            lane = Lane(exponent, own.lane.value)
            totals[local] += lane.units(frame.unit, width)
            place.seen |= mine
            place.not_finite |= not lane.finite
        stored.lane, totals[local] = round_sum(totals[local], width, frame.unit, place.not_finite)
        stored.rest = stored.tag = tag
        made = stored.lane
        stored.claimed = place.claimed = False
        yield  # ADDED
        self._count(bank, tag, frame.fragments)
        self._send_back(frame.changed(type=FrameType.SUM, lane=made, to=None))

    def is_fresh(self, place: Gather, tag: int) -> bool:
        """Whether this is the first contribution of its round there."""
        return place.tag < tag

    def has_contributed(self, place: Gather, bit: int) -> bool:
        """Whether that member is in the sum."""
        return bool(place.seen & bit)

    def _store(self, frame: StripeFrame, aggregators: tuple[int, ...]) -> str:
        alone = frame.members == 1 << frame.sender >> 1
        stripe = self._stripe_of(frame.sender, frame, aggregators)
        if not alone and frame.index not in stripe:
            return "range"
        if frame.index >= frame.fragments or frame.index >= self.records.room:
            return "range"
        self._go_on(self._put(frame, self.records, stripe))
        return ""

    def _put(self, frame: StripeFrame, records: Records, stripe: range) -> Iterator[None]:
        bank, tag = frame.round & 1, frame.tag
        stored = records.sums[bank][frame.index]
        yield  # CHECKED
        if stored.claimed:
            return
        stored.claimed = True
        yield  # CLAIMED
        if stored.tag >= tag or self.progress[bank].enter(tag):
            stored.claimed = False
            return
        stored.lane, stored.rest, stored.tag = frame.lane, 0, tag
        stored.claimed = False
        self.host.kernel.heard = self.host.clock()
        yield
        self._count(bank, tag, frame.fragments)
        yield from self._send_next(frame, records, stripe)

    def _send_next(self, frame: StripeFrame, records: Records, stripe: range) -> Iterator[None]:
        """The contribution to the same stripe that goes out as a sum of it has come."""
        host, bank = self.host, frame.round & 1
        index = self.next_to_send(frame.round, frame.sender)
        listed = frame.members >> host.node.number - 1 & 1
        if listed and self.swallows.get((bank, frame.sender)):
            self.swallows[bank, frame.sender] -= 1
            return
        if not listed or not index or index >= min(stripe.stop, records.room):
            return
        own = records.own[bank][index]
        if not self._is_offered(own, bank):
            return
        self.next[bank, frame.sender] = frame.round, index + 1
        host.sum_checks.sent(host, frame.round, index, own)
        yield
        lane, to = own.lane, wire.SWITCH
        if frame.sender:
            to = host.node.view.members[frame.sender - 1].mac
        if lane.finite and lane.exponent - frame.unit > wire.MAX_SHIFT[frame.width]:
            return
        rest_view, behind = self.rest[bank] if not frame.sender else (0, 0)
        kind, rest = FrameType.CONTRIBUTION, {"rest_view": rest_view, "behind": behind}
        self._send_back(frame.changed(type=kind, index=index, lane=lane, number=0, to=to, **rest))

    def _answer(self, frame: StripeFrame, state: KernelState, aggregators: tuple[int, ...]) -> str:
        host, bank, mine = self.host, frame.round & 1, 1 << self.host.node.number - 1
        alone = frame.members == mine
        stripe = self._stripe_of(host.node.number, frame, aggregators)
        if not alone and frame.index not in stripe:
            return "range"
        local = 0 if alone else frame.index - stripe.start
        count = self.places.blocks * self.places.per_block
        if frame.index >= min(frame.fragments, self.records.room) or local >= count:
            return "range"
        place = self.places.gathers[bank][local]
        stored = self.records.sums[bank][frame.index]
        own = self.records.own[bank][frame.index]
        if stored.claimed:
            return "busy"
        if not self.asked.setdefault(frame.sender, Asked()).answer(frame.number):
            return "replayed"
        ready = self._is_offered(own, bank)
        if ready if alone else stored.tag == frame.tag:
            lane = own.lane if alone else stored.lane
            answer = frame.changed(type=FrameType.SUM, lane=lane)
        else:
            lacking = frame.members
            if place.tag == frame.tag and not alone and place.what[4] == frame.index:
                lacking &= ~place.seen
            most = wire.MAX_SHIFT[frame.width]
            if ready and (not own.lane.finite or own.lane.exponent - frame.unit <= most):
                lacking &= ~mine
            answer = frame.changed(type=FrameType.LACKING, members=lacking)
        asker = host.node.view.members[frame.sender - 1].mac
        answer.to = asker
        self._send_back(answer)
        return ""

    def _send_back(self, frame: StripeFrame) -> None:
        """By XDP_TX: at once, past whatever is queued. The frame is signed here, with the key that is there now."""
        host = self.host
        frame.sender, frame.key = host.node.number, host.node.view.seed
        host.lan.stripe(host, frame, host.lan.now, answers=True)

    # ---- the doorbell

    def _announce(self, frame: StripeFrame) -> None:
        """The list, once a round; where there is no room the next contribution tells it."""
        bank, host = frame.round & 1, self.host
        if self.announced[bank] >= frame.tag or host.lan.odds.lose_bell():
            return
        self.announced[bank] = frame.tag
        host.wake(host.list_up, frame.view, frame.round, frame.members, frame.unit)

    def _count(self, bank: int, tag: int, fragments: int) -> None:
        """The agent hears of some sums, and always of the last."""
        host, state = self.host, self.host.kernel.state
        count, clock = self.progress[bank].leave(), state.clock if state is not None else 0
        step = min(clock, max(4, clock // 16)) if fragments - count < clock else clock
        some = step and count % step == 0 and not host.lan.odds.lose_bell()
        if count == fragments or some:
            host.wake(host.sums_up)
