# SPDX-License-Identifier: Apache-2.0
"""The training program's end of the agent's socket where a switch adds (docs/protocol.md, "Where a switch adds")."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

from nicps.client import JobAborted, LeftOut
from nicps.exchange import Exchange
from tests import reference
from tests.unit.test_trainer_session import LANES, VIEW, Agent, interrupt

UNIT = -30
LIMIT = 32767 >> 2  # of a lane, among three
ALL = (1 << 64) - 1
F32 = reference.F32


@pytest.fixture
def agent() -> Iterator[Agent]:
    agent = Agent(2)
    agent.enter("train", 7, exchange="switch", unit=UNIT)
    yield agent
    agent.close()


def gradient(seed: int, largest: float = LIMIT * 2.0**UNIT) -> F32:
    """Among its numbers is `largest`."""
    vector = np.random.default_rng(seed).uniform(-largest, largest, LANES).astype(np.float32)
    vector[3] = largest
    return vector


def offered(agent: Agent, round_: int, vector: F32) -> dict[str, Any]:
    agent.session.contribute(round_, vector, 4)
    return agent.take()


def lanes(agent: Agent, round_: int) -> Any:
    return agent.arena.lanes[round_ & 1, 0].view(">i2").astype(np.int64)


def arrive(agent: Agent, round_: int, total: Any, view: int = VIEW) -> None:
    """The switch's sum, as the kernel stores it."""
    agent.banks[round_ & 1, :LANES] = total
    agent.slots[round_ & 1]["tag"] = view << 32 | round_
    agent.slots[round_ & 1]["seen"] = ALL


@pytest.mark.parametrize(
    ("times", "unit", "skip"),
    [
        (0.9, UNIT + 1, False),  # it fits, and has a bit of room in the next round
        (0.2, UNIT - 1, False),  # the step follows the gradients down
        (1.5, UNIT + 2, False),  # it is cut off a little
        (15.9, UNIT + 5, False),
        (16.1, UNIT + 6, True),
        (1e6, UNIT + 21, True),
    ],
)
def test_what_is_offered(agent: Agent, times: float, unit: int, skip: bool) -> None:
    said = offered(agent, 7, gradient(1, times * LIMIT * 2.0**UNIT))
    assert said == {"op": "offer", "round": 7, "samples": 4, "unit": unit, "skip": skip}
    assert agent.arena.converted(7) == (0 if skip else 1)
    if not skip:
        assert np.abs(lanes(agent, 7)).max() == min(LIMIT, round(times * LIMIT))
        assert agent.arena.shifts[1, 0] == 0


def test_zeros_ask_for_no_unit(agent: Agent) -> None:
    said = offered(agent, 7, np.zeros(LANES, np.float32))
    assert (said["unit"], said["skip"]) == (None, False)


def test_the_next_round_is_converted_under_its_unit(agent: Agent) -> None:
    vector = gradient(1, 1e6 * LIMIT * 2.0**UNIT)
    assert offered(agent, 7, vector)["skip"]
    agent.commit(7, {}, UNIT, next_unit=UNIT + 21)
    commit = agent.session.wait_commit(7)
    assert commit is not None and commit.left_out
    said = offered(agent, 8, vector)
    assert (said["unit"], said["skip"]) == (UNIT + 21, False)


def test_ready_made_sums_are_the_gradients_sum(agent: Agent) -> None:
    """Also where one's own numbers were cut off: what was sent is in the sum already, and the rest comes later."""
    members = {number: reference.Member(16) for number in (1, 2, 3)}
    for round_, times in ((7, 0.5), (8, 3.0), (9, 0.01), (10, 0.01)):
        vectors = {k: gradient(10 * round_ + k, LIMIT * 2.0**UNIT / 2) for k in (1, 2, 3)}
        vectors[2] = gradient(round_, times * LIMIT * 2.0**UNIT)
        offered(agent, round_, vectors[2])
        total = np.zeros(LANES, np.int64)
        for number, member in members.items():
            whole, member.residual = member.quantise(vectors[number], UNIT, 3)
            total += whole
            if number == 2:
                assert (lanes(agent, round_) == whole).all()
        arrive(agent, round_, total)
        agent.commit(round_, {1: 4, 2: 4, 3: 4}, UNIT, exchange="switch")
        out = np.full(LANES, np.nan, np.float32)
        commit = agent.session.wait_commit(round_, out)
        assert (
            commit is not None
            and commit.members == 3
            and commit.exchange == Exchange.SWITCH
            and not commit.left_out
        )
        expected = (total.astype(np.float64) * 2.0**UNIT).astype(np.float32)
        assert (agent.session.sum(commit, out) == expected).all()
        assert (agent.session.saturated > 0) == (round_ > 7)
        agent.session.applied(commit, "d")
        assert agent.take()["op"] == "read"


@pytest.mark.parametrize("reads", [1, 2, 3])
def test_a_sum_may_be_read_more_than_once(agent: Agent, reads: int) -> None:
    """What rounding has left over of the round goes into the next one all the same, and once."""
    member = reference.Member(16)
    for round_ in (7, 8, 9):
        offered(agent, round_, gradient(round_, 3 * LIMIT * 2.0**UNIT))
        whole, member.residual = member.quantise(gradient(round_, 3 * LIMIT * 2.0**UNIT), UNIT, 3)
        assert (lanes(agent, round_) == whole).all()
        arrive(agent, round_, whole)
        agent.commit(round_, {1: 4, 2: 4, 3: 4}, UNIT, exchange="switch")
        commit = agent.session.wait_commit(round_)
        assert commit is not None
        expected = (whole * 2.0**UNIT).astype(np.float32)
        assert all((agent.session.sum(commit) == expected).all() for _ in range(reads))
        agent.session.applied(commit, "d")
        assert agent.take()["op"] == "read"


def test_a_sum_of_others_is_ready_made_too(agent: Agent) -> None:
    """This member was left out: none of its lanes is in the sum, and none is put there."""
    offered(agent, 7, gradient(1))
    arrive(agent, 7, 5)
    agent.commit(7, {1: 4, 3: 4}, UNIT, exchange="switch")
    commit = agent.session.wait_commit(7)
    assert commit is not None
    assert (agent.session.sum(commit) == np.float32(5 * 2.0**UNIT)).all()
    assert agent.session.saturated == 0


def test_who_is_left_alone_adds_for_itself(agent: Agent) -> None:
    """The lanes are still a switch's, but the sum is made here."""
    vector = gradient(1)
    offered(agent, 7, vector)
    arrive(agent, 7, 99)
    agent.view(2, (2,))
    agent.commit(7, {2: 4}, UNIT, exchange="broadcast")
    commit = agent.session.wait_commit(7)
    assert commit is not None and commit.members == 3
    whole, _ = reference.Member(16).quantise(vector, UNIT, 3)
    assert (agent.session.sum(commit) == (whole * 2.0**UNIT).astype(np.float32)).all()


def test_a_round_that_the_switch_had_added_before(agent: Agent) -> None:
    """The others have left, and the round is settled with what all of them have got."""
    offered(agent, 7, gradient(1))
    arrive(agent, 7, 5)
    agent.view(2, (2,))
    agent.commit(7, {1: 4, 2: 4, 3: 4}, UNIT, exchange="switch")
    commit = agent.session.wait_commit(7)
    assert commit is not None
    assert (agent.session.sum(commit) == np.float32(5 * 2.0**UNIT)).all()


def test_ready_made_sums_are_read_early(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    offered(agent, 7, gradient(1))
    arrive(agent, 7, 5)
    out = np.empty(LANES, np.float32)
    commit_it = partial(agent.commit, 7, {1: 4, 2: 4, 3: 4}, UNIT, exchange="switch")
    interrupt(agent, monkeypatch, out, commit_it)
    commit = agent.session.wait_commit(7, out)
    assert commit is not None
    arrive(agent, 7, 99)  # read already
    assert (agent.session.sum(commit, out) == np.float32(5 * 2.0**UNIT)).all()


# ---- all_reduce


@pytest.mark.parametrize("counted", [{}, {2: 1}, {2: 1, 3: 1}])
def test_left_out_is_left_out_everywhere(agent: Agent, counted: dict[int, int]) -> None:
    """A member's numbers were too large: also who was counted offers again, and no residual changes."""
    vector = gradient(1, 0.3 * LIMIT * 2.0**UNIT)
    agent.commit(
        7, counted, UNIT, next_unit=UNIT + 6, exchange="switch" if counted else "broadcast"
    )
    with pytest.raises(LeftOut, match="offer it again in round 8") as left:
        agent.session.all_reduce(7, vector)
    assert left.value.next_round == 8
    assert agent.take()["op"] == "offer" and agent.take()["op"] == "read"
    arrive(agent, 8, 3)
    agent.commit(8, {1: 1, 2: 1, 3: 1}, UNIT + 6, exchange="switch")
    assert (agent.session.all_reduce(8, vector) == np.float32(3 * 2.0 ** (UNIT + 6))).all()
    whole, _ = reference.Member(16).quantise(vector, UNIT + 6, 3)
    assert (lanes(agent, 8) == whole).all(), "nothing is left over of round 7"


def test_a_coarser_step_leaves_nobody_out(agent: Agent) -> None:
    arrive(agent, 7, 3)
    agent.commit(7, {1: 1, 2: 1, 3: 1}, UNIT, next_unit=UNIT + 5, exchange="switch")
    assert (agent.session.all_reduce(7, gradient(1)) == np.float32(3 * 2.0**UNIT)).all()


def test_left_out_where_the_hosts_add() -> None:
    """Any larger unit is somebody's who was left out."""
    agent = Agent(2)
    agent.enter("train", 7)
    agent.commit(7, {2: 1, 3: 1}, -30, next_unit=-29)
    with pytest.raises(LeftOut):
        agent.session.all_reduce(7, gradient(1))
    agent.close()


def test_too_late_for_the_quorum(agent: Agent) -> None:
    agent.commit(7, {1: 1, 3: 1}, UNIT, exchange="switch")
    with pytest.raises(LeftOut, match="round 7 closed without us"):
        agent.session.all_reduce(7, gradient(1))


def test_the_switch_is_given_up(agent: Agent) -> None:
    """The hosts begin with the round after, for which they add themselves."""
    agent.phase("train", 8)
    with pytest.raises(LeftOut, match="round 7 is not run again") as left:
        agent.session.all_reduce(7, gradient(1))
    assert left.value.next_round == 8
    assert [agent.take()["op"] for _ in range(2)] == ["offer", "prepared"]
    agent.banks[0, :LANES] = 5
    agent.commit(8, {1: 1, 3: 1, 2: 1})
    assert agent.session.all_reduce(8, np.zeros(LANES, np.float32))[0] == np.float32(5 * 2.0**-30)


def test_what_the_switch_has_left_over_is_too_large_for_the_hosts_unit(agent: Agent) -> None:
    """Though the gradient itself is small: the round is left out, and the next one's unit fits both."""
    coarse, fine = 10, -40
    agent.enter("train", 7, exchange="switch", unit=coarse)
    member = reference.Member(16)
    large, small = gradient(1, 15 * LIMIT * 2.0**coarse), gradient(2, 1.0)
    _, member.residual = member.quantise(large, coarse, 3)
    offered(agent, 7, large)
    agent.commit(7, {1: 4, 2: 4, 3: 4}, coarse, exchange="switch")
    commit = agent.session.wait_commit(7)
    assert commit is not None
    agent.session.sum(commit)
    agent.session.applied(commit, "d")
    assert agent.take()["op"] == "read"
    agent.enter("train", 8, unit=fine)
    said = offered(agent, 8, small)
    assert said["skip"] and said["unit"] > fine
    agent.commit(8, {1: 4, 3: 4}, fine, next_unit=said["unit"])
    assert agent.session.wait_commit(8) is not None
    whole, member.residual = member.quantise(small, said["unit"])
    assert not offered(agent, 9, small)["skip"]
    assert ((lanes(agent, 9) << int(agent.arena.shifts[1, 0])) == whole).all()


def test_the_same_round_is_run_again(agent: Agent) -> None:
    agent.phase("train", 7, exchange="switch", unit=UNIT)
    arrive(agent, 7, 3)
    agent.commit(7, {1: 1, 2: 1, 3: 1}, UNIT, exchange="switch")
    assert (agent.session.all_reduce(7, gradient(1)) == np.float32(3 * 2.0**UNIT)).all()


def test_what_comes_next_is_no_training(agent: Agent) -> None:
    agent.phase("end", 0)
    with pytest.raises(JobAborted, match="end comes next"):
        agent.session.all_reduce(7, gradient(1))
