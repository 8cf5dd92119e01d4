# SPDX-License-Identifier: Apache-2.0
"""One job after the other in the same agents, while hosts come and go."""

from __future__ import annotations

import random

import pytest

from nicps import wire
from nicps.job.actions import Post
from nicps.job.plan import Plan
from nicps.protocol import NodeState
from nicps.session import shared_form as says
from tests.simulator import schedules
from tests.simulator.drill import TRAINING_S, ends_well, idle, job, next_job, training
from tests.simulator.faults import MOMENTS
from tests.simulator.program import START_S

pytestmark = pytest.mark.unit

JOBS = 4
KINDS = (*schedules.AT_A_TIME, *schedules.PARTINGS)


@pytest.mark.short("3-gone0", "4-gone1", "4-gone2", "3-gone3", "4-gone4")
@pytest.mark.parametrize("gone", [(0,), (1,), (2,), (0, 1), (1, 2)])
@pytest.mark.parametrize("hosts", [3, 4])
def test_with_fewer_hosts(hosts: int, gone: tuple[int, ...]) -> None:
    """The numbers of the network before have nothing to do with this one's."""
    lan, _ = job(hosts=hosts)
    ends_well(lan)
    idle(lan)
    for index in gone:
        lan.hosts[index].kill()
    next_job(lan, max(set(range(hosts)) - set(gone)))
    ends_well(lan)
    there = [host for host in lan.hosts if not host.dead]
    assert all(host.node.ended and len(host.node.view.members) == len(there) for host in there)


def test_who_is_lost_in_the_one_is_a_member_of_the_next() -> None:
    """It comes back with an agent that knows nothing; in the next job another one is lost, and comes back."""
    lan, _ = training(hosts=4, lost=(1,))
    ends_well(lan)
    idle(lan)
    next_job(lan, 3)
    lan.at(lan.now + TRAINING_S, lan.hosts[0].kill)
    lan.at(lan.now + TRAINING_S + 0.5, lan.hosts[0].restart)
    ends_well(lan)
    assert len(lan.hosts[1].node.view.members) == 4


@pytest.mark.parametrize("dies", [False, True])
def test_a_part_of_the_last_job_has_nothing_to_do_with_the_next(dies: bool) -> None:
    """A host is evicted as its user cancels, unheard; then it hears nothing until the others have all started again.

    The next job is not cancelled by it; and if its starter dies, the host does not lead the job before.
    """
    lan, _ = training(hosts=4)
    host, others = lan.hosts[3], lan.hosts[:3]
    lan.lose[wire.FrameType.FAIL] = 99
    lan.at(TRAINING_S, host.cancel)
    lan.at(TRAINING_S, host.kill_program)
    lan.run(lambda: host.node.state is NodeState.STANDBY and bool(host.node.view.number), 2.0)
    lan.cut([frozenset({0, 1, 2}), frozenset({3})])
    lan.run(lambda: all(other.part is None for other in others), lan.now + 30.0)
    lan.lose.clear()
    for other in others:
        other.kill()
        other.restart()
    part = host.part
    assert part is not None and part.cancelled
    lan.cut([])
    next_job(lan, 2)
    if not dies:
        ends_well(lan)
        return
    lan.run(lambda: host.node.state is NodeState.MEMBER, lan.now + 5.0)
    lan.hosts[2].kill()
    lan.trouble(lan.now)
    assert schedules.finish(lan).what == "stopped"
    assert "nobody is left who has the whole job" in lan.ended


@pytest.mark.short("0", "4", "8")
@pytest.mark.parametrize("seed", range(12))
def test_with_faults(seed: int) -> None:
    one_after_the_other(seed)


@pytest.mark.long
def test_with_more_faults() -> None:
    for seed in range(300):
        one_after_the_other(seed)


def one_after_the_other(seed: int) -> None:
    """In each something happens; between them some are killed, and some start again. Whoever is there does the next."""
    rng = random.Random(seed)
    lan, faults = job(hosts=rng.randint(3, 6), rounds=20, compute_s=0.02)
    for left in reversed(range(JOBS)):
        for _ in range(rng.choice((0, 1, 2))):
            start = lan.now + rng.random() * 1.5
            faults.at_time(start, rng.choice(KINDS), rng.choice(lan.hosts))
        if rng.random() < 0.5:
            name, kind = rng.choice(list(MOMENTS)), rng.choice(schedules.AT_A_MOMENT)
            faults.at_moment(name, rng.choice((1, 2, 3)), kind)
        if schedules.finish(lan).what == "standing by":
            return  # until its user acts
        if left:
            lan.moments.clear()
            idle(lan, rng.choice((0.1, 1.0, 30.0)))
            come_and_go(lan, rng)
            next_job(lan, rng.choice([host.index for host in lan.hosts if not host.dead]))


def come_and_go(lan: schedules.Lan, rng: random.Random) -> None:
    """Two are there in the end, at least."""
    for host in lan.hosts:
        if not host.dead and rng.random() < 0.2:
            host.kill()
        elif host.dead and rng.random() < 0.5:
            host.restart()
    for host in lan.hosts[:2]:
        if host.dead:
            host.restart()


def test_a_batch_of_fewer_samples_than_hosts() -> None:
    """Each has one, and is counted."""
    lan, _ = job(hosts=4, plan=Plan("job", batch=2, width=16, quorum=1.0, alarm_below=0.0))
    ends_well(lan)
    assert {
        tuple(counted)
        for (_, _), (counted, _, kind) in lan.checks.commits.items()
        if kind is wire.PhaseKind.TRAIN
    } == {((1, 1), (2, 1), (3, 1), (4, 1))}


def test_a_program_that_has_not_connected_hears_nothing() -> None:
    """The agent has nobody to tell; what the program must know comes with its welcome and with the next phase."""
    lan, _ = training(hosts=3)
    host = lan.hosts[1]
    waiting: list[int] = []

    def tell() -> None:
        process = host.process
        assert process is not None and not process.attached
        host.do([Post(process.number, says.View(1, (1, 2, 3), 1, 1))])
        host.later(START_S / 10, lambda: waiting.append(len(process._inbox)))

    lan.at(TRAINING_S, host.kill_program)
    lan.at(TRAINING_S + START_S / 2, tell)
    ends_well(lan)
    assert waiting == [0]
