# SPDX-License-Identifier: Apache-2.0
"""A training program of a job with parameter servers: it pulls, computes, and pushes or contributes (docs/servers.md).

It looks up from its work between two pieces of it only. What comes meanwhile waits in its inbox, as in a socket.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

from nicps import wire
from nicps.protocol import Committed, Offer, Phase, Pulled, Stepped
from tests.simulator.served_places import Token, Weight

if TYPE_CHECKING:
    from tests.simulator.served_host import ServedHost

_SOCKET_S = 5e-5  # a message's way
_PIECES = 2  # of a step's work
#: Where no synchronisation is due, a round ends after so many pushes.
_PUSHES = 5

Steps = Generator[float | None, None, Any]  # seconds to work, or None: until there is a message
State = tuple[frozenset[tuple[Token, Weight]], ...]


class ServedProgram:
    """One process. `hung` and `blank` are as in other jobs' programs.

    Args:
        kept: the parameters of the last commit, as they were handed out.

    Attributes: `kept`, of the last commit that it has pulled; `behind`, there is a later one.
    """

    def __init__(self, host: ServedHost, kept: State) -> None:
        self.host, self.lan = host, host.lan
        self.hung = self.blank = self.behind = False
        self.kept = kept
        self.state: State = ()  # that it has pulled last
        self._inbox: deque[Any] = deque()
        self._next: Phase | None = None
        self._run_ = self._run()
        self._waits = False
        host.later(0.0, self._step)

    # ---- the process

    def deliver(self, message: Any) -> None:
        """The agent says something."""
        self.host.later(_SOCKET_S, lambda: self._take(message))

    def _take(self, message: Any) -> None:
        self._inbox.append(message)
        if self._waits:
            self._step()

    def _step(self) -> None:
        if self.host.process is not self:
            return
        self._waits = False
        seconds = next(self._run_)
        if seconds is None:
            self._waits = True
        else:
            self.host.later(seconds, self._step)

    def _receive(self, *kinds: type) -> Steps:
        while True:
            while self._inbox:
                message = self._inbox.popleft()
                if isinstance(message, kinds):
                    return message
            yield None

    # ---- the loop

    def _run(self) -> Steps:
        while True:
            phase = self._next or (yield from self._receive(Phase))
            self._next = None
            if phase.kind is wire.PhaseKind.TRAIN:
                yield from self._train(phase)
            else:
                yield self.lan.compute_s * self.lan.random.random()
                self.host.program_tests(phase, self.state)

    def _train(self, phase: Phase) -> Steps:
        """What was pulled in a round that was left in the middle is forgotten: everything is pulled again."""
        self.host.program_prepared(phase)
        round_ = max(phase.first_round, self.host.node.open_round)
        if not (yield from self._pull(round_)):
            return
        if self.behind:
            self.behind, self.kept = False, self.state
            self.host.program_catches_up(round_ - 1)
        if self._next:
            return
        while (yield from self._compute()):
            version = 0
            while True:
                token = self.host.next_token()
                skips = phase.serving is not None and not phase.serving.every
                skips = skips and version >= _PUSHES
                self.host.program_steps(Offer(round_, 1, None, skips), token)
                found = yield from self._receive(Stepped, Committed, Phase)
                if isinstance(found, Phase):
                    self._next = found
                    return
                if isinstance(found, Committed):
                    break
                self.lan.checks.served.stepped(self.host, token)
                version = found.version
                if not (yield from self._pull(round_)) or self._next:
                    return
                if not (yield from self._compute()):
                    return
            round_ += 1
            self.behind = True
            if not (yield from self._pull(round_)):
                return
            self.behind, self.kept = False, self.state
            yield 1e-4
            digest = hashlib.blake2b(repr([sorted(c) for c in self.state]).encode()).digest()
            self.host.program_reads(round_ - 1, self.state, digest)
            if self._next:
                return

    def _compute(self) -> Steps:
        """Whether no other phase has come."""
        seconds = self.lan.compute_s * (0.5 + self.lan.random.random()) * self.host.slowness
        for _ in range(_PIECES):
            yield seconds / _PIECES
            for message in self._inbox:
                if isinstance(message, Phase):
                    return False
        return True

    def _pull(self, round_: int) -> Steps:
        """All parameters; whether they have come, before another training phase, in which they are pulled anew."""
        self.host.program_pulls(round_)
        while True:
            found = yield from self._receive(Pulled, Phase)
            if isinstance(found, Phase):
                self._next = found
                if found.kind is wire.PhaseKind.TRAIN:
                    return False
            elif found.round == round_:
                store = self.host.kernel.stripes.store
                self.state = tuple(frozenset(one.content.items()) for one in store)
                return True
