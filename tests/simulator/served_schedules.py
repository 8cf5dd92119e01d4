# SPDX-License-Identifier: Apache-2.0
"""Schedules of faults for jobs with parameter servers, from a seed."""

from __future__ import annotations

import random

from nicps.exchange import Exchange
from nicps.job.plan import Plan
from nicps.protocol import Action, Pulled, ReadByAll, SendServed, Stepped, Timings
from nicps.protocol.serving import pulled_fragments
from nicps.wire import FrameType
from tests.simulator.faults import LASTS_S, MOMENTS, Faults, Moment
from tests.simulator.host import Host
from tests.simulator.lan import Conditions, Lan
from tests.simulator.served_checks import ServedChecks
from tests.simulator.served_host import ServedHost

FORMED_S = 0.8  # about when training begins
_AT_A_TIME = (
    *("kill", "kill", "lead kill", "lead kill", "pause", "lead pause"),
    *("cut", "cut", "cut in three", "isolate", "lead isolate", "lose", "renew", "lead renew"),
)
_AT_A_MOMENT = ("kill", "kill", "lead kill", "pause", "lead pause", "isolate", "lose", "renew")
_OTHER_JOBS = ("hand-out", "files", "state", "broadcast", "collecting")
_MOMENTS = {name: moment for name, moment in MOMENTS.items() if name not in _OTHER_JOBS}
#: The moments of servers: a push, a pull, or a contribution leaves, or something is whole.
_OF_SERVERS: dict[str, Moment] = {
    "pushing": lambda host, action: _sends(action, FrameType.PUSH),
    "pulling": lambda host, action: _sends(action, FrameType.PULL),
    "contributing": lambda host, action: _sends(action, FrameType.CONTRIBUTION),
    "stepped": lambda host, action: isinstance(action, Stepped),
    "pulled": lambda host, action: isinstance(action, Pulled),
    "read": lambda host, action: isinstance(action, ReadByAll),
}
_FRAMES = (
    *(FrameType.PUSH, FrameType.PULL, FrameType.HELD, FrameType.TAKEN, FrameType.CONTRIBUTION),
)


class ServedLan(Lan):
    """Attributes: `servers`, how many there are; `every`, pushes between synchronisations; `parts`, made so far;
    `sets`, where set 2 begins, if workers have partners; `channels`, to which parameters are dealt out; `alike`, all
    hosts' programs decide alike on tests, otherwise those of hosts that do not lead want more.
    """

    def __init__(self, rng: random.Random, hosts: int, seed: int, conditions: Conditions) -> None:
        width = rng.choice((16, 32))
        super().__init__(
            hosts,
            conditions,
            seed,
            plan=Plan("job", batch=hosts, width=width, alarm_below=0.0, exchange=Exchange.SERVERS),
            rounds=rng.randint(4, 12),
            test_every=rng.choice((3, 5)),
            fragments=rng.choice((1, 4, 12)),
            compute_s=rng.choice((0.002, 0.01, 0.05)),
            drift=rng.choice((0.0, 1e-3, 0.05)),
            timings=Timings(),
        )
        if (
            conditions.loss > 0.01
        ):  # in the simulator's short windows a lost one costs a whole time-out
            self.fragments = min(self.fragments, 4)
        elif conditions.loss:
            self.patience = 3  # seed 730387: 12 rounds of 5 s each
        self.servers = rng.choice((1, 1, 2, 3))
        self.every = rng.choice((0, 1, 2, 4, 8))
        self.parts = 0
        self.sets = 0  # where set 2 begins, in fragments of parameters
        apart = random.Random(f"partners {seed}")  # other draws stay what they were
        if apart.random() < 0.3:
            self.every = 1
            self.sets = apart.randint(1, pulled_fragments(self.fragments, width))
        apart = random.Random(f"bulk {seed}")
        self.channels = apart.choice((0, 0, 1, 2, 3, 8))
        self._late_s = apart.choice((0.0, 1e-4, 2e-3)) if self.channels > 1 else 0.0
        self.alike = random.Random(f"alike {seed}").random() < 0.7
        self.checks.served = ServedChecks(self.checks)

    def _host(self, index: int, rate: float) -> Host:
        return ServedHost(self, index, rate)

    def overtaken_s(self, channel: int) -> float:
        """How long questions and steps of that channel wait for more urgent ones."""
        return self._late_s * max(0, self.channels - 1 - channel)


def lan_of(seed: int, hosts: int | None = None) -> ServedLan:
    """The LAN of a seed, with its faults laid out, and the job submitted."""
    rng = random.Random(f"servers {seed}")
    hosts = hosts or rng.randint(3, 7)
    conditions = Conditions()
    if rng.random() < 0.5:
        conditions = Conditions(
            loss=rng.choice((0.0, 0.01, 0.05)),
            duplicate=rng.choice((0.0, 0.01)),
            jitter_s=rng.choice((0.0, 1e-4)),
            late=rng.choice((0.0, 0.01)),
        )
    lan = ServedLan(rng, hosts, seed, conditions)
    if rng.random() < 0.4:
        rng.choice(lan.hosts).slowness = rng.choice((3.0, 10.0))
    faults = Faults(lan, rng)
    lasts = 0.2 + lan.rounds * (lan.compute_s * 1.5 * max(1, lan.every) + 0.01)
    _lay_out(lan, faults, rng, lasts)
    for _ in range(rng.randint(0, 4)):
        if rng.random() < 0.4:
            start = FORMED_S + rng.random() * lasts
            faults.at_time(start, rng.choice(_AT_A_TIME), rng.choice(lan.hosts))
        else:
            moments = _OF_SERVERS if rng.random() < 0.6 else _MOMENTS
            name = rng.choice(list(moments))
            nth = rng.choice((1, 2, 3, 10, 30))
            faults.when(moments[name], name, nth, rng.choice(_AT_A_MOMENT))
    lan.hosts[0].submit()
    return lan


def _sends(action: Action, kind: FrameType) -> bool:
    return isinstance(action, SendServed) and action.type == kind


def _lay_out(lan: ServedLan, faults: Faults, rng: random.Random, lasts: float) -> None:
    """Frames of a kind are lost in a row, or do not pass from one host to another."""
    for _ in range(rng.choice((0, 0, 1, 3))):
        kind, count = rng.choice(_FRAMES), rng.randint(1, 40)

        def lose(kind: int = kind, count: int = count) -> None:
            lan.lose[kind] = lan.lose.get(kind, 0) + count

        lan.at(FORMED_S + rng.random() * lasts, lose)
    if rng.random() < 0.15:
        one, other = rng.sample(range(len(lan.hosts)), 2)
        start = FORMED_S + rng.random() * lasts
        until = start + rng.choice(LASTS_S)
        lan.trouble(until)
        lan.at(start, lambda: lan.starved.add((one, other)))
        lan.at(until, lambda: lan.starved.discard((one, other)))
