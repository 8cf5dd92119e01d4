# SPDX-License-Identifier: Apache-2.0
"""A session computes residuals of large vectors as sums come in, and takes them back if the round is not committed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from nicps.errors import JobAborted
from nicps.session import loops
from nicps.session.absolute import AbsoluteQuantiser
from nicps.session.lanes import LaneFormat, Residual
from nicps.session.residual_file import NAME, read
from nicps.wire import NOT_FINITE
from tests.unit.test_session_stripes import FRAGMENTS, LANES, WIDTH, Agent, gradient, others

pytest.importorskip("numba")

F32 = npt.NDArray[np.float32]


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Agent]:
    """Round 7 is over. Round 8 has all its sums, and no commit."""
    monkeypatch.setattr(loops, "LEAST_NUMBERS", 0)
    agent = Agent()
    agent.session.workdir = str(tmp_path)
    agent.ready()
    agent.enter("train", 7)
    for round_ in (7, 8):
        agent.session.contribute(round_, gradient(round_), 4)
        agent.offered(round_, gradient(round_))
        agent.others_offer(round_, others(round_))
        agent.settle(round_, (1, 2, 3), commit=round_ == 7)
        if round_ == 7:
            commit = agent.session.wait_commit(7)
            assert commit is not None
            agent.session.sum(commit)
            agent.session.applied(commit, "d")
            assert agent.take()["op"] == "read"
    agent.arena.set_sending_since(8, 1)
    yield agent
    agent.close()


def residual(agent: Agent) -> F32:
    assert agent.session._residual is not None
    return agent.session._residual.residual.kept[:LANES]


def after_the_sums(
    agent: Agent, monkeypatch: pytest.MonkeyPatch, then: Callable[[], object]
) -> F32:
    """As round 8 is waited for, `then` once its sums are read; the residual that round 7 has left."""
    before = residual(agent).copy()
    ahead = agent.session._shared().reducer.ahead

    def read_and_then(stop: Any) -> None:
        ahead(stop)
        assert (residual(agent) != before).mean() > 0.9
        then()

    monkeypatch.setattr(agent.session._shared().reducer, "ahead", read_and_then)
    return before


def close(found: F32, before: F32) -> bool:
    """But for the rounding of vector and residual to their sum."""
    return bool((np.abs(found - before) <= np.spacing(np.abs(before) + np.abs(gradient(8)))).all())


def test_they_are_those_of_the_commit(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    after_the_sums(agent, monkeypatch, lambda: agent.commit(8, (1, 2, 3), agent.unit))
    out = np.empty(LANES, np.float32)
    commit = agent.session.wait_commit(8, out)
    assert commit is not None
    agent.session.sum(commit, out)
    agent.session.applied(commit, "d")
    agent.same_residual()


def test_they_are_taken_back_if_the_phase_ends(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = after_the_sums(agent, monkeypatch, lambda: agent.phase("train", 8))
    assert agent.session.wait_commit(8, np.empty(LANES, np.float32)) is None
    assert close(residual(agent), before)
    assert agent.session.next_phase().kind == "train"
    assert close(residual(agent), before)
    agent.session.contribute(8, gradient(8), 4)


def test_the_file_has_what_the_rounds_before_have_left(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    message = {"op": "abort", "message": "no majority", "saved": True}
    before = after_the_sums(agent, monkeypatch, lambda: agent.channel.send(message))
    with pytest.raises(JobAborted):
        agent.session.wait_commit(8, np.empty(LANES, np.float32))
    values, limit = read(os.open(Path(agent.session.workdir, NAME), os.O_RDONLY), LANES, "d")
    assert close(values, before) and np.abs(values).max() <= limit


def test_a_contribution_that_is_not_finite_has_none() -> None:
    """Even if the sum seems finite: its record may be another view's, whose list has not this member."""
    format = LaneFormat(LANES, WIDTH)
    quantiser = AbsoluteQuantiser(format, residual := Residual(format))
    vector = gradient(1)
    vector[1440] = np.nan
    lanes = np.zeros((FRAGMENTS, 1440), format.wire)
    exponents = np.zeros(FRAGMENTS, np.int8)
    quantiser.begin()
    quantiser.batch(vector, 0, FRAGMENTS, lanes, exponents)
    assert exponents[1] == NOT_FINITE
    quantiser.keep_early(vector, 0, lanes, exponents, np.zeros(FRAGMENTS, np.bool_))
    assert residual.kept[:1440].any() and not residual.kept[1440:2880].any()
    quantiser.drop(vector, lanes, exponents)
    assert np.isfinite(residual.kept).all()
