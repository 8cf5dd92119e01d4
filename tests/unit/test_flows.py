# SPDX-License-Identifier: Apache-2.0
"""The parts of a step and their futures, on a session that the test plays."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
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
THREE = Phase("train", 7, 1, (4, 4), channels=(shared_form.PhaseChannel(0, (1, 1, 1), 7),))
WAIT_S = 20.0


class Channels:
    """Rounds that the test has committed; each sum is sixes.

    Attributes: `ends`, another phase comes next; `offered`, the rounds, in order, and `before`, by a round that is
    read, those that were offered before it was; `refused`, the round that cannot be offered.
    """

    def __init__(self) -> None:
        self.ends = False
        self.offered: list[int] = []
        self.before: dict[int, list[int]] = {}
        self.refused = 0
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
        if round_ == self.refused:
            raise OSError("the agent has gone")
        with self._changed:
            self.offered.append(round_)
            self._changed.notify_all()

    def wait_for_offers(self, count: int) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: len(self.offered) >= count, WAIT_S)

    def wait(
        self, channel: int, round_: int, unless: Callable[[], bool] = lambda: False
    ) -> shared_form.Committed | None:
        done = lambda: round_ in self.commits or self.ends or unless()  # noqa: E731
        with self._changed:
            assert self._changed.wait_for(done, WAIT_S)
            return self.commits.get(round_)

    def settle(self, commit: shared_form.Committed, vector: Any) -> None:
        self.before[commit.round] = [*self.offered]
        vector._vector[:] = 6.0

    def wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def attend(self, done: Any) -> None:
        with self._changed:
            assert self._changed.wait_for(done, WAIT_S)


def made_of(parts: int, *, together: bool = True) -> Flows:
    vectors = [Part(np.ones(5, np.float32), np.zeros(5, np.float32)) for _ in range(parts)]
    session: Any = SimpleNamespace(channels=Channels(), number=1)
    return Flows(session, [vectors], 8, together=together)


@pytest.fixture
def flows() -> Any:
    made = made_of(2)
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


def test_the_next_part_goes_out_while_a_round_is_on_its_way() -> None:
    """One part, at most: the one behind it has the bank of the round that is not read yet."""
    flows = made_of(3)
    flows.begin(THREE, [7])
    channels: Any = flows._channels
    means = [flows.offer(0, 4)]
    assert channels.wait_for_offers(1)
    means += [flows.offer(0, 4) for _ in range(2)]
    assert channels.wait_for_offers(2)
    channels.commit(7)
    assert result(means[0]) is None and channels.before == {7: [7, 8]}
    assert channels.wait_for_offers(3)
    channels.commit(8, 9)
    assert [result(mean) for mean in means] == [None] * 3 and flows.finish().round == 9
    assert channels.before == {7: [7, 8], 8: [7, 8, 9], 9: [7, 8, 9]}
    flows.close()


def test_a_part_that_comes_as_a_round_is_committed_goes_out_before_the_sum_is_read(
    flows: Flows,
) -> None:
    channels: Any = flows._channels
    first = flows.offer(0, 4)
    assert channels.wait_for_offers(1)
    with channels._changed:  # the thread finds both at once
        last = flows.offer(0, 4)
        channels.commit(7)
    assert result(first) is None and channels.before == {7: [7, 8]}
    channels.commit(8)
    assert result(last) is None


def test_what_goes_out_ahead_counts_as_offered_when_the_round_before_is_committed(
    flows: Flows,
) -> None:
    channels: Any = flows._channels
    means = [flows.offer(0, 4) for _ in range(2)]
    assert channels.wait_for_offers(2)
    channels.commit(7)
    assert result(means[0]) is None
    channels.commit(8)
    assert result(means[1]) is None
    first, last = flows.times[0, 0], flows.times[0, 1]
    assert last.offered == first.committed <= last.listed


@pytest.mark.parametrize("always", [True, False])
def test_in_a_queue_a_part_waits_for_the_mean_of_the_one_before_it(always: bool) -> None:
    """So that a round has the line alone, also where that is measured, in one step."""
    flows = made_of(2, together=not always)
    channels: Any = flows._channels
    flows.begin(PHASE, [7], together=always)
    means = [flows.offer(0, 4) for _ in range(2)]
    assert channels.wait_for_offers(1)
    channels.commit(7, 8)
    assert [result(mean) for mean in means] == [None, None]
    assert channels.before == {7: [7], 8: [7, 8]}
    flows.close()


def test_a_part_that_has_gone_out_early_does_not_come_if_the_phase_ends(flows: Flows) -> None:
    channels: Any = flows._channels
    settle = channels.settle

    def end(commit: shared_form.Committed, vector: Any) -> None:
        settle(commit, vector)
        channels.end()

    channels.settle = end
    first, last = flows.offer(0, 4), flows.offer(0, 4)
    channels.commit(7)
    assert result(first) is None and isinstance(result(last), StepEnded)
    assert channels.offered == [7, 8] and (flows._parts[0][0].vector == 2.0).all()
    assert (flows._parts[0][1].vector == 1.0).all(), "what has gone out stays as it is"


def test_a_part_that_cannot_go_out_does_not_hold_up_the_one_before_it(flows: Flows) -> None:
    channels: Any = flows._channels
    channels.refused = 8
    first, last = flows.offer(0, 4), flows.offer(0, 4)
    channels.commit(7)
    assert result(first) is None and isinstance(result(last), OSError)
    with pytest.raises(OSError, match="the agent has gone"):
        flows.finish()


def test_parts_of_a_step_that_is_given_up_do_not_go_out() -> None:
    """One is on its way, one has gone out ahead; the third has not."""
    flows = made_of(3)
    flows.begin(THREE, [7])
    channels: Any = flows._channels
    means = [flows.offer(0, 4) for _ in range(3)]
    assert channels.wait_for_offers(2)
    flows.give_up()
    channels.commit(7, 8)
    assert [result(mean) for mean in means[:2]] == [None, None]
    with pytest.raises(CancelledError):
        means[2].result(WAIT_S)
    assert channels.offered == [7, 8]
    flows.close()


def test_the_end_may_come_behind_a_part() -> None:
    """Its thread reads the sum that is on its way, and ends."""
    others = {*threading.enumerate()}
    flows = made_of(2)
    (thread,) = {*threading.enumerate()} - others
    flows.begin(PHASE, [7])
    channels: Any = flows._channels
    mean = flows.offer(0, 4)
    assert channels.wait_for_offers(1)
    flows.close()
    channels.commit(7)
    assert result(mean) is None
    thread.join(WAIT_S)
    assert not thread.is_alive()
