# SPDX-License-Identifier: Apache-2.0
"""A member's connection to its agent: one round after the other, each of its own size."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Self, TypeVar

from nicps.collective.errors import CallTimeout, GroupClosed, UnderWay
from nicps.collective.lanes import PER_FRAGMENT, fragments_of
from nicps.collective.store import Store
from nicps.errors import JobFailed, NetworkProblem
from nicps.session import shared_form
from nicps.session.arena import Arena
from nicps.session.channel import Channel, ChannelClosed, agent_address
from nicps.session.fields import Message, encode
from nicps.session.messages import Error, JoinGroup
from nicps.session.sized import Round, SizedRounds, Vector

M = TypeVar("M", bound=Message)
_ANSWER_S = 10.0  # beyond the agent's own limit
_GOODBYE_S = 5.0


class Link:
    """Not for use from several threads, but for `abandon`.

    Attributes: `number` of this member; `names` of the hosts, by number; `live`, the members that are left, as far as
    this program was told. `room`: fragments of a round at most, with lanes of 32 bits. `admits`: before the round that
    follows the next one, the lead takes in hosts that wait. `store`, which the members share, is for any thread.
    """

    def __init__(self, channel: Channel, welcome: shared_form.Welcome) -> None:
        self._channel = channel
        self.store: Store | None = None
        self.number = welcome.number
        self.names = {member.number: member.name for member in welcome.members}
        self.admits = False
        self.live = frozenset(self.names)
        self.room = int(welcome.settings["room"])
        self._rounds: SizedRounds | None = None
        self._round = 0
        self._leads = False
        self._decided: shared_form.Decide | None = None  # of the round that was committed last
        self._lost = ""  # why the group is over
        self._closing = threading.Lock()
        self._closed = False

    @classmethod
    def form(
        cls, name: str, size: int, socket: str | None, timeout_s: float, *, late: bool = False
    ) -> Self:
        """Wait, beside the agent, until the group has formed.

        Args:
            size: hosts; 0: all whose agents stand by.
            socket: the agent's; default: NICPS_SOCKET, or `@nicps`.
            late: wait to be taken into the group that is under way.

        Raises:
            NetworkProblem: no agent listens there, or the group has not formed in time.
            UnderWay: the group is under way already.
            GroupClosed: it ended before it began.
        """
        address = agent_address(socket)
        channel = Channel.to_agent(address)
        link: Self | None = None
        try:
            channel.send(encode(JoinGroup(name, size, timeout_s, late)))
            answer = shared_form.FROM_AGENT.decode(channel.recv(timeout_s + _ANSWER_S)[0])
            if isinstance(answer, Error):
                raise NetworkProblem(answer.message)
            if isinstance(answer, shared_form.Late):
                raise UnderWay(
                    f"group {name!r} is under way on this network without this program: it must say late=True, and all"
                    " members must call admit()",
                    answer.members,
                )
            if not isinstance(answer, shared_form.Welcome):
                raise NetworkProblem("the agent has not understood: is it of another version?")
            link = cls(channel, answer)
            link._enter(timeout_s)
            return link
        except BaseException as error:
            if link is not None:
                link.close("it could not begin")
            channel.close()
            if isinstance(error, ChannelClosed | TimeoutError):
                text = f"the agent at {address} does not answer: {error}"
                raise NetworkProblem(text) from None
            raise

    def _enter(self, timeout_s: float) -> None:
        lanes = self.room * PER_FRAGMENT
        self._send(shared_form.Ready(lanes, "group"))
        deadline = time.monotonic() + timeout_s
        _, fds = self._receive(deadline, shared_form.Store)
        self.store = Store(Channel.connect(f"fd:{fds[0]}"))
        message, fds = self._receive(deadline, shared_form.Arena)
        self._rounds = SizedRounds(self.number, Arena(fds[0], message.fragments), fds[1])
        self._receive(deadline, shared_form.Phase)

    # ---- rounds

    def exchange(self, vector: Vector, call: int, deadline: float) -> Round:
        """Exchange a vector that fits a round: its sums are with it, if all have called the same.

        Args:
            call: a checksum of what is called.
            deadline: on the monotonic clock.

        Raises:
            CallTimeout: not all others have called until then. The link is closed.
            GroupClosed: the group is over here.
        """
        assert fragments_of(vector.numbers, vector.width) <= self.room * vector.width // 32
        self._note_all()
        self._offer(vector, call)
        while True:
            message: shared_form.Committed | shared_form.Phase
            message, _ = self._receive(deadline, shared_form.Committed, shared_form.Phase)
            if isinstance(message, shared_form.Committed) and message.round == self._round:
                break
            if isinstance(message, shared_form.Phase):
                self._offer(vector, call)
        round_ = Round(self._round, dict(message.counted))
        self._judge(self._round, "admit" if self.admits and round_.agrees else "continue")
        self.admits = False
        if round_.agrees:
            self._memory().settle(message, vector)
        self._send(shared_form.Read(self._round, ""))
        self._round += 1
        return round_

    def _offer(self, vector: Vector, call: int) -> None:
        """Offer the vector to the open round, and convert it."""
        self._send(self._memory().begin(self._round, vector, call))
        self._memory().convert(self._round, vector, self.live)

    def _judge(self, round_: int, what: str) -> None:
        """What comes after that round (R14): every member knows it, and the lead says it."""
        self._decided = shared_form.Decide(round_, what)
        if self._leads or what == "end":
            self._send(self._decided)

    # ---- the end

    def leave(self) -> None:
        """Say that this program has done its last call, and wait a moment until the group is over."""
        with contextlib.suppress(GroupClosed, CallTimeout):
            self._judge(self._round - 1, "end")
            while True:
                self._receive(time.monotonic() + _GOODBYE_S, shared_form.Abort)
        self.close("it was closed")

    def close(self, reason: str) -> None:
        """Close the connection, and what came with it: the others go on without this member."""
        with self._closing:
            self._lost = self._lost or reason
            if self._closed:
                return
            self._closed = True
            self._channel.close()
            if self.store is not None:
                self.store.close(reason)
            if self._rounds is not None:
                self._rounds.close()
            self._rounds = None

    def abandon(self, reason: str) -> None:
        """The same, said in another thread: that which uses the link is woken, and calls `close`."""
        with self._closing:
            self._lost = self._lost or reason
            if not self._closed:
                self._channel.shut_down()

    # ---- messages

    def _memory(self) -> SizedRounds:
        assert self._rounds is not None, "the agent has sent no memory"
        return self._rounds

    @property
    def is_over(self) -> bool:
        """The group is over for this program, or goes on without it."""
        return bool(self._lost)

    def _send(self, message: Message) -> None:
        self._check()
        try:
            self._channel.send(encode(message))
        except ChannelClosed:
            self._end_with_last_words()

    def _check(self) -> None:
        if self._lost:
            raise GroupClosed(f"the group is over here: {self._lost}")

    def _end_with_last_words(self) -> None:
        """The agent has closed the connection; perhaps it has said why."""
        with contextlib.suppress(ChannelClosed):
            while (item := self._channel.pop()) is not None:
                self._note(shared_form.FROM_AGENT.decode(item[0]), item[1])
        self._fail("the agent has gone")

    def _fail(self, reason: str) -> None:
        self.close(reason)
        self._check()

    def _receive(self, deadline: float, *kinds: type[M]) -> tuple[M, list[int]]:
        """The next message of one of these kinds; what others tell is noted."""
        while True:
            self._check()
            try:
                message, fds = self._channel.recv(max(0.0, deadline - time.monotonic()))
            except TimeoutError:
                self.close("not all members have called in time")
                raise CallTimeout(
                    "not all members have made this call in time: the group is closed at this host"
                ) from None
            except ChannelClosed:
                self._end_with_last_words()
                continue
            told = shared_form.FROM_AGENT.decode(message)
            self._note(told, fds)
            if isinstance(told, kinds):
                return told, fds

    def _note_all(self) -> None:
        """Note what has been told since the last call."""
        self._check()
        try:
            while self._channel.wait(0.0):
                message, fds = self._channel.recv(1.0)
                self._note(shared_form.FROM_AGENT.decode(message), fds)
        except ChannelClosed:
            self._end_with_last_words()

    def _note(self, message: shared_form.FromAgent, fds: list[int]) -> None:
        if isinstance(message, shared_form.Abort):
            self._fail(message.message)
        if isinstance(message, Error):
            self._fail(message.message)
        if isinstance(message, shared_form.View | shared_form.Phase):
            self.live = frozenset(message.live)
            self._leads = message.lead == self.number
            self._take(message, iter(fds))
            if self._leads and self._decided is not None:
                self._send(self._decided)  # the lead before may not have said it

    def _take(self, message: shared_form.Phase | shared_form.View, fds: Iterator[int]) -> None:
        """Another view is in force, or a phase begins."""
        if isinstance(message, shared_form.View):
            if message.places:
                self._memory().map(message, fds)
            return
        if message.kind != "train" or not message.exchange.absolute:
            _close_all(fds)
            raise JobFailed(f"the agent opens a phase {message.kind} with {message.exchange.name}")
        if message.blocks:
            _close_all([next(fds), next(fds)])
        self._memory().map(message, fds)
        self._round = message.first_round
        self._send(shared_form.Prepared(message.number))


def _close_all(fds: Iterable[int]) -> None:
    for fd in fds:
        os.close(fd)
