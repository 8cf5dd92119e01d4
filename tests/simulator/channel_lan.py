# SPDX-License-Identifier: Apache-2.0
"""A LAN of hosts with channels, and schedules of faults from a seed. Frames of channels overtake each other."""

from __future__ import annotations

import random
from collections.abc import Mapping

from nicps import wire
from nicps.exchange import Exchange
from nicps.job.plan import Plan
from nicps.protocol import Action, Committed, NodeState, Send, Timings
from nicps.wire import FrameType
from tests.simulator.channel_checks import ChannelChecks
from tests.simulator.channel_host import ChannelHost
from tests.simulator.channel_wire import ChannelWire
from tests.simulator.faults import Moment
from tests.simulator.host import Host
from tests.simulator.lan import HOP_S, Conditions
from tests.simulator.schedules import Outcome, conditions_of

LIMIT_S = 60.0
_FORMED_S = 0.8
_LASTS_S = (0.05, 0.5, 2.0)
_AT_A_TIME = (
    "kill",
    "kill",
    "lead kill",
    "pause",
    "lead pause",
    "isolate",
    "lose",
    "renew",
    "starve",
)
_AT_A_MOMENT = ("kill", "kill", "lead kill", "lead kill", "pause", "isolate", "lose", "renew")
_LOST = (
    *(FrameType.WANT, FrameType.WANT, FrameType.TOKEN, FrameType.DECISION, FrameType.VOTE),
    *(FrameType.CONTRIBUTION, FrameType.SUM, FrameType.ASK),
)


def between_commits(host: Host, action: Action) -> bool:
    """A round of a step is committed at a host, and another one of that step is not."""
    ring = host.node.rings.current
    step = getattr(ring, "step", None)
    return isinstance(action, Committed) and step is not None and bool(step.under_way)


def _announces(flag: int) -> Moment:
    def moment(host: Host, action: Action) -> bool:
        wants = isinstance(action, Send) and action.frame.type is FrameType.WANT
        return wants and bool(action.frame.header.flags & flag)

    return moment


MOMENTS: dict[str, Moment] = {
    "between two commits": between_commits,
    "commit": lambda host, action: isinstance(action, Committed),
    "offer": _announces(wire.Flag.OFFERED),
    "mark": _announces(wire.Flag.COMPLETE),
    "decision": lambda host, action: (
        isinstance(action, Send) and action.frame.type is FrameType.DECISION
    ),
}


class ChannelLan(ChannelWire):
    """Attributes: `free_at`, when a channel's way out of a host is free.

    `moments_of_faults`, by name; `nths`, at the how manieth of these; `most_faults`.
    """

    checks: ChannelChecks
    moments_of_faults: Mapping[str, Moment] = MOMENTS
    nths = 1, 2, 3, 10, 40
    most_faults = 5

    def __init__(
        self,
        seed: int,
        rng: random.Random,
        hosts: int,
        conditions: Conditions,
        timings: Timings | None = None,
    ) -> None:
        super().__init__(
            hosts,
            conditions,
            seed,
            plan=Plan(
                "job",
                batch=10 * hosts,
                width=16,
                quorum=rng.choice((0.6, 0.9, 1.0, 1.0)),
                alarm_below=0.0,
                exchange=Exchange.STRIPES,
            ),
            rounds=rng.randint(3, 10),
            compute_s=rng.choice((0.002, 0.01, 0.05)),
            drift=rng.choice((0.0, 1e-3, 0.05)),
            timings=timings or Timings(),
        )
        self.draw_delays(rng)
        self.free_at: dict[tuple[int, int], float] = {}
        self.checks = ChannelChecks(self)
        if self.plan.quorum < 1 and rng.random() < 0.5:
            rng.choice(self.hosts).slowness = rng.choice((3.0, 10.0))

    @property
    def lasts_s(self) -> float:
        """About how long all of it takes."""
        return 0.2 + self.rounds * (self.compute_s * 1.5 + 0.03)

    def _host(self, index: int, rate: float) -> ChannelHost:
        return ChannelHost(self, index, rate)  # type: ignore[arg-type]


class ChannelFaults:
    """Faults one at a time, so that a majority is always there."""

    def __init__(self, lan: ChannelLan, rng: random.Random) -> None:
        self.lan, self.rng = lan, rng

    def _may(self, host: ChannelHost) -> bool:
        """The others are a majority by themselves, and hear each other."""
        view = max((h.node.view for h in self.lan.hosts if not h.dead), key=lambda v: v.number)
        if host.dead or host.paused or self.lan.groups or host.node.view.number != view.number:
            return False
        if not view.live:  # the network is not formed yet
            return False
        up = {
            h.node.number
            for h in self.lan.hosts
            if not h.dead and not h.paused and h.node.view.number == view.number
            if h.node.state is NodeState.MEMBER and not h.node.changing
        }
        trained = [
            h for h in self.lan.hosts if h is not host and not h.dead and not h.program.blank
        ]
        return up == view.live and view.agreed(up - {host.node.number}) and len(trained) > 1

    def strike(self, kind: str, host: ChannelHost) -> None:
        """One fault of that kind."""
        lan, rng = self.lan, self.rng
        if kind.startswith("lead "):
            host = next((h for h in lan.hosts if not h.dead and h.node.leads), host)  # type: ignore[assignment]
            kind = kind.removeprefix("lead ")
        lasts = rng.choice(_LASTS_S) * rng.random()
        lan.trouble(lan.now + lasts)
        if kind == "lose":
            frame = int(rng.choice(_LOST))
            lan.lose[frame] = lan.lose.get(frame, 0) + rng.randint(1, 6)
        elif kind == "renew":
            if host.node.state is NodeState.MEMBER and not host.dead:
                lan.note(f"RENEW h{host.index + 1}")
                host.renew()
        elif kind == "starve":
            other = rng.choice([h for h in lan.hosts if h is not host])
            pair = (host.index, other.index)
            lan.starved.add(pair)
            lan.at(lan.now + lasts, lambda: lan.starved.discard(pair))
        elif not self._may(host):
            return
        elif kind == "kill":
            host.kill()
            lan.at(lan.now + lasts + 0.01, lambda: host.restart() if host.dead else None)
        elif kind == "pause":
            host.pause()
            lan.at(lan.now + lasts, lambda: host.resume() if host.paused else None)
        elif kind == "isolate":
            alone = frozenset({host.index})
            groups = [alone, frozenset(range(len(lan.hosts))) - alone]
            lan.cut(groups)
            lan.at(lan.now + lasts, lambda: lan.cut([]))

    def at_time(self, time: float, kind: str, host: ChannelHost) -> None:
        """A fault at some time."""
        self.lan.trouble(time)
        self.lan.at(time, lambda: self.strike(kind, host))

    def at_moment(self, name: str, nth: int, kind: str) -> None:
        """At the n-th time that any host comes to that moment."""
        seen = 0

        def come(host: Host, action: Action) -> bool:
            nonlocal seen
            if not self.lan.moments_of_faults[name](host, action):
                return False
            seen += 1
            if seen < nth:
                return False
            self.lan.note(f"MOMENT {name} at {host.node.name}")
            assert isinstance(host, ChannelHost)
            if self.rng.random() < 0.5:
                self.strike(kind, host)
            else:
                self.at_time(self.lan.now + 2e-4 * self.rng.random(), kind, host)
            return True

        self.lan.moments.append(come)


def lan_of(seed: int, hosts: int | None = None, faults: int | None = None) -> ChannelLan:
    """The LAN of a seed, with its faults laid out, and the job begun.

    Args:
        faults: how many, at most; default: as many as the seed has.
    """
    return laid_out(seed, hosts, random.Random(f"channels {seed}"), ChannelLan, faults)


def laid_out(
    seed: int,
    hosts: int | None,
    rng: random.Random,
    kind: type[ChannelLan],
    most: int | None = None,
) -> ChannelLan:
    """A LAN of that kind, with the faults that `rng` draws, at most so many, and what it does begun."""
    hosts = hosts or rng.randint(3, 7)
    conditions = conditions_of(rng, 0.6)
    lan = kind(seed, rng, hosts, conditions)
    faults = ChannelFaults(lan, rng)
    for _ in range(rng.randint(0, lan.most_faults if most is None else most)):
        if rng.random() < 0.4:
            start = _FORMED_S + rng.random() * lan.lasts_s
            host = rng.choice(lan.hosts)
            assert isinstance(host, ChannelHost)
            faults.at_time(start, rng.choice(_AT_A_TIME), host)
        else:
            nth = rng.choice(lan.nths)
            faults.at_moment(rng.choice(list(lan.moments_of_faults)), nth, rng.choice(_AT_A_MOMENT))
    for host in lan.hosts[1:]:
        host.node.join(host.clock())
        host.arm()
    first = lan.hosts[0]
    lan.at(0.01, lambda: first.do(first.node.start(first.clock(), seed + 1)))
    return lan


def _all_stand_by(lan: ChannelLan) -> bool:
    """The job has ended, though its lead is lost: all that are left have heard so."""
    ended = False
    for host in lan.hosts:
        if not host.dead:
            if host.node.state is not NodeState.STANDBY:
                return False
            ended |= host.node.ended
    return ended


def finish(lan: ChannelLan) -> Outcome:
    """Run it to its end.

    Raises:
        Violation: an invariant does not hold, or a channel waits for ever.
    """
    limit = max(lan.calm_at, _FORMED_S) + LIMIT_S
    if not lan.run(lambda: bool(lan.ended) or _all_stand_by(lan), limit):
        places = [
            f"{h.node.name}{' dead' if h.dead else ''} {h.node.state.value} view {h.node.view.number} rounds "
            f"{h.node.rings.current.rounds if h.node.rings.current else None} trained {h.program.trained}"  # type: ignore[attr-defined]
            for h in lan.hosts
        ]
        lan.checks.fail(f"the job has not ended {LIMIT_S} s after the last fault: {places}")
    lan.run(lambda: False, lan.now + 10 * HOP_S)
    return Outcome("done", "", lan)
