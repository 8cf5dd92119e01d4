# SPDX-License-Identifier: Apache-2.0
"""What an urgent channel's direct calls leave of the line to the less urgent calls of their program."""

from __future__ import annotations

import contextlib
import gc
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from nicps.collective import CallTimeout, GroupClosed
from nicps.collective import link as links
from nicps.collective.directly import Directly
from nicps.collective.link import Link
from nicps.session import shared_form as says
from nicps.session.direct import DirectCall, Look
from tests.unit.test_group_channels import Channelled, commit, exchange
from tests.unit.test_link import descriptors

pytestmark = pytest.mark.unit
_LIMIT_S = 10.0
TOOK_S = 0.9


@pytest.fixture
def agent() -> Iterator[Channelled]:
    made = Channelled()
    yield made
    made.close()


class Turns(threading.Condition):
    """A link's, with a clock that goes on only while a thread waits here, and in direct calls.

    Attributes: `events`, what happens while a thread waits, and when; at most one.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = 100.0
        self.events: list[tuple[float, Callable[[], None]]] = []

    def monotonic(self) -> float:
        return self.now

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        assert timeout is not None
        until = self.now + timeout
        while not predicate() and self.now < until:
            self.now = min([until, *(at for at, _ in self.events)])
            while self.events and self.events[0][0] <= self.now:
                self.events.pop()[1]()
        return predicate()


class Calls:
    """Direct calls of a channel, each of which takes `TOOK_S`.

    Attributes: `begun`, when each of them was.
    """

    def __init__(self, turns: Turns) -> None:
        self._turns, self.begun = turns, list[float]()

    def gather(self, call: DirectCall, data: bytes, look: Look) -> dict[int, tuple[int, bytes]]:
        """As `DirectChannel`."""
        look()
        self.begun.append(self._turns.now)
        self._turns.now += TOOK_S
        return {1: (call.call, data)}


class Urgent:
    """A link with two channels, of which the second one is urgent, and its direct calls."""

    def __init__(self, link: Link, monkeypatch: pytest.MonkeyPatch) -> None:
        self.link, self.turns = link, Turns()
        link._turns, link._share = self.turns, 0.9
        monkeypatch.setattr(links, "time", SimpleNamespace(monotonic=self.turns.monotonic))
        self.calls = [Calls(self.turns) for _ in range(2)]
        link._directly = [Directly(calls) for calls in self.calls]  # type: ignore[arg-type]

    def call(self, channel: int = 1, limit_s: float = 60.0) -> None:
        """One call, over all members."""
        deadline = self.turns.now + limit_s
        assert self.link.gather(b"it", 5, frozenset({1}), deadline, channel) == {1: b"it"}

    def pauses(self) -> list[float]:
        """Between the urgent calls."""
        begun = self.calls[1].begun
        return [round(b - a - TOOK_S, 6) for a, b in itertools.pairwise(begun)]


@pytest.fixture
def urgent(agent: Channelled, monkeypatch: pytest.MonkeyPatch) -> Iterator[Urgent]:
    made = Urgent(agent.link(), monkeypatch)
    yield made
    made.link.close("the test is over")
    gc.collect()  # errors hold the link, and so its descriptors, which other tests count


@pytest.mark.parametrize(("share", "pause_s"), [(0.9, 0.1), (0.5, 0.9), (1.0, 0.0)])
def test_direct_calls_leave_the_line_a_part_of_the_time(
    urgent: Urgent, share: float, pause_s: float
) -> None:
    urgent.link._share = share
    with urgent.link._in_exchange(0):
        for _ in range(3):
            urgent.call()
    assert urgent.pauses() == [pause_s] * 2


def test_without_bulk_direct_calls_go_on_at_once(urgent: Urgent) -> None:
    with urgent.link._in_exchange(0):
        urgent.call()
    urgent.call()
    assert urgent.pauses() == [0.0]


def test_bulk_itself_never_pauses(urgent: Urgent) -> None:
    with urgent.link._in_exchange(1):
        for _ in range(2):
            urgent.call(0)
    first, second = urgent.calls[0].begun
    assert second == first + TOOK_S


def test_channels_of_equal_urgency_leave_each_other_nothing(urgent: Urgent) -> None:
    urgent.link.plan = tuple(replace(each, urgency=1) for each in urgent.link.plan)
    with urgent.link._in_exchange(0):
        for _ in range(2):
            urgent.call()
    assert urgent.pauses() == [0.0]


def test_a_direct_call_goes_on_once_bulk_is_done(urgent: Urgent) -> None:
    with contextlib.ExitStack() as bulk:
        bulk.enter_context(urgent.link._in_exchange(0))
        urgent.call()
        urgent.turns.events = [(urgent.turns.now + 0.03, bulk.close)]
        urgent.call()
    assert urgent.pauses() == [0.03]


def test_a_pause_does_not_outlast_the_calls_deadline(urgent: Urgent) -> None:
    with urgent.link._in_exchange(0):
        urgent.call()
        whole_at = urgent.turns.now
        with pytest.raises(CallTimeout):
            urgent.call(limit_s=0.04)
    assert urgent.turns.now == whole_at + 0.04 and len(urgent.calls[1].begun) == 1


def test_a_pause_ends_with_the_group(urgent: Urgent) -> None:
    with urgent.link._in_exchange(0):
        urgent.call()
        ended_at = urgent.turns.now + 0.02
        urgent.turns.events = [(ended_at, lambda: urgent.link.abandon("the program has failed"))]
        with pytest.raises(GroupClosed, match="the program has failed"):
            urgent.call()
    assert urgent.turns.now == ended_at and len(urgent.calls[1].begun) == 1


def gather(link: Link, deadline: float) -> Future[Any]:
    """An urgent call, in a thread of its own."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(link.gather(b"it", 5, frozenset({1}), deadline, 1))
        except GroupClosed as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


@pytest.mark.parametrize("fails", [False, True])
def test_what_ends_a_pause_wakes_its_thread(agent: Channelled, fails: bool) -> None:
    """Bulk is committed, or the group is cancelled."""
    before = descriptors()
    link, turns = agent.link(), Turns()
    bulk = exchange(link, 0)
    (offer,) = agent.of(says.Offer, 1)
    late = time.monotonic() + 1000.0
    link._directly = [Directly(Calls(turns), free_at=late) for _ in range(2)]  # type: ignore[arg-type]
    future = gather(link, late)
    agent.post(says.Abort("cancelled on h1") if fails else commit(offer))
    if fails:
        for each in (future, bulk):
            with pytest.raises(GroupClosed, match="cancelled on h1"):
                each.result(_LIMIT_S)
        del each
    else:
        assert future.result(_LIMIT_S) == {1: b"it"} and bulk.result(_LIMIT_S).number == 1
    link.close("the test is over")
    del future, bulk
    assert not descriptors() - before
