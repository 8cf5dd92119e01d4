# SPDX-License-Identifier: Apache-2.0
"""The state machines in virtual time: R1 to R3, R9 to R14, R16 (docs/protocol.md)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nicps import wire
from nicps.protocol import NodeState, Phase
from tests.sim import Conditions, Job, Lan, check_sums

pytestmark = pytest.mark.unit

TRAIN = Phase(
    number=0,
    generation=0,
    kind=wire.PhaseKind.TRAIN,
    rounds=20,
    fragments=40,
    last_fragments=40,
    width=16,
    unit=-40,
)
FINISH = Phase(number=0, generation=0, kind=wire.PhaseKind.FINISH)
STOP = Phase(number=0, generation=0, kind=wire.PhaseKind.STOP)


def run(hosts: int, conditions: Conditions, seed: int, *phases: Phase, **timings: float) -> Lan:
    lan = Lan(hosts, conditions, seed, **timings)
    jitter = lan.random
    job = Job(lan, [*phases, FINISH, STOP], lambda number, round_: 0.002 + jitter.random() * 0.003)
    job.start()
    lan.run(lambda: job.done and all(h.node.state is NodeState.STANDBY for h in lan.hosts))
    for phase in job.agreed[:-2]:
        check_sums(lan, phase)
        assert sum(phase.first_round <= c.round <= phase.last_round for c in lan.hosts[0].committed)
    return lan


def shares(hosts: int) -> tuple[int, ...]:
    return (10,) * hosts


@pytest.mark.parametrize("hosts", [1, 2, 3, 4, 7])
def test_every_round_commits_everywhere(hosts: int) -> None:
    phase = replace(TRAIN, shares=shares(hosts), quorum=10 * hosts)
    lan = run(hosts, Conditions(), 1, phase)
    assert [c.round for c in lan.hosts[-1].committed] == list(range(2, 22))
    assert all(sum(c.counted.values()) == 10 * hosts for c in lan.hosts[0].committed)
    if hosts > 1:
        assert max(lan.hosts[0].sent_counts.values()) == 20, "nothing is lost, nothing is repaired"


@pytest.mark.parametrize("seed", range(60))
def test_a_lossy_lan_changes_nothing_but_the_time(seed: int) -> None:
    hosts = 2 + seed % 4
    conditions = Conditions(loss=0.03, duplicate=0.02, jitter_s=1e-4 if seed % 2 else 0.0)
    handout = replace(
        TRAIN,
        kind=wire.PhaseKind.HANDOUT,
        width=0,
        rounds=3,
        last_fragments=7,
        shares=(1,) + (0,) * (hosts - 1),
        quorum=1,
    )
    train = replace(TRAIN, shares=shares(hosts), quorum=10 * hosts)
    test = replace(train, kind=wire.PhaseKind.TEST, rounds=1, fragments=1, last_fragments=1)
    run(hosts, conditions, seed, handout, train, test, replace(train, rounds=5))
