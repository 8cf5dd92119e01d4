# SPDX-License-Identifier: Apache-2.0
"""The processes that an agent starts, and their ends."""

from __future__ import annotations

import contextlib
import math
import os
import select
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from nicps.agent.loop import Loop
from nicps.agent.orphans import OrphanReaper
from nicps.agent.process import Child, User

_END_LIMIT_S = 5.0
_REST_S = 0.01


@dataclass(slots=True)
class _Known:
    """The state of a process. `done` is None once its end is no longer reported."""

    done: Callable[[int], None] | None
    until: float  # then it is killed, or (`gone`) counted as killed
    ours: bool
    gone: bool = False


class Children:
    """Processes from their start until the kernel has given us their exit codes.

    Processes that a program leaves behind are ended with it. The agent waits for none of them: a process that is gone
    can withhold its exit code for any time. The code goes to the process's tracer first, which can be another process
    of the training user.
    """

    def __init__(
        self,
        user: User,
        loop: Loop,
        clock: Callable[[], float],
        adopt: Callable[[socket.socket, int], object],
    ) -> None:
        """No process runs yet.

        Args:
            user: the user that processes run as.
            clock: the time of this step of the loop.
            adopt: takes the agent's end of a connection to a process of that user (its uid).
        """
        self._user, self._loop, self._clock, self._adopt = user, loop, clock, adopt
        self._known: dict[Child, _Known] = {}
        self._then: list[tuple[set[Child], float, Callable[[], None]]] = []
        self._orphans: OrphanReaper | None = None

    def adopt(self) -> None:
        """From now on processes that programs leave behind end with them, even outside their sessions.

        Only for a process that is an agent and nothing else.
        """
        self._orphans = OrphanReaper(self._user.uid)

    @property
    def hurry(self) -> bool:
        """Detached processes are being ended, and more of them may come: call `tick` again soon."""
        return self._orphans is not None and self._orphans.hurry(self._clock())

    def spawn(
        self,
        argv: Sequence[str],
        folder: Path,
        log: Path,
        done: Callable[[int], None],
        as_owner: bool = False,
        fds: Sequence[int] = (),
        connected: bool = False,
        network_access: bool = False,
        limit_s: float = math.inf,
        env: Mapping[str, str] | None = None,
        stdout: Path | None = None,
    ) -> Child:
        """Start a process as the training user; `done(exit_code)` is called when it has ended.

        A process that is to be `connected` finds a connection to the agent in NICPS_SOCKET. A process that takes longer
        than `limit_s` is killed. `log` and `stdout`: as those of a `Child`.
        """
        user = User.named("root") if as_owner and os.geteuid() == 0 else self._user
        env = dict(env or {})
        with contextlib.ExitStack() as stack:
            if connected:
                ours, theirs = socket.socketpair()
                stack.enter_context(theirs)
                self._adopt(ours, user.uid)
                fds = (*fds, theirs.fileno())
                env["NICPS_SOCKET"] = f"fd:{theirs.fileno()}"
            child = Child(argv, user, folder, log, env, fds, network_access, stdout)
        self._known[child] = _Known(done, self._clock() + limit_s, as_owner)
        self._loop.watch(child.fileno(), partial(self._is_gone, child))
        return child

    def end(self, child: Child, moment_s: float = 0.0) -> None:
        """Kill a process and its session, or let it end within a moment; its end is not reported."""
        known = self._known.get(child)
        if known is None:
            return
        known.done = None
        if moment_s:
            known.until = min(known.until, self._clock() + moment_s)
        else:
            child.kill()

    def once_gone(self, then: Callable[[], None]) -> None:
        """Call `then` once all processes that were ended are gone, and write no more files; after 5 s in any case.

        The processes that have detached themselves from them are gone then, too.
        """
        ending = {child for child, known in self._known.items() if not (known.done or known.gone)}
        self._then.append((ending, self._clock() + _END_LIMIT_S, then))
        self._go_on()

    def tick(self, now: float) -> None:
        """Kill processes that take too long, and count those as ended that are gone without an exit code."""
        for child, known in list(self._known.items()):
            if known.gone:
                self._take(child, known, now)
            elif now > known.until:
                known.until = math.inf
                child.kill()
        orphans = self._orphans
        if orphans is not None and (self._known or orphans.ending) and orphans.is_due(now):
            orphans.tick(now, self._numbers)
        self._go_on()

    def close(self) -> None:
        """End all of them, and wait for at most 5 s until they are gone."""
        deadline = time.monotonic() + _END_LIMIT_S
        poll, waiting = select.poll(), {}
        for child, known in self._known.items():
            if not known.gone:
                child.kill()
                waiting[child.fileno()] = child
                poll.register(child.fileno(), select.POLLIN)
        while waiting and (left_s := deadline - time.monotonic()) > 0:
            for fd, _ in poll.poll(left_s * 1000):
                poll.unregister(fd)
                self._is_gone(waiting.pop(fd))
        if self._orphans is not None:
            while True:
                self._orphans.end(time.monotonic(), self._numbers)
                if not self._orphans.ending or time.monotonic() > deadline:
                    break
                time.sleep(_REST_S)
            self._orphans.close()
        self._go_on(math.inf)

    @property
    def _numbers(self) -> set[int]:
        return {child.pid for child in self._known}

    def _is_gone(self, child: Child) -> None:
        known, now = self._known[child], self._clock()
        self._loop.unwatch(child.fileno())
        if not known.ours:
            child.kill()  # the processes left in its session
            if self._orphans is not None:
                self._orphans.end(now, self._numbers)  # and those outside of it
        known.gone, known.until = True, now + _END_LIMIT_S
        self._take(child, known, now)
        self._go_on()

    def _take(self, child: Child, known: _Known, now: float) -> None:
        """Its exit code, if the kernel gives it to the agent; a process that is gone without one counts as killed."""
        code = child.reap()
        if code is not None:
            del self._known[child]
        elif now <= known.until:
            return
        done, known.done = known.done, None
        if done is not None:
            self._loop.guard(partial(done, -signal.SIGKILL if code is None else code))

    def _go_on(self, now: float | None = None) -> None:
        if not self._then:
            return
        now = self._clock() if now is None else now
        orphans = self._orphans is not None and self._orphans.ending
        waiting, self._then = self._then, []
        for ending, until, then in waiting:
            there = {
                child for child in ending if child in self._known and not self._known[child].gone
            }
            if (there or orphans) and now <= until:
                self._then.append((there, until, then))
            else:
                then()
