# SPDX-License-Identifier: Apache-2.0
"""A program's side of a group's store: threads, time-outs, and an agent that goes (`nicps.collective.store`)."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from nicps.collective import GroupClosed, StoreRefused, StoreTimeout
from nicps.collective.store import Store
from nicps.session.channel import Channel, ChannelClosed
from nicps.session.fields import encode
from nicps.session.messages import Error
from nicps.session.store_form import FROM_USER, Answer, Ask, Forget
from nicps.store import Values


class Agent:
    """The other end: it carries calls out at once, and answers those that wait when it can."""

    def __init__(self, connection: socket.socket) -> None:
        self.channel = Channel(connection)
        self.values, self.waiting = Values(), list[Ask]()
        self.heard: list[Ask | Forget] = []
        self.deaf = False
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        try:
            while True:
                message = FROM_USER.decode(self.channel.recv(20)[0])
                self.heard.append(message)
                if isinstance(message, Forget):
                    self.waiting = [ask for ask in self.waiting if ask.number != message.number]
                elif not self.deaf:
                    self.waiting.append(message)
                    self._answer()
        except ChannelClosed:
            self.channel.close()

    def _answer(self) -> None:
        for ask in self.waiting[:]:
            if (answer := self.values.carry_out(ask)) is not None:
                self.waiting.remove(ask)
                self.channel.send(encode(answer))
                self._answer()  # others may have waited for it
                return

    def say(self, message: Answer | Error) -> None:
        self.channel.send(encode(message))

    def end(self) -> None:
        with contextlib.suppress(OSError):
            self.channel.socket.shutdown(socket.SHUT_RDWR)
        self._thread.join(20)
        assert not self._thread.is_alive()


@pytest.fixture
def both() -> Iterator[tuple[Store, Agent]]:
    ours, theirs = socket.socketpair()
    agent, store = Agent(theirs), Store(Channel(ours))
    yield store, agent
    store.close("the test has ended")
    agent.end()


def within(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_a_thread_that_waits_holds_no_other_up(both: tuple[Store, Agent]) -> None:
    store, _ = both
    with ThreadPoolExecutor(8) as pool:
        waits = [pool.submit(store.ask, "get", ["k"], timeout_s=20) for _ in range(4)]
        adds = [pool.submit(store.ask, "add", ["n"], amount=1, timeout_s=20) for _ in range(20)]
        assert sorted(add.result().amount for add in adds) == list(range(1, 21))
        assert not any(wait.done() for wait in waits)
        store.ask("set", ["k"], [b"\xff"], timeout_s=20)
        assert [wait.result().values for wait in waits] == [[b"\xff"]] * 4
    assert sorted(store.ask("list", timeout_s=20).values) == ["k", "n"]


def test_a_call_that_is_not_answered_in_time(both: tuple[Store, Agent]) -> None:
    """The agent need not keep it, and an answer that comes all the same is nobody's."""
    store, agent = both
    with pytest.raises(StoreTimeout, match=r"not answered within 0\.05 s"):
        store.ask("get", ["k"], timeout_s=0.05)
    within(lambda: len(agent.heard) == 2)
    assert [each.number for each in agent.heard] == [1, 1] and isinstance(agent.heard[1], Forget)
    agent.say(Answer(1, ("dg==",)))
    assert store.ask("add", ["n"], amount=2, timeout_s=20).amount == 2


def test_what_cannot_be_done_is_said_and_the_store_goes_on(both: tuple[Store, Agent]) -> None:
    store, agent = both
    store.ask("set", ["text"], [b"x"], timeout_s=20)
    with pytest.raises(StoreRefused, match="no whole number"):
        store.ask("add", ["text"], amount=1, timeout_s=20)
    with pytest.raises(StoreRefused, match="too large"):
        store.ask("set", ["text"], [b"x" * (1 << 19)], timeout_s=20)
    assert len(agent.heard) == 2  # it never went out
    assert store.ask("get", ["text"], timeout_s=20).values == [b"x"]


@pytest.mark.parametrize("how", ["error", "gone", "closed"])
def test_the_end_is_told_to_all_that_wait(both: tuple[Store, Agent], how: str) -> None:
    store, agent = both
    told = {"error": "the group is over", "gone": "the agent has gone", "closed": "it was closed"}
    with ThreadPoolExecutor(3) as pool:
        waits = [pool.submit(store.ask, "get", ["k"], timeout_s=20) for _ in range(3)]
        within(lambda: len(agent.heard) == 3)
        if how == "error":
            agent.say(Error("the group is over", 5))
        elif how == "gone":
            agent.end()
        else:
            store.close("it was closed")
        for wait in waits:
            with pytest.raises(GroupClosed, match=f"the store is over here: {told[how]}"):
                wait.result(20)
    with pytest.raises(GroupClosed, match=told[how]):
        store.ask("count", timeout_s=20)


def test_torch_is_told_what_tcpstore_raises(both: tuple[Store, Agent]) -> None:
    torch = pytest.importorskip("torch")
    from nicps.torch.store import GroupStore

    store, agent = both
    group: Any = SimpleNamespace(store=store, lost=(1,), names=("h1", "h2"))
    shared, errors = GroupStore(group), torch.distributed
    assert shared.compare_set("k", "", "v") == b"v" and shared.list_keys() == ["k"]
    shared.set_timeout(errors.distributed_c10d.timedelta(milliseconds=50))
    inner = errors.PrefixStore("p", shared)
    with pytest.raises(errors.DistStoreError, match=r"after 50ms, keys: p/x, p/y \(lost: h2\)"):
        inner.multi_get(["x", "y"])
    assert inner.num_keys() == 1 and not inner.delete_key("k") and shared.delete_key("k")
    agent.end()
    with pytest.raises(errors.DistNetworkError, match="the agent has gone"):
        inner.set("x", "y")
