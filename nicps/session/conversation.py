# SPDX-License-Identifier: Apache-2.0
"""A training program's side of its connection: what it sends, and messages that are waited for by kind and by round."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from nicps.session import shared_form
from nicps.session.channel import Channel
from nicps.session.fields import Message, encode
from nicps.session.mailbox import Mailbox
from nicps.session.served import OfRound
from nicps.session.served_form import Pulled, Stepped

M = TypeVar("M", bound=Message)
R = TypeVar("R", bound=OfRound)
#: Before the rest of a pull is computed on: it may have ended, or must wait.
_FIRST = shared_form.Phase, shared_form.Abort, shared_form.Keep, Pulled


class Conversation:
    """Messages of one connection. Any thread may send.

    Args:
        note: told of each message as it is taken, with the descriptors that came with it, before it is used.

    Attributes: `mail`, what has been received; `next`, a phase that ends this one, once it has come; `kept`, messages
    about rounds that nobody has awaited yet.
    """

    def __init__(
        self, channel: Channel, note: Callable[[shared_form.FromAgent, list[int]], None]
    ) -> None:
        self._channel, self._note = channel, note
        self._sending = threading.Lock()
        there = channel.fileno(), lambda: channel.wait(0.0), self._take
        self.mail = Mailbox(*there, note)
        self.next: shared_form.Phase | None = None
        self.kept: list[OfRound] = []

    def send(self, message: Message) -> None:
        """Send it.

        Raises:
            ChannelClosed: the agent has gone.
        """
        with self._sending:
            self._channel.send(encode(message))

    def receive(self, *kinds: type[M]) -> tuple[M, list[int]]:
        """The next message of one of these kinds, waited for; what others tell is noted."""
        while True:
            message, fds = self.mail.take()
            self._note(message, fds)
            if isinstance(message, kinds):
                return message, fds

    def next_phase(self) -> shared_form.Phase:
        """The phase that comes next, waited for. Nothing of the rounds before it is kept."""
        phase = self.next or self.receive(shared_form.Phase)[0]
        self.next, self.kept = None, []
        return phase

    def await_round(self, round_: int, *kinds: type[R], through: tuple[str, ...] = ()) -> R | None:
        """The round's next message of these kinds; None if another phase comes before, but for those in `through`."""
        while self.next is None or self.next.kind in through:
            self.kept = [message for message in self.kept if message.round >= round_]
            for message in self.kept:
                if isinstance(message, kinds) and message.round == round_:
                    self.kept.remove(message)
                    return message
            found: OfRound | shared_form.Phase
            found, _ = self.receive(shared_form.Committed, Stepped, Pulled, shared_form.Phase)
            if isinstance(found, shared_form.Phase):
                if self.next is not None:  # another one has come in its place
                    self.send(shared_form.Prepared(self.next.number))
                self.next = found
            else:
                self.kept.append(found)
        return None

    def note_urgent(self) -> None:
        """Note the messages that cannot wait for the end of a computation: a new lead decides at once, say."""
        self.mail.poll()
        self.mail.note_first(shared_form.View, shared_form.Abort)

    def comes_within(self, seconds: float) -> bool:
        """Whether there is a message within that time; none is taken."""
        return bool(self.mail.rest) or self._channel.wait(seconds)

    def glance(self, seconds: float) -> bool:
        """Wait so long for a message, and keep it; False once one of those kept comes first."""
        if self._channel.wait(seconds):
            self.mail.poll()
        return not any(isinstance(message, _FIRST) for message, _ in self.mail.rest)

    def close(self) -> None:
        """Close the connection."""
        self._channel.close()
        self.mail.close()

    def _take(self) -> tuple[shared_form.FromAgent, list[int]]:
        message, fds = self._channel.recv()
        return shared_form.FROM_AGENT.decode(message), fds
