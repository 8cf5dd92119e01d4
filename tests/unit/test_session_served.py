# SPDX-License-Identifier: Apache-2.0
"""The training program's end of the agent's socket where servers hold the parameters (docs/servers.md)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from nicps.client import Stepped
from nicps.errors import JobFailed, NonFinite, TooLarge
from nicps.layout import layout
from nicps.session.phases import Commit
from tests import served_reference as reference
from tests.served_agent import LANES, ROUND, WIDTHS, Agent, parameters, same
from tests.served_reference import F32, PULLED
from tests.striped_memory import Mapped


@pytest.fixture(params=WIDTHS)
def agent(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Agent]:
    agent = Agent(request.param, tmp_path)
    yield agent
    agent.close()


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Agent]:
    """Where the width does not matter."""
    agent = Agent(16, tmp_path, lanes=1500)
    yield agent
    agent.close()


def trained(weights: F32, seed: int) -> F32:
    """What an optimizer has made of them."""
    step = np.random.default_rng(seed).standard_normal(len(weights)) * 1e-3
    step[:: len(weights) // 7] *= 1e5
    changed: F32 = (weights + step).astype(np.float32)
    return changed


# ---- a step


def test_a_step_is_what_weights_differ_in(agent: Agent) -> None:
    """Three of them: the second one is dropped, so the third has what the first has left over."""
    agent.begin()
    residual = np.zeros(LANES, np.float32)
    for turn in range(3):
        weights = agent.pull(parameters(turn), version=turn)
        after = trained(weights, 10 + turn)
        agent.served.step(ROUND, after, 4)
        pieces = reference.convert(after, weights, residual, agent.width)
        agent.sent(pieces)
        if turn == 1:
            agent.phase()
            assert agent.served.wait(ROUND) is None
            assert agent.session.next_phase().kind == "train" and agent.take()["op"] == "prepared"
            continue
        if agent.width == 32:  # each push is answered with the parameters
            agent.pulled(parameters(100 + turn), version=turn + 1)
        agent.stepped(version=turn + 1)
        found = agent.served.wait(ROUND)
        assert isinstance(found, Stepped) and (found.version, found.staleness) == (turn + 1, (1,))
        residual = np.concatenate([piece.left for piece in pieces])
        file = agent.session._residual
        assert file is not None and same(file.residual.kept[:LANES], residual)
        assert float(np.abs(residual).max()) <= file.residual.limit
        assert not file.residual.kept[LANES:].any()
    assert residual.any()


def test_a_synchronisation_counts_who_is_in_it(small: Agent) -> None:
    small.begin(every=1)
    residual = np.zeros(small.lanes, np.float32)
    for round_, counted in ((7, (2, 3)), (8, (3,)), (9, (2, 3))):
        weights = small.pull(parameters(round_, small.lanes), round_)
        after = trained(weights, round_)
        small.served.step(round_, after, 4)
        pieces = reference.convert(after, weights, residual, 16)
        small.sent(pieces, round_)
        small.committed(round_, *counted)
        commit = small.served.wait(round_)
        assert isinstance(commit, Commit) and commit.counted == dict.fromkeys(counted, 4)
        assert (commit.round, commit.samples, commit.seconds_waited) == (
            round_,
            4 * len(counted),
            0.5,
        )
        if 2 in counted:
            residual = np.concatenate([piece.left for piece in pieces])


def test_a_round_without_a_step(small: Agent) -> None:
    small.begin(every=0)
    small.served.skip(ROUND)
    assert small.take() == {"op": "step", "round": ROUND, "samples": 1, "skip": True}
    small.committed(ROUND)
    commit = small.served.wait(ROUND)
    assert isinstance(commit, Commit) and not commit.counted and commit.seconds_waited == 0.0


#: The largest magnitude of a step by the lanes' bits: below 2**21, and a lane can name it under the largest exponent.
MOST = {8: 127 * 2.0**14, 16: 32767 * 2.0**6, 32: 2.0**21 - 2.0**-3}


def test_a_number_that_is_too_large_is_named_and_nothing_is_sent(agent: Agent) -> None:
    agent.begin()
    weights = agent.pull([0] * LANES)
    most = np.float32(MOST[agent.width])
    for place in (0, LANES - 1):
        after = weights.copy()
        after[place] = -most
        agent.served.step(ROUND, after, 4)
        agent.sent(reference.convert(after, weights, np.zeros(LANES, np.float32), agent.width))
        after[place] = np.nextafter(-most, np.float32(-np.inf))
        said = re.escape(f"a number of the step is {float(after[place]):.6g} at index {place}: ")
        with pytest.raises(TooLarge, match=f"^{said}") as error:
            agent.served.step(ROUND, after, 4)
        assert (error.value.index, error.value.value) == (place, after[place])
    assert not agent.channel.wait(0.0)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_number_that_is_not_finite_is_named(agent: Agent, value: float) -> None:
    agent.begin()
    weights = agent.pull(parameters(1))
    for place in (0, 50_001, LANES - 1):
        after = trained(weights, 2)
        after[place] = value
        with pytest.raises(NonFinite, match=f"at index {place}$") as error:
            agent.served.step(ROUND, after, 4)
        assert error.value.index == place
    assert not agent.channel.wait(0.0)


def test_what_rounding_leaves_over_can_be_too_much(small: Agent) -> None:
    """A number is refused with its residual, not without."""
    small.begin()
    weights = small.pull([0] * small.lanes)
    after = weights.copy()
    after[4], after[5] = 2.0**20, 7.25
    small.served.step(ROUND, after, 4)
    small.take()
    small.stepped()
    assert isinstance(small.served.wait(ROUND), Stepped)
    after[4], after[5] = 0.0, MOST[16]
    with pytest.raises(TooLarge, match="at index 5"):
        small.served.step(ROUND, after, 4)


# ---- parameters


def test_ranges_of_fragments(agent: Agent) -> None:
    agent.begin()
    served = agent.served
    before = agent.pull(parameters(1), version=3)
    assert served.fragments == -(-LANES // PULLED)
    served.pull(ROUND)
    units, agent.number = parameters(2), agent.number + 1
    assert not served.here(0, 1)
    out = np.full(LANES, 5, np.float32)
    new = {i: agent.hold(i, units[i * PULLED : (i + 1) * PULLED], version=9) for i in (1, 2, 4)}
    last = served.fragments - 1
    short = units[last * PULLED :]
    new[last] = agent.hold(last, short + [0] * (PULLED - len(short)), version=11)[: len(short)]
    assert served.here(1, 3) and served.here(4, 5) and served.here(last, last + 1)
    assert not served.here(0, 3) and not served.here(1, 5) and served.here(3, 3)
    served.read(out, 1, 3)
    assert same(out[PULLED : 3 * PULLED], np.concatenate((new[1], new[2])))
    assert (out[:PULLED] == 5).all() and (out[3 * PULLED :] == 5).all()
    served.read(out, last, served.fragments + 9)
    assert same(out[last * PULLED :], new[last])
    assert served.version(1, 3) == (ROUND, 9) and served.version(1, 4) == (ROUND, 3)
    assert served.version() == (ROUND, 3) and served.version(last, last + 1) == (ROUND, 11)
    served.read(out)
    assert same(out[3 * PULLED : 4 * PULLED], before[3 * PULLED : 4 * PULLED])


@pytest.mark.parametrize("width", [16, 32])
def test_what_a_step_has_brought_is_here(width: int) -> None:
    """With lanes of 32 bits: a pull that follows needs no server, and so no other number."""
    agent = Agent(width)
    agent.begin()
    agent.pull(parameters(1), version=3)
    agent.served.step(ROUND, np.zeros(LANES, np.float32), 4)
    agent.stepped()
    assert agent.served.wait(ROUND)
    if width == 32:
        agent.number -= 1
        agent.pulled(parameters(2), version=4)
    agent.served.pull(ROUND)
    assert agent.served.here(0, agent.room) is (width == 32)
    agent.close()


def test_what_a_step_has_brought_in_part_is_pulled_again(tmp_path: Path) -> None:
    """The kernel writes over it, so a program that read it meanwhile could have half of one and half of the other."""
    agent = Agent(32, tmp_path, lanes=1500)
    agent.begin()
    agent.pull(parameters(1, agent.lanes), version=3)
    agent.served.step(ROUND, np.zeros(agent.lanes, np.float32), 4)
    agent.stepped()
    assert agent.served.wait(ROUND)
    agent.hold(1, parameters(2)[PULLED : 2 * PULLED], version=4)
    agent.served.pull(ROUND)
    assert not agent.served.here(1, 2)
    agent.hold(2, parameters(2)[PULLED : 2 * PULLED], version=4)
    assert not agent.served.here(2, 3), "an answer to the step that was late"
    agent.number += 1
    agent.hold(1, parameters(2)[PULLED : 2 * PULLED], version=5)
    assert agent.served.here(1, 2) and not agent.served.here(0, 1)
    agent.close()


def test_answers_to_a_step_that_is_dropped_bring_nothing(tmp_path: Path) -> None:
    """They came in a round that was left in the middle: all parameters are pulled anew."""
    agent = Agent(32, tmp_path, lanes=1500)
    agent.begin()
    weights = agent.pull(parameters(1, agent.lanes), version=3)
    agent.served.step(ROUND, trained(weights, 1), 4)
    agent.take()
    agent.number += 1
    agent.hold(1, parameters(2)[PULLED : 2 * PULLED], version=4)
    agent.phase(first=ROUND + 1)
    assert agent.served.wait(ROUND) is None
    assert agent.session.next_phase().kind == "train"
    agent.served.pull(ROUND + 1)
    assert not agent.served.here(1, 2)
    agent.number += 1
    agent.hold(1, parameters(2)[PULLED : 2 * PULLED], ROUND + 1)
    assert agent.served.here(1, 2) and not agent.served.here(0, 1)
    agent.close()


def test_the_oldest_round_is_the_version(small: Agent) -> None:
    small.begin()
    small.pull(parameters(1, small.lanes), version=3)
    small.number += 1
    small.hold(2, [1] * PULLED, ROUND + 1, 0)
    assert small.served.version(2, 3) == (ROUND + 1, 0)
    assert small.served.version(1, 3) == (ROUND, 3)


def test_a_pull_after_a_commit_comes_before_a_test(small: Agent) -> None:
    """All must have read what was committed: the test is of that."""
    small.begin()
    small.committed(ROUND)
    assert isinstance(small.served.wait(ROUND), Commit)
    small.served.pull(ROUND + 1)
    small.phase("test", ROUND + 1)
    small.tell("pulled", round=ROUND + 1, number=3)
    assert small.served.wait_pulled(ROUND + 1)
    assert small.session.next_phase().kind == "test"


def test_what_a_test_needs_is_pulled_before_this_member_is_prepared_for_it(small: Agent) -> None:
    """Once all members are, the phase with servers is over, and nobody answers."""
    small.begin()
    small.committed(ROUND)
    assert isinstance(small.served.wait(ROUND), Commit)

    told: list[str] = []

    def pull(kind: str) -> None:
        told.append(kind)
        small.served.pull(ROUND + 1)
        assert small.take() == {"op": "pull", "round": ROUND + 1}
        small.tell("pulled", round=ROUND + 1, number=3)
        assert small.served.wait_pulled(ROUND + 1)

    small.session.on_phase = pull
    small.enter("test", ROUND + 1)
    assert told == ["test"]


def test_what_was_pulled_late_is_told(small: Agent) -> None:
    """It has no digest: the servers may have lost what that commit came to."""
    small.begin()
    small.served.caught_up(ROUND - 1)
    assert small.take() == {"op": "read", "round": ROUND - 1, "digest": ""}


def test_what_was_told_of_a_round_ends_with_its_phase(small: Agent) -> None:
    small.begin()
    small.served.pull(ROUND)
    small.take()
    small.committed(ROUND)
    small.tell("pulled", round=ROUND, number=3)
    assert small.served.wait_pulled(ROUND)
    small.enter()
    small.committed(ROUND, 3)
    commit = small.served.wait(ROUND)
    assert isinstance(commit, Commit) and commit.counted == {3: 4}


@pytest.mark.parametrize("kind", ["train", "save", "load", "test"])
def test_another_phase_ends_a_pull(small: Agent, kind: str) -> None:
    """A test does where there is nothing to be read: the last commit was read before."""
    small.begin()
    if kind != "test":
        small.committed(ROUND)
        small.served.wait(ROUND)
    small.served.pull(ROUND + 1)
    small.phase(kind, ROUND)
    assert not small.served.wait_pulled(ROUND + 1)
    assert small.session.next_phase().kind == kind


@pytest.mark.parametrize("op", ["phase", "lost", "keep", "abort"])
def test_what_comes_before_the_rest_of_a_pull(small: Agent, op: str) -> None:
    """R18: without a majority nothing comes, and the state is saved."""
    small.begin(every=1)
    small.served.pull(ROUND)
    small.number += 1
    small.hold(0, [1] * PULLED)
    small.tell("view", view=6, live=[1, 2, 3], lead=1, round=ROUND)
    assert small.served.arrive(0, 1), "a view ends no pull"
    if op == "phase":
        small.phase("train", ROUND + 1)
    elif op == "lost":
        small.tell("pulled", round=ROUND, number=1, lost=True)
    else:
        small.tell(op, **({"message": "over"} if op == "abort" else {}))
    assert not small.served.arrive(0, small.served.fragments)
    assert small.served.arrive(0, 1), "that is here"


@pytest.mark.parametrize("every", [0, 64])
def test_the_last_commit_is_taken_back(small: Agent, every: int) -> None:
    small.begin(every)
    weights = small.pull(parameters(1, small.lanes))
    committed = weights.copy()
    small.served.keep_commit(weights)
    weights[:] = small.pull(parameters(2, small.lanes))
    small.served.take_back(weights)
    assert same(weights, committed)
    weights[3] += 1
    small.served.keep_commit(weights)
    kept = weights.copy()
    weights[3] += 1
    small.served.take_back(weights)
    assert same(weights, kept)


def test_where_each_step_is_a_commit_the_store_has_it(small: Agent) -> None:
    small.begin(every=1)
    committed = small.pull(parameters(1, small.lanes))
    weights = committed.copy()
    small.served.keep_commit(weights)
    assert small.served._committed is None, "no copy"
    weights += 1
    small.served.take_back(weights)
    assert same(weights, committed)


def test_a_residual_between_commits_belongs_to_no_state(small: Agent, tmp_path: Path) -> None:
    """A checkpoint is of a commit: only what is left over at its end goes with it."""
    small.begin()
    weights = small.pull(parameters(1, small.lanes))
    commit = Commit(ROUND, 0, {}, -40)
    small.session.applied(commit, "state")
    small.served.step(ROUND, trained(weights, 1), 4)
    small.stepped()
    small.served.wait(ROUND)
    small.session.checkpoint(ROUND)
    assert not (tmp_path / "residual.npz").exists()
    small.session.applied(commit, "next")
    small.session.checkpoint(ROUND)
    assert (tmp_path / "residual.npz").exists()


def test_new_maps_take_the_place_of_old_ones(small: Agent) -> None:
    small.begin()
    small.pull(parameters(1, small.lanes))
    small.serves(every=0, new=False)
    small.enter()
    assert small.served.about.every == 0 and small.served.version() == (ROUND, 0), "the old ones"
    old = small.sums
    small.sums, small.number = Mapped(layout().records["stored"], (small.room,)), 0
    small.serves()
    small.enter()
    small.pull(parameters(2, small.lanes), version=4)
    old.close()


def test_a_parameter_near_the_limit_ends_the_job(small: Agent) -> None:
    small.begin()
    small.tell("near_limit", index=17, value=-4.19e6)
    with pytest.raises(TooLarge, match=r"^a parameter is -4.19e\+06 at index 17: servers") as error:
        small.served.wait(ROUND)
    assert error.value.index == 17 and isinstance(error.value, JobFailed)
