# SPDX-License-Identifier: Apache-2.0
"""A group's channels at one member: plans, the threads, and what concerns the rounds of all channels."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from nicps.collective import Group, GroupClosed
from nicps.collective.channels import Workers, plan_of
from nicps.collective.lanes import Words
from nicps.collective.link import Link
from nicps.collective.rounds import Ranks
from nicps.errors import JobFailed, UsageProblem
from nicps.exchange import Exchange
from nicps.job.plan import read_plan
from nicps.protocol.plan import ChannelPlan as AgreedPlan
from nicps.session import shared_form as says
from nicps.session.fields import encode
from nicps.session.shared_form import ChannelPlan
from nicps.session.sized import Round
from tests.unit.test_link import Agent, descriptors

pytestmark = pytest.mark.unit
_LIMIT_S = 10.0


# ---- plans


def test_rooms_are_dealt_out_or_said() -> None:
    assert plan_of([1, 0], None, 360, 9) == (ChannelPlan(1, (4,)), ChannelPlan(0, (4,)))
    assert plan_of([3], [361], 360, 9) == (ChannelPlan(3, (2,)),)


@pytest.mark.parametrize(
    ("urgencies", "rooms", "why"),
    [
        ([], None, "a group has 1 to 8 channels, not 0"),
        ([0] * 9, None, "a group has 1 to 8 channels, not 9"),
        ([0, 8], None, "an urgency is a number from 0 to 7, not 8"),
        ([0, "high"], None, "an urgency is a number from 0 to 7, not 'high'"),
        ([0, 1], [360], "2 urgencies and 1 rooms: each channel has one of both"),
        ([0, 1], [360, 0], "a channel's room is a number above 0, not 0"),
        ([0, 1], [720, 3000], "rooms are 3,720 numbers together, and a group has room for 3,240"),
    ],
)
def test_a_plan_that_cannot_be_meant(urgencies: Any, rooms: Any, why: str) -> None:
    with pytest.raises(UsageProblem, match=why):
        plan_of(urgencies, rooms, 360, 9)


def test_a_form_with_a_bad_plan_waits_for_nobody() -> None:
    with pytest.raises(UsageProblem, match="an urgency is a number from 0 to 7, not 9"):
        Group.form(2, socket="/no/such/socket", urgencies=[9])
    with pytest.raises(UsageProblem, match="needs urgencies="):
        Group.form(2, socket="/no/such/socket", rooms=[9])


def test_an_agent_reads_a_groups_plan() -> None:
    """Rounds have sizes of their own, up to the room."""
    group = {"group": {"name": "default", "size": 2}, "room": 8000}
    told = ChannelPlan(2, (7000,)), ChannelPlan(0, (1000,))
    assert read_plan(group, told) == (AgreedPlan(2, 7000), AgreedPlan(0, 1000))
    with pytest.raises(JobFailed, match="cannot have these rounds on its channels"):
        read_plan(group, (ChannelPlan(2, (9000,)),))
    with pytest.raises(JobFailed, match="tells the plan"):
        read_plan(group, ())


def test_a_program_that_has_come_late_has_the_channels_that_it_names() -> None:
    """Until it is in the group its calls are answered here."""
    group = Group(None, 0, _LIMIT_S)
    with pytest.raises(UsageProblem, match="there is no channel 1: the group has one channel, 0"):
        group.all_reduce(np.ones(3), channel=1)
    group.plan([0, 1]).result(_LIMIT_S)
    assert group.all_reduce(np.ones(3), channel=1).result(_LIMIT_S).tolist() == [1.0] * 3
    with pytest.raises(UsageProblem, match="there is no channel 2: the group has 2 channels"):
        group.barrier(channel=2)
    group.close()
    with pytest.raises(GroupClosed):
        group.plan([0])


# ---- the threads


def test_what_would_end_a_channels_thread_ends_no_call_behind_it() -> None:
    """A callback, or the call itself."""
    failed: list[BaseException] = []
    workers, gate = Workers(failed.append), threading.Event()

    def leave(_: object = None) -> None:
        raise SystemExit

    first = workers.put(0, lambda: gate.wait(_LIMIT_S))
    first.add_done_callback(leave)
    gate.set()
    assert workers.put(0, lambda: 1).result(_LIMIT_S) == 1 and not failed
    with pytest.raises(SystemExit):
        workers.put(0, leave).result(_LIMIT_S)
    assert workers.put(0, lambda: 2).result(_LIMIT_S) == 2
    assert [type(each) for each in failed] == [SystemExit]
    workers.end()
    workers.join()


def test_an_error_of_ours_shows_a_script_no_frames_of_the_threads() -> None:
    """Nor what it was raised for; an error of another kind is a mistake somewhere, and keeps them."""
    workers = Workers(lambda error: None)

    def fail(error: Exception) -> None:
        error.__context__ = KeyError()
        raise error

    ours = workers.put(0, lambda: fail(GroupClosed("over"))).exception(_LIMIT_S)
    assert ours is not None and ours.__traceback__ is None and ours.__suppress_context__
    other = workers.put(0, lambda: fail(ValueError("x"))).exception(_LIMIT_S)
    assert other is not None and other.__traceback__ is not None
    workers.end()
    workers.join()


def test_a_channel_without_a_thread_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system has no room for another thread: the call says so, and the next one does not wait for ever."""
    workers = Workers(lambda error: None)
    start = threading.Thread.start

    def fail(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", fail)
    with pytest.raises(RuntimeError, match="start new thread"):
        workers.put(1, lambda: 1)
    monkeypatch.setattr(threading.Thread, "start", start)
    assert workers.put(1, lambda: 2).result(10) == 2
    workers.end()
    workers.join()


def test_a_call_on_all_channels_stands_between_those_before_and_after_it() -> None:
    """Also where the channel's thread begins after it."""
    done: list[str] = []
    failed: list[BaseException] = []
    workers, gates = Workers(failed.append), [threading.Event() for _ in range(2)]

    def work(text: str, gate: threading.Event | None = None) -> None:
        assert gate is None or gate.wait(_LIMIT_S)
        done.append(text)

    before = workers.put(1, lambda: work("before on 1", gates[0]))
    whole = workers.put_together(lambda: work("on all", gates[1]))
    after = [workers.put(k, lambda k=k: work(f"after on {k}")) for k in (2, 1)]  # type: ignore[misc]
    gates[1].set()
    time.sleep(0.05)
    assert done == []
    gates[0].set()
    for future in (before, whole, *after):
        future.result(_LIMIT_S)
    assert done[:2] == ["before on 1", "on all"] and sorted(done[2:]) == [
        "after on 1",
        "after on 2",
    ]
    error = workers.put_together(lambda: 1 / 0)
    assert isinstance(error.exception(_LIMIT_S), ZeroDivisionError) and len(failed) == 1
    assert workers.put(2, lambda: 5).result(_LIMIT_S) == 5, "the others go on after an error"
    workers.end()
    workers.join(_LIMIT_S)
    assert not any(thread.is_alive() for thread in workers.threads)


# ---- the link


class Channelled(Agent):
    """It opens phases with two channels as the test says, and notes what the program sends.

    Attributes: `said`, all of it.
    """

    def __init__(self) -> None:
        self.said: list[Any] = []
        super().__init__()

    def phase(self, number: int, opened: tuple[int, int], room: int) -> says.Phase:
        channels = tuple(says.PhaseChannel(k, (2,), open_) for k, open_ in enumerate(opened))
        return says.Phase(
            "train",
            min(opened),
            number,
            0,
            (1,),
            Exchange.STRIPES,
            1,
            (1,),
            1,
            room=room,
            channels=channels,
        )

    def heard(self, message: Any) -> None:
        self.said.append(message)
        if isinstance(message, says.Ready):
            self.post(self.phase(1, (1, 1), 4), self._records)

    def post(self, message: Any, fds: Any = ()) -> None:
        self._channel.post(encode(message), fds)

    def of(self, kind: type, count: int) -> list[Any]:
        """Wait until so many of that kind have come."""
        deadline = time.monotonic() + _LIMIT_S
        while len(found := [each for each in self.said if isinstance(each, kind)]) < count:
            assert time.monotonic() < deadline, self.said
            time.sleep(0.002)
        return found


@pytest.fixture
def agent() -> Iterator[Channelled]:
    made = Channelled()
    yield made
    made.close()


def exchange(link: Link, channel: int) -> Future[Round]:
    """One round of 400 numbers, in a thread of its own."""
    future: Future[Round] = Future()
    words, out = np.arange(400, dtype=np.int32), np.zeros(400, np.int32)

    def run() -> None:
        try:
            vector = Words(words, out, np.zeros(2, np.bool_))
            found = link.of(channel).exchange(vector, 5, time.monotonic() + _LIMIT_S)
            assert np.array_equal(words, out)
            future.set_result(found)
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def commit(offer: says.Offer) -> says.Committed:
    of = offer.round, {1: offer.samples}, 0, 0, Exchange.STRIPES, 0.0, 1, (1,)
    return says.Committed(*of, channel=offer.channel)


def test_a_phase_begins_once_what_was_committed_before_it_is_read(agent: Channelled) -> None:
    """The round that was not committed is offered again, as the phase says; the lead's word is of each channel."""
    link = agent.link()
    futures = [exchange(link, channel) for channel in (0, 1)]
    offers = {each.channel: each for each in agent.of(says.Offer, 2)}
    agent.post(commit(offers[1]))
    agent.post(agent.phase(2, (7, 7), 0))
    assert futures[1].result(_LIMIT_S).number == 1
    again = agent.of(says.Offer, 3)[2]
    assert (again.channel, again.round) == (0, 7)
    kinds = [type(each) for each in agent.said]
    assert kinds.index(says.Read) < len(kinds) - 1 - kinds[::-1].index(says.Prepared)
    agent.post(commit(again))
    assert futures[0].result(_LIMIT_S).number == 7
    judged = set[tuple[int, int]]()
    for count in (2, 3):  # in the new phase the word of a channel may be said again
        if judged < {(1, 1), (0, 7)}:
            judged = {(each.channel, each.round) for each in agent.of(says.Decide, count)}
    assert judged >= {(1, 1), (0, 7)}
    link.close("the test is over")


def test_the_end_of_the_group_is_told_on_every_channel(agent: Channelled) -> None:
    before = descriptors()
    link = agent.link()
    futures = [exchange(link, channel) for channel in (0, 1)]
    agent.of(says.Offer, 2)
    agent.post(says.Abort("cancelled on h1"))
    for future in futures:
        with pytest.raises(GroupClosed, match="the group is over here: cancelled on h1"):
            future.result(_LIMIT_S)
    assert link.is_over
    del futures, future
    assert not descriptors() - before, "the last thread closes what is open"


def test_a_plan_is_waited_for(agent: Channelled) -> None:
    """The round is judged with it, and the lead's phase brings it."""
    link = agent.link()
    plan = ChannelPlan(3, (1,)), ChannelPlan(0, (1,))
    link.plans = plan
    future = exchange(link, 0)
    agent.post(commit(agent.of(says.Offer, 1)[0]))
    future.result(_LIMIT_S)
    judged = agent.of(says.Decide, 1)[-1]
    assert (judged.what, judged.channels, judged.round) == ("plan", plan, 1)
    agent.post(agent.phase(2, (2, 2), 0))  # the former plan goes on in another view
    channels = tuple(says.PhaseChannel(each.urgency, each.rounds, 9) for each in plan)
    agent.post(
        says.Phase("train", 9, 3, 0, (1,), Exchange.STRIPES, 1, (1,), 1, room=4, channels=channels),
        agent._records,
    )
    link.await_plan(plan, time.monotonic() + _LIMIT_S)
    assert link.plan == plan and link.of(0).room == 1
    link.close("the test is over")


def _with_a_plan_of_three(agent: Channelled) -> tuple[Link, says.Phase]:
    """A link whose program has a plan of three channels, where the phase before has two; and its phase."""
    link = agent.link()
    agent.of(says.Prepared, 1)
    plan = tuple(ChannelPlan(channel, (2,)) for channel in range(3))
    later = agent.phase(2, (5, 5, 5), 6)  # type: ignore[arg-type]
    agent.post(later, agent._records)
    link.await_plan(plan, time.monotonic() + _LIMIT_S)
    return link, later


@pytest.mark.parametrize("called", ["before", "after"])
def test_a_call_of_a_plan_that_comes_to_nothing_waits_for_it(
    agent: Channelled, called: str
) -> None:
    """The lead is lost before all have the plan: members go back to the phase before, and the next lead repeats it."""
    link, later = _with_a_plan_of_three(agent)
    if called == "before":
        future = exchange(link, 2)
        agent.of(says.Offer, 1)
    agent.post(agent.phase(3, (1, 1), 4), agent._records)
    if called == "after":
        future = exchange(link, 2)
    agent.of(says.Prepared, 3)
    assert not future.done()
    agent.post(replace(later, number=4, first_round=5), agent._records)
    agent.of(says.Prepared, 4)
    agent.post(commit(agent.of(says.Offer, 1 + (called == "before"))[-1]))
    assert future.result(_LIMIT_S).number == 5
    link.close("the test is over")


def _with_a_plan_that_came_to_nothing(agent: Channelled) -> tuple[Link, says.Phase]:
    """The same, back in the phase before."""
    link, later = _with_a_plan_of_three(agent)
    agent.post(agent.phase(3, (1, 1), 4), agent._records)
    return link, later


def _group(link: Link) -> Group:
    group = Group(None, 0, _LIMIT_S)
    group._link, group._ranks, group.channels = link, Ranks((1,), ("h1",)), 3
    return group


def test_a_call_on_a_channel_of_such_a_plan_is_none_on_no_channel(agent: Channelled) -> None:
    link, later = _with_a_plan_that_came_to_nothing(agent)
    group, first = _group(link), exchange(link, 0)
    agent.of(says.Prepared, 3)
    future = group.barrier(channel=2)
    agent.post(replace(later, number=4, first_round=5), agent._records)
    agent.of(says.Prepared, 4)
    for offer in agent.of(says.Offer, 2):
        agent.post(commit(offer))
    assert first.result(_LIMIT_S).number == 5
    future.result(_LIMIT_S)
    link.close("the test is over")


def test_a_plan_like_the_one_before_such_a_plan_is_decided_on(agent: Channelled) -> None:
    """The members have called both in turn, and the first of them comes into force before the second."""
    link, later = _with_a_plan_that_came_to_nothing(agent)
    group, other = _group(link), exchange(link, 1)
    agent.of(says.Prepared, 3)
    before = link.plan
    future = group._workers.put(0, lambda: group._plan(before))
    agent.post(replace(later, number=4, first_round=5), agent._records)
    agent.of(says.Prepared, 4)
    for offer in agent.of(says.Offer, 2):
        agent.post(commit(offer))
    other.result(_LIMIT_S)
    judged = [each for each in agent.of(says.Decide, 2) if not each.channel]
    assert (judged[-1].what, judged[-1].channels) == ("plan", before)
    agent.post(agent.phase(5, (9, 9), 4), agent._records)
    future.result(_LIMIT_S)
    link.close("the test is over")


def test_a_direct_call_that_is_put_off_outlives_such_a_plan(agent: Channelled) -> None:
    """It waits for a less urgent call when its channel goes, and then for the plan."""
    link, _ = _with_a_plan_that_came_to_nothing(agent)
    other, done = exchange(link, 0), Future[None]()

    def leave() -> None:
        try:
            link._leave_line(2, time.monotonic() + _LIMIT_S)
            done.set_result(None)
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=leave, daemon=True).start()
    agent.of(says.Prepared, 3)
    done.result(_LIMIT_S)
    assert not other.done()
    link.close("the test is over")
    assert isinstance(other.exception(_LIMIT_S), GroupClosed)
