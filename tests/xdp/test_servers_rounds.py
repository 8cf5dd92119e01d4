# SPDX-License-Identifier: Apache-2.0
"""In which order an agent writes what a server's kernel must know of phases and rounds (docs/servers.md)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from nicps import wire
from nicps.agent.frames import Frames
from nicps.agent.records import TimeLine
from nicps.dataplane import bpf
from nicps.exchange import Exchange
from nicps.job.actions import NoteCommit
from nicps.protocol import KernelState, Phase
from nicps.protocol.serving import Serving
from nicps.wire import Refusal
from tests.xdp.test_servers_maps import PART, PUSHES, ROUND, WIDTH, Host

PHASE = Phase(
    1,
    1,
    wire.PhaseKind.TRAIN,
    first_round=ROUND,
    fragments=PUSHES,
    last_fragments=PUSHES,
    width=WIDTH,
    shares=(0, 4, 4),
    quorum=8,
    exchange=Exchange.SERVERS,
    serving=Serving((1, 2), 64),
)
TEST = replace(PHASE, kind=wire.PhaseKind.TEST, exchange=Exchange.BROADCAST, serving=None)


class Agent:
    """A host whose agent has such a phase in force, and such a round open."""

    def __init__(self, host: Host) -> None:
        self.host, self.servers = host, host.servers
        self.node = SimpleNamespace(phase_in_force=PHASE, phase=PHASE, number=1, ring=None)
        self.node.header = self.node.take_sequence = self.node.members = None
        plane: Any = SimpleNamespace(maps=host.maps, rx_fileno=lambda: -1)
        plane.tx = plane.link_changes = plane.doorbell = SimpleNamespace(fileno=lambda: -1)
        driver: Any = SimpleNamespace(life=SimpleNamespace(node=self.node), now=0.0)
        loop: Any = SimpleNamespace(watch=lambda *_, **__: None)
        keys: Any = None
        self.frames = Frames(driver, plane, keys, loop, TimeLine(), lambda *_: None)
        self.hops = 0

    def opens(self, round_: int, phase: Phase = PHASE) -> None:
        """The loop's step ends, with that in force."""
        self.node.phase_in_force = phase
        ranks = (1, 2) if phase.serving is not None else ()
        self.hops += 1
        which = round_, round_, round_ + 1, self.hops, 0
        self.node.kernel = KernelState(
            *which, bounce=False, aggregators=ranks, aggregators_next=ranks, width=WIDTH
        )
        self.frames._sync_to_kernel()

    def commits(self, round_: int, *counted: int, test: bool = False) -> None:
        self.frames.settle(NoteCommit(round_, test, dict.fromkeys(counted, 4)))

    def push(self, number: int, round_: int, lane: int = 1) -> list[bpf.Run]:
        """A worker's whole step for this host's part."""
        bodies = [wire.Push(0, number, index, PUSHES, 0, WIDTH, -40) for index in range(PART)]
        return [self.host.give(body, 3, lane, round_) for body in bodies]

    def average(self, lane: int, round_: int) -> None:
        for sender in (2, 3):
            self.host.contribute(lane, sender, round_)

    @property
    def units(self) -> np.ndarray[Any, Any]:
        return self.servers.parameters()


@pytest.fixture(scope="module")
def loaded() -> Iterator[Host]:
    host = Host()
    yield host
    host.maps.close()
    host.beside.close()
    host.loaded.close()


@pytest.fixture
def agent(loaded: Host) -> Agent:
    """In the first round of a phase."""
    loaded.servers.retire()  # the job before is over
    loaded.begin()
    loaded.maps.config["room"] = 11
    agent = Agent(loaded)
    agent.opens(ROUND)
    return agent


def test_pushes_of_a_round_are_counted_until_the_next_one(agent: Agent) -> None:
    """Whatever else the agent writes meanwhile."""
    assert agent.servers.version == (ROUND, 0)
    agent.push(1, ROUND)
    agent.opens(ROUND)
    agent.push(2, ROUND)
    assert agent.servers.version == (ROUND, 2)
    assert agent.host.pull(0, ROUND + 1).reason == Refusal.NOT_YET
    agent.opens(ROUND + 1)
    assert agent.servers.version == (ROUND + 1, 0)
    assert agent.host.maps.config["round"] == ROUND + 1


def test_what_a_round_has_come_to_counts_with_its_commit(agent: Agent) -> None:
    before = agent.units
    agent.average(10, ROUND)
    agent.opens(ROUND)
    assert (agent.units == before).all()
    agent.commits(ROUND, 2, 3)
    agent.opens(ROUND + 1)
    assert (agent.units == before + 10).all()
    assert isinstance(agent.host.pull(0, ROUND + 1), wire.Held)


@pytest.mark.parametrize("test", [False, True])
def test_a_round_without_a_list_and_a_test_settle_nothing(agent: Agent, test: bool) -> None:
    before = agent.units
    agent.average(10, ROUND)
    agent.commits(ROUND, *((2, 3) if test else ()), test=test)
    agent.opens(ROUND + 1)
    assert (agent.units == before).all()


def test_a_phase_that_comes_with_a_commit_loses_nothing_of_it(agent: Agent) -> None:
    """Both in one step of the loop: the next round of the phase before is never opened here."""
    before = agent.units
    agent.average(10, ROUND)
    agent.commits(ROUND, 2, 3)
    agent.opens(ROUND + 2, replace(PHASE, first_round=ROUND + 2))
    assert (agent.units == before + 10).all()


def test_a_phase_in_force_forgets_the_steps_of_the_one_before(agent: Agent) -> None:
    before = agent.units
    agent.average(10, ROUND)
    agent.servers.homes["last"][:, 2] = 7
    agent.opens(ROUND + 2, replace(PHASE, first_round=ROUND + 2))
    assert not agent.servers.homes["last"].any() and not agent.servers.homes["due"].any()
    agent.push(1, ROUND + 2)
    assert agent.servers.version == (ROUND + 2, 1)
    agent.commits(ROUND + 2, 2, 3)
    agent.opens(ROUND + 3, replace(PHASE, first_round=ROUND + 2))
    assert (agent.units == before + 1).all(), "the round before was dropped"


def test_a_phase_that_is_only_prepared_forgets_nothing(agent: Agent) -> None:
    """It may be dropped. What a worker sends again then must not be added twice."""
    agent.push(1, ROUND)
    before = agent.units
    agent.node.phase = replace(PHASE, first_round=ROUND + 1)
    agent.opens(ROUND)
    agent.push(1, ROUND)
    assert (agent.units == before).all() and agent.servers.version == (ROUND, 1)


def test_a_test_between_two_phases(agent: Agent) -> None:
    agent.opens(ROUND + 1, replace(TEST, first_round=ROUND + 1))
    assert agent.host.maps.config["round"] == ROUND + 1
    assert all(run.verdict == bpf.XDP_DROP for run in agent.push(1, ROUND + 1)), "nobody serves"
    agent.opens(
        ROUND + 2, replace(PHASE, first_round=ROUND + 2, serving=Serving((1, 2), 64, False))
    )
    assert agent.host.maps.config["staleness"] == 0
    agent.push(1, ROUND + 2)
    assert agent.servers.version == (ROUND + 2, 1)


def test_another_job_begins_anew(agent: Agent) -> None:
    agent.average(10, ROUND)
    agent.commits(ROUND, 2, 3)
    agent.servers.retire()
    agent.host.begin()
    agent.host.maps.config["room"] = 11
    agent.servers.homes["last"][0] = 7
    before = agent.units
    agent.opens(ROUND - 1, replace(PHASE, first_round=ROUND - 1))
    assert agent.host.maps.config["settled"] == 0 and not agent.servers.homes["last"].any()
    agent.average(10, ROUND - 1)
    agent.opens(ROUND, replace(PHASE, first_round=ROUND - 1))
    assert (agent.units == before).all(), "what the job before had settled is nothing to it"
