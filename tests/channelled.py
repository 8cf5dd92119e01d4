# SPDX-License-Identifier: Apache-2.0
"""Three members' rings in a phase with channels, in one process: what one sends, the others hear, or not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from nicps import wire
from nicps.exchange import Exchange
from nicps.protocol import Phase
from nicps.protocol.actions import Committed, Send
from nicps.protocol.carried import Carried, Offer
from nicps.protocol.channels import ChannelledRing
from nicps.protocol.kernel import Receiver
from nicps.protocol.phase import AdaptiveTimeout
from nicps.protocol.plan import ChannelPlan
from nicps.protocol.signals import Signal, Steps
from nicps.protocol.view import View
from tests.ring_parts import START, TIMINGS, VIEW
from tests.rooms import NoKernel

#: The conversion of what is offered ahead.
AHEAD = 9
#: Channel 0 has two rounds a step, channel 1 has three, channel 2 has one.
PLANS = (ChannelPlan(0, 8, (8, 4)), ChannelPlan(1, 3, (3, 2, 1)), ChannelPlan(2, 2, (2,)))


class Kernel(NoKernel):
    """All lanes are converted, and all sums are here, but of the channels in `lacks`."""

    def __init__(self, channel: int = 0, lacks: set[int] | None = None) -> None:
        super().__init__()
        self.channel = channel
        self.lacks = lacks if lacks is not None else set()

    def of_channel(self, channel: int) -> Receiver:
        return Kernel(channel, self.lacks)  # type: ignore[return-value]

    def count(self, round_: int, view: int, sender: int) -> int:
        return 0 if self.channel in self.lacks else 90

    def reached(self, round_: int, view: int, first: int, end: int) -> tuple[int, int]:
        return (first, first) if self.channel in self.lacks else (end, end)

    def missing_sums(
        self, round_: int, view: int, first: int, end: int, limit: int
    ) -> list[tuple[int, int]]:
        return [(first, end - first)] if self.channel in self.lacks and first < end else []

    def absent(
        self, round_: int, view: int, first: int, count: int, members: int
    ) -> dict[int, int]:
        return {}

    def next_to_send(self, round_: int, aggregator: int) -> int:
        return 0

    def converted(self, round_: int, conversion: int, first: int, end: int) -> int:
        return end - first


def phase_of(quorum: int = 12, **changes: object) -> Phase:
    """Three members train with four samples each."""
    phase = Phase(
        1,
        1,
        wire.PhaseKind.TRAIN,
        first_round=1,
        fragments=8,
        last_fragments=8,
        width=16,
        shares=(4, 4, 4),
        quorum=quorum,
        exchange=Exchange.STRIPES,
        channels=PLANS,
    )
    return replace(phase, **changes)  # type: ignore[arg-type]


class Member:
    """One ring, and what has come of its events."""

    def __init__(
        self, number: int, phase: Phase, view: View = VIEW, carried: Carried | None = None
    ) -> None:
        self.number, self.kernel = number, Kernel()
        timeout = AdaptiveTimeout(TIMINGS)
        whose = phase, view, number, self.kernel, TIMINGS, timeout
        self.ring = ChannelledRing(*whose, carried, START)  # type: ignore[arg-type]
        self.commits: list[Committed] = []
        self.other: list[object] = []

    def done(self, channel: int) -> list[int]:
        """The rounds of that channel that it has committed."""
        return [commit.round for commit in self.commits if commit.channel == channel]


class Members:
    """All of them; `lost` says which frames do not get to whom, `now` what time it is."""

    now = START

    def __init__(self, phase: Phase | None = None, view: View = VIEW) -> None:
        self.phase, self.view = phase or phase_of(), view
        self.all = {k: Member(k, self.phase, view) for k in view.order}
        self.lost: Callable[[int, int, wire.Frame], bool] = lambda sender, to, frame: False
        self.sent: list[tuple[int, wire.Frame]] = []

    def __getitem__(self, number: int) -> Member:
        return self.all[number]

    def begin(self) -> None:
        """The lead makes the token."""
        self.take(self.view.lead, self[self.view.lead].ring.create(self.now))

    def take(self, number: int, steps: Steps) -> None:
        """Carry out what has come of an event, and of what it leads to at the others."""
        queue = [(number, steps)]
        while queue:
            whose, some = queue.pop(0)
            for step in some:
                if isinstance(step, Committed):
                    self[whose].commits.append(step)
                if not isinstance(step, Send):
                    self[whose].other.append(step)
                    continue
                self.sent.append((whose, step.frame))
                for other in self.all:
                    if other == whose or self.lost(whose, other, step.frame):
                        continue
                    queue.append((other, self._hear(other, step.frame)))

    def _hear(self, number: int, frame: wire.Frame) -> Steps:
        ring = self[number].ring
        if isinstance(frame.body, wire.Token):
            return ring.on_token(self.now, wire.unpack(frame.pack()))
        if isinstance(frame.body, wire.Want):
            return ring.on_want(self.now, frame)
        return []

    def offer(self, channel: int, *numbers: int, samples: int = 4) -> None:
        """These members offer to their open round of that channel; by default all."""
        for number in numbers or self.all:
            ring = self[number].ring
            offer = Offer(ring.rounds[channel], samples, 0, False, 7, channel)
            self.take(number, ring.offer(self.now, offer))

    def offer_ahead(self, channel: int, *numbers: int) -> None:
        """These offer to the round after their open one."""
        for number in numbers or self.all:
            ring = self[number].ring
            offer = Offer(ring.rounds[channel] + 1, 4, 0, False, AHEAD, channel)
            self.take(number, ring.offer(self.now, offer))

    def read(self, channel: int, round_: int, *numbers: int) -> None:
        """Their programs have read that sum."""
        for number in numbers or self.all:
            self.take(number, self[number].ring.read(self.now, round_, 0, channel))

    def go_on(self, *, saves: bool = False) -> None:
        """The lead's program has decided."""
        lead = self.view.lead
        self.take(lead, self[lead].ring.go_on(self.now, saves=saves))

    def tick(self, now: float) -> None:
        """Time has passed, at all."""
        for number in self.all:
            self.take(number, self[number].ring.tick(now))

    def rounds(self) -> set[tuple[int, ...]]:
        """The open rounds of the members, by channel."""
        return {member.ring.rounds for member in self.all.values()}

    def step(self) -> None:
        """A whole step, channel by channel: all offer, and read."""
        step = self[self.view.lead].ring.step
        assert step is not None
        current = step.current
        for channel in range(self.phase.channel_count):
            for place in range(self.phase.rounds_per_step(channel)):
                self.offer(channel)
                self.read(channel, self.phase.first_of(current, channel) + place)


def flags_in(steps: list[Signal] | Steps, channel: int) -> list[int]:
    """The flags of the WANT frames of that channel."""
    frames = [step.frame for step in steps if isinstance(step, Send)]
    wants = [frame for frame in frames if isinstance(frame.body, wire.Want)]
    flags = [frame.header.flags for frame in wants]
    return [flag for flag in flags if wire.channel_of(flag) == channel]
