# SPDX-License-Identifier: Apache-2.0
"""Simulated jobs: one to which something happens on purpose, and seeded schedules of faults."""

from __future__ import annotations

from collections import Counter

from nicps.exchange import Exchange
from nicps.job.plan import Plan
from tests.simulator import schedules
from tests.simulator.__main__ import Job, one
from tests.simulator.checks import Checks
from tests.simulator.faults import Faults
from tests.simulator.lan import Lan

TRAINING_S = 0.9  # when `training` trains


def job(hosts: int = 5, late: int = 0, **settings: object) -> tuple[Lan, Faults]:
    """A job without any fault as yet; `late` hosts more are not switched on."""
    plan = Plan("job", batch=10 * hosts, width=16, alarm_below=0.0)
    lan = Lan(hosts, seed=7, plan=plan, rounds=12, fragments=4, late=late)
    for name, value in settings.items():
        setattr(lan, name, value)
    lan.hosts[0].submit()
    lan.at(0.5, lambda: schedules.watch(lan, "", 0.0))
    return lan, Faults(lan, lan.random)


def training(hosts: int = 5, lost: tuple[int, ...] = ()) -> tuple[Lan, Faults]:
    """A job that trains for more than a second, in which the hosts of these indices are killed and start again."""
    lan, faults = job(hosts=hosts, rounds=30, compute_s=0.05)
    for host in (lan.hosts[index] for index in lost):
        lan.at(TRAINING_S + 0.1, host.kill)
        lan.at(TRAINING_S + 0.6, host.restart)
        lan.trouble(TRAINING_S + 0.6)
    return lan, faults


def run(
    seeds: range,
    hosts: int | None = None,
    exchange: Exchange | None = None,
    *,
    steps: bool = False,
) -> Counter[str]:
    """How often each outcome came; a failure names the command that shows it again."""
    outcomes: Counter[str] = Counter()
    for seed in seeds:
        _, what, why = one(Job(seed, hosts, exchange, steps))
        options = f" --hosts {hosts}" if hosts else ""
        options += f" --exchange {exchange.name}" if exchange else ""
        options += " --steps" if steps else ""
        again = f"python -m tests.simulator --seed {seed}{options} --trace 200"
        assert what not in ("violation", "error"), f"{again}: {why}"
        outcomes[what] += 1
    return outcomes


def idle(lan: Lan, seconds: float = 0.1) -> None:
    """The job has ended; the last one hears of it, and whatever is left of the faults happens."""
    lan.trouble(lan.now)
    lan.trouble(lan.calm_at + seconds)
    lan.run(lambda: False, lan.calm_at)


def next_job(lan: Lan, starter: int) -> None:
    """The agents that still run do another one, which that host submits."""
    lan.ended, lan.well, lan.given_up = "", False, ""
    lan.checks = Checks(lan)
    for host in lan.hosts:
        host.result, host.job_over, host.on_disk = None, "", None
        host.submitted, host.losses, host.judged = False, 0, 0
        host.checkpoint = host.cancelled_at = None
    lan.hosts[starter].submit()


def ends_well(lan: Lan) -> None:
    """It ends so, and each moment that was waited for has come."""
    assert schedules.finish(lan).what == "done"
    assert not lan.moments, "the moment has never come"
