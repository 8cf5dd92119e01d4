# SPDX-License-Identifier: Apache-2.0
"""A member's memory for rounds in stripes, or with a Linux switch, on one channel or several (docs/channels.md).

Each channel may be another thread's. Channels lie one behind the other in each bank.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import accumulate

from nicps.session import shared_form
from nicps.session.arena import Arena
from nicps.session.fields import Message
from nicps.session.lanes import LaneFormat
from nicps.session.mailbox import Mailbox
from nicps.session.maps import mapped
from nicps.session.sized import ChannelRounds, RoundMemory, Vector
from nicps.session.stripes import Remainders


class MemberRounds:
    """Own lanes, sums and remainders of all channels. There is one channel before a phase has told of more.

    Args:
        number: this member's.
        arena, doorbell: as `OwnRecords`.
    """

    def __init__(self, number: int, arena: Arena, doorbell: int) -> None:
        self._number = number
        self._memory = RoundMemory(arena, doorbell)
        self._rests: list[Remainders] = []  # by channel
        self._lock = threading.Lock()  # of the remainders: a view may come in any thread
        self._channels: list[ChannelRounds] = []
        self._deal_out([0])

    def map(self, message: shared_form.Phase | shared_form.View, fds: Iterator[int]) -> None:
        """Map what comes with a message, but for accumulators."""
        self._memory.map(message, fds)
        if message.places:
            self._map_places(message, next(fds))
        if isinstance(message, shared_form.Phase) and message.channels:
            rooms = (max(channel.rounds) for channel in message.channels)
            self._deal_out([0, *accumulate(rooms)][:-1])

    def close(self) -> None:
        """Give the memory back; the mappings go with the last view of them."""
        self._memory.own.close()

    def _map_places(self, message: shared_form.Phase | shared_form.View, fd: int) -> None:
        parts = message.stripes or (message.places,)
        firsts = [0, *accumulate(parts)]
        whole = mapped(fd, Remainders.size(message.places), mmap.PROT_READ)
        with self._lock:
            self._have_rests(len(parts))
            for rests, first, count in zip(self._rests, firsts, parts, strict=False):
                rests.add(whole, message.places, message.view, range(first, first + count))

    def _have_rests(self, channels: int) -> None:
        while len(self._rests) < channels:
            self._rests.append(Remainders(LaneFormat(1, 8)))

    def _deal_out(self, firsts: Sequence[int]) -> None:
        """Let the channels begin there in each bank."""
        with self._lock:
            self._have_rests(len(firsts))
            self._channels = [
                ChannelRounds(self._number, self._memory, rests, channel, first, self._lock)
                for channel, (rests, first) in enumerate(zip(self._rests, firsts, strict=False))
            ]

    def of(self, channel: int) -> ChannelRounds:
        """The rounds of that channel."""
        return self._channels[channel]


class Channels:
    """A session's rounds by channel. Each channel may be another thread's, and its rounds come in order.

    Args:
        send: to the agent.
        due: the members that have a share of a round, in order of rank.
        note_change: the residual is about to change, in the middle of a step.
    """

    def __init__(
        self,
        number: int,
        rounds: MemberRounds,
        mail: Mailbox,
        send: Callable[[Message], None],
        due: Callable[[], Collection[int]],
        note_change: Callable[[], None],
    ) -> None:
        self.number = number
        self._rounds, self._mail, self._send, self._due = rounds, mail, send, due
        self._note_change = note_change

    def attend(self, done: Callable[[], bool]) -> None:
        """The thread that computes waits for what others do (`Mailbox.attend`)."""
        self._mail.attend(done)

    def wake(self) -> None:
        """Another thread has done something that the thread that computes may wait for."""
        self._mail.wake()

    @property
    def ends(self) -> bool:
        """Something else than this phase comes next: nothing more need be offered."""
        return self._mail.ends

    def offer(self, channel: int, round_: int, vector: Vector, samples: int) -> None:
        """Offer a part of this member's gradient, the sum over `samples`; a long one is sent while it is converted.

        Args:
            vector: not changed before `settle`.
            round_: the open one, or the one after it in the same step, once the sum of the one before it is read. The
                own lanes of that one are in its bank, and nobody needs them any more: it is committed, so all members
                have marked it, and have all its sums.
        """
        rounds = self._rounds.of(channel)
        rounds.offer(round_, vector, samples, self._due(), self._send, sized=False)

    def wait(
        self, channel: int, round_: int, unless: Callable[[], bool] = lambda: False
    ) -> shared_form.Committed | None:
        """Wait until the round is committed; None if the phase ends before.

        Args:
            unless: None also once there is that to do; `wake` tells this thread.

        Raises:
            JobAborted: the job was stopped.
        """
        return self._mail.take_commit(channel, round_, unless=unless)

    def settle(self, commit: shared_form.Committed, vector: Vector) -> None:
        """Give the vector the sum, and tell the agent that it has been read. Without contributions there is none."""
        self._note_change()
        if commit.counted:
            self._rounds.of(commit.channel).settle(commit, vector)
        self._send(shared_form.Read(commit.round, "", commit.channel))
