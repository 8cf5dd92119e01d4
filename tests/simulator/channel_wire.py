# SPDX-License-Identifier: Apache-2.0
"""A LAN whose frames of stripes have channels: each has its own sums, and frames of channels overtake each other."""

from __future__ import annotations

import random
from typing import Any

from nicps import wire
from nicps.protocol.plan import ChannelPlan
from tests.simulator.host import Host
from tests.simulator.lan import Conditions, Lan
from tests.simulator.places import KernelFrame
from tests.simulator.sums import SumChecks


class ChannelWire(Lan):
    """Attributes: `part_s`, between two parts of a step; `late_channels`, what the LAN holds up."""

    def __init__(self, hosts: int, conditions: Conditions, seed: int, **more: Any) -> None:
        self.seed = seed
        self._sums: dict[int, SumChecks] = {}
        self._plans = random.Random(f"plans {seed}")
        super().__init__(hosts, conditions, seed, **more)

    def draw_delays(self, rng: random.Random) -> None:
        """How fast parts follow each other, and whose frames are late."""
        self.part_s = rng.choice((1e-4, 1e-3, 5e-3))
        self.late_channels = rng.choice(("none", "bulk", "urgent", "any"))

    def sums_of(self, channel: int) -> SumChecks:
        """What was offered to that channel's rounds, and what it came to."""
        if not channel:
            return self.checks.sums
        if channel not in self._sums:
            self._sums[channel] = SumChecks(_Relay(self))  # type: ignore[arg-type]
        return self._sums[channel]

    def plans(self) -> tuple[ChannelPlan, ...]:
        """A random plan: up to 8 channels, up to 6 rounds each."""
        rng = self._plans
        channels = rng.choice((1, 2, 2, 3, 3, 4, 8))
        most = min(6, wire.MOST_ROUNDS // channels)
        found = []
        sizes = (1, 3, 9) if self.conditions.loss else (1, 3, 9, 40)
        for channel in range(channels):
            rounds = tuple(rng.choice(sizes) for _ in range(rng.randint(1, most)))
            urgency = rng.choice((channel, 7 - channel))
            found.append(ChannelPlan(urgency, max(rounds), rounds))
        return tuple(found)

    def _delay(self, channel: int) -> float:
        """What holds up a frame of that channel."""
        held = {"none": False, "bulk": channel == 0, "urgent": channel > 0, "any": True}
        if not held[self.late_channels] or self.odds.random.random() < 0.7:
            return 0.0
        return self.odds.random.random() * 2e-3

    def stripe(
        self, sender: Any, frame: KernelFrame, when: float, *, answers: bool = False
    ) -> None:
        """A frame of a channel, for one host or for all."""
        life, channel = sender.life, getattr(sender, "channel", 0)
        if self.lose.get(frame.type):
            self.lose[frame.type] -= 1
            return

        def take(host: Host) -> None:
            passes = (sender.index, host.index) not in self.starved
            if passes and (sender.life == life or when <= sender.killed_at):
                host.at(channel).kernel.stripes.take(frame)

        floods = frame.to is None or self.odds.flood()
        only = None if floods else next(h for h in self.hosts if h.mac == frame.to)
        real = self.hosts[sender.index]
        way = 2 * channel + answers
        self._deliver(real, when + self._delay(channel), take, only, way=way)


class _Relay:
    """The violations of a channel are the LAN's."""

    def __init__(self, lan: ChannelWire) -> None:
        self.lan = lan

    def fail(self, what: str) -> None:
        """Stop the simulation."""
        self.lan.checks.fail(what)
