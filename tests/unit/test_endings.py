# SPDX-License-Identifier: Apache-2.0
"""Who is told how a job ended."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nicps import wire
from nicps.agent.children import Children
from nicps.agent.control import Access, ControlSocket
from nicps.agent.driver import Driver
from nicps.agent.loop import Loop
from nicps.agent.notifier import Notifier
from nicps.agent.peer import Peer
from nicps.agent.preparation import Preparation
from nicps.agent.process import User
from nicps.agent.settings import AgentSettings
from nicps.job import Life, LifeSettings, slow_work
from nicps.job import actions as act
from nicps.job.orders import Orders
from nicps.job.plan import Plan, stop
from nicps.job.roles import Roles
from nicps.job.tasks import Tasks
from nicps.protocol import Action, Evicted, Node, Prepare, View
from nicps.session.channel import Channel
from nicps.session.events import Progressed, Training, Warned
from nicps.session.fields import Message
from nicps.session.messages import Error, LastJob, Result, Submit
from nicps.session.shared_form import Report
from tests.parts import MEMBERS
from tests.simulator import schedules
from tests.simulator.drill import TRAINING_S, idle, job, training
from tests.simulator.host import Host

pytestmark = pytest.mark.unit

SAVED = "saved after 42 rounds of training in /runs/1/checkpoint"


class Nothing:
    """A kernel that has taken nothing."""

    def count(self, round_: int, view: int, sender: int) -> int:
        return 0

    def missing(self, *_: Any) -> list[tuple[int, int]]:
        return []


def roles_of(leads: bool, submitted: bool = True, tasks: Tasks | None = None) -> Roles:
    """The roles of the first of three hosts, whose training the second one leads, or itself."""
    node = Node(MEMBERS[0].mac, "h1", "nicps", Nothing(), lambda: 1)
    node._host.view, node._host.number = (
        View(1, MEMBERS, frozenset({1, 2, 3}), 1 if leads else 2),
        1,
    )
    roles = Roles(LifeSettings("h1", "nicps", runs="/runs"), node, tasks or Tasks())
    if submitted:
        roles.submit().job_id = "1"
    if leads:
        roles.begin_lead(0.0, Plan("1", 8, 16))
    return roles


def ended(orders: Orders) -> Message:
    """What the submitter hears."""
    (published,) = [order for order in orders if isinstance(order, act.Publish)]
    assert published.submission == 1
    return published.message


# ---- who hears of it


class Waiting:
    """An agent's socket with connections to it, and who is told through it."""

    def __init__(self) -> None:
        self.loop = Loop(lambda _: None)
        address = f"@nicps-test-{os.getpid()}-{time.monotonic_ns()}"
        access = Access(os.getuid())
        self.control = ControlSocket(address, access, self.loop.watch, self.loop.unwatch)
        user = User("me", os.getuid(), os.getgid())
        children = Children(user, self.loop, time.monotonic, self.control.adopt)
        self.notifier = Notifier(self.control, children, AgentSettings("eth1"))
        self.channels: list[Channel] = []

    def connect(self) -> Peer:
        ours, theirs = socket.socketpair()
        self.control.adopt(ours, os.getuid())
        self.channels.append(Channel(theirs))
        return self.control.peers[-1]

    def heard(self) -> list[int]:
        """How many messages came to each."""
        counts = []
        for channel in self.channels:
            if channel.wait(0.0):
                channel.pump()
            count = 0
            while channel.pop() is not None:
                count += 1
            counts.append(count)
        return counts

    def close(self) -> None:
        for channel in self.channels:
            channel.close()
        self.control.close()
        self.loop.drain()
        self.loop.close()


@pytest.fixture
def waiting() -> Iterator[Waiting]:
    made = Waiting()
    yield made
    made.close()


def test_who_submits_the_next_job_is_not_told_of_the_last_ones_end(waiting: Waiting) -> None:
    """The report takes a second or two, in which the host takes another job."""
    first, second, watcher = (waiting.connect() for _ in range(3))
    first.submission, second.submission, watcher.watches_all = 1, 2, True
    waiting.connect()
    waiting.notifier.publish(act.Publish(Training("2"), 2))
    assert waiting.heard() == [0, 1, 1, 0]
    waiting.notifier.publish(act.Publish(Result({}), 1))
    assert waiting.heard() == [1, 0, 1, 0]
    assert (first.submission, second.submission) == (0, 2)
    waiting.notifier.publish(act.Publish(Training("3")))
    assert waiting.heard() == [0, 0, 1, 0]


def test_a_result_is_its_own_submissions() -> None:
    lan, _ = job(hosts=2, rounds=2)
    host = lan.hosts[0]
    assert lan.run(lambda: bool(lan.ended) and host.node.ended, 30.0)
    assert not host.published or not isinstance(host.published[-1].message, Result)
    host.submit()
    lan.run(lambda: False, lan.now + 1.0)
    ends = [p for p in host.published if isinstance(p.message, Result | Error)]
    assert [end.submission for end in ends] == [1, 2], "the second job is a short one"


def test_a_run_without_a_report_is_told_to_who_submitted_it() -> None:
    """The host stands by already, and could take another job."""
    tasks = Tasks()
    roles = roles_of(leads=True, tasks=tasks)
    roles.begin_part(0.0, "1")
    (made,) = [order for order in roles.end_own_job(stop(None)) if isinstance(order, act.BeginTask)]
    (draws,) = tasks.finish(0.0, made.ticket, {})
    assert isinstance(draws, act.BeginTask) and isinstance(draws.task, slow_work.DrawReport)
    told = tasks.fail(0.0, draws.ticket, "there is no such module")
    published = [order for order in told if isinstance(order, act.Publish)]
    assert [type(order.message) for order in published] == [Warned, Result]
    assert {order.submission for order in published} == {1}


@pytest.mark.parametrize("saved", [True, False])
def test_after_an_alarm_all_are_told_where_the_model_is(saved: bool) -> None:
    """The submitter, the log, `nicps status` and the hook; at the other hosts, who has it."""
    leads = roles_of(leads=True)
    assert leads.lead is not None
    leads.lead.saved = SAVED
    phase = stop("h2 left", alarm=True, saved=saved)
    orders = leads.end_own_job(phase)
    where = f"; {SAVED}: `nicps resume` goes on from there" if saved else ""
    said = f"h2 left{where}"
    assert act.Log(f"job stopped: {said}") in orders and act.RunHook(said) in orders
    assert ended(orders) == Error(said, 6 if saved else 5)
    assert leads.publisher.last_job == LastJob("1", said, {})

    other = roles_of(leads=False, submitted=False)
    orders = other.end_others_job(phase)
    where = "; it was saved where it was led: `nicps resume` goes on from there" if saved else ""
    assert act.Log(f"job stopped: h2 left{where}") in orders
    assert act.RunHook(f"job stopped: h2 left{where}") in orders


@pytest.mark.parametrize(
    ("ending", "told"), [(wire.Ending.DONE, "result"), (wire.Ending.ENDED, "error")]
)
def test_who_was_not_heard_at_the_end_is_told_all_the_same(ending: wire.Ending, told: str) -> None:
    roles = roles_of(leads=False)
    orders = roles.note_eviction(Evicted("the job has ended", ending, "h2"))
    assert ended(orders).op == told
    assert roles.submission is None and not roles._node.busy
    assert "h2" in str(roles.publisher.last_job), "who knows more"


def test_who_was_not_heard_after_a_crash_is_told_of_that() -> None:
    """At every host, say: the one that submitted has only its own crash to go by."""
    roles = roles_of(leads=False)
    roles.begin_part(0.0, "1")
    assert roles.part is not None
    roles.part.programs.crash = "h1: the training program ended: SIGSEGV"
    roles.note_eviction(Evicted("the job has ended", wire.Ending.ENDED, "h2"))
    said = "the job was stopped while this host was not heard; h2 led it"
    assert roles.publisher.last_job is not None
    assert roles.publisher.last_job.error == f"h1: the training program ended: SIGSEGV; {said}"


def test_who_departs_while_it_stops_the_job_hears_of_the_end_too() -> None:
    """Its own program is killed while the others acknowledge its STOP."""
    lan, _ = training(hosts=3)
    first = lan.hosts[0]
    lan.at(TRAINING_S, lan.hosts[1].break_program)

    def stops(host: Host, action: Action) -> bool:
        if host is first or not isinstance(action, Prepare) or action.phase.rounds:
            return False
        if action.phase.kind is not wire.PhaseKind.STOP:
            return False
        first.kill_program()
        return True

    lan.moments.append(stops)
    assert schedules.finish(lan).what == "stopped"
    assert not lan.moments
    idle(lan)
    ends = [p for p in first.published if isinstance(p.message, Error)]
    assert [end.submission for end in ends] == [1]
    assert first.machine.roles.submission is None and first.part is None


@pytest.mark.parametrize(("live", "leads"), [({1}, True), ({1, 2}, False)])
def test_who_departs_leads_only_itself(live: set[int], leads: bool) -> None:
    """Where nobody else is left, the job ends, and somebody must say so."""
    roles = roles_of(leads=True)
    roles._node._host.view = View(1, MEMBERS, frozenset(live), 1)
    roles.depart("its program was killed")
    assert (roles.lead is not None) is leads


# ---- a job that cannot be prepared


@pytest.mark.parametrize(("ends", "code"), [(1, 5), (2, 2), (-9, 5)])
def test_a_setting_that_makes_no_sense_is_wrong_use(tmp_path: Path, ends: int, code: int) -> None:
    """The preparation ends with 2 for it; what else it ends with is the job's failure."""
    loop = Loop(lambda _: None)
    life = Life(MEMBERS[0].mac, LifeSettings("h1", "nicps"), Nothing(), lambda: 1)
    driver = Driver(life)
    user = User("me", os.getuid(), os.getgid())
    children = Children(user, loop, time.monotonic, lambda connection, uid: None)
    preparation = Preparation(driver, loop, children, tmp_path, tmp_path / "runs", user)
    published: list[act.Publish] = []
    driver.assign(
        {
            act.Publish: published.append,
            act.CloseSubmission: preparation.close,
            act.Log: lambda _: None,
        }
    )
    number = preparation.begin(Submit(str(ends), entry="tests.bad_trainer"))
    deadline = time.monotonic() + 30
    while not published:
        assert time.monotonic() < deadline
        loop.handle(loop.wait(0.1))
    (told,) = published
    assert told.submission == number and isinstance(told.message, Error)
    assert told.message.exit_code == code and "setting batch is 0" in told.message.message
    assert not life.busy_with
    while list(tmp_path.iterdir()):
        assert time.monotonic() < deadline
        loop.handle(loop.wait(0.1))
        children.tick(time.monotonic())
    loop.drain()
    loop.close()


# ---- progress and warnings of training programs


def test_a_warning_is_no_progress() -> None:
    """What was reported before still stands."""

    lan, _ = training(hosts=2)
    lan.run(lambda: lan.now > TRAINING_S)
    host = lan.hosts[0]
    host.published.clear()
    host.do(host.machine.program_message(host.clock(), Report({"round": 3})))
    host.do(host.machine.program_message(host.clock(), Report({"warning": "it is\nslow"})))
    progress, warning = (published.message for published in host.published)
    assert isinstance(progress, Progressed) and progress.token_turns > 0
    assert progress.values == {"round": 3} and progress.job_id == "job1"
    assert warning == Warned("job1", "h1: it is slow")
    assert host.machine.roles.publisher.progress == {"round": 3}
