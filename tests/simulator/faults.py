# SPDX-License-Identifier: Apache-2.0
"""Schedules of faults from a seed, and what must have become of the job once they stop."""

from __future__ import annotations

import random
from dataclasses import dataclass

from nicps.protocol import NodeState, Timings
from tests.simulator.checks import Violation
from tests.simulator.lan import Conditions, Lan

FAULTS_S = 4.0  # faults begin within this time of the job's start
LIMIT_S = 90.0


@dataclass(frozen=True)
class Outcome:
    """`done`: the job came to its end; otherwise `why` it may stand by."""

    done: bool
    why: str
    lan: Lan


def lan_of(seed: int, hosts: int | None = None) -> tuple[Lan, random.Random]:
    """The LAN of a seed, and the source of its schedule."""
    rng = random.Random(seed)
    hosts = hosts or rng.randint(3, 9)
    kind = rng.random()
    conditions = Conditions()
    if kind < 0.5:
        conditions = Conditions(
            loss=rng.choice((0.0, 0.01, 0.05)),
            duplicate=rng.choice((0.0, 0.01)),
            jitter_s=rng.choice((0.0, 1e-4)),
            late=rng.choice((0.0, 0.01)),
        )
    lan = Lan(
        hosts,
        conditions,
        seed,
        rounds=rng.randint(10, 30),
        compute_s=rng.choice((0.002, 0.01, 0.05)),
        drift=rng.choice((0.0, 1e-3)),
        timings=Timings(),
    )
    return lan, rng


def schedule(lan: Lan, rng: random.Random) -> None:
    """Kill, restart, stop, cut: some faults, each of which ends."""
    for _ in range(rng.randint(1, 5)):
        start = rng.random() * FAULTS_S
        host = rng.choice(lan.hosts)
        kind = rng.choice(("kill", "kill", "pause", "program", "cut", "lead"))
        if kind == "lead":
            lan.at(start, lambda: _kill_lead(lan, rng))
        elif kind == "kill":
            lan.at(start, lambda host=host: _kill(lan, rng, host))
        elif kind == "pause":
            lan.at(start, lambda host=host: _pause(lan, rng, host))
        elif kind == "program":
            lan.at(start, lambda host=host: _kill_program(host))
        else:
            lan.at(start, lambda: _cut(lan, rng))


def _kill(lan: Lan, rng: random.Random, host) -> None:  # type: ignore[no-untyped-def]
    if host.dead:
        return
    host.kill()
    lan.at(lan.now + rng.random() * 3, lambda: host.restart() if host.dead else None)


def _kill_lead(lan: Lan, rng: random.Random) -> None:
    for host in lan.hosts:
        if not host.dead and host.node.leads:
            _kill(lan, rng, host)
            return


def _pause(lan: Lan, rng: random.Random, host) -> None:  # type: ignore[no-untyped-def]
    if host.dead or host.paused:
        return
    host.pause()
    life = host.life
    lan.at(
        lan.now + rng.random() * 3,
        lambda: host.resume() if host.paused and host.life == life else None,
    )


def _kill_program(host) -> None:  # type: ignore[no-untyped-def]
    if not host.dead and not host.paused and host.program is not None:
        host.kill_program()


def _cut(lan: Lan, rng: random.Random) -> None:
    indices = list(range(len(lan.hosts)))
    rng.shuffle(indices)
    at = rng.randint(1, len(indices) - 1)
    lan.cut([frozenset(indices[:at]), frozenset(indices[at:])])
    lan.at(lan.now + rng.random() * 3, lambda: lan.cut([]))


def run(seed: int, hosts: int | None = None) -> Outcome:
    """One seed.

    Raises:
        Violation: an invariant does not hold, or the job neither ended nor stands by as the rules say.
    """
    lan, rng = lan_of(seed, hosts)
    schedule(lan, rng)
    lan.hosts[0].submit()
    done = lan.run(lambda: _over(lan), LIMIT_S)
    if done:
        return Outcome(True, "", lan)
    why = stuck(lan)
    if not why:
        lan.checks.fail(f"the job of seed {seed} has not ended after {LIMIT_S} s: {places(lan)}")
    return Outcome(False, why, lan)


def _over(lan: Lan) -> bool:
    """The job has ended, at all hosts that take part in it."""
    return lan.ended and all(
        h.dead or h.job_over or h.node.state is not NodeState.MEMBER for h in lan.hosts
    )


def places(lan: Lan) -> str:
    """Where everybody is."""
    return "; ".join(
        f"{h.node.name} {h.node.state.value} view {h.node.view.number} {sorted(h.node.view.live)} "
        f"round {h.node.open_round}"
        for h in lan.hosts
    )


def stuck(lan: Lan) -> str:
    """Why nobody may go on, or an empty text if somebody should have."""
    members = [h for h in lan.hosts if not h.dead and h.node.state is NodeState.MEMBER]
    if not members:
        if lan.hosts[0].life and not any(h.program for h in lan.hosts):
            return "the starter was lost before everybody had the job"
        return ""
    newest = max(members, key=lambda h: (h.node.view.number, h.node.view.ballot)).node.view
    voters = {h.node.number for h in members if h.node.view.number == newest.number}
    if not newest.agreed(voters):
        return f"view {newest.number} of {sorted(newest.live)} has only {sorted(voters)} left"
    return ""


__all__ = ["Outcome", "Violation", "lan_of", "places", "run", "schedule", "stuck"]
