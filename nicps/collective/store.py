# SPDX-License-Identifier: Apache-2.0
"""A program's side of the store that the members of a group share: docs/collective.md."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from typing import Any, NamedTuple

from nicps.collective.errors import GroupClosed, StoreRefused, StoreTimeout
from nicps.errors import MessageError, UsageProblem
from nicps.session.channel import Channel, ChannelClosed
from nicps.session.fields import encode
from nicps.session.messages import Error
from nicps.session.store_form import TO_USER, Answer, Ask, Forget, pack, unpack


class Found(NamedTuple):
    """An answer: a sum, a number of keys, or 1 for yes; and values, or keys of `list`."""

    amount: int
    values: list[Any]


class Store:
    """Calls can come from any thread: one that waits holds no other up.

    Args:
        channel: to the agent, for nothing else.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._lock = threading.Lock()  # of all below, and of sending
        self._numbers = itertools.count(1)
        self._asked: dict[int, Future[Answer]] = {}
        self._reads = False  # a thread does
        self._over = ""  # why

    def ask(
        self,
        what: str,
        keys: Sequence[str] = (),
        values: Sequence[bytes] = (),
        amount: int = 0,
        *,
        timeout_s: float,
    ) -> Found:
        """Call, and wait for the answer.

        Args:
            what: `set`, `get` and so on (`nicps.session.store_form`).

        Raises:
            StoreTimeout: it has not come in time. The call may be carried out all the same.
            StoreRefused: it cannot be done.
            GroupClosed: the group is over here.
        """
        call = Ask(next(self._numbers), what, tuple(keys), tuple(map(pack, values)), amount)
        try:
            call.check()
        except UsageProblem as error:
            raise StoreRefused(str(error)) from None
        future: Future[Answer] = Future()
        with self._lock:
            self._check()
            self._asked[call.number] = future
            self._send(call)
            if not self._reads:
                threading.Thread(target=self._read, name="nicps-store", daemon=True).start()
                self._reads = True
        try:
            answer = future.result(timeout_s)
        except FutureTimeout:
            with self._lock:
                if self._asked.pop(call.number, None) is not None and not self._over:
                    with suppress(GroupClosed):
                        self._send(Forget(call.number))
            raise StoreTimeout(f"the store has not answered within {timeout_s:g} s") from None
        if answer.error:
            raise StoreRefused(answer.error)
        texts = what == "list"
        return Found(answer.amount, [each if texts else unpack(each) for each in answer.values])

    def close(self, reason: str) -> None:
        """Whoever waits is told why; so is whoever asks from now on."""
        with self._lock:
            self._end(reason)

    def disown(self, reason: str) -> None:
        """As `nicps.collective.link.Link`."""
        self._lock, self._over = threading.Lock(), reason
        self._channel.close()

    def _check(self) -> None:
        if self._over:
            raise GroupClosed(f"the store is over here: {self._over}")

    def _send(self, message: Ask | Forget) -> None:
        try:
            self._channel.send(encode(message))
        except ChannelClosed:
            self._end("the agent has gone")
            self._check()

    def _end(self, reason: str) -> None:
        if self._over:
            return
        self._over = reason
        for future in self._asked.values():
            future.set_exception(GroupClosed(f"the store is over here: {reason}"))
        self._asked.clear()
        if self._reads:
            with suppress(OSError):
                self._channel.socket.shutdown(2)  # its thread closes it
        else:
            self._channel.close()

    def _read(self) -> None:
        reason = "the agent has gone"
        try:
            while True:
                message = TO_USER.decode(self._channel.recv()[0])
                if isinstance(message, Error):
                    reason = message.message
                    break
                with self._lock:
                    future = self._asked.pop(message.number, None)
                if future is not None:
                    future.set_result(message)
        except (ChannelClosed, MessageError):
            pass
        with self._lock:
            self._end(reason)
        self._channel.close()
