# SPDX-License-Identifier: Apache-2.0
"""Schedules of faults from a seed, and what must have become of the job once they stop."""

from __future__ import annotations

import random
from dataclasses import dataclass

from nicps.exchange import Exchange
from nicps.job.plan import Plan
from nicps.protocol import Timings
from tests.simulator import served_schedules
from tests.simulator.checks import Violation
from tests.simulator.faults import MOMENTS, Faults, member
from tests.simulator.lan import Conditions, Lan
from tests.simulator.standing import stuck

FORMED_S = 0.8  # about when the job has been handed out
LIMIT_S = 60.0  # to end in, once no fault is left
_CERTAIN_S = 3.0  # after which those who may not go on are taken at their word
WATCH_S = 0.5  # between two looks at that

AT_A_TIME = (
    *("kill", "kill", "lead kill", "lead kill", "pause", "lead pause", "program", "lead program"),
    *("cut", "cut", "cut", "cut", "cut in three", "isolate", "lead isolate", "lose", "tamper"),
    *("renew", "lead renew"),
)
AT_A_MOMENT = (
    "kill",
    "kill",
    "lead kill",
    "pause",
    "lead pause",
    "isolate",
    "program",
    "lose",
    "renew",
)
#: Of which `exchange_of` chooses one.
EXCHANGES = (
    *(Exchange.BROADCAST, Exchange.SWITCH, Exchange.STRIPES, Exchange.LINUX_SWITCH),
    Exchange.SERVERS,
)
#: What has come later: it is laid over the schedules that were there.
PARTINGS = ("sicken", "lead sicken", "leave", "lead leave", "hang", "hang", "lead hang", "break")


@dataclass(frozen=True)
class Outcome:
    """`what`: "done", "stopped" (with a reason that the rules allow) or "standing by"; `why`."""

    what: str
    why: str
    lan: Lan


def conditions_of(rng: random.Random, part: float) -> Conditions:
    """What a LAN does to frames: in that part of the schedules it may do something."""
    if rng.random() >= part:
        return Conditions()
    return Conditions(
        loss=rng.choice((0.0, 0.01, 0.05)),
        duplicate=rng.choice((0.0, 0.01)),
        jitter_s=rng.choice((0.0, 1e-4)),
        late=rng.choice((0.0, 0.01)),
    )


def exchange_of(seed: int) -> Exchange:
    """The exchange of a seed's job, where seeds have all exchanges (`--exchange all`).

    Its generator is its own. So the schedule is that of the seed in jobs that all have this exchange.
    """
    return random.Random(f"exchange {seed}").choice(EXCHANGES)


def lan_of(
    seed: int, hosts: int | None = None, series: Exchange | None = None, steps: bool = False
) -> Lan:
    """The LAN of a seed, with its faults laid out, and the job submitted.

    Args:
        series: of jobs with that exchange.
        steps: of jobs whose steps take several rounds (in stripes).
    """
    if series == Exchange.SERVERS:
        served = served_schedules.lan_of(seed, hosts)
        served.at(WATCH_S, lambda: watch(served, "", 0.0))
        return served
    rng = random.Random(seed)
    hosts = hosts or rng.randint(3, 9)
    alone = hosts == 2
    conditions = conditions_of(rng, 0.5)
    admit = rng.random() < 0.2
    more = random.Random(~seed)  # what has come later leaves older schedules as they were
    exchange = Exchange.SWITCH if more.random() < 0.4 else Exchange.BROADCAST
    exchange = Exchange.STRIPES if steps else series or exchange
    lan = Lan(
        hosts,
        conditions,
        seed,
        plan=Plan(
            "job",
            batch=10 * hosts,
            width=16,
            quorum=max(rng.choice((0.6, 0.9, 1.0)), float(steps)),
            alarm_below=rng.choice((0.0, 0.0, 0.0, 0.5)),
            admit=admit,
            exchange=exchange,
            steps=steps,
        ),
        rounds=rng.randint(10, 30) // (3 if steps else 1),
        fragments=rng.choice((1, 4, 12)),
        compute_s=rng.choice((0.002, 0.01, 0.05)),
        drift=rng.choice((0.0, 1e-3, 0.05)),
        timings=Timings(alone=alone),
        late=rng.randint(1, 2) if admit and not alone else 0,
        too_large=0.0 if steps else 0.02,
    )
    if lan.plan.quorum < 1 and more.random() < 0.5:  # the others do not wait for it
        more.choice(lan.hosts).slowness = more.choice((3.0, 10.0))
    lan.saving_s = random.Random(f"saving {seed}").choice((0.01, 0.05, 0.5))
    lan.spare = random.Random(f"spare {seed}").choice((0, 3)) if steps else 0
    lan.more = (
        more  # goes on where the schedule ends: the same numbers twice would tie the two together
    )
    faults = Faults(lan, rng)
    if exchange.absolute:
        faults.of_stripes(FORMED_S)
        lan.too_large = 0.0 if steps else lan.too_large
    if exchange.central:
        faults.of_linux_switch(FORMED_S)
    for host in lan.hosts[hosts:]:
        time = 1 + rng.random() * 2
        lan.trouble(time)
        lan.at(time, lambda host=host: host.restart() if host.dead else None)
    there = lan.hosts[:hosts]
    lasts = 0.2 + lan.rounds * (lan.compute_s * 1.5 + 0.003)  # about so long
    for _ in range(rng.randint(1, 5)):
        if rng.random() < 0.5:
            start = FORMED_S + rng.random() * (lasts if rng.random() < 0.9 else -FORMED_S)
            faults.at_time(start, rng.choice(AT_A_TIME), rng.choice(there))
        else:
            name = rng.choice(list(MOMENTS))
            faults.at_moment(name, rng.choice((1, 2, 3, 10)), rng.choice(AT_A_MOMENT))
    if exchange == Exchange.SWITCH and more.random() < 0.5:
        for _ in range(more.randint(1, 3)):
            faults.of_switch(
                FORMED_S + more.random() * lasts,
                more.choice(("forget", "forget", "stop", "deaf")),
                more,
            )
    if more.random() < 0.3:
        for _ in range(more.randint(1, 10)):
            faults.again(more.random() * (FORMED_S + lasts), more)
    if more.random() < 0.3:
        for _ in range(more.randint(1, 2)):
            start = FORMED_S + more.random() * lasts
            faults.at_time(start, more.choice(PARTINGS), more.choice(there))
    users = random.Random(f"users {seed}")
    if users.random() < 0.05:
        start = users.random() * (FORMED_S + lasts)
        faults.at_time(start, users.choice(("cancel", "lead cancel")), users.choice(there))
    lan.hosts[0].submit()
    lan.at(WATCH_S, lambda: watch(lan, "", 0.0))
    return lan


def run(
    seed: int, hosts: int | None = None, series: Exchange | None = None, steps: bool = False
) -> Outcome:
    """One seed.

    Raises:
        Violation: an invariant does not hold, or the job neither ended nor stands by as the rules say.
    """
    return finish(lan_of(seed, hosts, series, steps))


def finish(lan: Lan) -> Outcome:
    """Run it to its end, whatever that is.

    Raises:
        Violation: as for `run`.
    """
    lan.run(lambda: bool(lan.given_up or (lan.ended and _over(lan))))
    if lan.given_up:
        return Outcome("standing by", lan.given_up, lan)
    if not _over(lan):
        lan.checks.fail(f"nothing happens any more: {places(lan)}")
    if lan.well:
        _ended_well(lan)
        return Outcome("done", "", lan)
    return Outcome("stopped", lan.ended, lan)


def _over(lan: Lan) -> bool:
    """The job has ended, at all hosts that take part in it, and those that were evicted have heard of it."""
    if not lan.ended or any(member(host) for host in lan.hosts):
        return False
    tells = [host.node for host in lan.hosts if host.node.ended and not host.dead]
    asks = [host.node for host in lan.hosts if host.node.asks and not host.dead]
    return not any(
        node.view.number < teller.view.number and teller.view.number_of(node.mac)
        for node in asks
        for teller in tells
    )


def _ended_well(lan: Lan) -> None:
    """All who have saved have the same model, after all the rounds."""
    results = {host.result for host in lan.hosts if host.result is not None}
    results = results or {host.on_disk for host in lan.hosts if host.on_disk is not None}
    good = {result for result in results if not result[1].startswith("T")}
    if not results or min(trained for trained, _ in results) < lan.rounds:
        lan.checks.fail(f"the job ended too early: {results}")
    if len(good) > 1 and not lan.timings.alone:
        lan.checks.fail(f"models differ in the end: {results}")
    lan.checks.sums.balance()


def watch(lan: Lan, before: str, since: float) -> None:
    """Once nothing is planned any more and nobody may go on, there is nothing to wait for."""
    why = stuck(lan) if lan.now > lan.calm_at else ""
    if why != before or not why:
        before, since = why, lan.now
    elif lan.now > since + _CERTAIN_S:
        lan.given_up = why
        return
    limit_s = LIMIT_S * lan.patience
    if lan.now > lan.calm_at + limit_s:
        lan.checks.fail(f"the job has not ended {limit_s} s after the last fault: {places(lan)}")
    lan.at(lan.now + WATCH_S, lambda: watch(lan, before, since))


def places(lan: Lan) -> str:
    """Where everybody is."""
    return "; ".join(
        f"{h.node.name} {'dead' if h.dead else h.node.state.value} view {h.node.view.number} "
        f"{sorted(h.node.view.live)} round {h.node.open_round}"
        for h in lan.hosts
    )


__all__ = ["Outcome", "Violation", "exchange_of", "lan_of", "places", "run", "stuck"]
