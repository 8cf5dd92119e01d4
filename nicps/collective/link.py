# SPDX-License-Identifier: Apache-2.0
"""A member's connection to its agent: rounds of any size, on each channel one after the other."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Self, TypeVar

from nicps.collective.directly import Directly
from nicps.collective.errors import CallTimeout, GroupClosed, UnderWay
from nicps.collective.lanes import PER_FRAGMENT, fragments_of
from nicps.collective.store import Store
from nicps.errors import NetworkProblem
from nicps.session import shared_form
from nicps.session.arena import Arena
from nicps.session.channel import Channel, ChannelClosed, agent_address
from nicps.session.direct import DirectCall, DirectChannel, DirectMemory
from nicps.session.fields import Message, encode
from nicps.session.mailbox import Mailbox
from nicps.session.messages import Error, JoinGroup
from nicps.session.planned import MemberRounds
from nicps.session.shared_form import ChannelPlan
from nicps.session.sized import Round, Vector
from nicps.wire import DIRECT_MEMBERS

M = TypeVar("M", bound=Message)
_ANSWER_S = 10.0  # beyond the agent's own limit
_GOODBYE_S = 5.0


class Link:
    """Each channel may be another thread's. What concerns all of them is done once each of their threads that is in an
    exchange has come to the same point (`_take_turn`), since it may exchange the memory of all.

    Attributes: `number` of this member; `names` of the hosts, by number; `live`, the members that are left, as far as
    this program was told. `room`: fragments of all channels' rounds together, at most, with lanes of 32 bits. `plan`:
    the channels in force. `admits`: before the round that follows the next one of channel 0, the lead takes in hosts
    that wait; `plans`: it opens a phase with that plan. `store`, which the members share, is for any thread.
    """

    def __init__(self, channel: Channel, welcome: shared_form.Welcome) -> None:
        self._channel = channel
        there = channel.fileno(), lambda: channel.wait(0.0), self._receive
        self._mail = Mailbox(*there, self._note)
        self.store: Store | None = None
        self.number = welcome.number
        self.names = {member.number: member.name for member in welcome.members}
        self.admits = False
        self.plans: tuple[ChannelPlan, ...] = ()
        self.live = frozenset(self.names)
        self.room = int(welcome.settings["room"])
        self.plan: tuple[ChannelPlan, ...] = (ChannelPlan(0, (self.room,)),)
        self._agreed: tuple[ChannelPlan, ...] = ()  # the last plan that `await_plan` has seen
        self._rounds: MemberRounds | None = None
        self._open = [0]  # the round of each channel that this program is to offer next
        self._view = 0  # the one in force
        self._direct: DirectMemory | None = None
        self._share = 1.0  # of the time, that urgent calls take at most
        self._directly: list[Directly] = []  # by channel
        self._leads = False
        self._decided: dict[int, shared_form.Decide] = {}  # of each channel's last round
        self._lost = ""  # why the group is over
        self._turns = threading.Condition()  # of all above, and of what follows
        self._inside: set[int] = set()  # channels in an exchange
        self._aside: set[int] = set()  # those of them that have come to the point where all wait
        self._sending = threading.Lock()
        self._released = False

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
        _, fds = self._await(deadline, shared_form.Store)
        self.store = Store(Channel(socket.socket(fileno=fds[0])))
        message, fds = self._await(deadline, shared_form.Arena)
        self._rounds = MemberRounds(self.number, Arena(fds[0], message.fragments), fds[1])
        self._await(deadline, shared_form.Phase)
        self._mail.begin(planned=True)

    # ---- rounds

    def of(self, channel: int) -> LinkChannel:
        """The rounds of that channel."""
        return LinkChannel(self, channel, self.number, self.agreed[channel].rounds[0])

    @property
    def agreed(self) -> tuple[ChannelPlan, ...]:
        """The plan of calls from now on. It is not in force yet where a change to it has come to nothing."""
        return self._agreed or self.plan

    def exchange(self, vector: Vector, call: int, deadline: float, channel: int) -> Round:
        """Exchange a vector that fits a round: its sums are with it, if all have called the same.

        Args:
            call: a checksum of what is called.
            deadline: on the monotonic clock.

        Raises:
            CallTimeout: not all others have called until then. The link is closed.
            GroupClosed: the group is over here.
        """
        with self._in_exchange(channel):
            commit: shared_form.Committed | None = None
            self._mail.poll()
            while commit is None:
                self._take_turn(channel, deadline)
                if self.plan != self.agreed:
                    # The change has come to nothing, as the lead was lost: the next one decides on it again.
                    self._mail.take_commit(channel, 0, deadline)
                    continue
                round_ = self._open[channel]
                self._offer(channel, round_, vector, call)
                commit = self._mail.take_commit(channel, round_, deadline)
            found = Round(round_, dict(commit.counted), commit.seconds_listed)
            self._judge_round(found, channel)
            if found.agrees:
                self._memory().of(channel).settle(commit, vector)
            self._send(shared_form.Read(round_, "", channel))
            self._open[channel] += 1
            if channel < len(self._directly):
                self._directly[channel].since = 0
        return found

    def gather(
        self, data: bytes, call: int, among: frozenset[int], deadline: float, channel: int
    ) -> dict[int, bytes] | None:
        """Give all members `data` in a direct call, and get theirs, by number; None: it takes a round.

        Args:
            call: a checksum of what is called.
            among: members of the group; a view with others makes no direct calls.
            deadline: on the monotonic clock.

        Raises:
            CallTimeout: as `exchange`: this host has marked the call, and not all others do.
            GroupClosed: the group is over here.
        """
        directly = next(iter(self._directly[channel : channel + 1]), None)
        if directly is None or not directly.tries():
            return None
        self._leave_line(channel, min(directly.free_at, deadline))
        began = time.monotonic()
        with self._in_exchange(channel):
            view, live = self._look(channel, deadline)
            if self.plan != self.agreed or not live <= among or max(live) > DIRECT_MEMBERS:
                return None
            direct = DirectCall(view, self._open[channel], directly.since, call, live)
            found = directly.calls.gather(direct, data, lambda: self._look(channel, deadline))
            done = found is not None and len({said for said, _ in found.values()}) == 1
            now = time.monotonic()
            directly.note(done=done)
            directly.free_at = now + (now - began) * (1 / self._share - 1)
            if found is None or not done:
                return None
            return {number: given for number, (_, given) in found.items()}

    def _leave_line(self, channel: int, until: float) -> None:
        """Wait until then while a less urgent channel has a call under way, and the group goes on (docs/direct.md)."""

        def done() -> bool:
            plan = self.plan
            if channel >= len(plan):  # the change to this channel's plan has come to nothing
                return True
            own = plan[channel].urgency
            below = (other for other in self._inside if other < len(plan))
            return bool(self._lost) or all(plan[other].urgency >= own for other in below)

        with self._turns:
            self._turns.wait_for(done, until - time.monotonic())

    def _look(self, channel: int, deadline: float) -> tuple[int, frozenset[int]]:
        """The view in force, and its members, once all has been noted that has come.

        Raises:
            TimeoutError: the call has taken too long.
        """
        self._mail.poll()
        self._take_turn(channel, deadline)
        if time.monotonic() >= deadline:
            raise TimeoutError
        with self._turns:
            return self._view, self.live

    def _offer(self, channel: int, round_: int, vector: Vector, call: int) -> None:
        """Offer the vector to that round, and convert it."""
        self._memory().of(channel).offer(round_, vector, call, self.live, self._send)

    def await_plan(self, plan: tuple[ChannelPlan, ...], deadline: float) -> None:
        """Wait until the lead's phase with that plan has come; no exchange is under way.

        Raises:
            CallTimeout: it has not come until then. The link is closed.
            GroupClosed: the group is over here.
        """
        with self._in_exchange(0):
            while self.plan != plan:
                self._await(deadline, shared_form.Phase)
            self._agreed = plan

    @contextlib.contextmanager
    def _in_exchange(self, channel: int) -> Iterator[None]:
        """While a channel's thread uses the connection, and its memory."""
        with self._turns:
            self._check()
            self._inside.add(channel)
        try:
            yield
        except ChannelClosed:
            self._end_with_last_words()
        except TimeoutError:
            self.close("not all members have called in time")
            raise CallTimeout(
                "not all members have made this call in time: the group is closed at this host"
            ) from None
        finally:
            with self._turns:
                self._inside.discard(channel)
                self._turns.notify_all()
                self._release()

    def _take_turn(self, channel: int, deadline: float) -> None:
        """Handle what concerns all channels, in a thread of one of them, while no other one has a round under way."""
        with self._turns:
            self._aside.add(channel)
            try:
                while True:
                    self._check()
                    if not self._mail.rest:
                        return
                    if self._aside >= self._inside:
                        message, fds = self._mail.rest[0]
                        self._note(message, fds)
                        # Only now: a view that comes meanwhile stands behind it.
                        self._mail.rest.popleft()
                        continue
                    self._turns.notify_all()
                    if not self._turns.wait(max(0.0, deadline - time.monotonic())):
                        raise TimeoutError
            finally:
                self._aside.discard(channel)
                self._turns.notify_all()

    def _judge_round(self, round_: Round, channel: int) -> None:
        """What comes after that round (R14): every member knows it, and the lead says it."""
        what, plan = "continue", tuple[ChannelPlan, ...]()
        if not channel:
            if self.admits and round_.agrees:
                what = "admit"
            elif self.plans and round_.agrees:
                what, plan = "plan", self.plans
            self.admits, self.plans = False, ()
        self._judge(shared_form.Decide(round_.number, what, False, plan, channel))

    def _judge(self, decided: shared_form.Decide) -> None:
        with self._turns:
            self._decided[decided.channel] = decided
            if self._leads or decided.what == "end":
                self._send(decided)

    # ---- the end

    def leave(self) -> None:
        """Say that this program has done its last call, and wait a moment until the group is over."""
        with contextlib.suppress(GroupClosed, CallTimeout), self._in_exchange(0):
            self._judge(shared_form.Decide(self._open[0] - 1, "end"))
            self._await(time.monotonic() + _GOODBYE_S, shared_form.Abort)
        self.close("it was closed")

    def close(self, reason: str) -> None:
        """Close the connection, and what came with it, once no thread uses it: the others go on without this member."""
        with self._turns:
            self._lost = self._lost or reason
            if not self._released:
                self._channel.shut_down()
            self._turns.notify_all()
            self._release()

    def abandon(self, reason: str) -> None:
        """The same, said in another thread: those that use the link are woken, and the last of them closes it."""
        with self._turns:
            self._lost = self._lost or reason
            if not self._released:
                self._channel.shut_down()
            self._turns.notify_all()

    def disown(self, reason: str) -> None:
        """Give the connection up in a process that was forked: it goes on in the other one."""
        self._lost = reason
        self._channel.close()
        if self._direct is not None:
            self._direct.close()
        if self.store is not None:
            self.store.disown(reason)

    def _release(self) -> None:
        """Close what is open, if the group is over and no thread uses the link."""
        if not self._lost or self._inside or self._released:
            return
        self._released = True
        self._channel.close()
        self._mail.close()
        if self.store is not None:
            self.store.close(self._lost)
        if self._rounds is not None:
            self._rounds.close()
        self._rounds = None
        if self._direct is not None:
            self._direct.close()
        self._direct, self._directly = None, []

    # ---- messages

    def _memory(self) -> MemberRounds:
        assert self._rounds is not None, "the agent has sent no memory"
        return self._rounds

    @property
    def is_over(self) -> bool:
        """The group is over for this program, or goes on without it."""
        return bool(self._lost)

    def _send(self, message: Message) -> None:
        self._check()
        with self._sending:
            self._channel.send(encode(message))

    def _check(self) -> None:
        if self._lost:
            raise GroupClosed(f"the group is over here: {self._lost}")

    def _end_with_last_words(self) -> None:
        """The agent has closed the connection; perhaps it has said why."""
        with contextlib.suppress(ChannelClosed):
            self._mail.poll()
        for message, _ in list(self._mail.rest):
            if isinstance(message, shared_form.Abort | Error):
                self._fail(message.message)
        self._fail("the agent has gone")

    def _fail(self, reason: str) -> None:
        self.close(reason)
        self._check()

    def _receive(self) -> tuple[shared_form.FromAgent, list[int]]:
        message, fds = self._channel.recv()
        return shared_form.FROM_AGENT.decode(message), fds

    def _await(self, deadline: float, *kinds: type[M]) -> tuple[M, list[int]]:
        """The next message of one of these kinds, while no exchange is under way; what others tell is noted."""
        while True:
            self._check()
            message, fds = self._mail.take(deadline)
            self._note(message, fds)
            if isinstance(message, kinds):
                return message, fds

    def _note(self, message: shared_form.FromAgent, fds: list[int]) -> None:
        if isinstance(message, shared_form.Abort | Error):
            self._fail(message.message)
        if isinstance(message, shared_form.Direct):
            self._direct, self._share = DirectMemory(fds), message.share
        if isinstance(message, shared_form.View | shared_form.Phase):
            with self._turns:
                self.live, self._view = frozenset(message.live), message.view
                self._leads = message.lead == self.number
                self._take(message, iter(fds))
                if self._leads:
                    for decided in self._decided.values():  # the lead before may not have said it
                        self._send(decided)

    def _take(self, message: shared_form.Phase | shared_form.View, fds: Iterator[int]) -> None:
        """Another view is in force, or a phase begins."""
        if isinstance(message, shared_form.View):
            if message.places:
                self._memory().map(message, fds)
            return
        if message.kind != "train" or not message.exchange.absolute:
            _close_all(fds)
            self._fail(f"the agent opens a phase {message.kind} with {message.exchange.name}")
        if message.blocks:
            _close_all([next(fds), next(fds)])
        channels = message.channels
        if not channels:
            channels = (shared_form.PhaseChannel(0, (self.room,), message.first_round),)
        self._memory().map(replace(message, channels=channels), fds)
        self._open = [channel.open for channel in channels]
        self.plan = tuple(ChannelPlan(each.urgency, each.rounds) for each in channels)
        direct, number = self._direct, self.number
        if direct is not None:
            numbers = range(len(channels))
            self._directly = [Directly(DirectChannel(direct, k, number)) for k in numbers]
        self._send(shared_form.Prepared(message.number))


@dataclass(frozen=True, slots=True)
class LinkChannel:
    """The rounds of one channel of a link, until another plan is in force.

    Attributes: `number` of this member; `room`: fragments of a round at most, with lanes of 32 bits.
    """

    link: Link
    channel: int
    number: int
    room: int

    def gather(
        self, data: bytes, call: int, among: frozenset[int], deadline: float
    ) -> dict[int, bytes] | None:
        """As `Link`."""
        return self.link.gather(data, call, among, deadline, self.channel)

    def exchange(self, vector: Vector, call: int, deadline: float) -> Round:
        """As `Link`."""
        assert fragments_of(vector.numbers, vector.width) <= self.room * vector.width // 32
        return self.link.exchange(vector, call, deadline, self.channel)


def _close_all(fds: Iterable[int]) -> None:
    for fd in fds:
        os.close(fd)
