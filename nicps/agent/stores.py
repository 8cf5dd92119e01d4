# SPDX-License-Identifier: Apache-2.0
"""The store of the group that this host is in (docs/collective.md): its frames, and the program's questions."""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Callable
from dataclasses import replace

from nicps import wire
from nicps.agent.control import ControlSocket
from nicps.agent.driver import Driver
from nicps.agent.peer import Peer
from nicps.errors import JobFailed, NicpsError
from nicps.job.part import Part
from nicps.protocol import NodeState
from nicps.protocol.view import View
from nicps.session.messages import Error
from nicps.session.store_form import FROM_USER, Answer, Forget
from nicps.store import Piece, Replica
from nicps.wire import ScriptStep

_MOST_BACKLOG = 1 << 18  # bytes that a program has not read: with more, it gets no answers
_FULL_S = 0.01  # then the connection is tried again


class Stores:
    """One store at a time: it begins and ends with this host's part in a group.

    Args:
        send: tags a control frame, and sends it.
        nonce: fresh random 64-bit numbers.
    """

    def __init__(
        self,
        driver: Driver,
        control: ControlSocket,
        send: Callable[[bytes], None],
        nonce: Callable[[], int],
    ) -> None:
        self._driver, self._control, self._send, self._nonce = driver, control, send, nonce
        self._part: Part | None = None
        self._replica: Replica | None = None
        self._view = View()
        self._run = 0  # names the group and the view on the wire
        self._users: list[Peer] = []
        self._answers: list[tuple[Peer, Answer]] = []  # answers that were not sent yet

    def open(self) -> int:
        """A connection for the program of this host; the descriptor of its end."""
        self._follow()
        ours, theirs = socket.socketpair()
        peer = self._control.adopt(ours, os.getuid())
        peer.trains, peer.uses_store = False, True
        self._users.append(peer)
        return theirs.detach()

    def take_message(self, peer: Peer, raw: dict[str, object]) -> None:
        """A program asks a question.

        Raises:
            MessageError: it cannot be understood.
        """
        message = FROM_USER.decode(raw)
        if self._replica is None or peer not in self._users:
            return
        of = peer, message.number
        if isinstance(message, Forget):
            self._replica.forget(of)
            return
        try:
            self._replica.call(of, message)
        except NicpsError as error:
            self._answers.append((peer, Answer(message.number, error=str(error))))

    def forget(self, peer: Peer) -> None:
        """A connection has ended."""
        if peer in self._users:
            self._users.remove(peer)
            self._answers = [each for each in self._answers if each[0] is not peer]
            if self._replica is not None:
                self._replica.forget_all(lambda of: of[0] is peer)

    def take_frame(self, source: bytes, frame: wire.Frame) -> None:
        """A SCRIPT frame of a view that came up.

        Raises:
            WireError: the frame is not valid.
        """
        self._follow()
        body = frame.body
        if self._replica is None or not isinstance(body, wire.Script) or body.run != self._run:
            return
        if body.step in (ScriptStep.OUTPUT, ScriptStep.SEEN):
            piece = Piece(ScriptStep(body.step), body.rank, body.at, bytes(frame.tail))
            self._replica.take(self._driver.now, self._view.number_of(source), piece)

    def tick(self) -> None:
        """Answer the calls that are settled, and send the frames that are due."""
        self._follow()
        if self._replica is None:
            return
        found = self._replica.take_answers()
        self._answers += [
            (peer, replace(answer, number=number)) for (peer, number), answer in found
        ]
        left = []
        for peer, answer in self._answers:
            if peer.channel.backlog > _MOST_BACKLOG:
                left.append((peer, answer))
            else:
                self._control.post(peer, answer)
        self._answers = left
        for piece in self._replica.due(self._driver.now):
            body = wire.Script(self._run, piece.at, piece.step, piece.member)
            self._send(wire.pack(self._driver.life.node.header(0, 0), body, tail=piece.tail))

    @property
    def wait_s(self) -> float | None:
        """When `tick` wants to be called, if nothing happens before; None: never."""
        now = self._driver.now
        due_at = self._replica.due_at(now) if self._replica is not None else None
        wait_s = max(0.0, due_at - now) if due_at is not None else None
        return min(wait_s or 0.0, _FULL_S) if self._answers else wait_s

    def _follow(self) -> None:
        """Read which group this host is in, and which view is in force."""
        life = self._driver.life
        part, node = life.part, life.node
        if part is not None and not part.job.group:
            part = None
        if part is not self._part:
            self._part, self._view, self._run = part, View(), 0
            self._replica = Replica(self._nonce() >> 2) if part is not None else None
            self._close()
        view = node.view
        if part is None or self._replica is None or node.state is not NodeState.MEMBER:
            return
        if (view.number, view.seed) != (self._view.number, self._view.seed):
            self._view = view
            name = f"{part.id}/{view.number}/".encode() + view.seed
            self._run = int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "big")
            self._replica.enter(self._driver.now, view.number, node.number, view.live)

    def _close(self) -> None:
        """The group is over: so is its store."""
        reason = "the group is over on this host, and its store with it"
        for peer in self._users[:]:
            self._control.post(peer, Error(reason, JobFailed.exit_code))
            self._control.drop(peer)
        self._users, self._answers = [], []
