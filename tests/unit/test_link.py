# SPDX-License-Identifier: Apache-2.0
"""A group's connection to its agent, which is played here: what becomes of it at the end, and of a thread in a call."""

from __future__ import annotations

import fcntl
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any, cast

import numpy as np
import pytest

from nicps.collective import Group
from nicps.collective.errors import CallTimeout, GroupClosed
from nicps.collective.link import Directly, Link
from nicps.collective.rounds import Ranks
from nicps.errors import NetworkProblem
from nicps.exchange import Exchange
from nicps.session import shared_form as says
from nicps.session.arena import Arena
from nicps.session.channel import Channel, ChannelClosed
from nicps.session.direct import DirectCall, DirectChannel, Look
from nicps.session.fields import encode

pytestmark = pytest.mark.unit
ROOM = 4
WELCOME = says.Welcome(1, (says.Member(1, "h1"),), "h1", 1, {"room": ROOM}, "", 1)
_LIMIT_S = 10.0


class Agent:
    """The other end: it welcomes a program into a group of one host, opens a phase, and commits no round.

    Attributes: `asked`: an offer has come. `ended`: what has ended the connection.
    """

    def __init__(self) -> None:
        ours, self.theirs = socket.socketpair()
        self._channel = Channel(ours)
        self._bell = os.eventfd(0, os.EFD_CLOEXEC)
        self._arena = Arena.create(ROOM)
        self._store, self._of_store = socket.socketpair()
        self._records = [os.memfd_create(name) for name in ("own", "sums")]
        for fd in self._records:
            os.ftruncate(fd, 1 << 20)
        self.asked = threading.Event()
        self.ended: Exception | None = None
        self._thread = threading.Thread(target=self._answer, daemon=True)
        self._thread.start()

    def _answer(self) -> None:
        post = self._channel.post
        while True:
            try:
                said, _ = self._channel.recv(_LIMIT_S)
            except (ChannelClosed, TimeoutError) as error:
                self.ended = error
                return
            if said["op"] == "group":
                post(encode(WELCOME))
                continue
            message = says.FROM_PROGRAM.decode(said)
            if isinstance(message, says.Ready):
                post(encode(says.Store()), [self._store.fileno()])
                post(encode(says.Arena(ROOM)), [self._arena.fd, self._bell])
            self.heard(message)

    def heard(self, message: says.FromProgram) -> None:
        """The program has said something; once it is ready it has its memory."""
        if isinstance(message, says.Ready):
            phase = says.Phase("train", 1, 1, 0, (1,), Exchange.STRIPES, 1, (1,), 1, room=ROOM)
            self._channel.post(encode(phase), self._records)
        if isinstance(message, says.Offer):
            self.asked.set()

    def link(self) -> Link:
        """A program's end, in the group."""
        link = Link(Channel(self.theirs), WELCOME)
        link._enter(_LIMIT_S)
        return link

    def close(self) -> None:
        self._channel.shut_down()
        self._thread.join(_LIMIT_S)
        assert not self._thread.is_alive()
        self._channel.close()
        self._arena.close()
        self._store.close()
        self._of_store.close()
        for fd in (self._bell, *self._records):
            os.close(fd)


@pytest.fixture
def agent() -> Iterator[Agent]:
    made = Agent()
    yield made
    made.close()


def descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


def test_nothing_stays_open(agent: Agent) -> None:
    before = descriptors()
    link = agent.link()
    assert len(descriptors() - before) == 7, (
        "the store, the arena, the doorbell, the bell of the threads that wait, and three mappings"
    )
    link.close("the test is over")
    link.close("once more")
    link.abandon("nobody uses it")
    assert not descriptors() - before


def test_a_program_may_have_many_files_open(agent: Agent) -> None:
    """PyTorch's DataLoader has a descriptor for each tensor that is on its way. `select` takes none from 1024 on."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
    try:
        high = fcntl.fcntl(agent.theirs, fcntl.F_DUPFD_CLOEXEC, 1500)
        link = Link(Channel(socket.socket(fileno=high)), WELCOME)
        link._enter(_LIMIT_S)
        link.close("the test is over")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_nothing_stays_open_of_a_group_that_did_not_form(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent has sent its memory, and goes."""
    monkeypatch.setattr(Channel, "connect", lambda _: Channel(agent.theirs))
    enter = Link._enter

    def enters(link: Link, timeout_s: float) -> None:
        enter(link, timeout_s)
        raise ChannelClosed("it has gone")

    monkeypatch.setattr(Link, "_enter", enters)
    before = descriptors()
    with pytest.raises(NetworkProblem, match="does not answer: it has gone"):
        Link.form("default", 1, "@nobody", _LIMIT_S)
    assert not descriptors() - before


def test_an_error_wakes_the_thread_that_waits_in_a_call(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That thread closes the connection, not the one that raises: another file could get its number meanwhile."""
    ranks = Ranks((1,), ("h1",))  # to ask for them would be a round
    monkeypatch.setattr(Group, "_agree_on_ranks", lambda *_: ranks)
    closed_by: list[threading.Thread] = []
    close = Channel.close

    def note(channel: Channel) -> None:
        closed_by.append(threading.current_thread())
        close(channel)

    before = descriptors()
    group = Group(agent.link(), None, _LIMIT_S)
    monkeypatch.setattr(Channel, "close", note)
    futures: list[Future[Any]] = []

    def program() -> None:
        with group:
            futures.extend(group.all_reduce(np.ones(3, np.float32)) for _ in range(2))
            assert agent.asked.wait(_LIMIT_S)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        program()
    for future in futures:
        with pytest.raises(GroupClosed, match="the program has failed"):
            future.result(_LIMIT_S)
    (thread,) = group._workers.threads
    assert {*closed_by} == {thread} and not thread.is_alive()
    assert not descriptors() - before


class Marked:
    """Direct calls of a channel: this host has marked one, and others never do, as their programs stand still."""

    def gather(self, call: DirectCall, data: bytes, look: Look) -> None:
        """As `DirectChannel`."""
        for _ in range(2_000):
            look()
            time.sleep(0.001)


def test_a_direct_call_ends_in_time(agent: Agent) -> None:
    link = agent.link()
    link._directly = [Directly(cast(DirectChannel, Marked()))]
    with pytest.raises(CallTimeout):
        link.gather(b"", 0, frozenset({1}), time.monotonic() + 0.1, 0)
    assert link.is_over
    link.close("the test is over")


def _connects() -> str:
    with pytest.raises(NetworkProblem) as refused:
        Channel.to_agent("fd:1000000")
    return str(refused.value)


def test_a_process_that_a_program_has_started_is_told_of_one_rank_a_host() -> None:
    """As `mp.spawn` starts it, without its descriptors; the program itself can have used its connection."""
    with ProcessPoolExecutor(1, get_context("spawn")) as spawned:
        text = spawned.submit(_connects).result(60)
    assert text.startswith("a group has one rank a host, in the process that nicps has started")
    assert _connects().startswith("this process has used its connection to the agent")


def test_a_file_with_the_number_of_a_used_connection_is_left_alone() -> None:
    """A script that would form a second group, or come back, in a process that nicps has started."""
    ours, theirs = socket.socketpair()  # as this process opens one: no other inherits it
    with pytest.raises(NetworkProblem, match="has used its connection to the agent"):
        Channel.to_agent(f"fd:{theirs.fileno()}")
    os.set_inheritable(theirs.fileno(), True)
    Channel.to_agent(f"fd:{theirs.detach()}").close()
    ours.close()


_FORKS = """
import os, signal, sys
from nicps.collective import Group, GroupClosed, StoreRefused
from nicps.collective.link import Link
from nicps.collective.rounds import Ranks

Group._agree_on_ranks = lambda *_: Ranks((1,), ("h1",))  # to ask for them would be a round
group = Group(Link.form("default", 1, sys.argv[1], 10.0), None, 10.0)
if os.fork():
    os.kill(os.getpid(), signal.SIGKILL)
for call in (group.barrier, lambda: group.store.ask("set", ["a"], [b"1"], timeout_s=10.0)):
    try:
        call()
    except GroupClosed as error:
        print(error, flush=True)
group.close()
group.__exit__(ZeroDivisionError)
print("closed", flush=True)
sys.stdin.read()
"""


def test_a_worker_that_a_program_has_forked_does_not_keep_its_connection(agent: Agent) -> None:
    """The program is killed, and the worker lives. For the agent the program has gone."""
    argv = [sys.executable, "-c", _FORKS, f"fd:{agent.theirs.fileno()}"]
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(argv, pass_fds=[agent.theirs.fileno()], **pipes) as program:
        agent.theirs.close()
        assert program.wait(60) == -signal.SIGKILL
        agent._thread.join(2 * _LIMIT_S)
        assert isinstance(agent.ended, ChannelClosed)
        said = "".join(program.stdout.readline() for _ in range(3))
    of_parent = "the group is that of the process that this one was forked from: make calls there\n"
    assert said == f"{of_parent}the store is over here: {of_parent}closed\n"
