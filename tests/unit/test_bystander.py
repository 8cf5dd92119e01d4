# SPDX-License-Identifier: Apache-2.0
"""A host that comes while a job is under way that admits nobody knows of it, and takes part in the next one."""

from __future__ import annotations

import math

import pytest

from nicps import wire
from nicps.errors import NetworkProblem
from nicps.job.actions import Log
from nicps.job.plan import Plan
from nicps.job.publisher import Publisher
from nicps.job.text import one_line
from nicps.protocol import Group, NodeState, NotAdmitted, Send, Timings, View
from nicps.protocol.bystander import Bystander
from nicps.protocol.local_host import LocalHost
from tests.simulator import schedules
from tests.simulator.drill import idle, job, next_job
from tests.simulator.host import Host
from tests.simulator.lan import Lan

pytestmark = pytest.mark.unit

COMES_S = 0.9


def late(**settings: object) -> tuple[Lan, Host]:
    """Two hosts train for some seconds, and a third one comes."""
    lan, _ = job(hosts=2, late=1, rounds=100, compute_s=0.05, **settings)
    host = lan.hosts[2]
    lan.at(COMES_S, host.restart)
    return lan, host


def knows(host: Host) -> str:
    return host.machine.roles.publisher.other_job


def test_it_is_told_at_once() -> None:
    lan, host = late()
    assert lan.run(lambda: knows(host) == "job1", COMES_S + 0.1)
    said = "job job1 is under way and admits no more hosts: this one takes part in the next"
    assert any(f"h3  log: {said}" in line for line in lan.trace)
    with pytest.raises(NetworkProblem, match=r"; job job1 is: run `nicps cancel` on one of its"):
        host.machine.cancel(host.clock())
    lan.run(lambda: False, 3.0)
    assert host.node.state is NodeState.STANDBY and lan.hosts[0].node.view.live == {1, 2}
    assert len([line for line in lan.trace if "admits no more hosts" in line]) == 1


def test_it_asks_again_where_a_frame_is_lost() -> None:
    lan, host = late()
    lan.at(COMES_S - 0.01, lambda: lan.lose.update({wire.FrameType.CALL: 1}))
    lan.run(lambda: bool(knows(host)), COMES_S + 2.0)
    assert not knows(host)
    assert lan.run(lambda: knows(host) == "job1", COMES_S + 4.0)


def test_it_takes_part_in_the_next_one() -> None:
    lan, host = late()
    assert schedules.finish(lan).what == "done"
    assert knows(host) == "job1"
    next_job(lan, 0)
    assert lan.run(lambda: host.node.state is NodeState.MEMBER, lan.now + 3.0)
    assert lan.hosts[0].node.view.live == {1, 2, 3} and not knows(host)


def test_a_job_that_has_ended_is_forgotten() -> None:
    """Then it is silent: a network that idles sends nothing."""
    lan, host = late()
    assert schedules.finish(lan).what == "done"
    idle(lan, 20.0)
    assert not knows(host)
    assert any("job job1 has ended, or is not heard of any more" in line for line in lan.trace)
    assert host.node.deadline() == math.inf


def test_where_nothing_runs_it_asks_a_few_times() -> None:
    lan, _ = job(hosts=1, late=1)
    host = lan.hosts[1]
    lan.hosts[0].dead = True
    lan.at(COMES_S, host.restart)
    asked: list[tuple[Host, float]] = []

    def asks(other: Host, action: object) -> bool:
        if isinstance(action, Send):
            asked.append((other, lan.now))
        return False

    lan.moments.append(asks)
    lan.trouble(60.0)
    lan.run(lambda: False, 60.0)
    assert len(asked) == 4 and {other for other, _ in asked} == {host}
    assert not knows(host) and host.node.deadline() == math.inf


def test_every_question_can_be_answered() -> None:
    """The host gives up only when the last question has had its time; no question is sent whose answer is ignored."""
    host = LocalHost(bytes(6), "h1", NodeState.STANDBY, View(0, (), frozenset(), 0), 0)
    bystander, question = Bystander(host, Timings()), Send(wire.Frame(wire.Header(), wire.Call(0)))
    bystander.begin(0.0)
    bystander.hear("job1")
    for _ in range(4):
        at = bystander.deadline()
        assert at < math.inf and bystander.ask(at, question) == [question]
    assert bystander.hear("job2") == [NotAdmitted("job2")]
    for _ in range(4):
        at = bystander.deadline()
        assert at < math.inf and bystander.ask(at, question) == [question]
    at = bystander.deadline()
    assert at < math.inf and bystander.ask(at, question) == [NotAdmitted("")]
    assert bystander.deadline() == math.inf and not bystander.hear("job3")


@pytest.mark.parametrize("name", ["job\x1b[2J\n1", "j" * 1000, "\n"])
def test_a_strangers_text_is_one_printable_line(name: str) -> None:
    publisher = Publisher("h1")
    shown = one_line(name)
    logged = [log.text for log in publisher.note_other_job(name) if isinstance(log, Log)]
    assert publisher.other_job == shown and shown.isprintable()
    assert all(text.isprintable() and len(text) < 400 for text in logged)
    assert bool(logged) is bool(shown)


def test_where_new_hosts_are_admitted_it_takes_part() -> None:
    lan, _ = late(plan=Plan("job", batch=20, width=16, alarm_below=0.0, admit=True))
    assert lan.run(lambda: lan.hosts[0].node.view.live == {1, 2, 3}, 5.0)
    assert not any("admits no more hosts" in line for line in lan.trace)


def test_no_job_begins_beside_a_run() -> None:
    """Scripts of `nicps run` are under way on two hosts; a third one, which is not in the run, submits a job."""
    lan, _ = job(hosts=2, late=1)
    assert schedules.finish(lan).what == "done"
    members, stranger = lan.hosts[:2], lan.hosts[2]
    stranger.restart()
    for host in members:
        host.machine.note_run("run-1")
    next_job(lan, 2)
    lan.run(lambda: False, lan.now + 3.0)
    said = (
        "job stopped: run run-1 is under way on this network, without this host: wait for its end"
    )
    assert [line for line in lan.trace if said in line]
    assert {host.node.state for host in lan.hosts} == {NodeState.STANDBY}
    assert not any(knows(host) for host in lan.hosts)
    for host in members:
        host.machine.note_run("")
    next_job(lan, 2)
    assert lan.run(lambda: members[0].node.state is NodeState.MEMBER, lan.now + 3.0)
    assert stranger.node.view.live == {1, 2, 3}


def test_the_group_of_a_run_forms_while_a_stranger_submits_a_job() -> None:
    """What another host of the run tells the stranger is nothing to a host that forms the group."""
    lan, _ = job(hosts=2, late=1)
    assert schedules.finish(lan).what == "done"
    host = lan.hosts[0]
    host.machine.note_run("run-1")
    number = host.machine.form_group(Group(7, 2))
    body, header = wire.Call(0), wire.Header(network=host.node.network)
    frame = wire.pack(header, body, tail=b"run run-1")
    host.machine.on_frame(host.clock(), lan.hosts[1].mac, frame)
    submission = host.machine.roles.submission
    assert submission is not None and submission.number == number and not knows(host)
