# SPDX-License-Identifier: Apache-2.0
"""Jobs whose steps have a plan, on several channels, under schedules of faults from a seed: their life as it is.

The faults, and how a job may end, are those of all jobs (`tests.simulator.schedules`).
"""

from __future__ import annotations

import random

from nicps.exchange import Exchange
from nicps.job.plan import Plan
from nicps.protocol import Timings
from tests.simulator.channel_lan import between_commits
from tests.simulator.channel_wire import ChannelWire
from tests.simulator.faults import MOMENTS, Faults
from tests.simulator.lan import Conditions
from tests.simulator.planned_checks import PlannedChecks
from tests.simulator.planned_host import PlannedHost
from tests.simulator.schedules import (
    AT_A_MOMENT,
    AT_A_TIME,
    FORMED_S,
    PARTINGS,
    WATCH_S,
    conditions_of,
    watch,
)


class PlannedLan(ChannelWire):
    """Attributes: `first_plan`, that of the training programs when they have built the model."""

    checks: PlannedChecks

    def __init__(self, seed: int, rng: random.Random, hosts: int, conditions: Conditions) -> None:
        admit = rng.random() < 0.2
        plan = Plan(
            "job",
            batch=10 * hosts,
            width=16,
            quorum=rng.choice((0.6, 0.9, 1.0, 1.0)),
            alarm_below=rng.choice((0.0, 0.0, 0.0, 0.5)),
            admit=admit,
            exchange=Exchange.STRIPES,
            planned=True,
        )
        super().__init__(
            hosts,
            conditions,
            seed,
            plan=plan,
            rounds=rng.randint(4, 12),
            test_every=rng.choice((3, 5, 8)),
            compute_s=rng.choice((0.002, 0.01, 0.05)),
            drift=rng.choice((0.0, 1e-3, 0.05)),
            timings=Timings(alone=hosts == 2),
            late=rng.randint(1, 2) if admit and hosts > 2 else 0,
        )
        self.draw_delays(rng)
        self.checks = PlannedChecks(self)
        self.first_plan = self.plans()
        self.saving_s = rng.choice((0.01, 0.05, 0.5))
        if plan.quorum < 1 and rng.random() < 0.5:
            rng.choice(self.hosts).slowness = rng.choice((3.0, 10.0))

    def _host(self, index: int, rate: float) -> PlannedHost:
        return PlannedHost(self, index, rate)


def lan_of(seed: int, hosts: int | None = None) -> PlannedLan:
    """The LAN of a seed, with its faults laid out, and the job submitted."""
    rng = random.Random(f"planned {seed}")
    hosts = hosts or rng.randint(3, 7)
    lan = PlannedLan(seed, rng, hosts, conditions_of(rng, 0.5))
    faults = Faults(lan, rng)
    faults.of_stripes(FORMED_S)
    there = lan.hosts[:hosts]
    for host in lan.hosts[hosts:]:
        time = 1 + rng.random() * 2
        lan.trouble(time)
        lan.at(time, lambda host=host: host.restart() if host.dead else None)
    lasts = 0.2 + lan.rounds * (lan.compute_s * 1.5 + 0.03)
    moments = {**MOMENTS, "between two commits": between_commits}
    for _ in range(rng.randint(0, 5)):
        if rng.random() < 0.5:
            faults.at_time(
                FORMED_S + rng.random() * lasts, rng.choice(AT_A_TIME), rng.choice(there)
            )
        else:
            name, nth = (
                rng.choice([*moments, *["between two commits"] * 5]),
                rng.choice((1, 2, 10, 40)),
            )
            faults.when(moments[name], name, nth, rng.choice(AT_A_MOMENT))
    if rng.random() < 0.3:
        for _ in range(rng.randint(1, 2)):
            faults.at_time(FORMED_S + rng.random() * lasts, rng.choice(PARTINGS), rng.choice(there))
    if rng.random() < 0.1:
        start = FORMED_S + rng.random() * lasts
        faults.at_time(start, rng.choice(("cancel", "lead cancel")), rng.choice(there))
    lan.hosts[0].submit()
    lan.at(WATCH_S, lambda: watch(lan, "", 0.0))
    return lan
