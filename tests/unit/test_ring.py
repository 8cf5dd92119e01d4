# SPDX-License-Identifier: Apache-2.0
"""The state machines in virtual time: R1 to R3, R9 to R14, R16 (docs/protocol.md)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nicps import wire
from nicps.protocol import Failed, NodeState, Phase
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


@pytest.mark.parametrize("seed", range(6))
def test_rounds_may_take_longer_than_silence_may(seed: int) -> None:
    """Computing is not silence: the parked token is announced, and its holder hears nobody for a good reason."""
    phase = replace(TRAIN, shares=shares(4), quorum=40, rounds=3)
    lan = Lan(4, Conditions(), seed)
    job = Job(lan, [phase, FINISH, STOP], lambda number, round_: 20.0 + lan.random.random() * 5)
    job.start()
    lan.run(lambda: job.done, limit_s=600.0)
    assert not [a for host in lan.hosts for a in host.log if isinstance(a, Failed)]


@pytest.mark.parametrize("hosts", [2, 3, 4])
@pytest.mark.parametrize("dies", [0, 1])
def test_a_dead_member_is_told_and_the_rest_stand_by(hosts: int, dies: int) -> None:
    """Nobody is evicted yet, but nobody hangs either: the job fails with the dead one's name."""
    phase = replace(TRAIN, shares=shares(hosts), quorum=10 * hosts, rounds=1000)
    lan = Lan(hosts, Conditions(loss=0.01), seed=dies, silent_s=2.0)
    job = Job(lan, [phase, STOP], lambda number, round_: 0.003 + lan.random.random() * 0.002)
    job.start()
    lan.run(lambda: len(lan.hosts[-1].committed) > 5)
    lan.hosts[dies].die()
    alive = [host for host in lan.hosts if not host.dead]

    def told() -> bool:
        failed = [a for host in alive for a in host.log if isinstance(a, Failed)]
        return bool(failed) and all(
            host.node.state is NodeState.STANDBY or host.node.number == 1 for host in alive
        )

    if dies:  # node 1 lives: it hears of it, and would stop the job
        lan.run(lambda: any(isinstance(a, Failed) for a in lan.hosts[0].log), limit_s=30.0)
    else:
        lan.run(told, limit_s=30.0)
    failures = [a.reason for host in alive for a in host.log if isinstance(a, Failed)]
    assert f"h{dies + 1} " in failures[0]


@pytest.mark.parametrize("seed", range(20))
def test_node_1_decides_before_the_next_round_is_committed(seed: int) -> None:
    """R14 with a quorum that one gradient fills: others run ahead, but never by a round that node 1 may drop."""
    phase = replace(TRAIN, shares=shares(5), quorum=10, rounds=30)
    lan = run(5, Conditions(loss=0.1), seed, phase)
    assert all(sum(c.counted.values()) >= 10 for c in lan.hosts[0].committed)


def test_two_starters_at_once_make_one_network() -> None:
    """R3: the lower MAC wins, the other joins it."""
    lan = Lan(4, Conditions())
    for index in (2, 1):
        host = lan.hosts[index]
        host.do(host.node.start(lan.now, nonce=100 + index))
    lan.run(lambda: all(h.formed is not None for h in lan.hosts), limit_s=5.0)
    views = {(h.formed.view, tuple(m.mac for m in h.formed.members)) for h in lan.hosts if h.formed}
    assert len(views) == 1
    assert lan.hosts[1].node.number == 1
    assert [a for a in lan.hosts[2].log if isinstance(a, Failed)]
