# SPDX-License-Identifier: Apache-2.0
"""A program that waits at its agent for a group that is under way: the calls of the group's lead keep it waiting."""

from __future__ import annotations

import os
import select
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nicps import wire
from nicps.agent.group import Groups
from nicps.agent.peer import Peer
from nicps.job.actions import CloseSubmission, GroupCalled, Log
from nicps.protocol import Send
from nicps.session.channel import Channel
from nicps.session.messages import JoinGroup
from nicps.session.shared_form import FROM_AGENT, Late
from tests import parts
from tests.ring_parts import START, enter_ring
from tests.rooms import Rooms

pytestmark = pytest.mark.unit

LEAD = bytes([2, 0, 0, 0, 0, 9])
UNHEARD_S, ENDING_S = 30, 3


class Host:
    """A host that stands by. Its program waits for the group "g" of two."""

    def __init__(self, folder: Path, *, late: bool = True) -> None:
        self.rooms = Rooms(folder)
        rooms, control = self.rooms, Any
        self.groups = Groups(
            rooms.driver, control, rooms.preparation, rooms.program, rooms.dataplane
        )
        self.answers: list[wire.Frame] = []
        rooms.driver.assign(
            {
                GroupCalled: self.groups.note_call,
                CloseSubmission: lambda _: None,
                Log: lambda _: None,
                Send: lambda action: self.answers.append(action.frame),
            }
        )
        rooms.driver.now = START
        self.ends = socket.socketpair()
        self.peer = Peer(self.ends[0], os.getuid(), commands=True, trains=True)
        self.groups.join(self.peer, JoinGroup("g", 2, late=late))

    def hears_call(self, group: str) -> None:
        """The lead of that group calls."""
        driver, header = self.rooms.driver, wire.Header(network=wire.network_id("nicps"))
        call = wire.pack(header, wire.Call(7, 3), tail=group.encode())
        driver.carry_out(driver.life.on_frame(driver.now, LEAD, call))

    def close(self) -> None:
        for end in self.ends:
            end.close()
        self.rooms.close()


def restarted(folder: Path) -> Host:
    """A host whose job has just ended, and whose program is started again."""
    host = Host(folder, late=False)
    roles = host.rooms.driver.life.roles
    host.groups.forget(host.peer)
    roles.part = parts.Host().part
    host.groups.tick()
    roles.part = None
    host.groups.join(host.peer, JoinGroup("g", 2))
    return host


def in_group(life: Any) -> None:
    """The host is in the group "g" of two, which is under way."""
    life.roles.part = parts.Host().part
    life.roles.part.job.prepared = {"settings": {"group": {"name": "g", "size": 2}}}
    life.roles.part.job.digest = "abc"
    enter_ring(life.node, 1, None)


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    made = Host(tmp_path)
    yield made
    made.close()


@pytest.mark.parametrize(
    ("called", "waits"),
    [
        ("group g (size 2, members 2)", True),
        ("group other (size 2, members 2)", False),
        ("20260101-120000-digits-ab12", False),
    ],
)
def test_a_program_waits_as_long_as_its_group_calls(host: Host, called: str, waits: bool) -> None:
    for later in range(1, 2 * UNHEARD_S):
        host.rooms.driver.now = START + later
        host.hears_call(called)
        host.groups.tick()
    assert host.peer.was_refused is not waits


def test_only_the_group_that_it_waits_for_is_answered(host: Host) -> None:
    host.hears_call("group other (size 2, members 2)")
    assert host.answers == []
    host.hears_call("group g (size 2, members 2)")
    (answer,) = host.answers
    assert isinstance(answer.body, wire.Answer) and answer.body.nonce == 7


def test_a_program_whose_group_calls_no_more_is_refused(host: Host) -> None:
    host.hears_call("group g (size 2, members 2)")
    for later, refused in ((UNHEARD_S - 1, False), (UNHEARD_S, True)):
        host.rooms.driver.now = START + later
        host.groups.tick()
        assert host.peer.was_refused is refused


@pytest.mark.parametrize(
    "under_way", ["group g (size 2, members 2)", "group f (size 2, members 2)"]
)
def test_a_group_that_has_just_ended_here_may_be_ending_elsewhere(
    tmp_path: Path, under_way: str
) -> None:
    """A program that is started right after it asks again, until that host must have heard of the end, too."""
    host = restarted(tmp_path)
    roles = host.rooms.driver.life.roles
    for later, answered in ((0.5, False), (ENDING_S - 0.1, False), (ENDING_S, True)):
        host.rooms.driver.now = START + later
        roles.publisher.note_other_job(under_way)
        host.groups.tick()
        said, _, _ = select.select([host.ends[1]], [], [], 0)
        assert bool(said) is answered, later
        assert not roles.publisher.other_job
        assert roles.submission is None, "the others go on: this host would form a group of its own"
    host.close()


def test_a_host_that_waits_for_the_end_of_a_group_elsewhere_begins_another_one_then(
    tmp_path: Path,
) -> None:
    host = restarted(tmp_path)
    roles = host.rooms.driver.life.roles
    assert roles.submission is not None
    roles.publisher.note_other_job("group g (size 2, members 2)")
    for later, begins in ((0.5, False), (0.7, False), (0.9, True)):
        host.rooms.driver.now = START + later
        host.groups.tick()
        assert (roles.submission is not None) is begins, later
    host.close()


@pytest.mark.parametrize("leaves", [False, True])
def test_no_program_comes_into_a_group_that_its_host_is_leaving(host: Host, leaves: bool) -> None:
    """The host leaves for the sake of a program that has gone: the next one waits until the others have agreed."""
    life = host.rooms.driver.life
    life.roles.part = parts.Host().part
    life.roles.part.job.digest = "abc"  # of a job that is no group
    enter_ring(life.node, 1, None)
    if leaves:
        life.node.leave(START, "the program has gone")
    assert life.node.leaving is leaves
    host.groups.tick()
    assert host.peer.was_refused is not leaves, "a job has begun on this host"


def test_a_program_that_is_started_where_one_that_came_late_was_killed_comes_late_itself(
    tmp_path: Path,
) -> None:
    """It does not know that there is a group, and would call what members of one that forms call."""
    host = Host(tmp_path, late=False)
    life, program = host.rooms.driver.life, host.rooms.program
    in_group(life)
    program.expects = True
    life.node.membership.learners = frozenset({life.node.number})
    host.groups.tick()
    said, _ = Channel(host.ends[1]).recv(1.0)
    assert FROM_AGENT.decode(said) == Late(len(life.node.view.members))
    assert program.expects and not host.groups.waiting
    host.close()


def test_a_second_program_on_a_host_is_refused(tmp_path: Path) -> None:
    """After a while, in which the first one may be ending."""
    host = Host(tmp_path, late=False)
    driver, program = host.rooms.driver, host.rooms.program
    in_group(driver.life)
    program._channel = Channel(host.ends[1])
    for later, refused in ((ENDING_S - 0.1, False), (ENDING_S, True)):
        driver.now = START + later
        host.groups.tick()
        assert host.peer.was_refused is refused
    said, _ = Channel(host.ends[1]).recv(1.0)
    assert "another program on this host is in group 'g' already" in said["message"]
    program._channel = None
    host.close()
