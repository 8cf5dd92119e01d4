# SPDX-License-Identifier: Apache-2.0
"""The training program's end of the agent's socket: views, leads and decisions (R18 to R22), without a kernel."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from nicps.client import JobAborted, Session
from nicps.layout import layout
from nicps.session import shared_form
from nicps.session.arena import Arena
from nicps.session.channel import Channel
from nicps.session.shared_form import Member, Welcome
from nicps.wire import BLOCK_LANES

LANES = 720  # one fragment of i16
VIEW = 5


class Agent:
    """The agent's end, for member `number` of three; `banks` and `slots` stand for the kernel's memory."""

    def __init__(self, number: int, lead: int = 1) -> None:
        ours, theirs = socket.socketpair()
        self.channel = Channel(ours)
        members = tuple(Member(n, f"h{n}") for n in (1, 2, 3))
        settings, workdir = {"lane": "i16"}, "/nowhere"
        welcome = Welcome(number, members, f"h{number}", lead, settings, workdir, VIEW)
        self.session = Session(Channel(theirs), welcome)
        self.arena = Arena.create(1)
        self._doorbell = os.eventfd(0)
        self.channel.send({"op": "arena", "fragments": 1}, (self.arena.fd, self._doorbell))
        self.session.ready(LANES, "d")
        record = layout().records["slot"]
        sizes = (
            2 * BLOCK_LANES * 8,
            2 * layout().limits["BLOCK_SLOTS"] * record.itemsize,
        )
        self._fds = [os.memfd_create("kernel") for _ in sizes]
        for fd, size in zip(self._fds, sizes, strict=True):
            os.ftruncate(fd, -(-size // 4096) * 4096)
        self.banks = np.memmap(
            f"/proc/self/fd/{self._fds[0]}", np.int64, "r+", shape=(2, BLOCK_LANES)
        )
        slots = np.memmap(f"/proc/self/fd/{self._fds[1]}", np.uint8, "r+", shape=(sizes[1],))
        self.slots = slots.view(record).reshape(2, -1)
        self._numbers = 0
        assert self.take()["op"] == "ready"

    def take(self) -> dict[str, Any]:
        return self.channel.recv(10.0)[0]

    def silent(self) -> bool:
        """Whether the session has said nothing more."""
        return not self.channel.wait(0.0)

    def phase(
        self, kind: str, first: int, shares: tuple[int, ...] = (4, 4, 4), **more: Any
    ) -> None:
        self._numbers += 1
        message = {"op": "phase", "kind": kind, "first_round": first, "number": self._numbers}
        message |= {
            "unit": -30,
            "exchange": "broadcast",
            "view": VIEW,
            "live": [1, 2, 3],
            "lead": 1,
            "shares": shares,
            **more,
        }
        if self._numbers == 1:
            self.channel.send(message | {"blocks": 1}, self._fds)
        else:
            self.channel.send(message)

    def view(self, lead: int, live: tuple[int, ...], number: int = VIEW + 1) -> None:
        self.channel.send({"op": "view", "view": number, "live": live, "lead": lead, "round": 7})

    def commit(
        self,
        round_: int,
        counted: dict[int, int],
        unit: int = -30,
        *,
        next_unit: int | None = None,
        exchange: str = "broadcast",
    ) -> None:
        message = {
            "op": "committed",
            "round": round_,
            "counted": counted,
            "unit": unit,
            "next_unit": unit if next_unit is None else next_unit,
            "exchange": exchange,
        }
        self.channel.send(message | {"seconds_waited": 0.0})

    def enter(self, kind: str, first: int, **more: Any) -> None:
        """A phase that the session takes."""
        self.phase(kind, first, **more)
        assert self.session.next_phase().kind == kind
        assert self.take() == {"op": "prepared", "number": self._numbers}

    def close(self) -> None:
        self.session.close()
        self.channel.close()
        self.arena.close()
        os.close(self._doorbell)
        for fd in self._fds:
            os.close(fd)


@pytest.fixture
def agent() -> Iterator[Agent]:
    agent = Agent(2)
    yield agent
    agent.close()


def test_a_state_is_saved_while_the_others_are_waited_for(agent: Agent) -> None:
    """The round goes on as if nothing had been: what was offered is counted, and nothing is offered again."""
    session = agent.session
    agent.enter("train", 7)
    session.contribute(7, np.ones(LANES, np.float32), 4)
    assert agent.take()["op"] == "offer"
    session.on_keep = lambda: session.checkpoint(6)
    agent.channel.send({"op": "keep"})
    agent.commit(7, {2: 4})
    commit = session.wait_commit(7)
    assert commit is not None and commit.counted == {2: 4}
    assert agent.take() == {"op": "checkpoint", "round": 6}
    assert np.array_equal(session.sum(commit), np.ones(LANES, np.float32))
    assert agent.silent()


def test_a_program_without_a_state_says_so(agent: Agent) -> None:
    agent.channel.send({"op": "keep"})
    agent.phase("train", 7)
    assert agent.session.next_phase().kind == "train"
    answer = agent.take()
    assert answer["op"] == "checkpoint" and "cannot save" in answer["error"]
    assert agent.take()["op"] == "prepared"


def test_the_leads_last_word_comes_last(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    """A channel's thread notes the view in which this program leads, while the thread that computes decides."""
    session, sent = agent.session, list[int]()
    session.decide(6, "continue")
    deciding = threading.Thread(target=session.decide, args=(7, "continue"))

    def send(message: shared_form.Decide) -> None:
        if message.round == 6:
            deciding.start()
            deciding.join(0.2)
        sent.append(message.round)

    monkeypatch.setattr(session._decisions, "_send", send)
    session._note(shared_form.View(VIEW + 1, (1, 2, 3), 2, 7), [])
    deciding.join(10.0)
    assert sent == [6, 7]


def test_a_view_is_taken_from_every_message(agent: Agent) -> None:
    session = agent.session
    assert (session.view, session.live, session.lead) == (VIEW, {1, 2, 3}, False)
    agent.enter("train", 7, view=6, live=[2, 3], lead=2, shares=(0, 6, 6))
    assert (session.view, session.live, session.lead) == (6, {2, 3}, True)
    agent.view(1, (1, 2, 3), 7)
    agent.commit(7, {2: 6})
    commit = session.wait_commit(7)
    assert commit is not None and commit.counted == {2: 6}
    assert (session.view, session.live, session.lead) == (7, {1, 2, 3}, False)


def test_the_phase_says_what_a_member_works(agent: Agent) -> None:
    agent.phase("train", 7, (0, 5, 7))
    phase = agent.session.next_phase()
    assert phase.shares == (0, 5, 7)
    assert [phase.share_of(number) for number in (1, 2, 3, 4)] == [0, 5, 7, 0]


def test_a_new_lead_decides_what_it_would_have_decided(agent: Agent) -> None:
    agent.enter("train", 6)
    agent.session.decide(6, "test")
    assert agent.silent()  # member 1's word counts
    agent.view(2, (2, 3))
    agent.phase("test", 7, (0, 1, 1), lead=2)
    assert agent.session.wait_commit(7) is None
    assert agent.take() == {"op": "decide", "round": 6, "what": "test"}
    agent.session.next_phase()
    assert agent.take()["op"] == "prepared"
    agent.session.decide(7, "end")
    assert agent.take() == {"op": "decide", "round": 7, "what": "end"}
    assert agent.silent()


def test_it_decides_while_it_computes(agent: Agent) -> None:
    agent.enter("train", 6)
    agent.session.decide(6, "continue")
    agent.commit(7, {1: 4})
    agent.session.progress(7, 1)
    assert agent.take()["op"] == "progress"
    agent.view(2, (2, 3))
    agent.session.progress(7, 2)
    assert agent.take()["op"] == "progress"
    assert agent.silent()  # the commit comes first: it may be what there is to decide about
    assert not agent.session.lead
    assert agent.session.wait_commit(7) is not None
    agent.session.decide(7, "test")
    assert agent.silent()
    agent.session.progress(8, 1)
    assert agent.take()["op"] == "progress"
    assert agent.take() == {"op": "decide", "round": 7, "what": "test"}
    assert agent.session.lead
    assert agent.silent()


def test_who_has_committed_nothing_decides_nothing(agent: Agent) -> None:
    agent.enter("train", 6)
    agent.view(2, (2, 3))
    agent.session.progress(6, 1)
    assert agent.take()["op"] == "progress"
    assert agent.session.lead
    assert agent.silent()


def test_a_test_that_a_view_change_swallowed_is_asked_for_again(agent: Agent) -> None:
    agent.enter("train", 6)
    agent.session.decide(6, "test")
    agent.phase("train", 7, lead=2, live=[2, 3], view=6, shares=(0, 6, 6))
    agent.session.next_phase()
    assert agent.take() == {
        "op": "decide",
        "round": 6,
        "what": "test",
    }  # before the phase is in force
    assert agent.take()["op"] == "prepared"
    agent.session.decide(7, "continue")
    assert agent.take()["op"] == "decide"
    agent.enter("train", 8, lead=2, live=[2, 3], view=7, shares=(0, 6, 6))
    assert agent.silent()


def test_an_abort_is_heard_while_computing(agent: Agent) -> None:
    agent.enter("train", 6)
    agent.channel.send({"op": "abort", "message": "h1 is tired"})
    with pytest.raises(JobAborted, match="h1 is tired"):
        agent.session.progress(6, 1)


def test_the_digest_goes_out_when_the_sum_is_applied(agent: Agent) -> None:
    agent.enter("train", 7)
    agent.commit(7, {})
    commit = agent.session.wait_commit(7)
    assert commit is not None
    assert not agent.session.sum(commit).any()
    assert agent.silent()
    agent.session.applied(commit, "abc")
    assert agent.take() == {"op": "read", "round": 7, "digest": "abc"}


def test_messages_about_state(agent: Agent) -> None:
    agent.enter("save", 7)
    agent.session.saved(1, 30, "abc")
    assert agent.take() == {"op": "saved", "number": 1, "round": 30, "digest": "abc"}
    agent.session.saved(1, 30, "abc", "the disk is full")
    assert agent.take()["error"] == "the disk is full"
    agent.session.decide(6, "test")
    agent.enter("load", 7)
    agent.session.loaded(2, "abc")
    assert agent.take() == {"op": "loaded", "number": 2, "digest": "abc"}
    agent.view(2, (2, 3))
    agent.session.checkpoint(31)
    error = agent.take()
    assert error.pop("op") == "residual" and "No such file" in error.pop("error") and not error
    assert agent.take() == {"op": "checkpoint", "round": 31}
    agent.session.progress(7, 1)
    assert agent.take()["op"] == "progress"
    assert agent.silent()  # round 6 was before what it has loaded


def contribute(agent: Agent, round_: int, value: float) -> None:
    agent.session.contribute(round_, np.full(LANES, value, np.float32), 4)
    assert agent.take()["op"] == "offer"


def arrive(agent: Agent, round_: int, view: int, senders: tuple[int, ...], value: float) -> None:
    """What the kernel has added, all of it."""
    agent.banks[round_ & 1] = round(value * 2**30)
    agent.slots[round_ & 1]["tag"] = view << 32 | round_
    agent.slots[round_ & 1]["seen"] = sum(1 << (number - 1) for number in senders)


def test_what_was_summed_early_is_the_sum(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    """Among the members that are there: member 1 is not, and nobody waits for it."""
    agent.enter("train", 7, live=[2, 3], shares=(0, 4, 4))
    contribute(agent, 7, 0.5)
    arrive(agent, 7, VIEW, (3,), 0.25)
    out = np.empty(LANES, np.float32)
    interrupt(agent, monkeypatch, out, lambda: agent.commit(7, {2: 4, 3: 4}))
    commit = agent.session.wait_commit(7, out)
    assert commit is not None
    arrive(agent, 7, VIEW, (3,), 99.0)  # read already
    assert (agent.session.sum(commit, out) == 0.75).all()


def test_a_view_change_takes_back_what_was_summed_early(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent.enter("train", 7)
    contribute(agent, 7, 0.5)
    arrive(agent, 7, VIEW, (1, 3), 0.25)
    out = np.empty(LANES, np.float32)

    def change() -> None:
        agent.view(1, (1, 2, 3))
        arrive(agent, 7, VIEW + 1, (1, 3), 1.0)  # sent again: the same in life, here to tell
        agent.commit(7, {1: 4, 2: 4, 3: 4})

    interrupt(agent, monkeypatch, out, change)
    commit = agent.session.wait_commit(7, out)
    assert commit is not None
    assert (agent.session.sum(commit, out) == 1.5).all()


def test_what_was_summed_early_and_not_counted(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The round was closed without member 3, whose gradient had come; the kernel has taken it out again."""
    agent.enter("train", 7)
    contribute(agent, 7, 0.5)
    arrive(agent, 7, VIEW, (1, 3), 0.25)
    out = np.empty(LANES, np.float32)

    def close() -> None:
        arrive(agent, 7, VIEW, (1,), 0.125)
        agent.commit(7, {1: 4, 2: 4})

    interrupt(agent, monkeypatch, out, close)
    commit = agent.session.wait_commit(7, out)
    assert commit is not None
    assert (agent.session.sum(commit, out) == 0.625).all()


def interrupt(agent: Agent, monkeypatch: pytest.MonkeyPatch, out: Any, what: Any) -> None:
    """Do `what` as soon as something has been summed early into `out`."""
    sums = agent.session._shared().adding.sums
    ahead = sums.ahead
    out[:] = np.nan

    def then(*arguments: Any) -> None:
        ahead(*arguments)
        assert not np.isnan(out).any()
        what()

    monkeypatch.setattr(sums, "ahead", then)


def test_a_test_round(agent: Agent) -> None:
    agent.enter("test", 8, shares=(1, 1, 1))
    agent.banks[0, :2] = 7, 2
    agent.commit(8, {1: 1, 2: 1, 3: 1}, 0)
    assert agent.session.tally(8, 5, 1) == (12, 3)
    assert agent.take()["op"] == "offer"
    assert agent.take() == {"op": "read", "round": 8, "digest": ""}


def test_a_test_round_without_a_share(agent: Agent) -> None:
    agent.enter("test", 8, shares=(1, 0, 1))
    agent.banks[0, :2] = 7, 2
    agent.commit(8, {1: 1, 3: 1}, 0)
    assert agent.session.tally(8, 0, 0) == (7, 2)
    assert agent.take()["op"] == "read"


def test_a_test_round_that_is_left(agent: Agent) -> None:
    agent.enter("test", 8)
    agent.phase("test", 9)
    assert agent.session.tally(8, 5, 1) is None
    assert agent.take()["op"] == "offer"
    assert agent.session.next_phase().first_round == 9
