# SPDX-License-Identifier: Apache-2.0
"""The training program's end of the agent's socket at a host that serves parameters (docs/servers.md)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from nicps.session.phases import Commit
from tests.served_agent import ROUND, Agent, parameters, same
from tests.striped_memory import Mapped


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Agent]:
    agent = Agent(16, tmp_path, lanes=1500)
    yield agent
    agent.close()


def test_a_server_without_steps_reads_its_own_part_from_a_file(agent: Agent) -> None:
    agent.begin()
    part = Mapped(np.float32, (500,))
    part.array[:] = np.arange(500)
    agent.served.pull(ROUND)
    agent.take()
    rest = agent.pulled(parameters(1, agent.lanes))
    agent.tell("pulled", (part.reading_fd,), round=ROUND, number=1, first=700, lanes=500)
    assert agent.served.wait_pulled(ROUND)
    out = np.full(agent.lanes, 5, np.float32)
    agent.served.read(out)
    assert same(out[700:1200], part.array) and same(out[:700], rest[:700])
    assert same(out[1200:], rest[1200:])
    out[:] = 5
    agent.served.read(out, 3, 4)
    assert same(out[1080:1200], part.array[380:]) and same(out[1200:1440], rest[1200:1440])
    assert (out[:1080] == 5).all() and (out[1440:] == 5).all()
    agent.served.read(out, 0, 1)
    assert same(out[:360], rest[:360])
    part.close()


def test_a_server_alone_has_no_store(agent: Agent) -> None:
    agent.serves(new=False)
    agent.enter()
    part = Mapped(np.float32, (agent.lanes,))
    part.array[:] = np.arange(agent.lanes)
    agent.served.pull(ROUND)
    agent.tell("pulled", (part.reading_fd,), round=ROUND, number=1, lanes=agent.lanes)
    assert agent.served.wait_pulled(ROUND)
    out = np.zeros(agent.lanes, np.float32)
    agent.served.read(out)
    assert same(out, part.array)
    part.close()


def test_a_server_fills_its_part_before_it_is_prepared(agent: Agent) -> None:
    file = Mapped(np.float32, (600,))
    agent.serves(fds=(file.fd,), first=720, lanes=600)
    agent.phase()
    assert agent.session.next_phase().kind == "train"
    assert not agent.channel.wait(0.05), "not prepared"
    weights = np.arange(agent.lanes, dtype=np.float32)
    agent.served.fill(weights)
    assert agent.take() == {"op": "prepared", "number": 1}
    assert same(file.array, weights[720:1320])
    agent.served.fill(weights + 1)
    assert same(file.array, weights[720:1320]) and not agent.channel.wait(0.0)
    agent.enter()  # and the next one as ever
    file.close()


def test_a_round_can_be_committed_while_a_server_pulls(agent: Agent) -> None:
    """Workers do not wait for a host that only serves. What it was told meanwhile is not lost."""
    agent.begin()
    agent.committed(ROUND)
    agent.served.wait(ROUND)
    agent.served.pull(ROUND + 1)
    agent.committed(ROUND + 1, 3)
    agent.tell("pulled", round=ROUND + 1, number=3)
    agent.committed(ROUND + 2)
    agent.channel.close()  # nothing more comes
    assert agent.served.wait_pulled(ROUND + 1)
    for round_, counted in ((ROUND + 1, {3: 4}), (ROUND + 2, {})):
        commit = agent.served.wait(round_)
        assert isinstance(commit, Commit) and commit.counted == counted
    assert not agent.session._talk.kept


def test_a_server_is_lost_while_a_test_is_prepared(agent: Agent) -> None:
    """Its part is to be filled here, in a phase that comes next: for the test this member is prepared all the same."""
    agent.begin()
    agent.committed(ROUND)
    agent.served.wait(ROUND)
    file = Mapped(np.float32, (600,))

    def pull(kind: str) -> None:
        agent.session.on_phase = None
        agent.served.pull(ROUND + 1)
        assert agent.take()["op"] == "pull"
        agent.serves(new=False, fds=(file.fd,), first=720, lanes=600)
        agent.phase(first=ROUND + 1)
        assert not agent.served.wait_pulled(ROUND + 1)

    agent.session.on_phase = pull
    agent.phase("test", ROUND + 1)
    assert agent.session.next_phase().kind == "test"
    assert agent.take() == {"op": "prepared", "number": 2}
    assert agent.session.next_phase().kind == "train"
    agent.served.fill(np.zeros(agent.lanes, np.float32))
    assert agent.take() == {"op": "prepared", "number": 3}
    file.close()
