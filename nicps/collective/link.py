# SPDX-License-Identifier: Apache-2.0
"""A member's connection to its agent: one round after the other, each of its own size."""

from __future__ import annotations

import contextlib
import mmap
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
from typing import Self, TypeVar

from nicps.barrier import barrier
from nicps.collective.errors import CallTimeout, GroupClosed, UnderWay
from nicps.collective.lanes import PER_FRAGMENT, Outcome, Rest, Vector, fragments_of
from nicps.errors import JobFailed, NetworkProblem
from nicps.session import shared_form
from nicps.session.absolute import Lanes
from nicps.session.arena import Arena
from nicps.session.channel import DEFAULT_SOCKET, Channel, ChannelClosed
from nicps.session.fields import Message, encode
from nicps.session.lanes import LaneFormat
from nicps.session.messages import Error, JoinGroup
from nicps.session.stripes import Records, Remainders, stripe
from nicps.wire import NOT_FINITE, fragments_per_block, sized_samples

M = TypeVar("M", bound=Message)
_LAST_CONVERSION = (1 << 32) - 1
_ANSWER_S = 10.0  # beyond the agent's own limit
_GOODBYE_S = 5.0


@dataclass(frozen=True, slots=True)
class Round:
    """A round that is committed. `offers`: what each member in its list has offered, by number."""

    number: int
    offers: dict[int, int]

    @property
    def agrees(self) -> bool:
        """All have called the same; otherwise there is no sum."""
        return len(set(self.offers.values())) <= 1


class Link:
    """Not for use from several threads.

    Attributes: `number` of this member; `names` of the hosts, by number; `live`, the members that are left, as far as
    this program was told. `room`: fragments of a round at most, with lanes of 32 bits. `admits`: before the round that
    follows the next one, the lead takes in hosts that wait.
    """

    def __init__(self, channel: Channel, welcome: shared_form.Welcome) -> None:
        self._channel = channel
        self.number = welcome.number
        self.names = {member.number: member.name for member in welcome.members}
        self.admits = False
        self.live = frozenset(self.names)
        self.room = int(welcome.settings["room"])
        self._arena: Arena | None = None
        self._doorbell = -1
        self._own: Records | None = None
        self._sums: Records | None = None
        self._rests = Remainders(LaneFormat(1, 8))  # by blocks
        self._conversion = 0
        self._round = 0
        self._phase = 0
        self._leads = False
        self._decided: shared_form.Decide | None = None  # of the round that was committed last
        self._lost = ""  # why the group is over

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
        address = socket or os.environ.get("NICPS_SOCKET", DEFAULT_SOCKET)
        try:
            channel = Channel.connect(address)
        except OSError as error:
            raise NetworkProblem(
                f"no agent listens on {address} ({error.strerror}): run `nicps join --iface IFACE` first"
            ) from None
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
        except (ChannelClosed, TimeoutError) as error:
            channel.close()
            raise NetworkProblem(f"the agent at {address} does not answer: {error}") from None
        except BaseException:
            channel.close()
            raise

    def _enter(self, timeout_s: float) -> None:
        lanes = self.room * PER_FRAGMENT
        self._send(shared_form.Ready(lanes, "group"))
        deadline = time.monotonic() + timeout_s
        message, fds = self._receive(deadline, shared_form.Arena)
        self._arena, self._doorbell = Arena(fds[0], message.fragments), fds[1]
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
        fragments = fragments_of(vector.numbers, vector.width)
        assert fragments <= self.room * vector.width // 32
        self._note_all()
        self._offer(vector, fragments, call)
        while True:
            message: shared_form.Committed | shared_form.Phase
            message, _ = self._receive(deadline, shared_form.Committed, shared_form.Phase)
            if isinstance(message, shared_form.Committed) and message.round == self._round:
                break
            if isinstance(message, shared_form.Phase):
                self._offer(vector, fragments, call)
        round_ = Round(self._round, dict(message.counted))
        self._judge(self._round, "admit" if self.admits and round_.agrees else "continue")
        self.admits = False
        if round_.agrees:
            vector.settle(self._outcome(message, vector, fragments))
        self._send(shared_form.Read(self._round, ""))
        self._round += 1
        return round_

    def _offer(self, vector: Vector, fragments: int, call: int) -> None:
        """Offer the vector to the open round, and convert it: this member's own stripe first."""
        arena, own, bank = self._arena, self._records(self._own), self._round & 1
        assert arena is not None
        self._conversion = self._conversion % _LAST_CONVERSION + 1
        arena.set_converted(self._round, 0)
        arena.set_sending_since(self._round, 0)
        samples = sized_samples(fragments, call, vector.width)
        offer = shared_form.Offer(self._round, samples, vector.bound(), False, self._conversion)
        self._send(offer)
        lanes, exponents = _lanes(own, bank, vector.width), own.exponents[bank]
        conversions, done = own["conversion"][bank], 0
        for part in self._in_turn(fragments, LaneFormat(1, vector.width).batch):
            vector.write(part.start, len(part), lanes, exponents)
            barrier()  # a reader that sees the conversion also sees the lanes
            conversions[part.start : part.stop] = self._conversion
            done += len(part)
            arena.set_converted(self._round, done)
            os.eventfd_write(self._doorbell, 1)

    def _outcome(self, round_: shared_form.Committed, vector: Vector, count: int) -> Outcome:
        """The round's sums, and what goes with them."""
        alone, own = set(round_.counted) == {self.number}, self._records(self._own)
        sums, bank = own if alone else self._records(self._sums), round_.round & 1
        rest, width = None, vector.width
        if vector.feedback and not alone and self.number in round_.aggregators:
            order, each = round_.aggregators, fragments_per_block(width)
            here = stripe(count, order.index(self.number), len(order))
            blocks = self._rests.of(round_.round, round_.view, -(-len(here) // each))
            part = slice(here.start, here.stop)
            used = sums["rest"][bank, part] == round_.view << 32 | round_.round
            used &= sums.exponents[bank, part] != NOT_FINITE
            lanes = blocks.reshape(-1, LaneFormat(1, width).per_fragment)[: len(here)]
            rest = Rest(here.start, lanes, used)
        return Outcome(
            count,
            _lanes(sums, bank, width),
            sums.exponents[bank],
            _lanes(own, bank, width),
            own.exponents[bank],
            len(round_.counted),
            round_.unit,
            rest,
        )

    def _in_turn(self, fragments: int, batch: int) -> Iterator[range]:
        """All batches: those of the own stripe first, then one of each other stripe in turn."""
        order = sorted(self.live)
        at = order.index(self.number) if self.number in self.live else 0
        stripes = [stripe(fragments, (at + k) % len(order), len(order)) for k in range(len(order))]
        own, *others = [
            [part[i : i + batch] for i in range(0, len(part), batch)] for part in stripes
        ]
        yield from own
        for turn in zip_longest(*others):
            yield from (part for part in turn if part is not None)

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
        """Close the connection: the others go on without this member."""
        if not self._lost:
            self._lost = reason
            self._channel.close()

    # ---- messages

    def _records(self, records: Records | None) -> Records:
        assert records is not None, "the agent has sent no memory"
        return records

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
            fds = list(fds)
            if message.places:
                self._rests.map(fds.pop(), message.places, message.view)
            if isinstance(message, shared_form.Phase):
                self._enter_phase(message, fds)
            else:
                _close_all(fds)
            if self._leads and self._decided is not None:
                self._send(self._decided)  # the lead before may not have said it

    def _enter_phase(self, phase: shared_form.Phase, fds: list[int]) -> None:
        if phase.kind != "train" or not phase.exchange.absolute:
            _close_all(fds)
            raise JobFailed(f"the agent opens a phase {phase.kind} with {phase.exchange.name}")
        if phase.blocks:
            _close_all([fds.pop(0), fds.pop(0)])
        if phase.room:
            whole = LaneFormat(phase.room * PER_FRAGMENT, 32)
            both = mmap.PROT_READ | mmap.PROT_WRITE
            self._own = Records("own", whole, fds.pop(0), phase.room, both)
            self._sums = Records("stored", whole, fds.pop(0), phase.room, mmap.PROT_READ)
            self._conversion = max(self._conversion, int(self._own["conversion"].max()))
        _close_all(fds)
        self._round, self._phase = phase.first_round, phase.number
        self._send(shared_form.Prepared(phase.number))


def _lanes(records: Records, bank: int, width: int) -> Lanes:
    """(room, per_fragment)."""
    found: Lanes = records["lane"][bank].view(LaneFormat(1, width).wire)
    return found


def _close_all(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)
