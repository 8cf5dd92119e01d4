# SPDX-License-Identifier: Apache-2.0
"""A Linux switch that adds (docs/linux-switch.md): the control as it is (`nicps.switch.adding`), and a model of its
XDP program, whose processors may stall at each step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from nicps import wire
from nicps.switch.adding import Adding, NoRoom
from nicps.switch.grants import Granted
from nicps.wire import FrameType
from tests.simulator.gradients import Lane, remainder_in, round_sum
from tests.simulator.places import NO_LANE, Asked, StripeFrame

if TYPE_CHECKING:
    from tests.simulator.host import Host
    from tests.simulator.lan import Lan

_FIRST_S = 0.2  # the switch is there before the hosts

What = tuple[int, int, int, int, int, int]  # list, unit, size, width, behind, its view


@dataclass(slots=True)
class Place:
    """One of two of a fragment: the sum that is being made, or what was left over of it, and the sum as it was sent."""

    tag: int = 0
    seen: int = 0
    what: What = (0, 0, 0, 0, 0, 0)
    total: int = 0
    made: Lane = NO_LANE
    not_finite: bool = False
    finished: bool = False


@dataclass(slots=True)
class Pair:
    """A fragment's places, under one claim."""

    claimed: bool = False
    places: tuple[Place, Place] = field(default_factory=lambda: (Place(), Place()))


class LinuxSwitch:
    """Where the first host is, when the LAN is cut.

    Attributes: `there`, it can be switched on; `memory`, fragments for which there may be room; `lose`, how many of its
    frames of a step are lost next; `boots`, by view, the boots that have made sums in it.
    """

    def __init__(self, lan: Lan) -> None:
        self._lan = lan
        self.there = True
        self.memory = 1 << 20
        self.lose: dict[int, int] = {}
        self.boots: dict[int, set[int]] = {}
        self.life = 0
        self.control: Adding | None = None
        self._granted: Granted | None = None
        self._asked: dict[int, Asked] = {}
        self._pairs: list[Pair] = []
        self._width = 0
        self._unknown: set[int] = set()
        self._due = 0.0
        lan.at(_FIRST_S, self.start)

    # ---- its life

    def start(self) -> None:
        """`nicps switch xdp run`"""
        if self.control is not None or not self.there:
            return
        lan = self._lan
        lan.note("SWITCH STARTS")
        network = lan.hosts[0].node.network
        boot = int(lan.now * 1e9) + 1
        self.control = Adding(
            self, network, boot, fresh=lambda: lan.odds.random.getrandbits(63) + 1
        )
        self._pump()

    def kill(self) -> None:
        """kill -9, and its program goes with it."""
        self._lan.note("SWITCH KILLED")
        self.control = self._granted = None
        self._pairs, self._width = [], 0
        self.life += 1

    def _pump(self) -> None:
        """What the control has to say, and the time for more."""
        control, lan, life = self.control, self._lan, self.life
        if control is None:
            return
        for frame in control.frames(lan.now):
            self._broadcast(frame)
        for line in control.lines(lan.now):
            lan.note(f"switch: {line}")
        self._due = due = lan.now + max(control.wait(lan.now, 1.0), 1e-4)

        def again() -> None:
            if self.life == life and self._due == due:
                self._pump()

        lan.at(due, again)

    def _broadcast(self, frame: bytes) -> None:
        step = frame[wire.HEADER_BYTES + _STEP_AT]
        if self.lose.get(step):
            self.lose[step] -= 1
            return
        self._lan.from_switch(lambda host: host.take_of_switch(frame))

    # ---- `Places`

    def grow(self, fragments: int, width: int) -> None:
        """Zeroed ones."""
        if fragments > self.memory:
            raise NoRoom(f"there is no memory for {fragments} fragments")
        self._lan.note(f"SWITCH ROOM {fragments} of {width}")
        self._pairs, self._width = [Pair() for _ in range(fragments)], width

    def enter_view(self, granted: Granted) -> None:
        """Add for this list."""
        before = self._granted
        self._lan.note(f"SWITCH VIEW {granted.number} {sorted(granted.live)}")
        if before is None or before.seed != granted.seed:
            self._asked = {}
        self._granted = granted

    def leave_view(self) -> None:
        """For nobody."""
        self._granted = None

    # ---- frames

    def hear(self, source: bytes, frame: bytes) -> None:
        """A small frame passes."""
        if self.control is not None:
            self.control.on_frame(self._lan.now, source, frame)
            self._pump()

    def take(self, frame: StripeFrame, source: bytes) -> str:
        """A frame of stripes comes: why it is dropped, or an empty text."""
        granted = self._granted
        if self.control is None:
            return "off"
        if granted is None or frame.view != granted.number:
            if frame.view not in self._unknown:
                self._unknown.add(frame.view)
                self.control.hear_of(self._lan.now, frame.view)
                self._pump()
            return "view"
        if granted.live.get(frame.sender) != source or frame.key != granted.seed:
            return "stranger"
        if frame.index >= min(frame.fragments, len(self._pairs)):
            return "range"
        pair = self._pairs[frame.index]
        if frame.type is FrameType.ASK:
            return self._answer(frame, pair, source)
        if frame.type is not FrameType.CONTRIBUTION:
            return "type"
        members, bit = frame.members, 1 << frame.sender - 1
        live = sum(1 << number - 1 for number in granted.live)
        if not members & bit or members & ~live or frame.width != self._width:
            return "malformed"
        if frame.lane.finite and frame.lane.exponent - frame.unit > wire.MAX_SHIFT[frame.width]:
            return "shift"
        self._go_on(self._add(frame, pair, granted), self.life)
        return ""

    def _go_on(self, steps: Iterator[None], life: int) -> None:
        """Until the end, or until this processor stalls."""
        lan = self._lan
        if self.life != life:
            return
        for _ in steps:
            if stall_s := lan.odds.stall_s():
                lan.note(f"switch  STALLS {stall_s}")
                lan.at(lan.now + stall_s, lambda: self._go_on(steps, life))
                return

    def _add(self, frame: StripeFrame, pair: Pair, granted: Granted) -> Iterator[None]:
        bit, tag = 1 << frame.sender - 1, frame.tag
        rest = frame.rest_view << 32 | frame.round - frame.behind if frame.behind else 0
        what = (
            *(frame.members, frame.unit, frame.fragments, frame.width),
            *(frame.behind, frame.rest_view),
        )
        yield
        if pair.claimed:
            return
        pair.claimed = True
        yield
        place, start = self.find(pair, tag, rest), 0
        fresh = place is not None and place.tag != tag
        if place is None or (not fresh and (place.what != what or place.seen & bit)):
            pair.claimed = False
            return
        if fresh:
            start = self.first(pair, place, rest, frame)
            yield
            place.seen, place.what, place.not_finite, place.finished = 0, what, False, False
            place.total, place.tag = start, tag
        place.not_finite |= not frame.lane.finite
        place.seen |= bit
        place.total += frame.lane.units(frame.unit, frame.width)
        last = place.seen == frame.members
        if last:
            place.made, place.total = round_sum(
                place.total, frame.width, frame.unit, place.not_finite
            )
            place.finished = True
            self._note_boot(
                frame.view
            )  # a sum can be asked for, and be committed, before it is sent
        pair.claimed = False
        yield
        if not last:
            return
        made = frame.changed(type=FrameType.SUM, lane=place.made, to=None)
        self._send(made, granted)

    def _note_boot(self, view: int) -> None:
        assert self.control is not None
        boots = self.boots.setdefault(view, set())
        boots.add(self.control.boot)
        if len(boots) > 1:
            self._lan.checks.fail(f"the switch was started again in view {view}")

    def find(self, pair: Pair, tag: int, rest: int) -> Place | None:
        """Where a contribution with that tag goes; None: it is too old."""
        same = [place for place in pair.places if place.tag == tag]
        older = [p for p in pair.places if p.tag < tag and not (rest and p.tag == rest)]
        return next(iter(same), None) or min(older, key=lambda p: p.tag, default=None)

    def first(self, pair: Pair, place: Place, rest: int, frame: StripeFrame) -> int:
        """What a sum begins with: the remainder of another one, in this round's units."""
        other = next(p for p in pair.places if p is not place)
        if not rest or other.tag != rest or not other.finished:
            return 0
        if other.what[2:4] != (frame.fragments, frame.width) or not other.made.finite:
            return 0
        assert self._granted is not None
        largest = max(self._granted.live)
        return remainder_in(other.total, other.what[1], other.made.exponent, frame.unit, largest)

    def _answer(self, frame: StripeFrame, pair: Pair, source: bytes) -> str:
        if pair.claimed:
            return "busy"
        if not self._asked.setdefault(frame.sender, Asked()).answer(frame.number):
            return "replayed"
        place = next((place for place in pair.places if place.tag == frame.tag), None)
        if place is not None and place.what[0] != frame.members:
            return "malformed"
        if place is not None and place.finished:
            answer = frame.changed(type=FrameType.SUM, lane=place.made, to=source)
        else:
            lacking = frame.members & ~(place.seen if place is not None else 0)
            answer = frame.changed(type=FrameType.LACKING, members=lacking, to=source)
        assert self._granted is not None
        self._send(answer, self._granted)
        return ""

    def _send(self, frame: StripeFrame, granted: Granted) -> None:
        frame.sender, frame.key = 0, granted.seed
        if self._lan.lose.get(frame.type):
            self._lan.lose[frame.type] -= 1
            return
        life = self.life

        def take(host: Host) -> None:
            if (-1, host.index) not in self._lan.starved and self.life == life:
                host.kernel.stripes.take(frame)

        only = None
        if frame.to is not None:
            only = next(host for host in self._lan.hosts if host.mac == frame.to)
        self._lan.from_switch(take, only)


_STEP_AT = wire.Layout.of(wire.Switch).offsets[wire.Layout.of(wire.Switch).names.index("step")]
