# SPDX-License-Identifier: Apache-2.0
"""The parts of a step and their futures, on a session that the test plays."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from nicps.client import Phase
from nicps.exchange import Exchange
from nicps.flows import Flows, Part
from nicps.session import shared_form
from nicps.steps import StepEnded

pytestmark = pytest.mark.unit

PHASE = Phase("train", 7, 1, (4, 4), channels=(shared_form.PhaseChannel(0, (1, 1), 7),))
WAIT_S = 20.0


class Channels:
    """Rounds that the test has committed; each sum is sixes. `ends`: another phase comes next."""

    def __init__(self) -> None:
        self.ends = False
        self.offered: list[int] = []
        self.commits: dict[int, shared_form.Committed | None] = {}
        self._changed = threading.Condition()

    def commit(self, *rounds: int) -> None:
        for round_ in rounds:
            of = round_, {2: 3}, -30, -30, Exchange.STRIPES, 0.0, 1, (1, 2)
            self.commits[round_] = shared_form.Committed(*of, seconds_listed=0.25)
        with self._changed:
            self._changed.notify_all()

    def end(self) -> None:
        self.ends = True
        with self._changed:
            self._changed.notify_all()

    def offer(self, channel: int, round_: int, vector: Any, samples: int) -> None:
        self.offered.append(round_)

    def wait(self, channel: int, round_: int) -> shared_form.Committed | None:
        with self._changed:
            assert self._changed.wait_for(lambda: round_ in self.commits or self.ends, WAIT_S)
        return self.commits.get(round_)

    def settle(self, commit: shared_form.Committed, vector: Any) -> None:
        vector._vector[:] = 6.0

    def wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def attend(self, done: Any) -> None:
        with self._changed:
            assert self._changed.wait_for(done, WAIT_S)


@pytest.fixture
def flows() -> Any:
    vectors = [Part(np.ones(5, np.float32), np.zeros(5, np.float32)) for _ in range(2)]
    session: Any = SimpleNamespace(channels=Channels(), number=1)
    made = Flows(session, [vectors], 8)
    made.begin(PHASE, [7])
    yield made
    made.close()


def result(future: Future[None]) -> BaseException | None:
    return future.exception(WAIT_S)


def test_a_part_is_done_once_its_mean_is_there(flows: Flows) -> None:
    channels: Any = flows._channels
    first, last = flows.offer(0, 4), flows.offer(0, 4)
    channels.commit(7)
    assert result(first) is None and not last.done()
    assert (flows._parts[0][0].vector == 2.0).all(), "the sum by the samples"
    channels.commit(8)
    assert flows.finish().round == 8 and result(last) is None
    assert channels.offered == [7, 8]
    times = flows.times[0, 1]
    assert times.listed == times.offered + 0.25 and times.committed <= times.done


def test_a_round_that_is_committed_counts_though_the_phase_has_ended(flows: Flows) -> None:
    """A member without a share of the step is told of both before it has come to its last part."""
    channels: Any = flows._channels
    channels.commit(7, 8)
    channels.end()
    assert [result(flows.offer(0, 0)) for _ in range(2)] == [None, None]
    assert flows.finish().round == 8 and channels.offered == []


def test_what_is_not_committed_fails(flows: Flows) -> None:
    channels: Any = flows._channels
    first, last = flows.offer(0, 4), flows.offer(0, 4)
    channels.commit(7)
    assert result(first) is None
    channels.end()
    assert isinstance(result(last), StepEnded)
    with pytest.raises(StepEnded):
        flows.finish()
